"""A directory whose entries are known by their identities too, with the record of its live source. Pure.

The identity of an entry, its entryUUID, leads to the key of its name through an index in pages. The index is built when
the first live record comes, so a source of LDIF files alone has none. From then on every change keeps it up to date,
whichever record made it. An entry without entryUUID is in the index under a mark and the id that the transform made.

In the index the parts of a UUID are in the order of their time. OpenLDAP makes UUIDs of time and sends entries in the
order of their creation, so that a batch of a refresh touches few pages.

Two entries can have one name for a while: a refresh reports an entry under a name that another had, before it says
what became of that one. The other is **displaced**: it keeps its state, under a key that no name has, until it is
reported under another name, is gone, or its name is free again.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from purveyor.pipeline.transform.directory_records import descendant_prefix, parse_dn
from purveyor.pipeline.transform.directory_rules import ENTRY_UUID, Entry, Store
from purveyor.pipeline.transform.live_records import read_uuid
from purveyor.pipeline.transform.paged_map import PagedMap, PageFormat
from purveyor.pipeline.transform.sync_state import (
    ID_BYTES,
    IdSet,
    NumberedStore,
    NumberSpace,
    SyncState,
    as_array,
    contained,
    dump_state,
    load_state,
)

_NUMBERS_PER_SPACE: Final = 1 << 40
"""Numbers of pages of the directory are smaller. The record, the index and the two sets have a space each."""
_RECORD, _INDEX, _REPORTED, _PRESENT = (_NUMBERS_PER_SPACE * number for number in range(1, 5))
_MAX_INDEX_PAGE_ENTRIES: Final = 128
_MAX_INDEX_PAGE_BYTES: Final = 48 << 10
_BUILD_RUN_ENTRIES: Final = 200_000
"""Entries that are sorted in memory together when the index is built."""
_MADE: Final = "~"
_DISPLACED: Final = "\1"
_UUID_CHARACTERS: Final = 36


class EntryMap(Store, Protocol):
    """The entries by their keys."""

    def items(self, prefix: str = "") -> Iterator[tuple[str, Entry]]:
        """Yield everything whose key has this prefix, in order."""

    @property
    def marked(self) -> bool:
        """Whether the source is live: there are a record and an index beside the entries."""

    def mark(self) -> None:
        """Mark the entries as those of a live source. Programs that do not know the index stop at the mark."""

    def flush(self) -> None:
        """Write back what changed."""


class EntryLocation(NamedTuple):
    """Where an entry is."""

    key: str
    moved: int
    """The refresh that gave it this key; 0 if none did."""


def _encode_location(location: EntryLocation) -> bytes:
    return f"{location.moved} {location.key}".encode("utf-8", "surrogatepass")


def _decode_location(raw: bytes) -> EntryLocation:
    moved, _, key = raw.decode("utf-8", "surrogatepass").partition(" ")
    return EntryLocation(key, int(moved))


_FORMAT: Final = PageFormat(_encode_location, _decode_location, _MAX_INDEX_PAGE_ENTRIES, _MAX_INDEX_PAGE_BYTES)


def index_key(uuid: str) -> str:
    """Return the location of a UUID in the index: the parts in the order of their time.

    >>> index_key("0f8fad5b-d9cb-469f-a165-70867728950e")
    '469fd9cb0f8fad5ba16570867728950e'
    """
    low, middle, high, clock, node = uuid.split("-")
    return f"{high}{middle}{low}{clock}{node}"


def identity(entry: Entry) -> str:
    """Return the key of an entry in the index."""
    uuid = entry_uuid(entry)
    return f"{_MADE}{entry.uuid}" if uuid is None else index_key(uuid)


def entry_uuid(entry: Entry) -> str | None:
    """Return the entryUUID of an entry; None if it has none."""
    given = entry.attributes.get(ENTRY_UUID)
    return read_uuid(given[0]) if given else None


def _set_member(known: str) -> bytes:
    if known.startswith(_MADE):
        return hashlib.blake2b(known.encode("utf-8", "surrogatepass"), digest_size=ID_BYTES).digest()
    return bytes.fromhex(known)


class LiveDirectory:
    """The entries of one source, and the record of a source that is live. Only `flush` guarantees that all is written.

    `undo` restores what it was at the last `begin`, except for the entries that were noted as seen.
    """

    def __init__(self, entries: EntryMap, store: NumberedStore) -> None:
        self._entries = entries
        self._store = store
        self._index: PagedMap[EntryLocation] | None = None
        self._seen: tuple[IdSet, IdSet] | None = None
        self._forget_seen = False
        self._undo: list[tuple[str, Entry | None, int]] = []
        self._undo_state: SyncState | None = None
        self._stored_state = self._state = load_state(store.read(_RECORD)) if entries.marked else None

    # The entries by their keys.

    def get(self, key: str) -> Entry | None:
        """Return the entry of that name."""
        return self._entries.get(key)

    def put(self, key: str, entry: Entry, moved: int | None = None) -> None:
        """Add or replace the entry; `moved` is the refresh that gives it this key, by default the earlier one."""
        before = self._entries.get(key)
        was_moved = 0 if self._state is None else self._enter(key, before, entry, moved)
        self._undo.append((key, before, was_moved))
        self._entries.put(key, entry)

    def remove(self, key: str) -> None:
        """Remove the entry, if it is there."""
        before = self._entries.get(key)
        if before is None:
            return
        was_moved = 0
        if self._state is not None:
            known = identity(before)
            location = self._open_index().get(known)
            if location is not None and location.key == key:
                self._open_index().remove(known)
                was_moved = location.moved
        self._undo.append((key, before, was_moved))
        self._entries.remove(key)

    def descendants(self, key: str) -> Iterator[tuple[str, Entry]]:
        """Yield everything below an entry, in the order of the keys (so parents come first)."""
        return self._entries.descendants(key)

    def replace(self, entry: Entry) -> None:
        """Replace an entry by one with the same identity and name, wherever it is."""
        found = None if self._state is None else self.find_known(identity(entry))
        self.put(parse_dn(entry.dn).key if found is None else found[0], entry)

    def _enter(self, key: str, before: Entry | None, entry: Entry, moved: int | None) -> int:
        """Enter an entry into the index; return the refresh that gave this key to the earlier entry."""
        index, was_moved, known = self._open_index(), 0, identity(entry)
        if before is not None:
            former = identity(before)
            location = index.get(former)
            if location is not None and location.key == key:
                was_moved = location.moved
                if former != known:
                    index.remove(former)
        location = EntryLocation(key, was_moved if moved is None else moved)
        if index.get(known) != location:
            index.put(known, location)
        return was_moved

    # The record of the live source.

    @property
    def is_live(self) -> bool:
        """Whether a live source has ever sent a record."""
        return self._state is not None

    @property
    def state(self) -> SyncState:
        """The record. The first call for a source builds the index."""
        if self._state is None:
            self._state = self._undo_state = SyncState()
            self._entries.mark()
            self._build_index()
        return self._state

    def change_state(self, state: SyncState) -> None:
        """Replace the record."""
        self._state = state

    # The entries by their identities.

    def find(self, uuid: str) -> tuple[str, Entry] | None:
        """Return an entry and its key by its entryUUID."""
        return self.find_known(index_key(uuid))

    def find_known(self, known: str) -> tuple[str, Entry] | None:
        """Return an entry and its key by its key in the index."""
        location = self._open_index().get(known)
        entry = None if location is None else self._entries.get(location.key)
        if location is None or entry is None or identity(entry) != known:
            return None
        return location.key, entry

    def moved_by(self, known: str) -> int:
        """Return the refresh that gave an entry its key; 0 if none did."""
        location = self._open_index().get(known)
        return 0 if location is None else location.moved

    # Entries that are displaced.

    def displace(self, key: str) -> None:
        """Take the name of an entry away; its state stays."""
        entry = self._entries.get(key)
        assert entry is not None
        moved = self.moved_by(identity(entry))
        self.remove(key)
        own = entry_uuid(entry) or hashlib.blake2b(identity(entry).encode(), digest_size=18).hexdigest()
        self.put(f"{_DISPLACED}{key}{_DISPLACED}{own}", entry, moved)
        self.change_state(replace(self.state, displaced=self.state.displaced + 1))

    def take(self, key: str) -> None:
        """Remove an entry that is displaced or not. Its name is free then: see `settle`."""
        if key.startswith(_DISPLACED):
            self.change_state(replace(self.state, displaced=self.state.displaced - 1))
        self.remove(key)

    def settle(self, key: str) -> None:
        """Give a name that is free back to an entry that it was taken from."""
        if not self.state.displaced or self._entries.get(key) is not None:
            return
        prefix = f"{_DISPLACED}{key}{_DISPLACED}"
        rest = (each for each in self._entries.items(prefix) if len(each[0]) == len(prefix) + _UUID_CHARACTERS)
        found = next(rest, None)
        if found is not None:
            moved = self.moved_by(identity(found[1]))
            self.take(found[0])
            self.put(key, found[1], moved)

    def below(self, key: str) -> Iterator[tuple[str, Entry]]:
        """Yield everything below a name, displaced or not."""
        if not self.state.displaced:
            return self._entries.descendants(key)
        displaced = self._entries.items(f"{_DISPLACED}{descendant_prefix(key)}")
        return chain(self._entries.descendants(key), displaced)

    # What a refresh has seen.

    def note_reported(self, known: str) -> None:
        """Note that the refresh has reported an entry."""
        self._open_seen()[0].add(_set_member(known))

    def note_present(self, known: str) -> None:
        """Note that the refresh has said that an entry is there."""
        self._open_seen()[1].add(_set_member(known))

    def forget_seen(self) -> None:
        """Empty both sets, unless the change is undone."""
        self._forget_seen = True

    def reported(self) -> "SeenEntries":
        """Return the entries that the refresh has reported."""
        return SeenEntries(self._open_seen()[0].load())

    def unseen(self) -> list[str]:
        """Return the keys, in the index, of the entries that the refresh has neither reported nor found present."""
        seen = np.union1d(*(each.load() for each in self._open_seen()))
        found: list[str] = []
        for keys in self._open_index().key_pages():
            known = contained(as_array(map(_set_member, keys)), seen)
            found += [key for key, is_seen in zip(keys, known, strict=True) if not is_seen]
        return found

    # Beginning, undoing and writing.

    def begin(self) -> None:
        """Begin a change that can be undone."""
        self._undo.clear()
        self._undo_state = self._state
        self._clear_seen()

    def undo(self) -> None:
        """Restore what it was at `begin`."""
        self._forget_seen = False
        done, self._undo = self._undo, []
        for key, before, moved in reversed(done):
            if before is None:
                self.remove(key)
            else:
                self.put(key, before, moved)
        self._undo.clear()
        if self._undo_state is not None:
            self._state = self._undo_state

    def flush(self) -> None:
        """Write back what changed."""
        self._entries.flush()
        if self._index is not None:
            self._index.flush()
        if self._state is None:
            return
        self._forget_seen |= self._state.refresh is None
        self._clear_seen()
        if self._seen is not None:
            for each in self._seen:
                each.flush()
            reported, present = (each.size for each in self._seen)
            self._state = replace(self._state, reported=reported, present=present)
        if self._state != self._stored_state:
            self._store.write(_RECORD, dump_state(self._state))
            self._stored_state = self._state

    def _clear_seen(self) -> None:
        state = self._state
        if self._forget_seen and state is not None and (self._seen or state.reported or state.present):
            for each in self._open_seen():
                each.clear()
        self._forget_seen = False

    def _open_index(self) -> PagedMap[EntryLocation]:
        if self._index is None:
            self._index = PagedMap(NumberSpace(self._store, _INDEX), _FORMAT)
        return self._index

    def _open_seen(self) -> tuple[IdSet, IdSet]:
        if self._seen is None:
            state = self.state
            reported = IdSet(self._store, _REPORTED, state.reported)
            self._seen = (reported, IdSet(self._store, _PRESENT, state.present))
        return self._seen

    def _build_index(self) -> None:
        index, run = self._open_index(), dict[str, str]()
        for key, entry in self._entries.items():
            run[identity(entry)] = key
            if len(run) == _BUILD_RUN_ENTRIES:
                _put_sorted(index, run)
        _put_sorted(index, run)


def _put_sorted(index: PagedMap[EntryLocation], run: dict[str, str]) -> None:
    for known in sorted(run):
        index.put(known, EntryLocation(run[known], 0))
    run.clear()


class SeenEntries:
    """Entries that a refresh has reported."""

    def __init__(self, members: npt.NDArray[np.bytes_]) -> None:
        self._members = members
        self._known: dict[str, bool] = {}

    def has(self, entry: Entry) -> bool:
        """Return whether an entry is among them."""
        known = identity(entry)
        if known not in self._known:
            self._known[known] = bool(contained(as_array([_set_member(known)]), self._members)[0])
        return self._known[known]


def original_key(key: str, entry: Entry) -> str:
    """Return the key of the name that an entry has for subscribers."""
    return parse_dn(entry.dn).key if key.startswith(_DISPLACED) else key


def is_displaced(key: str) -> bool:
    """Return whether an entry with this key is displaced."""
    return key.startswith(_DISPLACED)
