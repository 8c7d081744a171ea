"""One subscription in this process: its book, kept in step with all other processes, and what was read of its queue.

Decisions are made on the book in memory and written by compare-and-set. Those that are asked for while a write is under
way are made together and written with the next one, so a hundred consumers of a subscription cost little more than one.
When another process wrote in between, the book is read again and the same decisions are made anew.

Acknowledging, and what a crash between the steps means:

1. The book is written: the message is done, its lease ended, its position noted. Before that nothing has happened, and
   the message is delivered again. From here on it is acknowledged, and the caller is told so.
2. The message is removed from the queue, soon after, many at once. A crash before that leaves it there; it is not
   delivered, since the book tells that it is done, and whoever opens the desk next removes it.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from purveyor.delivery import lease_rules
from purveyor.delivery import state_codec as book_json
from purveyor.delivery.lease_rules import Acked, Book, Kind
from purveyor.delivery.memory_limit import Memory
from purveyor.delivery.message_buffer import Window
from purveyor.delivery.prefetch import Ahead
from purveyor.delivery.registration_cache import Gate
from purveyor.jetstream.config import INCARNATION
from purveyor.jetstream.key_value import Bucket
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.errors import (
    PurveyorError,
    Refused,
    Unavailable,
    UnknownMessage,
    UnknownStream,
    UnknownSubscription,
    WrongRevision,
)
from purveyor.model.subscription import Subscription
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.registry import Registered

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 100
_TIDY_SECONDS: Final = 0.05
_TIDY_PAUSE_SECONDS: Final = 1.0
_AT_ONCE: Final = 100
_CLOSE_SECONDS: Final = 5.0
_HEADER_BYTES: Final = 512
"""What the headers of a stored book take at most."""
_V = TypeVar("_V")


class Step(NamedTuple, Generic[_V]):
    """A decision on a book: what the caller gets, and what it changes."""

    value: _V
    book: Book | None = None
    """The next book; None if nothing changes."""
    acked: Sequence[Acked] = ()
    missing: int = 0
    """How many messages more it would have taken if they had been known."""
    frees: bool = False
    """Whether others may get something now that they could not have before."""
    empty: bool = False
    """Whether it came to nothing, or says something about the book as it is: then that is read before it counts."""
    undo: Callable[[Book], Book] | None = None
    """For a caller who is not there any more to take what it asked for."""


@dataclass(slots=True, eq=False)
class _Request(Generic[_V]):
    decide: Callable[[Book], Step[_V]]
    answer: "asyncio.Future[_V]"
    alike: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Office:
    """What all desks of a process share."""

    queues: Queues
    books: Bucket
    gate: Gate
    memory: Memory
    ring: Callable[[str], None]


class Desk:
    """See the module. Belongs to one incarnation of a subscription."""

    def __init__(self, office: Office, found: Registered) -> None:
        self.name = found.name
        self.incarnation = found.incarnation
        self._office = office
        self._found = found
        self._stream = subscription_queue(found.name).stream
        self.window = self._new_window(found)
        self._book: Book | None = None
        self._revision = 0
        self._new_key = False
        self._generation = office.queues.connection.generation
        self._requests: list[_Request[Any]] = []
        self._working: asyncio.Task[None] | None = None
        self._to_remove: dict[Kind, set[int]] = {kind: set() for kind in Kind}
        self._tidied = False
        self._tidied_at = float("-inf")
        self._tidying: asyncio.Task[None] | None = None
        self.ahead = Ahead(self._give_back)

    def update(self, found: Registered) -> None:
        """The registry says something new: the order may be another, or the prefill have changed the queue."""
        if found is self._found:
            return
        if found.prefill != self._found.prefill or found.record.definition != self._found.record.definition:
            self.window.clear()
            self.window = self._new_window(found)
        self._found = found

    def _new_window(self, found: Registered) -> Window:
        keys = found.record.definition.order_by is OrderBy.KEY
        return Window(self._office.queues, found.name, self._office.memory, keys=keys)

    @property
    def definition(self) -> Subscription:
        """What the subscription asked for."""
        return self._found.record.definition

    @property
    def most_state_bytes(self) -> int:
        """How large the stored book may become by leases; what is left is for answers, which are always taken."""
        return self._office.queues.connection.max_payload * 7 // 8

    @property
    def in_doubt(self) -> bool:
        """Whether the server was away since we knew it: what we know of it has to be read again."""
        return self._office.queues.connection.generation != self._generation

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, so that it may be forgotten."""
        return (self._working is None or self._working.done()) and (self._tidying is None or self._tidying.done())

    async def decide(self, decide: Callable[[Book], Step[_V]], *, alike: bool = False) -> _V:
        """Make a decision that counts. It is a pure function, and may be asked several times.

        Of those that are alike, when one comes to nothing the others do too: they are not made.
        """
        request = _Request(decide, asyncio.get_running_loop().create_future(), alike)
        self._requests.append(request)
        self._work_soon()
        answer: _V = await request.answer
        return answer

    async def look(self) -> Book:
        """The book as it is now."""
        return await self.decide(lambda book: Step(value=book, empty=True))

    def _give_back(self, lease_id: str) -> None:
        """Nobody has asked for what was kept."""
        self._requests.append(_Request(_undone(lambda book: lease_rules.give_back(book, lease_id)), _nobody()))
        self._work_soon()

    def _work_soon(self) -> None:
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self._requests:
            requests = [request for request in self._requests if not request.answer.done()]
            self._requests = []
            try:
                await self._answer(requests)
            except Exception as error:  # noqa: BLE001 - those who asked are told, whatever it is
                self._book = None  # what was written, if anything, is read again
                _refuse(requests, error)
            except asyncio.CancelledError:
                _refuse(requests + self._requests, Unavailable("this process is about to end", fix="ask again"))
                raise

    async def _answer(self, requests: list[_Request[Any]]) -> None:
        """Decide all requests on one book, and write it."""
        self._forget_if_reconnected()
        more, fresh, pages = True, False, 0
        for attempt in range(_ATTEMPTS):
            if self._book is None:
                await self._load()
                fresh = True
            assert self._book is not None
            if self.window.is_behind(self._book):
                await self._catch_up(self._book)
            steps, book = self._decide_all(requests, self._book)
            missing = sum(step.missing for step in steps if isinstance(step, Step))
            if missing and more:
                more = await self._read_on(self._book, missing << min(pages, 10))
                pages += 1
                continue
            if not fresh and any(isinstance(step, PurveyorError) or step.empty for step in steps):
                self._book = None  # a refusal counts only if nobody else has written since
                continue
            if book is not self._book and not await self._write(book):
                fresh = False
                await asyncio.sleep(random.random() * 0.002 * attempt)  # noqa: S311 - only to get out of step
                continue
            self._finish(requests, steps)
            return
        raise Unavailable(f"subscription {self.name!r} is used by others faster than it can be read", fix="try again")

    def _decide_all(self, requests: list[_Request[Any]], book: Book) -> tuple[list[Step[Any] | PurveyorError], Book]:
        steps: list[Step[Any] | PurveyorError] = []
        nothing: Step[Any] | None = None
        for request in requests:
            if nothing is not None and request.alike:
                steps.append(nothing)
                continue
            try:
                step = request.decide(book)
            except PurveyorError as error:  # the caller's own; the others are not concerned
                steps.append(error)
                continue
            steps.append(step)
            if step.book is not None:
                book, nothing = step.book, None
            elif step.empty and request.alike:
                nothing = step._replace(missing=0)
        return steps, book

    def _finish(self, requests: list[_Request[Any]], steps: list[Step[Any] | PurveyorError]) -> None:
        freed = False
        for request, step in zip(requests, steps, strict=True):
            if isinstance(step, PurveyorError):
                if not request.answer.done():
                    request.answer.set_exception(step)
                continue
            freed = freed or step.frees or bool(step.acked)
            gone: dict[Kind, set[int]] = {}
            for message in step.acked:
                gone.setdefault(message.kind, set()).add(message.sequence)
            for kind, sequences in gone.items():
                self.window.forget(kind, sequences)
                self._to_remove[kind] |= sequences
            if not request.answer.done():
                request.answer.set_result(step.value)
            elif step.undo is not None:
                self._requests.append(_Request(_undone(step.undo), _nobody()))
        if freed:
            self._office.ring(self.name)
        self._tidy_soon()

    def _forget_if_reconnected(self) -> None:
        """A server that was away may have come back without its last moments: what we know of it is read again."""
        if self.in_doubt:
            self._generation, self._book = self._office.queues.connection.generation, None
            self.window.clear()

    async def _load(self) -> None:
        entry = await self._office.books.newest(self.name)
        book = Book(incarnation=self.incarnation)
        self._revision, self._new_key = 0 if entry is None else entry.revision, True
        if entry is not None and not entry.deleted:
            found = book_json.decode(entry.value, f"subscription {self.name!r}")
            if found.incarnation == self.incarnation:
                book, self._new_key = found, False
        self._book = book
        self.window.trim(book)
        self._tidy_soon()

    async def _read_on(self, book: Book, count: int) -> bool:
        try:
            return await self.window.read_on(book, count)
        except UnknownStream:
            return False  # the next writer makes the queue again; until then it is empty
        finally:
            self._take_leftover()

    async def _catch_up(self, book: Book) -> None:
        with contextlib.suppress(UnknownStream):
            await self.window.catch_up(book)
        self._take_leftover()

    def _take_leftover(self) -> None:
        for kind, sequences in self.window.take_leftover().items():
            self._to_remove[kind] |= sequences

    async def _write(self, book: Book) -> bool:
        """Whether the book is written; if not, somebody else has changed it.

        That it is the book of this subscription, and not of one that has its name meanwhile, follows from the revision:
        deleting a subscription removes its book before another can be added. Where there was no book to remove, the
        registry is asked once more.
        """
        book, value = self._fitting(book)
        try:
            self._revision = await self._office.books.update(self.name, value, self._revision)
        except WrongRevision:
            self._book = None
            return False
        self._book = book
        if self._new_key:
            found = await self._office.gate.look_again(self.name)
            if found.incarnation != self.incarnation:
                raise UnknownSubscription(f"subscription {self.name!r} was deleted meanwhile", fix="ask again")
            self._new_key = False
        return True

    def _fitting(self, book: Book) -> tuple[Book, bytes]:
        """The book and its bytes, without the notes of how deliveries ended if the server would not take those."""
        value = book_json.encode(book)
        most = self._office.queues.connection.max_payload - _HEADER_BYTES
        if len(value) > most and book.ends:
            _log.warning("the delivery state of subscription %s is too large for notes of failed deliveries", self.name)
            book = book._replace(ends={})
            value = book_json.encode(book)
        if len(value) > most:
            raise Refused(
                f"the delivery state of subscription {self.name!r} takes {len(value)} bytes, and the server {most}",
                fix="raise max_payload of the NATS server",
            )
        return book, value

    def _tidy_soon(self) -> None:
        if self._tidying is not None and not self._tidying.done():
            return
        # Where nothing was ever acknowledged nothing can be left: thousands that are only looked at ask nothing.
        left = not self._tidied and self._book is not None and any(self._book.done(kind).last for kind in Kind)
        if left or any(self._to_remove.values()):
            self._tidying = asyncio.create_task(self._tidy())

    async def _tidy(self) -> None:
        """Remove from the queue what is done. If that fails it is tried again after the next acknowledgement.

        Soon, but not often: under load many are removed at once.
        """
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(max(_TIDY_SECONDS, self._tidied_at + _TIDY_PAUSE_SECONDS - now))
        try:
            while await self._remove():
                pass
        except UnknownStream:
            self._to_remove = {kind: set() for kind in Kind}
        except PurveyorError as error:
            _log.warning("what subscription %s has acknowledged is not removed yet: %s", self.name, error)
        finally:
            self._tidied_at = asyncio.get_running_loop().time()

    async def _remove(self) -> bool:
        """One round; whether there may be another."""
        streams, book = self._office.queues.streams, self._book
        if book is None:
            return False  # nobody knows at present; when it is read again, this goes on
        config = (await streams.raw_info(self._stream))["config"]  # as it came: asked often, and for one word
        if (config.get("metadata") or {}).get(INCARNATION) != self.incarnation:
            raise UnknownStream(f"the queue of subscription {self.name!r} is another one's by now")
        for kind in Kind:
            floor, todo = book.done(kind).floor, self._to_remove[kind]
            below = {sequence for sequence in todo if sequence <= floor}
            above = sorted(todo - below)[:_AT_ONCE]
            if below or (floor and not self._tidied):
                await streams.purge(self._stream, subject=f"{self.name}.{kind.value}", before_sequence=floor + 1)
            await asyncio.gather(*(self._delete(sequence) for sequence in above))
            self._to_remove[kind] -= below.union(above)
        self._tidied = True
        return any(self._to_remove.values())

    async def _delete(self, sequence: int) -> None:
        with contextlib.suppress(UnknownMessage, Refused):  # it is gone already
            await self._office.queues.streams.delete_message(self._stream, sequence)

    async def close(self) -> None:
        """Return when nothing is under way any more; what takes too long, because the server is away, is given up."""
        if (kept := self.ahead.close()) is not None:
            self._give_back(kept)
        tasks = {task for task in (self._working, self._tidying) if task is not None and not task.done()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.window.clear()


def _refuse(requests: Iterable[_Request[Any]], error: Exception) -> None:
    for request in requests:
        if not request.answer.done():
            request.answer.set_exception(error)


def _undone(undo: Callable[[Book], Book]) -> Callable[[Book], Step[None]]:
    return lambda book: Step(value=None, book=undo(book), frees=True)


def _nobody() -> "asyncio.Future[None]":
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
