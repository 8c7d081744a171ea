"""What the transform knows about a live source beside its entries: one record, and sets of identities in chunks. Pure.

A set holds 16 bytes for each identity. A batch appends to the last chunk, and only the end of a refresh reads all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from purveyor.model import json_fields
from purveyor.model.json_fields import Json, Kind

ID_BYTES: Final = 16
CHUNK_IDS: Final = 4096
_CHUNK_BYTES: Final = ID_BYTES * CHUNK_IDS
_ID: Final = f"S{ID_BYTES}"
"""NumPy ignores zero bytes at the end of such a value: two different values of the same length still differ."""


class NumberedStore(Protocol):
    """Values by numbers."""

    def find(self, number: int) -> bytes | None:
        """Return a value; None if there is none."""

    def read(self, number: int) -> bytes:
        """Return a value that is there."""

    def write(self, number: int, data: bytes) -> None:
        """Store a value."""

    def remove(self, number: int) -> None:
        """Remove a value, if it is there."""


class NumberSpace:
    """The values of a store from some number on, as pages with an index."""

    def __init__(self, store: NumberedStore, first: int) -> None:
        self._store = store
        self._first = first

    def read_index(self) -> bytes | None:
        """Return the index; None if there was never one."""
        return self._store.find(self._first)

    def write_index(self, data: bytes) -> None:
        """Store the index."""
        self._store.write(self._first, data)

    def read(self, number: int) -> bytes:
        """Return a page of the index."""
        return self._store.read(self._first + 1 + number)

    def write(self, number: int, data: bytes) -> None:
        """Store a page."""
        self._store.write(self._first + 1 + number, data)

    def remove(self, number: int) -> None:
        """Remove a page, if it was ever stored."""
        self._store.remove(self._first + 1 + number)


@dataclass(frozen=True, slots=True)
class Refresh:
    """A refresh that has begun and not ended."""

    full: bool
    complete: bool = True
    """Whether every record of it was understood."""
    ending: bool = False
    """Whether its end has come, and more entries change by it than fit into the outputs of one record."""
    remove_unseen: bool = False
    csns: tuple[str, ...] = ()
    """Of its end."""


@dataclass(frozen=True, slots=True)
class SyncState:
    """The record of a live source."""

    epoch: int = 0
    csns: Mapping[str, str] = field(default_factory=dict)
    """The newest operation that was applied, by server id."""
    generation: int = 0
    """The number of refreshes up to now."""
    refresh: Refresh | None = None
    containers: Mapping[str, str] = field(default_factory=dict)
    """By the key that an entry had before the refresh: its identity. It is another key now, and entries below did not
    follow yet."""
    displaced: int = 0
    """The number of entries whose names other entries have taken."""
    reported: int = 0
    """The sizes of the two sets."""
    present: int = 0


_NUMBERS: Final = ("epoch", "generation", "displaced", "reported", "present")
_KIND: Final = Kind(
    "record of a live source in the transform's checkpoint", (*_NUMBERS, "csns", "containers", "refresh")
)


def dump_state(state: SyncState) -> bytes:
    """Encode the record."""
    refresh = state.refresh
    fields: Json = {name: getattr(state, name) for name in _NUMBERS}
    fields |= {"csns": dict(state.csns), "containers": dict(state.containers)}
    if refresh is not None:
        fields["refresh"] = {
            "full": refresh.full,
            "complete": refresh.complete,
            "ending": refresh.ending,
            "remove_unseen": refresh.remove_unseen,
            "csns": list(refresh.csns),
        }
    return _KIND.dump(fields)


def load_state(data: bytes) -> SyncState:
    """Decode the record; raise UnreadableRecord if a newer program wrote it."""
    return _KIND.read(data, _read)


def _read(given: Json) -> SyncState:
    fields = _KIND.check(given)
    refresh: Any = fields.get("refresh")
    if refresh is not None:
        known = json_fields.mapping(refresh, "refresh")
        json_fields.reject_unknown(known, tuple(Refresh.__slots__), "refresh")
        refresh = Refresh(**{**known, "csns": tuple(known["csns"])})
    numbers = {name: json_fields.whole(fields, name, _KIND.what) for name in _NUMBERS}
    csns, containers = (json_fields.mapping(fields.get(name), name) for name in ("csns", "containers"))
    return SyncState(refresh=refresh, csns=csns, containers=containers, **numbers)


class IdSet:
    """A set of identities in chunks. An identity may be added twice."""

    def __init__(self, store: NumberedStore, first: int, size: int) -> None:
        self._store = store
        self._first = first
        self._tail: bytearray | None = None
        self._stored_chunks = -(-size // CHUNK_IDS)
        self._changed = False
        self.size = size

    def add(self, identity: bytes) -> None:
        """Add an identity of 16 bytes."""
        tail = self._last_chunk()
        tail += identity
        self.size += 1
        self._changed = True
        if len(tail) == _CHUNK_BYTES:
            self._write_tail()

    def extend(self, identities: Iterable[bytes]) -> None:
        """Add several."""
        for identity in identities:
            self.add(identity)

    def load(self) -> npt.NDArray[np.bytes_]:
        """Return all, sorted, each once."""
        self.flush()
        chunks = (self._store.read(self._first + number) for number in range(self._stored_chunks))
        return np.unique(np.frombuffer(b"".join(chunks), dtype=_ID))

    def clear(self) -> None:
        """Remove all."""
        for number in range(self._stored_chunks):
            self._store.remove(self._first + number)
        self._tail, self._stored_chunks, self.size, self._changed = bytearray(), 0, 0, False

    def flush(self) -> None:
        """Write back what changed."""
        if self._changed and self._tail:
            self._write_tail()

    def _last_chunk(self) -> bytearray:
        if self._tail is None or len(self._tail) == _CHUNK_BYTES:
            partial = self.size % CHUNK_IDS
            known = self._store.read(self._first + self.size // CHUNK_IDS) if partial else b""
            self._tail = bytearray(known)
        return self._tail

    def _write_tail(self) -> None:
        assert self._tail is not None
        number = (self.size - 1) // CHUNK_IDS
        self._store.write(self._first + number, bytes(self._tail))
        self._stored_chunks = max(self._stored_chunks, number + 1)
        self._changed = False


def contained(identities: npt.NDArray[np.bytes_], among: npt.NDArray[np.bytes_]) -> npt.NDArray[np.bool_]:
    """Return for each identity whether it is in a sorted set."""
    if not among.size:
        return np.zeros(identities.size, dtype=np.bool_)
    at = np.minimum(np.searchsorted(among, identities), among.size - 1)
    found: npt.NDArray[np.bool_] = among[at] == identities
    return found


def as_array(identities: Iterable[bytes]) -> npt.NDArray[np.bytes_]:
    """Return identities of 16 bytes as an array."""
    return np.frombuffer(b"".join(identities), dtype=_ID)
