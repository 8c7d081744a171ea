"""The directory in pages: entries sorted by the keys of their names. Pure.

A subtree is one range of the sorted keys, so the descendants of an entry are found without reading anything else, and
no list of children is stored.
"""

import json
from collections.abc import Iterator
from typing import Final

from purveyor.pipeline.transform.directory_records import descendant_prefix
from purveyor.pipeline.transform.directory_rules import Entry, Published
from purveyor.pipeline.transform.paged_map import MAX_HELD_BYTES, PagedMap, PageFormat, PageStore, encode_json

MAX_PAGE_ENTRIES: Final = 64
MAX_PAGE_BYTES: Final = 48 << 10


def _decode(raw: bytes) -> Entry:
    dn, uuid, attributes, *rest = json.loads(raw)
    if not rest:
        return Entry(dn, uuid, attributes)
    ((published,),) = rest
    return Entry(dn, uuid, attributes, Published(None if published is None else Entry(*published)))


def _encode(entry: Entry) -> bytes:
    """Return a list in JSON. Only an entry of which subscribers have another version has a fourth element."""
    if entry.published is None:
        return encode_json(entry[:3]).encode()
    published = entry.published.entry
    return encode_json((*entry[:3], [None if published is None else published[:3]])).encode()


_FORMAT: Final = PageFormat(_encode, _decode, MAX_PAGE_ENTRIES, MAX_PAGE_BYTES)


class PagedDirectory(PagedMap[Entry]):
    """A `Store` of entries over a store of pages."""

    def __init__(self, store: PageStore, *, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        super().__init__(store, _FORMAT, max_held_bytes=max_held_bytes)

    def descendants(self, key: str) -> Iterator[tuple[str, Entry]]:
        """Yield everything below an entry, in order. Collect it before you change anything."""
        return self.items(descendant_prefix(key))
