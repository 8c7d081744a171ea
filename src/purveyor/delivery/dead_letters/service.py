"""List, show, redrive and discard dead letters, for the command line, the HTTP API and the console.

The dead letters of all parts are in one queue (`queues/dead_letters/store.py`). A `DeadLetterFilter` selects some of
them. `redrive_target` decides where a dead letter goes back to; `redrive` puts it back once.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from purveyor.delivery.dead_letters.redrive import CrashPoint, Redriver, RedriveResult
from purveyor.delivery.dead_letters.redrive_target import belongs_to, origins_of, redrive_target
from purveyor.delivery.state_writer import SharedServices
from purveyor.model.errors import PurveyorError, Refused, UnknownMessage, UnknownSubscription, UnreadableRecord
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.store import LETTER_SUBJECTS, DeadLetterStore, ParkedMessage, Resolution, subjects_of
from purveyor.queues.registry import Registered

_BATCH_LETTERS: Final = 50


def _ignore_progress(_count: int) -> None:
    pass


def _ignore_point(_point: CrashPoint) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """Selects the dead letters that match every given field; without fields, all."""

    ids: tuple[int, ...] = ()
    subscription: str | None = None
    """Given up in the queue of this subscription, or too large for it."""
    origin: str | None = None
    reason: str | None = None
    """A part of the reason, in upper or lower case."""

    def matches(self, parked: ParkedMessage) -> bool:
        """Return whether a dead letter matches all fields except `subscription`. Pure."""
        return (
            (not self.ids or parked.id in self.ids)
            and (self.origin is None or parked.origin == self.origin)
            and (self.reason is None or self.reason.casefold() in parked.reason.casefold())
        )


ALL: Final = DeadLetterFilter()


@dataclass(frozen=True, slots=True)
class Page:
    """Dead letters, the oldest first. Pass `next` as `after` for the next page; None at the end."""

    letters: tuple[ParkedMessage, ...]
    next: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A dead letter that stays, and why."""

    id: int
    message: str
    fix: str | None = None


@dataclass(slots=True)
class Report:
    """The result of redriving or discarding many dead letters."""

    done: int = 0
    gone: int = 0
    """Dead letters that another process redrove or discarded meanwhile."""
    failed: list[Failure] = field(default_factory=list)
    chosen: int = 0
    """How many dead letters the filter selected."""
    targets: dict[str, int] = field(default_factory=dict)
    """The subjects that redriven dead letters go to, with their number."""
    next: int | None = None
    """The last selected dead letter, if the limit left out later ones: pass it as `after`."""

    def add(self, results: Sequence[RedriveResult]) -> None:
        """Count results."""
        for each in results:
            if each.error is not None:
                self.failed.append(Failure(each.id, each.error.message, each.error.fix))
            elif each.gone:
                self.gone += 1
            else:
                self.done += 1


@dataclass(frozen=True, slots=True)
class _Selected:
    """A selected dead letter without its body: where it goes back to, or why that is not possible."""

    id: int
    subscription: str | None = None
    subject: str = ""
    sort_position: int = 0
    error: PurveyorError | None = None


class DeadLetters:
    """The dead letters of a server. `reach` is called at each `CrashPoint` of a redrive, for tests.

    >>> async with open_dead_letters(queues) as letters:  # doctest: +SKIP
    ...     page = await letters.list(DeadLetterFilter(subscription="ox", reason="no such mailbox"))
    ...     report = await letters.retry(DeadLetterFilter(ids=(page.letters[0].id,)))
    """

    def __init__(self, shared: SharedServices, *, reach: Callable[[CrashPoint], None] = _ignore_point) -> None:
        self._registrations = shared.registrations
        self._replicas = shared.replicas
        self._store = DeadLetterStore(shared.queues)
        self._redriver = Redriver(
            shared.queues, self._store, shared.state_writers, replicas=shared.replicas, reach=reach
        )

    async def list(self, choice: DeadLetterFilter = ALL, *, after: int = 0, limit: int = 100) -> Page:
        """Return up to `limit` dead letters after one. `UnknownSubscription` if the filter names an unknown one."""
        found: list[ParkedMessage] = []
        async for parked in self._select(choice, after):
            found.append(parked)
            if len(found) > limit:
                return Page(tuple(found[:limit]), found[limit - 1].id)
        return Page(tuple(found))

    async def show(self, number: int, choice: DeadLetterFilter = ALL) -> ParkedMessage:
        """Return one dead letter; `UnknownMessage` if it does not exist or does not match the filter."""
        parked = await self._store.find(number)
        if parked is None or not _matches(parked, choice, await self._owner(choice)):
            raise _unknown([number])
        return parked

    async def counts(self) -> dict[str, int]:
        """Return the number of dead letters of each origin, by its token in the subject."""
        return await self._store.counts()

    async def retry(
        self,
        choice: DeadLetterFilter,
        *,
        dry_run: bool = False,
        after: int = 0,
        limit: int | None = None,
        advance: Callable[[int], None] = _ignore_progress,
    ) -> Report:
        """Redrive dead letters, the lowest position first. Each goes back once, however often this is called.

        `limit` selects the oldest ones after `after`. With `dry_run` only the report is made. `advance` is called with
        the number of dead letters that are done.
        """
        selected, more = await self._select_all(choice, after, limit)
        report = Report(chosen=len(selected), next=more)
        for each in selected:
            if each.error is not None:
                report.failed.append(Failure(each.id, each.error.message, each.error.fix))
            else:
                report.targets[each.subject] = report.targets.get(each.subject, 0) + 1
        ready = sorted((each for each in selected if each.error is None), key=_redrive_order)
        advance(len(report.failed))
        if dry_run:
            return report
        for name in dict.fromkeys(each.subscription for each in ready):
            ids = [each.id for each in ready if each.subscription == name]
            for start in range(0, len(ids), _BATCH_LETTERS):
                batch = ids[start : start + _BATCH_LETTERS]
                report.add(await self._redrive(name, batch))
                advance(len(batch))
        return report

    async def discard(
        self,
        choice: DeadLetterFilter,
        *,
        dry_run: bool = False,
        after: int = 0,
        limit: int | None = None,
        advance: Callable[[int], None] = _ignore_progress,
    ) -> Report:
        """Delete dead letters. Their receipts stay, for the audit."""
        selected, more = await self._select_all(choice, after, limit)
        ids = [each.id for each in selected]
        report = Report(chosen=len(ids), next=more)
        for start in range(0, 0 if dry_run else len(ids), _BATCH_LETTERS):
            batch = ids[start : start + _BATCH_LETTERS]
            report.add(await asyncio.gather(*map(self._discard, batch)))
            advance(len(batch))
        return report

    async def set_retention(self, retention: timedelta) -> None:
        """Set how long dead letters are kept; zero: for ever."""
        await self._store.set_retention(retention, replicas=self._replicas)

    async def _discard(self, number: int) -> RedriveResult:
        """1. Write the receipt. 2. Delete the dead letter. After a crash in between, the next call deletes it."""
        parked = await self._store.find(number)
        if parked is None:
            return RedriveResult(number, gone=True)
        try:
            parked.check_understood()
            receipt = await self._store.find_receipt(parked)
        except UnreadableRecord as error:
            return RedriveResult(number, error=error)
        if receipt is None:
            await self._store.settle(parked, Resolution.DISCARDED)
        removed = await self._store.remove(number)
        return RedriveResult(
            number, gone=not removed or (receipt is not None and receipt.resolution is Resolution.RETRIED)
        )

    async def _redrive(self, name: str | None, letters: Sequence[int]) -> Sequence[RedriveResult]:
        if name is None:
            return await self._redriver.to_other_queue(letters)
        try:
            return await self._redriver.to_subscription(await self._registrations.refresh(name), letters)
        except (UnknownSubscription, UnreadableRecord) as error:
            return [RedriveResult(letter, error=error) for letter in letters]

    async def _select_all(
        self, choice: DeadLetterFilter, after: int, limit: int | None
    ) -> tuple[Sequence[_Selected], int | None]:
        """Return all selected dead letters, or the oldest of them, without their bodies. Unknown ids are errors.

        The second value is the last id if there are more than `limit`.
        """
        selected: dict[int, _Selected] = {}
        more: int | None = None
        async for parked in self._select(choice, after):
            if limit is not None and len(selected) == limit:
                more = max(selected)
                break
            selected[parked.id] = _with_target(parked)
        if choice.ids and not selected:
            raise _unknown(choice.ids)
        for number in choice.ids:
            if limit is None and number not in selected:
                selected[number] = _Selected(number, error=_unknown([number]))
        return tuple(selected.values()), more

    async def _select(self, choice: DeadLetterFilter, after: int) -> AsyncIterator[ParkedMessage]:
        owner = await self._owner(choice)
        if choice.ids:
            for number in sorted({*choice.ids}):
                parked = await self._store.find(number) if number > after else None
                if parked is not None and _matches(parked, choice, owner):
                    yield parked
            return
        subjects = (LETTER_SUBJECTS,) if owner is None else subjects_of(origins_of(owner.name))
        if owner is None and choice.origin is not None:
            subjects = subjects_of([choice.origin])
        async for parked in self._merge(subjects, after):
            if _matches(parked, choice, owner):
                yield parked

    async def _merge(self, subjects: Sequence[str], after: int) -> AsyncIterator[ParkedMessage]:
        """Yield the dead letters on some subjects, the oldest first."""
        scans = [self._store.scan(subject, after) for subject in subjects]
        heads = [await anext(scan, None) for scan in scans]
        while any(head is not None for head in heads):
            _, at = min((head.id, number) for number, head in enumerate(heads) if head is not None)
            head = heads[at]
            assert head is not None
            yield head
            heads[at] = await anext(scans[at], None)

    async def _owner(self, choice: DeadLetterFilter) -> Registered | None:
        return None if choice.subscription is None else await self._registrations.refresh(choice.subscription)


@contextlib.asynccontextmanager
async def open_dead_letters(
    queues: Queues, *, replicas: int = 1, reach: Callable[[CrashPoint], None] = _ignore_point
) -> AsyncIterator[DeadLetters]:
    """Open the dead letters with their own shared services, for a program that needs no other delivery service."""
    async with SharedServices.build(queues, replicas=replicas) as shared:
        yield DeadLetters(shared, reach=reach)


def _matches(parked: ParkedMessage, choice: DeadLetterFilter, owner: Registered | None) -> bool:
    if owner is not None and (parked.letter is None or not belongs_to(parked.letter, owner)):
        return False
    return choice.matches(parked)


def _with_target(parked: ParkedMessage) -> _Selected:
    try:
        target = redrive_target(parked)
    except (Refused, UnreadableRecord) as error:
        return _Selected(parked.id, error=error)
    return _Selected(parked.id, target.subscription, target.subject, target.sort_position)


def _unknown(numbers: Iterable[int]) -> UnknownMessage:
    ids = ", ".join(map(str, numbers))
    return UnknownMessage(f"no dead letter {ids}", fix="it was redriven or discarded already, or never existed")


def _redrive_order(selected: _Selected) -> tuple[str, int, int]:
    return selected.subject, selected.sort_position, selected.id
