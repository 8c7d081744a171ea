"""Dead letters go back to where they were given up, each once, whoever is cut off and however many try it at once.

Into the queue of a subscription, for a portion of letters at a time:

1. The book of the subscription notes that they are being put back. A crash after this leaves them in that note.
2. What is known about each is read: whether it is there, and whether it was settled before.
3. They are stored on `<subscription>.retry`, under ids of their own. Those that an earlier attempt had noted are looked
   for in the queue first: one that is neither there nor acknowledged (the note tells) was not stored. Ids catch what
   two do at the same moment.
4. Each gets its receipt.
5. The book notes how far dead letters were put back, so that every process looks for them before it gives out anything
   else; and that nothing is being put back any more. Before this nobody needs to find them; they are still letters.
6. The letters go. A crash before this, after step 4: the receipt tells, and only 5 and 6 are made up for.

Into other queues, where there is no book: 2, 3, 4 and 6. There it is the window of duplicates of the server that knows
a message which a crash between 3 and 4 has left behind, and for stages, without a limit of time, their inbox.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from purveyor.delivery.dead_letters.redrive_target import Way, check_takes_back, way_back
from purveyor.delivery.message_buffer import letter_of
from purveyor.delivery.state import Book
from purveyor.delivery.state_writer import Desk, Step
from purveyor.delivery.state_writer_cache import Desks
from purveyor.jetstream.publisher import Expect
from purveyor.model.errors import (
    PurveyorError,
    Refused,
    Unavailable,
    UnknownMessage,
    UnknownSubscription,
    UnreadableRecord,
)
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.store import Fate, LetterBox, Parked, Receipt
from purveyor.queues.registry import Registered
from purveyor.queues.subscriptions import make_queue

_TRUST_SECONDS: Final = 60.0
"""What was found is believed for so long: half of the time in which the server knows a message again."""


class Point(Enum):
    """Where a crash may be made to happen."""

    NOTED = "noted"
    STORED = "stored"
    SETTLED = "settled"
    OPENED = "opened"


@dataclass(frozen=True, slots=True)
class Done:
    """What came of one letter: put back, or why not. `gone`: somebody else has dealt with it."""

    id: int
    gone: bool = False
    error: PurveyorError | None = None


@dataclass(frozen=True, slots=True)
class _Ready:
    """A letter on its way; `put_at` when an attempt before has stored it."""

    parked: Parked
    way: Way
    put_at: int = 0


class PuttingBack:
    """See the module."""

    def __init__(
        self,
        queues: Queues,
        box: LetterBox,
        desks: Desks,
        *,
        replicas: int = 1,
        reach: Callable[[Point], None] = lambda _point: None,
    ) -> None:
        self._queues = queues
        self._box = box
        self._desks = desks
        self._replicas = replicas
        self._reach = reach

    async def to_subscription(self, found: Registered, letters: Sequence[int]) -> list[Done]:
        """Put letters of a subscription back into its queue, in the order given."""
        desk = await self._desks.of(found)
        await make_queue(
            self._queues,
            found.name,
            found.incarnation,
            still_ours=lambda: _refuse_replaced(found.name),
            replicas=self._replicas,
        )
        begun = time.monotonic()
        before = await desk.decide(lambda book: _note(book, letters))  # 1
        self._reach(Point.NOTED)
        results: dict[int, Done] = {}
        ready = await self._prepare(letters, results, found)  # 2
        if time.monotonic() - begun > _TRUST_SECONDS:
            raise Unavailable("the server took too long to tell about dead letters", fix="try again")
        ready = await self._found_again(desk, ready, before)
        stored = await self._store(ready, results)  # 3
        self._reach(Point.STORED)
        await asyncio.gather(*(self._box.settle(each.parked, Fate.RETRIED, each.put_at) for each in stored))  # 4
        self._reach(Point.SETTLED)
        newest = max((each.put_at for each in stored), default=0)
        await desk.decide(lambda book: _open(book, letters, newest))  # 5
        self._reach(Point.OPENED)
        await self._remove(stored, results)  # 6
        return [results[letter] for letter in letters]

    async def elsewhere(self, letters: Sequence[int]) -> list[Done]:
        """Put letters of other parts back, in the order given."""
        results: dict[int, Done] = {}
        stored = await self._store(await self._prepare(letters, results), results)
        await asyncio.gather(*(self._box.settle(each.parked, Fate.RETRIED, each.put_at) for each in stored))
        await self._remove(stored, results)
        return [results[letter] for letter in letters]

    async def _prepare(
        self, letters: Sequence[int], results: dict[int, Done], found: Registered | None = None
    ) -> list[_Ready]:
        ready: list[_Ready] = []
        for letter, parked in zip(letters, await asyncio.gather(*map(self._box.find, letters)), strict=True):
            if parked is None:
                results[letter] = Done(letter, gone=True)
                continue
            try:
                way = way_back(parked)
                if found is not None:
                    check_takes_back(parked, found)
            except (Refused, UnreadableRecord) as error:
                results[letter] = Done(letter, error=error)
                continue
            ready.append(_Ready(parked, way))
        receipts = await asyncio.gather(*(self._receipt(each.parked, results) for each in ready))
        for each, receipt in zip(ready, receipts, strict=True):
            if receipt is not None and receipt.fate is Fate.DISCARDED:  # somebody is about to remove it, or was
                await self._box.remove(each.parked.id)
                results[each.parked.id] = Done(each.parked.id, gone=True)
        return [
            replace(each, put_at=receipt.put_at if receipt is not None else 0)
            for each, receipt in zip(ready, receipts, strict=True)
            if each.parked.id not in results
        ]

    async def _receipt(self, parked: Parked, results: dict[int, Done]) -> Receipt | None:
        try:
            return await self._box.receipt(parked)
        except UnreadableRecord as error:
            results[parked.id] = Done(parked.id, error=error)
            return None

    async def _found_again(self, desk: Desk, ready: Sequence[_Ready], noted: frozenset[int]) -> list[_Ready]:
        """With the places of those that an attempt before has stored.

        The queue is read first and the book then: what was acknowledged in between is seen in one or the other. A note
        that is gone means that somebody else has come to the end of it.
        """
        doubtful = {each.parked.id for each in ready if not each.put_at and each.parked.id in noted}
        if not doubtful:
            return list(ready)
        places = await self._places(desk.name, ready[0].way)
        book = await desk.look()
        for letter in doubtful - places.keys():
            if book.putting.get(letter, True):
                places[letter] = max(book.retry.last, book.retry_to)
        return [
            replace(each, put_at=places.get(each.parked.id, 0)) if each.parked.id in doubtful else each
            for each in ready
        ]

    async def _places(self, name: str, way: Way) -> dict[int, int]:
        """Where each letter lies that was put back and not acknowledged, asked of the leader."""
        found: dict[int, int] = {}
        at = 1
        with contextlib.suppress(UnknownMessage):
            while True:
                message = await self._queues.streams.get_next(way.stream, at, f"{name}.retry")
                found[letter_of(message.headers)] = message.sequence
                at = message.sequence + 1
        return found

    async def _store(self, ready: Sequence[_Ready], results: dict[int, Done]) -> list[_Ready]:
        """Store them, all under way at once; they arrive in the order in which they are sent."""
        answers = await asyncio.gather(
            *(self._publish(each.way) if not each.put_at else _answer(each.put_at) for each in ready),
            return_exceptions=True,
        )
        stored: list[_Ready] = []
        for each, answer in zip(ready, answers, strict=True):
            if isinstance(answer, PurveyorError) and not answer.retryable:
                results[each.parked.id] = Done(each.parked.id, error=answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                stored.append(replace(each, put_at=answer))
        return stored

    async def _publish(self, way: Way) -> int:
        expect = Expect(stream=way.stream)
        receipt = await self._queues.publish(
            way.subject, way.data, headers=dict(way.headers), msg_id=way.msg_id, expect=expect
        )
        return receipt.sequence

    async def _remove(self, stored: Sequence[_Ready], results: dict[int, Done]) -> None:
        removed = await asyncio.gather(*(self._box.remove(each.parked.id) for each in stored))
        for each, was_there in zip(stored, removed, strict=True):
            results[each.parked.id] = Done(each.parked.id, gone=not was_there)


def _note(book: Book, letters: Sequence[int]) -> Step[frozenset[int]]:
    """Note that letters are being put back; which of them were noted before."""
    before = frozenset(letters).intersection(book.putting)
    fresh = {letter: False for letter in letters if letter not in before}
    noted = book._replace(putting={**book.putting, **fresh}) if fresh else None
    return Step(value=before, book=noted, empty=noted is None)


def _open(book: Book, letters: Sequence[int], newest: int) -> Step[None]:
    """Letters are back in the queue, up to a sequence."""
    putting = {letter: done for letter, done in book.putting.items() if letter not in letters}
    changed = book._replace(putting=putting, retry_to=max(book.retry_to, newest))
    return Step(value=None, book=changed if changed != book else None, frees=True)


async def _answer(sequence: int) -> int:
    return sequence


async def _refuse_replaced(name: str) -> None:
    raise UnknownSubscription(f"subscription {name!r} was deleted meanwhile", fix="is there another of its name?")
