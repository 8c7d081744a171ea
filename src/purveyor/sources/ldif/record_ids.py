"""Ids of records, as links of a chain: each id stands for its record and for everything before it in the input. Pure.

So the same beginning of an input has the same ids, whatever the file is called and however it is read, while two equal
records in one input have different ones. Records are numbered in blocks; the first id of a block names it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from purveyor.model.errors import UnreadableRecord
from purveyor.model.stored_record import UPGRADE
from purveyor.sources.ldif.records import Broken, Record

BLOCK = 1000
"""How many records are sent, acknowledged and noted together."""

_ROOT = hashlib.sha256(b"purveyor ldif import 1").digest()
_NOTE_BYTES = 8  # of an id: enough to tell it from the few others that are noted with the same block
_MOST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Link:
    """A record in its place."""

    id: bytes
    item: Record | Broken

    @property
    def msg_id(self) -> str:
        """The id as a message carries it."""
        return self.id.hex()


@dataclass(slots=True)
class Block:
    """Neighbours in a chain: the ids of all, and those still to be dealt with. It may take a while to fill up."""

    ids: list[bytes] = field(default_factory=list)
    waiting: list[Link] = field(default_factory=list)
    waiting_bytes: int = 0

    @property
    def key(self) -> str:
        """Names the block: inputs that share everything up to its first record share it."""
        return self.ids[0].hex()

    @property
    def done(self) -> int:
        """How many are dealt with, from the first on."""
        return len(self.ids) - len(self.waiting)

    @property
    def full(self) -> bool:
        """Whether the next record begins another."""
        return len(self.ids) >= BLOCK

    @property
    def heavy(self) -> bool:
        """Whether what is waiting should not wait any longer, for the sake of memory."""
        return self.waiting_bytes >= _MOST_BYTES

    def append(self, link: Link) -> None:
        """The next one."""
        self.ids.append(link.id)
        self.waiting.append(link)
        self.waiting_bytes += len(link.item.raw)

    def settle(self) -> None:
        """All that was waiting is dealt with."""
        self.waiting = []
        self.waiting_bytes = 0


class Chain:
    """Gives each record of one input its id."""

    def __init__(self) -> None:
        self._last = _ROOT
        self.length = 0

    def append(self, item: Record | Broken) -> Link:
        """The next link."""
        self._last = hashlib.sha256(self._last + item.raw).digest()
        self.length += 1
        return Link(self._last, item)


def note_of(link_id: bytes) -> bytes:
    """An id in short."""
    return link_id[:_NOTE_BYTES]


def known_count(ids: Sequence[bytes], notes: Iterable[bytes]) -> int:
    """How many ids from the first on were dealt with before: all up to the furthest that is noted."""
    noted = frozenset(notes)
    return next((count for count in range(len(ids), 0, -1) if note_of(ids[count - 1]) in noted), 0)


def split_notes(value: bytes) -> list[bytes]:
    """Notes as they were joined; UnreadableRecord if they are not in this form.

    Notes of version 1 are their bytes alone. A later version has a length that is no multiple of theirs.
    """
    if len(value) % _NOTE_BYTES:
        raise UnreadableRecord(f"a block of the import ledger has {len(value)} bytes", fix=UPGRADE)
    return [value[at : at + _NOTE_BYTES] for at in range(0, len(value), _NOTE_BYTES)]


def join_notes(known: Sequence[bytes], new: Iterable[bytes], *, most: int) -> bytes:
    """Old and new notes, each once; the oldest make room."""
    return b"".join(list(dict.fromkeys([*known, *new]))[-most:])
