"""The state of the transform for a live directory: its size, and the cost of a small batch, by the entries known.

The rules and the pages are those of the pipeline; the pages are in memory instead of Spark's state.
"""

import random
import statistics
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from benchmarks.report import Row, Section, machine_load
from purveyor.jetstream.address import Address
from purveyor.model.ldif_changes import RefreshBegin, RefreshEnd
from purveyor.pipeline.transform import load_mapping
from purveyor.pipeline.transform.directory_pages import PagedDirectory
from purveyor.pipeline.transform.live_directory import LiveDirectory
from purveyor.pipeline.transform.record_transform import Message, Output, TransformRules, transform
from purveyor.sources.ldif.live_records import LiveEntry, LiveRecord, encode_live_record

SMALL: Final = 10_000
LARGE: Final = 1_000_000
_BATCH: Final = 5000
_ROUNDS: Final = 500
_STORED: Final = datetime(2026, 11, 19, tzinfo=UTC)


class Pages:
    """Pages in a dictionary, as Spark keeps them for a source; counts what a batch reads and writes."""

    def __init__(self) -> None:
        self.index: bytes | None = None
        self.pages: dict[int, bytes] = {}
        self.accesses = self.traffic = 0

    @property
    def size(self) -> int:
        """The bytes of all pages."""
        return len(self.index or b"") + sum(map(len, self.pages.values()))

    def read_index(self) -> bytes | None:
        """Return the index of the pages."""
        return self._count(self.index)

    def write_index(self, data: bytes) -> None:
        """Store the index of the pages."""
        self.index = self._count(data)

    def find(self, number: int) -> bytes | None:
        """Return a page, if it is there."""
        return self._count(self.pages.get(number))

    def read(self, number: int) -> bytes:
        """Return a page."""
        found = self._count(self.pages[number])
        assert found is not None
        return found

    def write(self, number: int, data: bytes) -> None:
        """Store a page."""
        self._count(data)
        self.pages[number] = data

    def remove(self, number: int) -> None:
        """Remove a page."""
        self.pages.pop(number, None)

    def _count(self, data: bytes | None) -> bytes | None:
        self.accesses += 1
        self.traffic += len(data or b"")
        return data


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs with a number of entries known."""

    state: int
    refresh_rate: float
    end_seconds: float
    batch_ms: float
    traffic: float
    accesses: float


def run(_address: Address, *, small: int = SMALL, large: int = LARGE) -> list[Section]:
    """Compare a large directory with a small one; no server is needed."""
    few, many = _costs(small), _costs(large)
    known = f"{large:,} entries known / {small:,}"
    rows = [
        Row(f"one changed entry in a batch, median, {known}", many.batch_ms, few.batch_ms, "ms"),
        Row(f"bytes read and written by it, {known}", many.traffic, few.traffic, "B", at_most=2),
        Row(f"accesses to the state by it, {known}", many.accesses, few.accesses, "", at_most=2),
        Row(f"state for each entry, {known}", many.state / large, few.state / small, "B", at_most=1.2),
        Row(f"full refresh, {known}", many.refresh_rate, few.refresh_rate, "entries/s"),
    ]
    words = (
        f"The rules of the transform with pages in memory; Spark keeps the same pages in RocksDB. {large:,} people "
        f"have a state of {many.state / 1e6:,.0f} MB, {small:,} one of {few.state / 1e6:,.1f} MB. The end of a full "
        f"refresh takes {many.end_seconds:.1f} s and {few.end_seconds * 1000:.0f} ms. Median of {_ROUNDS} batches of "
        f"one entry, chosen at random. The machine was {machine_load()}."
    )
    return [Section("LDAP: state of the transform", words, rows)]


def _costs(entries: int) -> Costs:
    pages = Pages()
    rules = TransformRules(load_mapping("udm"), max_payload=8 << 20)
    began = time.perf_counter()
    _apply(pages, rules, [RefreshBegin(full=True)])
    for first in range(0, entries, _BATCH):
        _apply(pages, rules, (_person(number) for number in range(first, min(first + _BATCH, entries))))
    rate = entries / (time.perf_counter() - began)
    began = time.perf_counter()
    _apply(pages, rules, [RefreshEnd(remove_unseen=True)])
    end_seconds = time.perf_counter() - began
    size = pages.size
    chosen = random.Random(1)
    times: list[float] = []
    pages.accesses = pages.traffic = 0
    for count in range(_ROUNDS):
        changed = [_person(chosen.randrange(entries), f"change {count}")]
        began = time.perf_counter()
        outputs = _apply(pages, rules, changed)
        times.append((time.perf_counter() - began) * 1000)
        assert len(outputs) == 1
        assert not outputs[0].parked
    print(f"state with {entries:,} entries known: {size:,} bytes, {statistics.median(times):.2f} ms", flush=True)
    return Costs(
        state=size,
        refresh_rate=rate,
        end_seconds=end_seconds,
        batch_ms=statistics.median(times),
        traffic=pages.traffic / _ROUNDS,
        accesses=pages.accesses / _ROUNDS,
    )


def _apply(pages: Pages, rules: TransformRules, records: Iterable[LiveRecord]) -> list[Output]:
    """Process one batch, as the state processor does."""
    directory = LiveDirectory(PagedDirectory(pages), pages)
    outputs: list[Output] = []
    for record in records:
        message = Message(1, _STORED, "ldif.bench", {}, encode_live_record(record, 1))
        outputs = transform(directory, rules, message)
    directory.flush()
    return outputs


def _person(number: int, description: str = "someone") -> LiveEntry:
    uid = f"user{number}"
    attributes = {
        "objectClass": ("top", "person", "organizationalPerson", "inetOrgPerson"),
        "uid": (uid,),
        "cn": (f"User Number {number}",),
        "sn": (f"Number {number}",),
        "givenName": ("User",),
        "mail": (f"{uid}@example.com",),
        "telephoneNumber": (f"+49 30 {number}",),
        "title": ("äöü",),
        "description": (description,),
        "employeeNumber": (str(number),),
        "structuralObjectClass": ("inetOrgPerson",),
        "creatorsName": ("cn=admin,dc=example,dc=org",),
        "createTimestamp": ("20261119041842Z",),
        "entryCSN": ("20261119041842.123456Z#000000#000#000000",),
        "modifiersName": ("cn=admin,dc=example,dc=org",),
        "modifyTimestamp": ("20261119041842Z",),
    }
    # As slapd makes them: of time first, so entries of one time are neighbours.
    known = str(uuid.UUID(fields=(0x10000 + number, 0x1234, 0x1041, 0x80, 0, 0x1234567890AB)))
    values = {name: tuple(value.encode() for value in given) for name, given in attributes.items()}
    return LiveEntry(known, f"uid={uid},ou=people,dc=example,dc=org", values)
