"""The ids of records, and the count of known records of a block."""

from purveyor.sources.ldif.ldif_parser import parse_ldif
from purveyor.sources.ldif.queue_store import (
    IdentifiedRecord,
    RecordIdChain,
    count_known,
    join_ids,
    shorten_id,
    split_ids,
)


def links(text: bytes) -> list[IdentifiedRecord]:
    chain = RecordIdChain()
    return [chain.append(item) for item in parse_ldif([text])]


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


def test_everything_up_to_the_last_id_in_the_ledger_is_known() -> None:
    ids = [link.id for link in links(A + B + C + A)]
    short_ids = [shorten_id(each) for each in ids]
    assert count_known(ids, []) == 0
    assert count_known(ids, [short_ids[0], short_ids[2]]) == 3
    assert count_known(ids, short_ids[3:]) == 4
    assert count_known(ids, [shorten_id(link.id) for link in links(B)]) == 0


def test_ids_are_stored_once_and_the_oldest_are_dropped() -> None:
    short_ids = [shorten_id(link.id) for link in links(A + B + C + A)]
    value = join_ids(short_ids[:3], short_ids[1:], limit=10)
    assert split_ids(value) == short_ids
    assert split_ids(join_ids(short_ids[:2], short_ids[2:], limit=3)) == short_ids[1:]
    assert split_ids(b"") == []
