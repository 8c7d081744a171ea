"""Ids stand for a record and all before it; from what is noted of a block follows what is known."""

from purveyor.sources.ldif.record_ids import (
    Chain,
    Link,
    join_notes,
    known_count,
    note_of,
    split_notes,
)
from purveyor.sources.ldif.stream_parser import read


def links(text: bytes) -> list[Link]:
    chain = Chain()
    return [chain.append(item) for item in read([text])]


A, B, C = b"dn: cn=a\ncn: a\n\n", b"dn: cn=b\ncn: b\n\n", b"rubbish\n\n"


def test_the_same_beginning_has_the_same_ids() -> None:
    whole, begin = links(A + B + C), links(A + B)
    assert [link.id for link in whole[:2]] == [link.id for link in begin]
    assert [link.id for link in links(b"# remark\n\nversion: 1\n\n" + A + b"\n\n" + B.rstrip())] == [
        link.id for link in begin
    ], "what is no record does not count"


def test_an_id_depends_on_all_before_it() -> None:
    assert len({link.id for text in (A + A + A, B + A, C + A) for link in links(text)}) == 7
    assert links(A + B)[1].id != links(B)[0].id


def test_everything_up_to_the_furthest_note_is_known() -> None:
    ids = [link.id for link in links(A + B + C + A)]
    notes = [note_of(each) for each in ids]
    assert known_count(ids, []) == 0
    assert known_count(ids, [notes[0], notes[2]]) == 3
    assert known_count(ids, notes[3:]) == 4
    assert known_count(ids, [note_of(link.id) for link in links(B)]) == 0


def test_notes_are_kept_once_and_the_oldest_make_room() -> None:
    notes = [note_of(link.id) for link in links(A + B + C + A)]
    value = join_notes(notes[:3], notes[1:], most=10)
    assert split_notes(value) == notes
    assert split_notes(join_notes(notes[:2], notes[2:], most=3)) == notes[1:]
    assert split_notes(b"") == []
