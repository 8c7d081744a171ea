"""A large directory is read and written in few pieces."""

import json
import random

import pytest

from purveyor.model.errors import UnreadableRecord
from purveyor.pipeline.transform.directory_pages import MAX_PAGE_BYTES, MAX_PAGE_ENTRIES, PagedDirectory
from purveyor.pipeline.transform.directory_records import parse_dn
from purveyor.pipeline.transform.directory_rules import Entry, Published
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


def test_what_subscribers_have_instead_of_an_entry_is_kept() -> None:
    pages = MemoryPages()
    directory = PagedDirectory(pages)
    before, after = Entry("cn=a", "id", {"cn": ["a"]}), Entry("cn=b", "id", {"cn": ["b"]})
    entries = [after, after._replace(published=Published(before)), after._replace(published=Published(None))]
    for number, each in enumerate(entries):
        directory.put(f"cn={number}", each)
    directory.flush()
    again = PagedDirectory(pages)
    assert [again.get(f"cn={number}") for number in range(3)] == entries


@pytest.mark.parametrize("index", [b'[[""], [0], 1, 2]', b'{"version": 3}', b'{"version": 2}', b"no JSON", b"7"])
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


def flat_index(count: int) -> MemoryPages:
    """A directory as version 1 wrote it: pages of some entries, and a list of three as index."""
    pages = MemoryPages()
    entries = sorted(entry(number) for number in range(count))
    begins = []
    for number, start in enumerate(range(0, count, 4)):
        some = entries[start : start + 4]
        bodies = [json.dumps(each[:3], separators=(",", ":")).encode() for _, each in some]
        head = json.dumps([[key for key, _ in some], [len(each) for each in bodies]]).encode()
        pages.write(number, len(head).to_bytes(4, "big") + head + b"".join(bodies))
        begins.append(some[0][0] if start else "")
    pages.write_index(json.dumps([begins, list(range(len(begins))), len(begins)]).encode())
    return pages


@pytest.mark.parametrize(("count", "small"), [(400, True), (4000, False)])
def test_a_directory_of_version_1_continues(count: int, small: bool) -> None:
    """A small one stays readable for version 1; a large one gets an index that version 1 refuses."""
    pages = flat_index(count)
    directory = PagedDirectory(pages)
    key, known = entry(count // 2)
    assert directory.get(key) == known
    directory.put(key, known._replace(uuid="other"))
    for number in range(count, count + 100):
        directory.put(*entry(number))
    directory.flush()
    assert isinstance(json.loads(pages.read_index() or b""), list) is small
    expected = {entry(number)[0]: entry(number)[1] for number in range(count + 100)}
    assert dict(PagedDirectory(pages).items()) == {**expected, key: known._replace(uuid="other")}


def test_a_batch_reads_a_part_of_the_index_however_large_the_directory_is() -> None:
    small, large = (bytes_of_a_batch(filled(count)) for count in (5_000, 50_000))
    assert large < 2 * small


def bytes_of_a_batch(pages: MemoryPages) -> int:
    """What is read and written to change one entry."""
    before = dict(pages.pages)
    pages.traffic = 0
    directory = PagedDirectory(pages)
    key, known = entry(777)
    directory.put(key, known._replace(uuid="other"))
    directory.flush()
    assert sum(before[number] != data for number, data in pages.pages.items()) == 1
    return pages.traffic


def test_all_pages_can_go_and_come_again() -> None:
    pages = filled(20_000)
    directory = PagedDirectory(pages, max_held_bytes=100_000)
    numbers = list(range(20_000))
    random.Random(1).shuffle(numbers)
    for number in numbers:
        directory.remove(entry(number)[0])
    directory.flush()
    assert dict(PagedDirectory(pages).items()) == {}
    assert len(pages.pages) <= 2
    for number in numbers[:3000]:
        directory.put(*entry(number))
    directory.flush()
    assert [key for key, _ in PagedDirectory(pages).items()] == sorted(entry(number)[0] for number in numbers[:3000])
