"""What is stored about a live source."""

import random

import numpy as np
import pytest

from purveyor.model.errors import UnreadableRecord
from purveyor.pipeline.transform.directory_pages import PagedDirectory
from purveyor.pipeline.transform.directory_records import Value, parse_dn
from purveyor.pipeline.transform.directory_rules import Entry
from purveyor.pipeline.transform.live_directory import LiveDirectory
from purveyor.pipeline.transform.sync_state import (
    CHUNK_IDS,
    IdSet,
    Refresh,
    SyncState,
    as_array,
    contained,
    dump_state,
    load_state,
)
from tests.pipeline.transform.memory import MemoryPages

FIRST = 1000


def identity(number: int) -> bytes:
    """Some end with zero bytes."""
    return number.to_bytes(4, "big") * 2 + number.to_bytes(8, "little")


def test_a_record_comes_back() -> None:
    refresh = Refresh(full=True, complete=False, ending=True, remove_unseen=True, csns=("a", "b"))
    for state in (
        SyncState(),
        SyncState(3, {"001": "x"}, 4, refresh, {"dc=e\0ou=\udcff": "id"}, 5, 6, 7),
    ):
        assert load_state(dump_state(state)) == state


@pytest.mark.parametrize(
    "data", [b"{}", b'{"version":2}', dump_state(SyncState())[:-1] + b',"new":1}', b"7", b"no JSON"]
)
def test_a_record_of_a_newer_program_stops_the_source(data: bytes) -> None:
    with pytest.raises(UnreadableRecord):
        load_state(data)


def test_a_set_of_many_chunks_survives_batches_of_any_size_and_repetition() -> None:
    pages, size = MemoryPages(), 0
    numbers = list(range(3 * CHUNK_IDS + 77))
    random.Random(1).shuffle(numbers)
    expected: set[int] = set()
    for step in (1, CHUNK_IDS - 1, 1, 0, 5, 2 * CHUNK_IDS, 70):
        batch, numbers = numbers[:step], numbers[step:]
        ids = IdSet(pages, FIRST, size)
        for number in (*batch, *batch[:3]):
            ids.add(identity(number))
        ids.flush()
        expected |= set(batch)
        size = ids.size
        assert IdSet(pages, FIRST, size).load().size == len(expected)
    loaded = IdSet(pages, FIRST, size).load()
    asked = range(3 * CHUNK_IDS + 100)
    found = contained(as_array(map(identity, asked)), loaded)
    assert [number for number, known in zip(asked, found, strict=True) if known] == sorted(expected)
    ids = IdSet(pages, FIRST, size)
    ids.add(identity(1))
    ids.clear()
    assert pages.pages == {}
    ids.add(identity(9))
    ids.flush()
    assert IdSet(pages, FIRST, ids.size).load().tolist() == as_array([identity(9)]).tolist()
    assert not contained(as_array([identity(1)]), np.array([], dtype="S16")).any()


def test_a_batch_appends_to_the_set_without_reading_it() -> None:
    pages = MemoryPages()
    ids = IdSet(pages, FIRST, 0)
    ids.extend(identity(number) for number in range(20 * CHUNK_IDS))
    ids.flush()
    pages.reads = pages.writes = 0
    more = IdSet(pages, FIRST, ids.size)
    more.extend(identity(number) for number in range(100))
    more.flush()
    assert (pages.reads, pages.writes) == (0, 1)


def test_the_index_of_a_large_directory_of_ldif_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purveyor.pipeline.transform.live_directory._BUILD_RUN_ENTRIES", 700)
    pages = MemoryPages()
    entries = PagedDirectory(pages)
    for number in range(3000):
        dn = f"uid=u{number},dc=e"
        attributes: dict[str, list[Value]] = (
            {"entryuuid": [f"{number:08x}-0000-1000-8000-000000000000"]} if number % 2 else {}
        )
        entries.put(parse_dn(dn).key, Entry(dn, f"id-{number}", attributes))
    entries.flush()
    before = len(pages.pages)
    assert not LiveDirectory(PagedDirectory(pages), pages).is_live
    directory = LiveDirectory(PagedDirectory(pages), pages)
    assert directory.state == SyncState()
    directory.flush()
    assert len(pages.pages) > before
    again = LiveDirectory(PagedDirectory(pages), pages)
    assert again.is_live
    for number in range(1, 3000, 2):
        found = again.find(f"{number:08x}-0000-1000-8000-000000000000")
        assert found is not None
        assert found[1].uuid == f"id-{number}"
    assert len(again.unseen()) == 3000
