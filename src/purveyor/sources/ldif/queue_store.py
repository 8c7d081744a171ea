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

An id is a hash of its record and of the id before it, so it identifies the record and everything before it in the
input. Inputs that begin alike have the same ids there, whatever their file names and portions are, while two equal
records in one input have different ids. Records form blocks; the first id of a block is its key.

The server recognises a repeated message id for some minutes only; the ledger remembers it for ever, with about nine
bytes for each record in the bucket `imports`.
"""

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Protocol, TypeVar, cast

from purveyor.jetstream import Outgoing, PublishMode, PublishOptions, outgoing, publish_many
from purveyor.jetstream.headers import MSG_ID, first
from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.model.errors import (
    AlreadyExists,
    OutcomeUnknown,
    Unavailable,
    UnknownKey,
    UnknownMessage,
    UnreadableRecord,
    WrongRevision,
)
from purveyor.model.json_fields import UPGRADE
from purveyor.model.retries import Backoff, RetryDelays
from purveyor.queues.catalogue import DEAD_LETTERS, LDIF
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import DeadLetter, park
from purveyor.queues.permissions import SOURCES
from purveyor.sources.ldif.records import BrokenRecord, Record, encode_record

BLOCK_RECORDS = 1000
"""The number of records that are sent, acknowledged and entered into the ledger together."""

_ROOT = hashlib.sha256(b"purveyor ldif import 1").digest()
_SHORT_ID_BYTES = 8  # enough to distinguish an id from the few others of the same block
_MAX_WAITING_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class IdentifiedRecord:
    """A record with its id."""

    id: bytes
    item: Record | BrokenRecord

    @property
    def msg_id(self) -> str:
        """The message id."""
        return self.id.hex()


@dataclass(slots=True)
class Block:
    """Consecutive records of an input: the ids of all, and the records that are not stored yet."""

    ids: list[bytes] = field(default_factory=list)
    waiting: list[IdentifiedRecord] = field(default_factory=list)
    waiting_bytes: int = 0

    @property
    def key(self) -> str:
        """The key of the block: the same for inputs that are equal up to its first record."""
        return self.ids[0].hex()

    @property
    def stored_count(self) -> int:
        """The number of stored records, from the first on."""
        return len(self.ids) - len(self.waiting)

    @property
    def is_full(self) -> bool:
        """Whether the next record begins another block."""
        return len(self.ids) >= BLOCK_RECORDS

    @property
    def is_heavy(self) -> bool:
        """Whether the waiting records use so much memory that they must be stored now."""
        return self.waiting_bytes >= _MAX_WAITING_BYTES

    def append(self, record: IdentifiedRecord) -> None:
        """Append the next record."""
        self.ids.append(record.id)
        self.waiting.append(record)
        self.waiting_bytes += len(record.item.raw)

    def mark_stored(self) -> None:
        """Mark all waiting records as stored."""
        self.waiting = []
        self.waiting_bytes = 0


class RecordIdChain:
    """Assigns the ids of one input."""

    def __init__(self) -> None:
        self._last = _ROOT
        self.length = 0

    def append(self, item: Record | BrokenRecord) -> IdentifiedRecord:
        """Return the next record with its id."""
        self._last = hashlib.sha256(self._last + item.raw).digest()
        self.length += 1
        return IdentifiedRecord(self._last, item)


def shorten_id(record_id: bytes) -> bytes:
    """Return the part of an id that the ledger stores."""
    return record_id[:_SHORT_ID_BYTES]


def count_known(ids: Sequence[bytes], short_ids: Iterable[bytes]) -> int:
    """Count the ids, from the first on, that were imported before: all up to the last one in the ledger."""
    known = frozenset(short_ids)
    return next((count for count in range(len(ids), 0, -1) if shorten_id(ids[count - 1]) in known), 0)


def split_ids(value: bytes) -> list[bytes]:
    """Split an entry of the ledger into short ids; UnreadableRecord if it does not have this form.

    An entry of version 1 is the bytes of the ids alone. A later version has a length that is no multiple of theirs.
    """
    if len(value) % _SHORT_ID_BYTES:
        raise UnreadableRecord(f"a block of the import ledger has {len(value)} bytes", fix=UPGRADE)
    return [value[at : at + _SHORT_ID_BYTES] for at in range(0, len(value), _SHORT_ID_BYTES)]


def join_ids(known: Sequence[bytes], new: Iterable[bytes], *, limit: int) -> bytes:
    """Join old and new short ids, each once; without the oldest if there are more than `limit`."""
    return b"".join(list(dict.fromkeys([*known, *new]))[-limit:])


BUCKET = "imports"
_MAX_IDS_PER_BLOCK = 16 * BLOCK_RECORDS
"""Enough for all records of 16 inputs that begin alike and then differ."""


class ImportLedger:
    """The bucket of the records that were imported before."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    @classmethod
    async def open(cls, queues: Queues, *, replicas: int) -> "ImportLedger":
        """Open the ledger of a deployment; create its bucket if it is missing."""
        return cls(await queues.bucket(BucketConfig(name=BUCKET, replicas=replicas)))

    async def count_known(self, block: Block) -> int:
        """Count the records of a block, from its first on, that were imported before."""
        known, _ = await self._read(block.key)
        return count_known(block.ids, known)

    async def add(self, block: Block, records: Sequence[IdentifiedRecord]) -> None:
        """Enter stored records of a block, with compare-and-set: other imports may do so at the same time."""
        while True:
            known, revision = await self._read(block.key)
            value = join_ids(known, (shorten_id(record.id) for record in records), limit=_MAX_IDS_PER_BLOCK)
            try:
                if revision is None:
                    await self._bucket.create(block.key, value)
                else:
                    await self._bucket.update(block.key, value, revision)
            except (AlreadyExists, WrongRevision):
                continue
            return

    async def _read(self, key: str) -> tuple[list[bytes], int | None]:
        try:
            entry = await self._bucket.get(key)
        except UnknownKey:
            return [], None
        return split_ids(entry.value), entry.revision


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
            origin=SOURCES,
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
