"""The last step of an import: a block of records goes to its queue, what is broken to the dead letters, each once.

1. Ask what of the block is known: the ledger, and the newest message of the source in the queue.
2. Park what is broken. A crash after it: the next import parks it again under the same id.
3. Publish the records, in order, as one atomic batch, each with its id of the chain.
4. Note the block in the ledger.

A crash between 3 and 4 leaves records (`chain.BLOCK` at most; all of them or none) that are stored and not noted. The
next import recognises them by the newest message of the source. If that has been consumed by then, it sends them again
with the same ids, and the server drops them within the deduplication window of the queue (two minutes unless it is
set). Only when both have passed are they stored twice. The same holds for a server that went away while it stored them.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Protocol, TypeVar, cast

from purveyor.jetstream import Outgoing, PublishMode, PublishOptions, outgoing, publish_many
from purveyor.jetstream.headers import MSG_ID, first
from purveyor.model.errors import OutcomeUnknown, Unavailable, UnknownMessage
from purveyor.queues.catalogue import DEAD_LETTERS, LDIF
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import DeadLetter, park
from purveyor.sources.ldif.import_ledger import Ledger
from purveyor.sources.ldif.record_ids import Block, Link
from purveyor.sources.ldif.record_messages import body
from purveyor.sources.ldif.records import Broken

ORIGIN = "intake"
_HEADER_ROOM = 1024  # of the largest message, for its id and for being part of a batch
_FOR_EVER_SECONDS = 10 * 365 * 86400.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What became of the records of a block that were waiting."""

    added: int = 0
    known: int = 0
    broken: tuple[Broken, ...] = ()
    position: int | None = None
    """The sequence of the last one in the queue, if any was sent."""


class Store(Protocol):
    """What an import needs of the place where records go."""

    @property
    def most_bytes(self) -> int:
        """The largest record that can be stored."""

    async def put(self, block: Block, subject: str) -> Stored:
        """Deal with what is waiting in a block."""


class Checked:
    """Stores nothing, and tells what would be stored: a dry run."""

    most_bytes = 8 << 20

    async def put(self, block: Block, subject: str) -> Stored:
        """Count."""
        broken = tuple(link.item for link in block.waiting if isinstance(link.item, Broken))
        added = len(block.waiting) - len(broken)
        block.settle()
        return Stored(added=added, broken=broken)


class QueueStore:
    """The queue `ldif`. With `wait_for_ever` a lost server is waited for until it is back."""

    def __init__(self, queues: Queues, ledger: Ledger, *, wait_for_ever: bool = False) -> None:
        self._queues = queues
        self._ledger = ledger
        self._patience_seconds = _FOR_EVER_SECONDS if wait_for_ever else PublishOptions().patience_seconds
        self._sure_of: str | None = None
        """The source whose newest message is our own doing, so that it need not be looked at."""

    @classmethod
    async def open(cls, queues: Queues, *, replicas: int = 1, wait_for_ever: bool = False) -> "QueueStore":
        """With its queues and its ledger made where they are missing."""
        for queue in (LDIF, DEAD_LETTERS):
            (await queues.ensure(queue, replicas=replicas)).require_usable()
        ledger = await Ledger.open(queues, replicas=replicas)
        return cls(queues, ledger, wait_for_ever=wait_for_ever)

    @property
    def most_bytes(self) -> int:
        """As large as a message may be."""
        return self._queues.connection.max_payload

    async def put(self, block: Block, subject: str) -> Stored:
        """See the module for the steps."""
        before = block.done
        known = max(before, await self._patiently(lambda: self._known(block, subject)))
        links = block.waiting[known - before :]
        messages: list[Outgoing] = []
        broken: list[Broken] = []
        for link in links:
            message = self._message(link)
            if isinstance(message, Broken):
                await self._patiently(partial(self._park, link, message, subject))
                broken.append(message)
            else:
                messages.append((subject, message, None, link.msg_id))
        added, position = await self._publish(messages, subject) if messages else (0, None)
        if links:
            await self._patiently(lambda: self._ledger.note(block, links))
        skipped = len(block.waiting) - added - len(broken)
        block.settle()
        return Stored(added=added, known=skipped, broken=tuple(broken), position=position)

    def _message(self, link: Link) -> bytes | Broken:
        item = link.item
        if isinstance(item, Broken):
            return item
        data = body(item)
        if len(data) + _HEADER_ROOM > self.most_bytes:
            reason = f"a message of {len(data)} bytes, and the server takes {self.most_bytes}"
            return Broken(item.line, reason, item.raw, len(item.raw))
        return data

    async def _known(self, block: Block, subject: str) -> int:
        noted = await self._ledger.known(block)
        if self._sure_of == subject:
            return noted
        newest = await self._newest(subject)
        in_queue = (count for count, each in enumerate(block.ids, 1) if newest and each.hex() == newest[0])
        return max(noted, next(in_queue, 0))

    async def _newest(self, subject: str) -> tuple[str | None, int] | None:
        """Id and sequence of the newest message of the source that is still in the queue."""
        try:
            found = await self._queues.streams.get_last(LDIF.stream, subject)
        except UnknownMessage:
            return None
        return first(found.headers, MSG_ID), found.sequence

    async def _park(self, link: Link, broken: Broken, subject: str) -> None:
        now = datetime.now(UTC)
        letter = DeadLetter(
            reason=broken.reason,
            origin=ORIGIN,
            subject=subject,
            data=broken.raw,
            headers={MSG_ID: (link.msg_id,)},
            failed_first=now,
            failed_last=now,
            details={"line": broken.line} | ({"bytes": broken.size} if broken.size > len(broken.raw) else {}),
        )
        await park(self._queues, letter)

    async def _publish(self, messages: list[Outgoing], subject: str) -> tuple[int, int]:
        """Store all; how many were new to the queue, and the sequence of the last."""
        self._sure_of = None
        options = PublishOptions(
            mode=PublishMode.ATOMIC, expected_stream=LDIF.stream, patience_seconds=self._patience_seconds
        )
        found = 0
        while len(messages) > found:
            rest = messages[found:]
            try:
                report = await in_thread(partial(publish_many, self._queues.address, outgoing(rest), options))
            except OutcomeUnknown:
                newest = await self._patiently(lambda: self._newest(subject))
                if newest is None:
                    raise  # consumed, or never stored: there is no telling
                ids = [msg_id for _, _, _, msg_id in messages]
                found = ids.index(newest[0]) + 1 if newest[0] in ids else found
                position = newest[1]
            else:
                self._sure_of = subject
                return found + report.stored, report.last_sequences[LDIF.stream]
        return found, position

    async def _patiently(self, step: Callable[[], Coroutine[None, None, T]]) -> T:
        """Do a step that may be done twice, again and again while the server is away."""
        give_up = time.monotonic() + self._patience_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return await step()
            except Unavailable:
                if time.monotonic() > give_up:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread that ends with the process.

    `asyncio.to_thread` would make the end of the program wait for it, and a server that is away is waited for long.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():  # cancelled: nobody waits any more
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(cast("T", value))

    def run() -> None:
        value: T | None = None
        failure: BaseException | None = None
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, name="import", daemon=True).start()
    return await result
