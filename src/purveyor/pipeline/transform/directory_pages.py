"""The directory in pages: entries sorted by key, dozens to a page, so that a batch reads and writes few pages. Pure.

Each access to Spark's state from Python is a round trip of about 0.2 ms. With a value per entry an import would make
two for every record; with pages, one for many. A subtree is one range of the sorted keys, so the descendants of an
entry are found without reading anything else, and no list of children is stored.

A page is bytes: the length of its head, its head (JSON: keys and sizes), and the entries one after the other, each
decoded only when it is read. The index (JSON: the first key and the number of each page) is read once per batch. A
later version of this format has an index that is not a list of three.
"""

import json
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Final, Protocol

from purveyor.model.errors import UnreadableRecord
from purveyor.model.json_fields import UPGRADE
from purveyor.pipeline.transform.directory_records import descendant_prefix
from purveyor.pipeline.transform.directory_rules import Entry

MAX_PAGE_ENTRIES: Final = 64
MAX_PAGE_BYTES: Final = 48 << 10
"""A page above either limit is divided; a single entry may be larger."""
MAX_HELD_BYTES: Final = 64 << 20
"""Bytes of pages in memory, above which they are written back before the batch is over."""

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode  # ASCII: any string passes


class PageStore(Protocol):
    """Where pages are stored between batches."""

    def read_index(self) -> bytes | None:
        """Return the index; None if there was never one."""

    def write_index(self, data: bytes) -> None:
        """Store the index."""

    def read(self, number: int) -> bytes:
        """Return a page of the index."""

    def write(self, number: int, data: bytes) -> None:
        """Store a page."""

    def remove(self, number: int) -> None:
        """Remove a page, if it was ever stored."""


class Page:
    """The entries of one range of keys, in memory."""

    __slots__ = ("changed", "entries", "keys", "raw", "size")

    def __init__(self, data: bytes | None = None) -> None:
        self.keys: list[str] = []
        self.raw: dict[str, bytes] = {}
        self.entries: dict[str, Entry] = {}
        """The decoded entries."""
        self.size = 0
        self.changed = False
        if data is not None:
            self._load(data)

    def _load(self, data: bytes) -> None:
        at = 4 + int.from_bytes(data[:4], "big")
        keys, sizes = json.loads(data[4:at])
        self.keys = keys
        for key, size in zip(keys, sizes, strict=True):
            self.raw[key] = data[at : at + size]
            at += size
        self.size = len(data)

    def dump(self) -> bytes:
        """Return the page as it is stored."""
        bodies = [self.raw[key] for key in self.keys]
        head = _encode([self.keys, [len(body) for body in bodies]]).encode()
        return b"".join((len(head).to_bytes(4, "big"), head, *bodies))

    def get(self, key: str) -> Entry | None:
        """Return the entry, decoded."""
        found = self.entries.get(key)
        if found is None and (raw := self.raw.get(key)) is not None:
            found = self.entries[key] = Entry(*json.loads(raw))
        return found

    def put(self, key: str, entry: Entry) -> None:
        """Add or replace an entry."""
        raw = _encode(entry).encode()
        if key in self.raw:
            self.size -= len(self.raw[key])
        else:
            insort(self.keys, key)
            self.size += len(key) + 8
        self.raw[key] = raw
        self.entries[key] = entry
        self.size += len(raw)
        self.changed = True

    def remove(self, key: str) -> None:
        """Remove an entry that is there."""
        self.size -= len(self.raw.pop(key)) + len(key) + 8
        self.entries.pop(key, None)
        del self.keys[bisect_left(self.keys, key)]
        self.changed = True

    def cut(self) -> "Page":
        """Split off the upper half."""
        upper = Page()
        middle = len(self.keys) // 2
        self.keys, upper.keys = self.keys[:middle], self.keys[middle:]
        for key in upper.keys:
            upper.raw[key] = self.raw.pop(key)
            if key in self.entries:
                upper.entries[key] = self.entries.pop(key)
            upper.size += len(upper.raw[key]) + len(key) + 8
        self.size -= upper.size
        self.changed = upper.changed = True
        return upper


def _read_index(data: bytes) -> tuple[list[str], list[int], int]:
    """Parse the index; raise UnreadableRecord if a newer program wrote it."""
    try:
        begins, numbers, following = json.loads(data)
    except (ValueError, TypeError) as error:
        what = f"the index of the directory in the transform's checkpoint is not understood: {error}"
        raise UnreadableRecord(what, fix=UPGRADE) from error
    return begins, numbers, following


class PagedDirectory:
    """A `Store` of entries over a store of pages. Only `flush` guarantees that changes are written."""

    def __init__(self, store: PageStore, *, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._store = store
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._held: dict[int, Page] = {}
        index = store.read_index()
        self._begins: list[str]
        self._numbers: list[int]
        self._next: int
        self._begins, self._numbers, self._next = _read_index(index) if index else ([""], [0], 1)
        self._index_changed = not index
        if not index:
            self._held[0] = Page()
            self._held[0].changed = True

    def get(self, key: str) -> Entry | None:
        """Return the entry of that name."""
        return self._page(self._at(key)).get(key)

    def put(self, key: str, entry: Entry) -> None:
        """Add or replace an entry; a page that grows too large is divided."""
        at = self._at(key)
        page = self._page(at)
        before = page.size
        page.put(key, entry)
        self._held_bytes += page.size - before
        while len(page.keys) > 1 and (len(page.keys) > MAX_PAGE_ENTRIES or page.size > MAX_PAGE_BYTES):
            upper = page.cut()
            number, self._next = self._next, self._next + 1
            self._begins.insert(at + 1, upper.keys[0])
            self._numbers.insert(at + 1, number)
            self._held[number] = upper
            self._index_changed = True
            at, page = (at + 1, upper) if key >= upper.keys[0] else (at, page)

    def remove(self, key: str) -> None:
        """Remove an entry, if it is there."""
        at = self._at(key)
        page = self._page(at)
        if key not in page.raw:
            return
        before = page.size
        page.remove(key)
        self._held_bytes += page.size - before
        if not page.keys and at > 0:  # the first page begins before every key and stays
            self._store.remove(self._numbers[at])
            self._held.pop(self._numbers[at])
            del self._begins[at], self._numbers[at]
            self._index_changed = True

    def descendants(self, key: str) -> Iterator[tuple[str, Entry]]:
        """Yield everything below an entry, in order. Collect it before you change anything."""
        prefix = descendant_prefix(key)
        at = self._at(prefix)
        while at < len(self._begins):
            page = self._page(at)
            for each in page.keys[bisect_left(page.keys, prefix) :]:
                if not each.startswith(prefix):
                    return
                entry = page.get(each)
                assert entry is not None
                yield each, entry
            at += 1

    def flush(self) -> None:
        """Write back what changed."""
        for number, page in self._held.items():
            if page.changed:
                self._store.write(number, page.dump())
                page.changed = False
        if self._index_changed:
            self._store.write_index(_encode([self._begins, self._numbers, self._next]).encode())
            self._index_changed = False

    def _at(self, key: str) -> int:
        return bisect_right(self._begins, key) - 1

    def _page(self, at: int) -> Page:
        number = self._numbers[at]
        page = self._held.get(number)
        if page is None:
            if self._held_bytes > self._max_held_bytes:
                self.flush()
                self._held.clear()
                self._held_bytes = 0
            page = self._held[number] = Page(self._store.read(number))
            self._held_bytes += page.size
        return page
