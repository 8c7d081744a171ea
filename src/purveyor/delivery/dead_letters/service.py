"""List, show, redrive and discard dead letters, for the command line, the HTTP API and the console.

The dead letters of all parts are in one queue (`queues/dead_letters/store.py`). A `Choice` selects some of them.
`redrive_target` decides where a dead letter goes back to; `redrive` puts it back once.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, Self

from purveyor.delivery.dead_letters.park import ATTEMPTS_LOG
from purveyor.delivery.dead_letters.redrive import Done, Point, PuttingBack
from purveyor.delivery.dead_letters.redrive_target import belongs_to, origins_of, way_back
from purveyor.delivery.notifier import Bells
from purveyor.delivery.registration_cache import Gate
from purveyor.delivery.state_writer_cache import Desks
from purveyor.model.errors import PurveyorError, Refused, UnknownMessage, UnknownSubscription, UnreadableRecord
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.store import LETTERS, Fate, LetterBox, Parked, subjects_of
from purveyor.queues.registry import Registered

_PORTION: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which letters: all that fit every part that is given. Nothing given means all there are."""

    ids: tuple[int, ...] = ()
    subscription: str | None = None
    """Given up in the queue of this subscription, or too large for it."""
    origin: str | None = None
    reason: str | None = None
    """A part of the reason, in whatever case."""

    def fits(self, parked: Parked) -> bool:
        """Whether a letter is meant, as far as it tells itself. Pure."""
        return (
            (not self.ids or parked.id in self.ids)
            and (self.origin is None or parked.origin == self.origin)
            and (self.reason is None or self.reason.casefold() in parked.reason.casefold())
        )


ALL: Final = Choice()


@dataclass(frozen=True, slots=True)
class Page:
    """Letters, the oldest first; `next` is what to give as `after` for more, None at the end."""

    letters: tuple[Parked, ...]
    next: int | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One delivery that failed."""

    time: datetime | None
    status: int | None = None
    error: str | None = None
    excerpt: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A letter that stays, and why."""

    id: int
    message: str
    fix: str | None = None


@dataclass(slots=True)
class Report:
    """What came of dealing with many letters."""

    done: int = 0
    gone: int = 0
    """Others had dealt with them meanwhile."""
    failed: list[Failure] = field(default_factory=list)
    chosen: int = 0
    """How many there were to deal with."""
    targets: dict[str, int] = field(default_factory=dict)
    """Where those go that can be put back: how many to which subject."""

    def add(self, results: Sequence[Done]) -> None:
        """Count what came of some."""
        for each in results:
            if each.error is not None:
                self.failed.append(Failure(each.id, each.error.message, each.error.fix))
            elif each.gone:
                self.gone += 1
            else:
                self.done += 1


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A letter that was chosen, without its bytes: where it goes back to, or why it cannot."""

    id: int
    subscription: str | None = None
    subject: str = ""
    place: int = 0
    error: PurveyorError | None = None


class DeadLetters:
    """See the module. One per process, on one connection; closed with `close` or as a context manager.

    >>> letters = DeadLetters(queues)  # doctest: +SKIP
    >>> page = await letters.list(Choice(subscription="ox", reason="no such mailbox"))  # doctest: +SKIP
    >>> report = await letters.retry(Choice(ids=(page.letters[0].id,)))  # doctest: +SKIP
    """

    def __init__(
        self, queues: Queues, *, replicas: int = 1, reach: Callable[[Point], None] = lambda _point: None
    ) -> None:
        self._queues = queues
        self._replicas = replicas
        self._box = LetterBox(queues)
        bells = Bells(queues.connection)
        self._gate = Gate(queues, bells.ring, replicas=replicas)
        self._desks = Desks(queues, self._gate, bells, replicas=replicas)
        self._putting = PuttingBack(queues, self._box, self._desks, replicas=replicas, reach=reach)

    async def list(self, choice: Choice = ALL, *, after: int = 0, limit: int = 100) -> Page:
        """Letters behind one, so many at most. `UnknownSubscription` if one is named that is not there."""
        found: list[Parked] = []
        async for parked in self._chosen(choice, after):
            found.append(parked)
            if len(found) > limit:
                return Page(tuple(found[:limit]), found[limit - 1].id)
        return Page(tuple(found))

    async def show(self, number: int, choice: Choice = ALL) -> Parked:
        """One letter; `UnknownMessage` if it is not there or not among those."""
        parked = await self._box.find(number)
        if parked is None or not await self._is_chosen(parked, choice):
            raise _unknown([number])
        return parked

    async def counts(self) -> dict[str, int]:
        """How many letters each origin has, by its token in the subject: for those who watch."""
        return await self._box.counts()

    async def retry(
        self,
        choice: Choice,
        *,
        dry_run: bool = False,
        most: int | None = None,
        advance: Callable[[int], None] = lambda _count: None,
    ) -> Report:
        """Put letters back, the oldest position first; each once, however often it is tried.

        With `dry_run` nothing is done but told. `advance` hears how many more are dealt with.
        """
        chosen = await self._choose(choice, most)
        report = Report(chosen=len(chosen))
        for each in chosen:
            if each.error is not None:
                report.failed.append(Failure(each.id, each.error.message, each.error.fix))
            else:
                report.targets[each.subject] = report.targets.get(each.subject, 0) + 1
        ready = sorted((each for each in chosen if each.error is None), key=_in_order)
        advance(len(report.failed))
        if dry_run:
            return report
        for name in dict.fromkeys(each.subscription for each in ready):
            its = [each.id for each in ready if each.subscription == name]
            for start in range(0, len(its), _PORTION):
                portion = its[start : start + _PORTION]
                report.add(await self._put_back(name, portion))
                advance(len(portion))
        return report

    async def discard(
        self,
        choice: Choice,
        *,
        dry_run: bool = False,
        most: int | None = None,
        advance: Callable[[int], None] = lambda _count: None,
    ) -> Report:
        """Take letters out for good. What became of them stays noted, for the audit."""
        chosen = [each.id for each in await self._choose(choice, most)]
        report = Report(chosen=len(chosen))
        for start in range(0, 0 if dry_run else len(chosen), _PORTION):
            portion = chosen[start : start + _PORTION]
            report.add(await asyncio.gather(*map(self._discard, portion)))
            advance(len(portion))
        return report

    async def keep(self, kept: timedelta) -> None:
        """Keep letters for so long, and no longer; zero: for ever."""
        await self._box.keep(kept, replicas=self._replicas)

    async def _discard(self, number: int) -> Done:
        """1. The receipt. 2. The letter goes. A crash in between leaves a letter that the next one removes."""
        parked = await self._box.find(number)
        if parked is None:
            return Done(number, gone=True)
        try:
            parked.check_understood()
            settled = await self._box.receipt(parked)
        except UnreadableRecord as error:
            return Done(number, error=error)
        if settled is None:
            await self._box.settle(parked, Fate.DISCARDED)
        removed = await self._box.remove(number)
        return Done(number, gone=not removed or (settled is not None and settled.fate is Fate.RETRIED))

    async def close(self) -> None:
        """End what is under way."""
        await self._gate.close()
        await self._desks.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _put_back(self, name: str | None, letters: Sequence[int]) -> Sequence[Done]:
        if name is None:
            return await self._putting.elsewhere(letters)
        try:
            return await self._putting.to_subscription(await self._gate.look_again(name), letters)
        except (UnknownSubscription, UnreadableRecord) as error:
            return [Done(letter, error=error) for letter in letters]

    async def _choose(self, choice: Choice, most: int | None) -> Sequence[_Chosen]:
        """All that are meant, or the oldest of them, without their bytes. An id that is not there is an error."""
        chosen: dict[int, _Chosen] = {}
        async for parked in self._chosen(choice, 0):
            if most is not None and len(chosen) == most:
                break
            chosen[parked.id] = _look(parked)
        if choice.ids and not chosen:
            raise _unknown(choice.ids)
        for number in choice.ids:
            if most is None and number not in chosen:
                chosen[number] = _Chosen(number, error=_unknown([number]))
        return tuple(chosen.values())

    async def _chosen(self, choice: Choice, after: int) -> AsyncIterator[Parked]:
        owner = await self._owner(choice)
        if choice.ids:
            for number in sorted({*choice.ids}):
                parked = await self._box.find(number) if number > after else None
                if parked is not None and _fits(parked, choice, owner):
                    yield parked
            return
        subjects = (LETTERS,) if owner is None else subjects_of(origins_of(owner.name))
        if owner is None and choice.origin is not None:
            subjects = subjects_of([choice.origin])
        async for parked in self._merged(subjects, after):
            if _fits(parked, choice, owner):
                yield parked

    async def _merged(self, subjects: Sequence[str], after: int) -> AsyncIterator[Parked]:
        """What lies on some subjects, the oldest first."""
        scans = [self._box.scan(subject, after) for subject in subjects]
        heads = [await anext(scan, None) for scan in scans]
        while any(head is not None for head in heads):
            _, at = min((head.id, number) for number, head in enumerate(heads) if head is not None)
            head = heads[at]
            assert head is not None
            yield head
            heads[at] = await anext(scans[at], None)

    async def _owner(self, choice: Choice) -> Registered | None:
        return None if choice.subscription is None else await self._gate.look_again(choice.subscription)

    async def _is_chosen(self, parked: Parked, choice: Choice) -> bool:
        return _fits(parked, choice, await self._owner(choice))


def _fits(parked: Parked, choice: Choice, owner: Registered | None) -> bool:
    if owner is not None and (parked.letter is None or not belongs_to(parked.letter, owner)):
        return False
    return choice.fits(parked)


def _look(parked: Parked) -> _Chosen:
    try:
        way = way_back(parked)
    except (Refused, UnreadableRecord) as error:
        return _Chosen(parked.id, error=error)
    return _Chosen(parked.id, way.subscription, way.subject, way.place)


def _unknown(numbers: Iterable[int]) -> UnknownMessage:
    told = ", ".join(map(str, numbers))
    return UnknownMessage(f"no dead letter {told}", fix="it was dealt with already, or never was there")


def _in_order(chosen: _Chosen) -> tuple[str, int, int]:
    return chosen.subject, chosen.place, chosen.id


def attempts_of(parked: Parked) -> tuple[Attempt, ...]:
    """The attempts that were noted one by one; none where only their number is known."""
    text = parked.letter.details.get(ATTEMPTS_LOG) if parked.letter is not None else None
    try:
        given: Any = json.loads(text) if isinstance(text, str) else []
    except ValueError:
        return ()
    return tuple(_attempt(each) for each in given if isinstance(each, dict)) if isinstance(given, list) else ()


def _attempt(given: dict[str, Any]) -> Attempt:
    moment = None
    with contextlib.suppress(ValueError):
        moment = datetime.fromisoformat(str(given.get("time")))
    status = given.get("status")
    return Attempt(
        time=moment,
        status=status if isinstance(status, int) else None,
        error=None if given.get("error") is None else str(given["error"]),
        excerpt=None if given.get("excerpt") is None else str(given["excerpt"]),
    )
