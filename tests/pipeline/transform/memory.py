"""In-memory replacements of Spark's state, and short ways to write entries and records."""

from collections.abc import Iterator
from typing import Any

from purveyor.model import json_fields
from purveyor.pipeline.transform.directory_records import descendant_prefix
from purveyor.pipeline.transform.directory_rules import Entry


class MemoryPages:
    """Pages in a dictionary; tells how often they were read and written."""

    def __init__(self) -> None:
        self.index: bytes | None = None
        self.pages: dict[int, bytes] = {}
        self.reads = self.writes = self.traffic = 0

    def read_index(self) -> bytes | None:
        self.traffic += len(self.index or b"")
        return self.index

    def write_index(self, data: bytes) -> None:
        self.traffic += len(data)
        self.index = data

    def find(self, number: int) -> bytes | None:
        self.reads += 1
        return self.pages.get(number)

    def read(self, number: int) -> bytes:
        self.reads += 1
        self.traffic += len(self.pages[number])
        return self.pages[number]

    def write(self, number: int, data: bytes) -> None:
        self.writes += 1
        self.traffic += len(data)
        self.pages[number] = data

    def remove(self, number: int) -> None:
        self.pages.pop(number, None)


class MemoryStore:
    """Entries in a dictionary: what a directory is, in the simplest way."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.marked = False

    def get(self, key: str) -> Entry | None:
        return self.entries.get(key)

    def put(self, key: str, entry: Entry) -> None:
        self.entries[key] = entry

    def remove(self, key: str) -> None:
        self.entries.pop(key, None)

    def items(self, prefix: str = "") -> Iterator[tuple[str, Entry]]:
        return iter([(each, self.entries[each]) for each in sorted(self.entries) if each.startswith(prefix)])

    def descendants(self, key: str) -> Iterator[tuple[str, Entry]]:
        return self.items(descendant_prefix(key))

    def mark(self) -> None:
        self.marked = True

    def flush(self) -> None:
        """Nothing is written."""


def body(dn: str, change: str, **fields: Any) -> bytes:
    """A message of the queue `ldif`."""
    return json_fields.dump({"dn": dn, "change": change, "line": 1, **fields})


def person(uid: str, **attributes: Any) -> dict[str, Any]:
    """The attributes of a person."""
    return {"objectClass": ["inetOrgPerson"], "uid": [uid], **attributes}


def modify(dn: str, *steps: tuple[str, str, list[Any]]) -> bytes:
    return body(dn, "modify", modifications=[{"op": op, "attribute": name, "values": v} for op, name, v in steps])
