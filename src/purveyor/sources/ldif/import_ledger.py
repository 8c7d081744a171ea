"""The ids of LDIF records, and the ledger of the records that were imported before.

An id is a hash of its record and of the id before it, so it identifies the record and everything before it in the
input. Inputs that begin alike have the same ids there, whatever their file names and portions are, while two equal
records in one input have different ids. Records form blocks; the first id of a block is its key.

The server recognises a repeated message id for some minutes only; the ledger remembers it for ever, with about nine
bytes for each record in the bucket `imports`. `queue_store` explains what a crash before an entry in the ledger means.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.model.errors import AlreadyExists, UnknownKey, UnreadableRecord, WrongRevision
from purveyor.model.stored_record import UPGRADE
from purveyor.queues.client import Queues
from purveyor.sources.ldif.records import BrokenRecord, Record

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
