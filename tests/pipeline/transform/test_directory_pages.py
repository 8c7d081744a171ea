"""A large directory is read and written in few pieces."""

import pytest

from purveyor.model.errors import UnreadableRecord
from purveyor.pipeline.transform.directory_pages import MAX_PAGE_BYTES, MAX_PAGE_ENTRIES, PagedDirectory
from purveyor.pipeline.transform.directory_records import parse_dn
from purveyor.pipeline.transform.directory_rules import Entry
from tests.pipeline.transform.memory import MemoryPages


def entry(number: int, size: int = 10) -> tuple[str, Entry]:
    dn = f"uid=u{number:05},ou=people,dc=e"
    return parse_dn(dn).key, Entry(dn, f"id-{number}", {"cn": ["x" * size]})


def filled(count: int, size: int = 10) -> MemoryPages:
    pages = MemoryPages()
    directory = PagedDirectory(pages)
    for number in range(count):
        directory.put(*entry((number * 7919) % count, size))
    directory.flush()
    return pages


def test_a_batch_reads_and_writes_what_it_touches_only() -> None:
    pages = filled(5000)
    assert 5000 / MAX_PAGE_ENTRIES <= len(pages.pages) <= 5000 / MAX_PAGE_ENTRIES * 3
    pages.reads = pages.writes = 0
    directory = PagedDirectory(pages)
    key, known = entry(777)
    assert directory.get(key) == known
    directory.put(key, known._replace(uuid="other"))
    directory.flush()
    assert (pages.reads, pages.writes) == (1, 1)
    assert PagedDirectory(pages).get(key) == known._replace(uuid="other")


def test_large_entries_make_small_pages() -> None:
    pages = filled(100, size=MAX_PAGE_BYTES // 4)
    assert max(map(len, pages.pages.values())) < 2 * MAX_PAGE_BYTES
    directory = PagedDirectory(pages)
    directory.put(*entry(3, size=10 * MAX_PAGE_BYTES))
    directory.flush()
    assert PagedDirectory(pages).get(entry(3)[0]) == entry(3, size=10 * MAX_PAGE_BYTES)[1]


def test_a_subtree_over_many_pages_is_found_in_order_and_can_go() -> None:
    pages = filled(1000)
    directory = PagedDirectory(pages, max_held_bytes=10_000)
    people = parse_dn("ou=people,dc=e").key
    directory.put(people, Entry("ou=people,dc=e", "p", {}))
    below = list(directory.descendants(people))
    assert below == [entry(number) for number in range(1000)]
    for key, _ in below:
        directory.remove(key)
    directory.flush()
    left = PagedDirectory(pages)
    assert list(left.descendants(parse_dn("dc=e").key)) == [(people, Entry("ou=people,dc=e", "p", {}))]
    assert len(pages.pages) <= 2


def test_memory_is_bounded_by_writing_back_early() -> None:
    pages = filled(2000, size=500)
    directory = PagedDirectory(pages, max_held_bytes=100_000)
    for number in range(2000):
        key, known = entry(number)
        directory.put(key, known)
    assert pages.writes > len(pages.pages)
    directory.flush()
    again = PagedDirectory(pages)
    assert [again.get(entry(number)[0]) for number in range(2000)] == [entry(number)[1] for number in range(2000)]


def test_any_text_can_be_kept() -> None:
    pages = MemoryPages()
    directory = PagedDirectory(pages)
    odd = Entry("cn=\udcff", "id", {"cn": ["\udcff", "ö", {"base64": "/w=="}]})
    directory.put("cn=\udcff", odd)
    directory.flush()
    assert PagedDirectory(pages).get("cn=\udcff") == odd


@pytest.mark.parametrize("index", [b'[[""], [0], 1, 2]', b'{"version": 2}', b"no JSON", b"7"])
def test_a_directory_of_a_newer_program_is_left_as_it_is(index: bytes) -> None:
    pages = filled(10)
    understood = pages.read_index()
    assert understood is not None
    pages.write_index(index)
    with pytest.raises(UnreadableRecord, match="upgrade"):
        PagedDirectory(pages)
    assert pages.read_index() == index
    pages.write_index(understood)
    key, known = entry(3)
    assert PagedDirectory(pages).get(key) == known
