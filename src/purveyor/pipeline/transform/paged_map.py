"""A sorted map in pages over Spark's state: dozens of values to a page, so that a batch reads and writes few. Pure.

Each access to Spark's state from Python is a round trip of about 0.2 ms. With one state value for each value of the map
an import would make two for every record; with pages, one for many.

A page is bytes: the length of its head, its head (JSON: keys and sizes), and the values one after the other, each
decoded only when it is read. The index says with which key each page begins. It has one of two forms:

- of a small map: JSON, a list of three: the first keys of the pages, their numbers, and the next free number;
- of a large map: an object with a version, and the first keys and numbers of the nodes, which are pages that hold a
  part of the index each: the first keys and the numbers of some hundred pages. A batch reads the nodes of the pages
  that it touches, so its time does not depend on the size of the map.

The small form is that of version 1, which knew no other: a program of that version reads a small map, and stops at a
large one. A mark is in the large form only, so it stops at a marked map too.
"""

import json
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from purveyor.model.errors import InvalidInput, UnreadableRecord
from purveyor.model.json_fields import UPGRADE, Kind, load

MAX_NODE_PAGES: Final = 256
"""Pages in one node of the index."""
MAX_HELD_BYTES: Final = 64 << 20
"""Bytes of pages in memory, above which they are written back before the batch is over."""
_INDEX: Final = Kind("index of a map in the transform's checkpoint", ("begins", "nodes", "next", "marked"), version=2)

encode_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode  # ASCII: any string passes
T = TypeVar("T")


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


@dataclass(frozen=True, slots=True)
class PageFormat(Generic[T]):
    """How values are written, and when a page is divided: above either limit. A single value may be larger."""

    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]
    max_entries: int
    max_bytes: int


class Page(Generic[T]):
    """The values of one range of keys, in memory."""

    __slots__ = ("changed", "form", "keys", "raw", "size", "values")

    def __init__(self, form: PageFormat[T], data: bytes | None = None) -> None:
        self.form = form
        self.keys: list[str] = []
        self.raw: dict[str, bytes] = {}
        self.values: dict[str, T] = {}
        """The decoded values."""
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
        head = encode_json([self.keys, [len(body) for body in bodies]]).encode()
        return b"".join((len(head).to_bytes(4, "big"), head, *bodies))

    def get(self, key: str) -> T | None:
        """Return the value, decoded."""
        found = self.values.get(key)
        if found is None and (raw := self.raw.get(key)) is not None:
            found = self.values[key] = self.form.decode(raw)
        return found

    def put(self, key: str, value: T) -> None:
        """Add or replace a value."""
        raw = self.form.encode(value)
        if key in self.raw:
            self.size -= len(self.raw[key])
        else:
            insort(self.keys, key)
            self.size += len(key) + 8
        self.raw[key] = raw
        self.values[key] = value
        self.size += len(raw)
        self.changed = True

    def remove(self, key: str) -> None:
        """Remove a value that is there."""
        self.size -= len(self.raw.pop(key)) + len(key) + 8
        self.values.pop(key, None)
        del self.keys[bisect_left(self.keys, key)]
        self.changed = True

    @property
    def is_too_large(self) -> bool:
        """Whether the page must be divided."""
        return len(self.keys) > 1 and (len(self.keys) > self.form.max_entries or self.size > self.form.max_bytes)

    def cut(self) -> "Page[T]":
        """Split off the upper half."""
        upper = Page(self.form)
        middle = len(self.keys) // 2
        self.keys, upper.keys = self.keys[:middle], self.keys[middle:]
        for key in upper.keys:
            upper.raw[key] = self.raw.pop(key)
            if key in self.values:
                upper.values[key] = self.values.pop(key)
            upper.size += len(upper.raw[key]) + len(key) + 8
        self.size -= upper.size
        self.changed = upper.changed = True
        return upper


class _Node:
    """A part of the index: pages in the order of their keys. Its lists are read when they are needed."""

    __slots__ = ("begins", "changed", "number", "pages")

    def __init__(self, number: int | None, begins: list[str], pages: list[int], *, changed: bool) -> None:
        self.number = number
        """Where the node is stored; None if it was never stored."""
        self.begins = begins
        """The first key of each page."""
        self.pages = pages
        """Their numbers; empty if the node has not been read."""
        self.changed = changed


@dataclass(frozen=True, slots=True)
class _PageLocation:
    """A page: its node, and its location in it."""

    node: int
    at: int


class PagedMap(Generic[T]):
    """A sorted map over a store of pages. Only `flush` guarantees that changes are written."""

    def __init__(self, store: PageStore, form: PageFormat[T], *, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._store = store
        self._form = form
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0
        self._held: dict[int, Page[T]] = {}
        self._begins: list[str] = [""]
        self._nodes: list[_Node]
        self._next = 1
        self._has_nodes = False
        self.marked = False
        """Whether `mark` was ever called."""
        index = store.read_index()
        self._index_changed = not index
        if index:
            self._read_index(index)
        else:
            self._nodes = [_Node(None, [""], [0], changed=True)]
            self._held[0] = Page(form)
            self._held[0].changed = True

    def mark(self) -> None:
        """Mark the map, so that a program that knows version 1 alone stops at it."""
        if not self.marked:
            self.marked = self._has_nodes = self._index_changed = True

    def get(self, key: str) -> T | None:
        """Return the value of a key."""
        return self._page(self._find(key)).get(key)

    def put(self, key: str, value: T) -> None:
        """Add or replace a value; a page that grows too large is divided."""
        location = self._find(key)
        page = self._page(location)
        before = page.size
        page.put(key, value)
        self._held_bytes += page.size - before
        while page.is_too_large:
            upper = page.cut()
            self._held[self._insert(location, upper.keys[0])] = upper
            if key >= upper.keys[0]:
                page = upper
            location = self._find(page.keys[0])

    def remove(self, key: str) -> None:
        """Remove a value, if it is there."""
        location = self._find(key)
        page = self._page(location)
        if key not in page.raw:
            return
        before = page.size
        page.remove(key)
        self._held_bytes += page.size - before
        if not page.keys and location != _PageLocation(0, 0):  # the first page begins before every key and stays
            self._drop(location)

    def items(self, prefix: str = "") -> Iterator[tuple[str, T]]:
        """Yield everything with this prefix, in order. Collect it before you change anything."""
        for page in self._pages_from(prefix):
            for key in page.keys[bisect_left(page.keys, prefix) :]:
                if not key.startswith(prefix):
                    return
                value = page.get(key)
                assert value is not None
                yield key, value

    def key_pages(self) -> Iterator[list[str]]:
        """Yield all keys in order, page by page, without decoding values."""
        for page in self._pages_from(""):
            yield page.keys

    def flush(self) -> None:
        """Write back what changed."""
        for number, page in self._held.items():
            if page.changed:
                self._store.write(number, page.dump())
                page.changed = False
        if self._index_changed:
            self._write_index()
            self._index_changed = False

    def _pages_from(self, key: str) -> Iterator[Page[T]]:
        location = self._find(key)
        while True:
            yield self._page(location)
            if location.at + 1 < len(self._node(location.node).pages):
                location = _PageLocation(location.node, location.at + 1)
            elif location.node + 1 < len(self._nodes):
                location = _PageLocation(location.node + 1, 0)
            else:
                return

    def _find(self, key: str) -> _PageLocation:
        node = bisect_right(self._begins, key) - 1
        return _PageLocation(node, bisect_right(self._node(node).begins, key) - 1)

    def _node(self, at: int) -> _Node:
        node = self._nodes[at]
        if not node.pages:
            assert node.number is not None
            node.begins, node.pages = json.loads(self._store.read(node.number))
        return node

    def _page(self, location: _PageLocation) -> Page[T]:
        number = self._node(location.node).pages[location.at]
        page = self._held.get(number)
        if page is None:
            if self._held_bytes > self._max_held_bytes:
                self.flush()
                self._held.clear()
                self._held_bytes = 0
            page = self._held[number] = Page(self._form, self._store.read(number))
            self._held_bytes += page.size
        return page

    def _insert(self, location: _PageLocation, begin: str) -> int:
        """Enter a new page behind another one into the index; return its number."""
        node = self._node(location.node)
        number = self._take_number()
        node.begins.insert(location.at + 1, begin)
        node.pages.insert(location.at + 1, number)
        node.changed = self._index_changed = True
        if len(node.pages) > MAX_NODE_PAGES:
            middle = len(node.pages) // 2
            upper = _Node(None, node.begins[middle:], node.pages[middle:], changed=True)
            del node.begins[middle:], node.pages[middle:]
            self._begins.insert(location.node + 1, upper.begins[0])
            self._nodes.insert(location.node + 1, upper)
        return number

    def _drop(self, location: _PageLocation) -> None:
        """Remove an empty page."""
        node = self._node(location.node)
        number = node.pages[location.at]
        self._store.remove(number)
        self._held.pop(number)
        del node.begins[location.at], node.pages[location.at]
        node.changed = self._index_changed = True
        if not node.pages:  # never the first node: its first page stays
            if node.number is not None:
                self._store.remove(node.number)
            del self._begins[location.node], self._nodes[location.node]
        elif location.at == 0:
            node.begins[0] = self._begins[location.node]  # keys between the two belong to this page now

    def _take_number(self) -> int:
        number, self._next = self._next, self._next + 1
        return number

    def _read_index(self, data: bytes) -> None:
        """Parse the index; raise UnreadableRecord if a newer program wrote it."""
        try:
            index = load(data)
            if isinstance(index, list):
                begins, pages, self._next = index
                self._set_flat(begins, pages)
                return
            given = _INDEX.check(index)
            self._begins, self._next, self._has_nodes = list(given["begins"]), int(given["next"]), True
            self.marked = bool(given["marked"])
            self._nodes = [_Node(int(number), [], [], changed=False) for number in given["nodes"]]
        except UnreadableRecord:
            raise
        except (InvalidInput, ValueError, TypeError, KeyError) as error:
            what = f"the index of the directory in the transform's checkpoint is not understood: {error}"
            raise UnreadableRecord(what, fix=UPGRADE) from error

    def _set_flat(self, begins: list[str], pages: list[int]) -> None:
        cuts = range(0, len(pages), MAX_NODE_PAGES)
        self._begins = [begins[cut] for cut in cuts]
        self._nodes = [
            _Node(None, begins[cut : cut + MAX_NODE_PAGES], pages[cut : cut + MAX_NODE_PAGES], changed=True)
            for cut in cuts
        ]
        self._index_changed = len(self._nodes) > 1  # a large map of version 1 gets nodes

    def _write_index(self) -> None:
        if len(self._nodes) == 1 and not self._has_nodes:
            (node,) = self._nodes
            self._store.write_index(encode_json([node.begins, node.pages, self._next]).encode())
            return
        self._has_nodes = True
        for node in self._nodes:
            if node.changed:
                node.number = self._take_number() if node.number is None else node.number
                self._store.write(node.number, encode_json([node.begins, node.pages]).encode())
                node.changed = False
        numbers = [node.number for node in self._nodes]
        index = {"begins": self._begins, "nodes": numbers, "next": self._next, "marked": self.marked}
        self._store.write_index(encode_json({"version": _INDEX.version, **index}).encode())
