"""The directory in pages: entries sorted by the keys of their names. Pure.

A subtree is one range of the sorted keys, so the descendants of an entry are found without reading anything else, and
no list of children is stored.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from purveyor.pipeline.transform.directory_records import descendant_prefix
from purveyor.pipeline.transform.directory_rules import Entry, Published
from purveyor.pipeline.transform.paged_map import MAX_HELD_BYTES, PagedMap, PageFormat, PageStore, encode_json

MAX_PAGE_ENTRIES: Final = 64
MAX_PAGE_BYTES: Final = 48 << 10
_PUBLISHED: Final = "published"
_MEMBER_KINDS: Final = "member_kinds"
_NO_NOTES: Final[Mapping[str, Any]] = MappingProxyType({})


def _decode(raw: bytes) -> Entry:
    dn, uuid, attributes, *rest = json.loads(raw)
    return _with_notes(Entry(dn, uuid, attributes), *rest)


def _with_notes(entry: Entry, notes: Mapping[str, Any] = _NO_NOTES) -> Entry:
    if not notes:
        return entry
    published = None
    if _PUBLISHED in notes:
        (known,) = notes[_PUBLISHED]
        published = Published(None if known is None else _with_notes(Entry(*known[:3]), *known[3:]))
    return entry._replace(published=published, member_kinds=notes.get(_MEMBER_KINDS))


def _encode(entry: Entry) -> bytes:
    return encode_json(_as_list(entry)).encode()


def _as_list(entry: Entry) -> Sequence[Any]:
    """Return name, uuid and attributes, and a fourth element if anything else is known."""
    if entry.published is None and entry.member_kinds is None:
        return entry[:3]
    notes: dict[str, Any] = {}
    if entry.published is not None:
        known = entry.published.entry
        notes[_PUBLISHED] = [None if known is None else _as_list(known)]
    if entry.member_kinds is not None:
        notes[_MEMBER_KINDS] = entry.member_kinds
    return (*entry[:3], notes)


_FORMAT: Final = PageFormat(_encode, _decode, MAX_PAGE_ENTRIES, MAX_PAGE_BYTES)


class PagedDirectory(PagedMap[Entry]):
    """A `Store` of entries over a store of pages."""

    def __init__(self, store: PageStore, *, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        super().__init__(store, _FORMAT, max_held_bytes=max_held_bytes)

    def descendants(self, key: str) -> Iterator[tuple[str, Entry]]:
        """Yield everything below an entry, in order. Collect it before you change anything."""
        return self.items(descendant_prefix(key))
