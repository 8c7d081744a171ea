"""The last step of an import: stores a block of records in the queue, and its broken records as dead letters, once.

1. Find out which records of the block are known: by the ledger, and by the newest message of the source in the queue.
2. Park the broken records. A crash after it: the next import parks them again under the same ids.
3. Publish the records, in order, as one atomic batch, each with its id of the chain.
4. Enter the block into the ledger.

A crash between 3 and 4 leaves records (one block at most; all of them or none) that are stored and not in the ledger.
The next import recognises them by the newest message of the source. If the transform has consumed that message by then,
the import sends them again with the same ids, and the server drops them within the deduplication window of the queue
(two minutes by default). Only after both are they stored twice. The same holds for a server that becomes unavailable
while it stores them.
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
from purveyor.model.backoff import Backoff, RetryDelays
from purveyor.model.errors import OutcomeUnknown, Unavailable, UnknownMessage
from purveyor.queues.catalogue import DEAD_LETTERS, LDIF
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import DeadLetter, park
from purveyor.sources.ldif.import_ledger import Block, IdentifiedRecord, ImportLedger
from purveyor.sources.ldif.records import BrokenRecord, encode_record

ORIGIN = "intake"
"""The origin of the dead letters of an import; the name is from an earlier version."""
_HEADER_BYTES = 1024  # of the largest message: its id, and its place in a batch
_FOR_EVER_SECONDS = 10 * 365 * 86400.0
_RETRY_BACKOFF = Backoff(0.1, 2.0)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResult:
    """The outcome of the waiting records of a block."""

    added: int = 0
    known: int = 0
    broken: tuple[BrokenRecord, ...] = ()
    position: int | None = None
    """The sequence in the queue of the last record, if any was sent."""


class RecordStore(Protocol):
    """Where an import stores its records."""

    @property
    def max_record_bytes(self) -> int:
        """The size of the largest record that can be stored."""

    async def put(self, block: Block, subject: str) -> BlockResult:
        """Store the waiting records of a block."""


class DryRunStore:
    """A dry run: counts the records and stores nothing."""

    max_record_bytes = 8 << 20

    async def put(self, block: Block, subject: str) -> BlockResult:
        """Count the waiting records of a block."""
        broken = tuple(each.item for each in block.waiting if isinstance(each.item, BrokenRecord))
        added = len(block.waiting) - len(broken)
        block.mark_stored()
        return BlockResult(added=added, broken=broken)


class QueueStore:
    """The queue `ldif`. With `wait_for_ever` it waits for an unavailable server without a limit."""

    def __init__(self, queues: Queues, ledger: ImportLedger, *, wait_for_ever: bool = False) -> None:
        self._queues = queues
        self._ledger = ledger
        self._patience_seconds = _FOR_EVER_SECONDS if wait_for_ever else PublishOptions().patience_seconds
        self._last_published: str | None = None
        """The subject whose newest message this store wrote, so that it need not read it."""

    @classmethod
    async def open(cls, queues: Queues, *, replicas: int = 1, wait_for_ever: bool = False) -> "QueueStore":
        """Open the store; create its queues and its ledger if they are missing."""
        for queue in (LDIF, DEAD_LETTERS):
            (await queues.ensure(queue, replicas=replicas)).require_usable()
        ledger = await ImportLedger.open(queues, replicas=replicas)
        return cls(queues, ledger, wait_for_ever=wait_for_ever)

    @property
    def max_record_bytes(self) -> int:
        """The largest message that the server takes."""
        return self._queues.connection.max_payload

    async def put(self, block: Block, subject: str) -> BlockResult:
        """Store the waiting records of a block, by the steps at the top of this module."""
        before = block.stored_count
        known = max(before, await self._retry(lambda: self._count_known(block, subject)))
        records = block.waiting[known - before :]
        messages: list[Outgoing] = []
        broken: list[BrokenRecord] = []
        for record in records:
            message = self._encode(record)
            if isinstance(message, BrokenRecord):
                await self._retry(partial(self._park, record, message, subject))
                broken.append(message)
            else:
                messages.append((subject, message, None, record.msg_id))
        added, position = await self._publish(messages, subject) if messages else (0, None)
        if records:
            await self._retry(lambda: self._ledger.add(block, records))
        skipped = len(block.waiting) - added - len(broken)
        block.mark_stored()
        return BlockResult(added=added, known=skipped, broken=tuple(broken), position=position)

    def _encode(self, record: IdentifiedRecord) -> bytes | BrokenRecord:
        item = record.item
        if isinstance(item, BrokenRecord):
            return item
        data = encode_record(item)
        if len(data) + _HEADER_BYTES > self.max_record_bytes:
            reason = f"a message of {len(data)} bytes, and the server takes {self.max_record_bytes}"
            return BrokenRecord(item.line, reason, item.raw, len(item.raw))
        return data

    async def _count_known(self, block: Block, subject: str) -> int:
        in_ledger = await self._ledger.count_known(block)
        if self._last_published == subject:
            return in_ledger
        newest = await self._newest(subject)
        in_queue = (count for count, each in enumerate(block.ids, 1) if newest and each.hex() == newest[0])
        return max(in_ledger, next(in_queue, 0))

    async def _newest(self, subject: str) -> tuple[str | None, int] | None:
        """Return the id and sequence of the newest message of the source that is still in the queue."""
        try:
            found = await self._queues.streams.get_last(LDIF.stream, subject)
        except UnknownMessage:
            return None
        return first(found.headers, MSG_ID), found.sequence

    async def _park(self, record: IdentifiedRecord, broken: BrokenRecord, subject: str) -> None:
        now = datetime.now(UTC)
        letter = DeadLetter(
            reason=broken.reason,
            origin=ORIGIN,
            subject=subject,
            data=broken.raw,
            headers={MSG_ID: (record.msg_id,)},
            failed_first=now,
            failed_last=now,
            details={"line": broken.line} | ({"bytes": broken.size} if broken.size > len(broken.raw) else {}),
        )
        await park(self._queues, letter)

    async def _publish(self, messages: list[Outgoing], subject: str) -> tuple[int, int]:
        """Store all messages; return the number of those new to the queue, and the sequence of the last."""
        self._last_published = None
        options = PublishOptions(
            mode=PublishMode.ATOMIC, expected_stream=LDIF.stream, patience_seconds=self._patience_seconds
        )
        found = 0
        while len(messages) > found:
            rest = messages[found:]
            try:
                report = await run_in_thread(partial(publish_many, self._queues.address, outgoing(rest), options))
            except OutcomeUnknown:
                newest = await self._retry(lambda: self._newest(subject))
                if newest is None:
                    raise  # consumed, or never stored: the two cannot be distinguished
                ids = [msg_id for _, _, _, msg_id in messages]
                found = ids.index(newest[0]) + 1 if newest[0] in ids else found
                position = newest[1]
            else:
                self._last_published = subject
                return found + report.stored, report.last_sequences[LDIF.stream]
        return found, position

    async def _retry(self, step: Callable[[], Coroutine[None, None, T]]) -> T:
        """Run a step that may run twice, and repeat it while the server is unavailable."""
        deadline = time.monotonic() + self._patience_seconds
        delays = RetryDelays(_RETRY_BACKOFF)
        while True:
            try:
                return await step()
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(delays.next_seconds())


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread that ends with the process.

    With `asyncio.to_thread` the end of the program would wait for it, and the work may wait long for a server.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():  # cancelled
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
