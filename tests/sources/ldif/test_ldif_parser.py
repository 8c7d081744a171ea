"""The parser reads LDIF by RFC 2849, in portions of any size, and a broken record never hides the next one."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purveyor.model.ldif_changes import Change, Step
from purveyor.sources.ldif.ldif_parser import LdifParser, parse_ldif
from purveyor.sources.ldif.records import BrokenRecord, Control, Modification, Record
from tests.support.ldif_text import Style, people, write
from tests.support.scale import pick

EXAMPLES = pick(60, 1000)
GOOD = b"dn: cn=good\ncn: good\n\n"


def one(text: bytes) -> Record:
    (found,) = parse_ldif([text])
    assert isinstance(found, Record), found
    return found


def broken(text: bytes) -> BrokenRecord:
    """Return the one broken record of a text; the parser must find the valid one after it."""
    first, second = parse_ldif([text + b"\n\n" + GOOD])
    assert isinstance(first, BrokenRecord), first
    assert isinstance(second, Record)
    assert second.dn == "cn=good"
    return first


def test_an_entry_with_values_of_every_kind() -> None:
    record = one(
        b"version: 1\n# a comment\n  that goes on: here\n\ndn: cn=Ada,\n  dc=example\nobjectClass: top\n"
        b"objectclass: person\ncn;lang-de:: R3LDvMOfZQ==\n# between\ndescription:  indented, and a : colon \n"
        b"photo;binary:: /w==\nempty:\nlatin: caf\xe9\n"
    )
    assert (record.line, record.dn, record.change) == (5, "cn=Ada, dc=example", Change.CONTENT)
    assert record.attributes == {
        "objectClass": (b"top", b"person"),
        "cn;lang-de": ("Grüße".encode(),),
        "description": (b"indented, and a : colon ",),
        "photo;binary": (b"\xff",),
        "empty": (b"",),
        "latin": (b"caf\xe9",),
    }


def test_every_kind_of_change() -> None:
    text = b"""version: 1
dn: cn=a
changetype: add
cn: a

dn: cn=a
control: 1.2.840.113556.1.4.805 true
control: 1.2.3
control: 1.2.4 false: words
control: 1.2.5:: /w==
changetype: modify
add: mail
mail: a@x
mail: b@x
-
delete: phone
-
delete: fax
fax: 1
-
replace: title
-
increment: uidNumber
uidNumber: -3

dn:: Y249YQ==
changetype: moddn
newrdn: cn=b
deleteoldrdn: 1
newsuperior: ou=x

dn: cn=a
changetype: modrdn
newrdn: cn=c
deleteoldrdn: 0

dn: cn=c
changetype: delete
"""
    add, modify, move, rename, delete = parse_ldif([text])
    assert isinstance(modify, Record)
    assert add == Record(2, "cn=a", Change.ADD, {"cn": (b"a",)})
    assert modify.controls == (
        Control("1.2.840.113556.1.4.805", critical=True),
        Control("1.2.3"),
        Control("1.2.4", value=b"words"),
        Control("1.2.5", value=b"\xff"),
    )
    assert modify.modifications == (
        Modification(Step.ADD, "mail", (b"a@x", b"b@x")),
        Modification(Step.DELETE, "phone"),
        Modification(Step.DELETE, "fax", (b"1",)),
        Modification(Step.REPLACE, "title"),
        Modification(Step.INCREMENT, "uidNumber", (b"-3",)),
    )
    assert move == Record(26, "cn=a", Change.MODRDN, new_rdn="cn=b", delete_old_rdn=True, new_superior="ou=x")
    assert rename == Record(32, "cn=a", Change.MODRDN, new_rdn="cn=c", delete_old_rdn=False)
    assert delete == Record(37, "cn=c", Change.DELETE)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"cn: a\nsn: b", "begins with its dn"),
        (b"version: 2", "only version 1"),
        (b"dn: cn=a", "nothing else"),
        (b"dn: cn=a\nno colon", "without a colon: 'no colon'"),
        (b"dn: cn=a\nb\xc3\xa4d name: x", "not the name of an attribute"),
        (b"dn: cn=a\ncn:: not base64!", "bad base64 in 'cn'"),
        (b"dn: cn=a\ncn:: YQ", "bad base64 in 'cn'"),
        (b"dn:: /w==\ncn: a", "dn is not UTF-8"),
        (b"dn: cn=a\nphoto:< file:///etc/passwd", "URL"),
        (b"dn: cn=a\ncn: a\nchangetype: delete", "amid the attributes"),
        (b"dn: cn=a\ncn: a\ndn: cn=b\ncn: b", "'dn' amid the attributes"),
        (b"dn: cn=a\nchangetype: content\ncn: a", "unknown changetype"),
        (b"dn: cn=a\nchangetype: destroy", "unknown changetype 'destroy'"),
        (b"dn: cn=a\nchangetype: add", "without attributes"),
        (b"dn: cn=a\nchangetype: delete\ncn: a", "nothing after its changetype"),
        (b"dn: cn=a\ncontrol: 1.2.3 true\ncn: a", "without a changetype"),
        (b"dn: cn=a\ncontrol: what\nchangetype: delete", "not a control"),
        (b"dn: cn=a\nchangetype: modify\nchange: cn\ncn: a\n-", "is not add, delete, replace or increment"),
        (b"dn: cn=a\nchangetype: modify\nadd: cn\n-", "without values"),
        (b"dn: cn=a\nchangetype: modify\nreplace: cn\ncn: a\nreplace: sn\nsn: b", "'-' missing"),
        (b"dn: cn=a\nchangetype: modify\nincrement: n\n-", "needs one number"),
        (b"dn: cn=a\nchangetype: modify\nincrement: n\nn: many\n-", "needs one number"),
        (b"dn: cn=a\nchangetype: modrdn\ndeleteoldrdn: 1", "without newrdn"),
        (b"dn: cn=a\nchangetype: modrdn\nnewrdn: cn=b", "deleteoldrdn: 0 or 1"),
        (b"dn: cn=a\nchangetype: modrdn\nnewrdn: cn=b\ndeleteoldrdn: 1\nnewrdn: cn=c", "no line of a rename"),
        (b" dn: cn=a\ncn: a", "not the name of an attribute"),
    ],
)
def test_a_broken_record_says_why_and_the_next_one_is_read(text: bytes, reason: str) -> None:
    found = broken(text)
    assert reason in found.reason
    assert (found.line, found.raw, found.size) == (1, text, len(text))


def test_a_reason_shows_no_values() -> None:
    assert "hunter2" not in broken(b"userPassword: hunter2\ncn: a").reason
    assert "hunter2" not in broken(b"dn: cn=a\nchangetype: delete\nuserPassword: hunter2").reason


def test_lines_are_counted_through_everything() -> None:
    text = b"\n\n# one\n# two\n\nversion: 1\n\n\ndn: cn=a\ncn: a\n b\n c\n\nrubbish\n\n\n\n# x\ndn: cn=b\ncn: b"
    for newline in (b"\n", b"\r\n"):
        found = list(parse_ldif([text.replace(b"\n", newline)]))
        assert [item.line for item in found] == [9, 14, 19]
        assert isinstance(found[0], Record)
        assert found[0].attributes == {"cn": (b"abc",)}


def test_a_byte_order_mark_is_not_part_of_the_first_line() -> None:
    assert one(b"\xef\xbb\xbfdn: cn=a\ncn: a").dn == "cn=a"


@pytest.mark.parametrize("text", [b"", b"\n", b"\r\n\r\n", b"# only\n words\n", b"version: 1\n", b"version: 1\n\n\n"])
def test_empty_input_has_no_records(text: bytes) -> None:
    assert list(parse_ldif([text])) == []


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 1 << 20])
def test_a_record_above_the_limit_is_reported_and_not_held(chunk: int, newline: bytes) -> None:
    huge = newline.join([b"dn: cn=huge", *(b"cn: %08d" % number for number in range(100))])
    text = b"\n" + GOOD + huge + newline * 3 + GOOD
    found = list(parse_ldif([text[at : at + chunk] for at in range(0, len(text), chunk)], max_record_bytes=200))
    assert [type(item) for item in found] == [Record, BrokenRecord, Record]
    assert [item.line for item in found] == [2, 5, 108]
    (cut,) = [item for item in found if isinstance(item, BrokenRecord)]
    assert "larger than 200 bytes" in cut.reason
    assert cut.size == len(huge) + len(newline) - 1
    assert huge.startswith(cut.raw)


def test_an_unended_record_above_the_limit_is_reported_at_the_end() -> None:
    parser = LdifParser(max_record_bytes=100)
    assert not [item for _ in range(1000) for item in parser.feed(b"x" * 1000)]
    (found,) = parser.close()
    assert isinstance(found, BrokenRecord)
    assert found.size == 1_000_000
    assert len(found.raw) < 100_000


def test_an_abandoned_record_is_broken() -> None:
    parser = LdifParser()
    assert len(list(parser.feed(GOOD + b"dn: cn=half\nc"))) == 1
    (found,) = parser.abandon("cut")
    assert (found.line, found.reason, found.raw) == (4, "cut", b"dn: cn=half\nc")
    assert list(parser.close()) == []


names = st.from_regex(r"[a-z][a-z0-9-]{0,8}(;lang-[a-z]{2}|;binary)?", fullmatch=True).filter(
    lambda name: name not in ("dn", "control", "changetype")
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
values = st.one_of(st.binary(max_size=40), texts.map(str.encode))
some_values = st.lists(values, min_size=1, max_size=3).map(tuple)
attributes = st.dictionaries(names, some_values, min_size=1, max_size=5)
oids = st.lists(st.integers(0, 999), min_size=1, max_size=4).map(lambda parts: ".".join(map(str, parts)))
controls = st.lists(st.builds(Control, oids, st.booleans(), st.none() | values), max_size=2).map(tuple)
modifications = st.one_of(
    st.builds(Modification, st.just(Step.ADD), names, some_values),
    st.builds(Modification, st.sampled_from([Step.DELETE, Step.REPLACE]), names, st.just(()) | some_values),
    st.builds(Modification, st.just(Step.INCREMENT), names, st.integers().map(lambda n: (b"%d" % n,))),
)


def change(kind: Change, **fields: Any) -> st.SearchStrategy[Record]:
    return st.builds(Record, st.just(0), texts, st.just(kind), controls=controls, **fields)


records = st.one_of(
    st.builds(Record, st.just(0), texts, st.just(Change.CONTENT), attributes),
    change(Change.ADD, attributes=attributes),
    change(Change.DELETE),
    change(Change.MODIFY, modifications=st.lists(modifications, max_size=3).map(tuple)),
    change(
        Change.MODRDN,
        new_rdn=texts.filter(bool),
        delete_old_rdn=st.booleans(),
        new_superior=st.none() | texts,
    ),
)
styles = st.builds(
    Style,
    newline=st.sampled_from([b"\n", b"\r\n"]),
    fold_at=st.none() | st.integers(3, 80),
    always_base64=st.booleans(),
    comments=st.booleans(),
    last_newline=st.booleans(),
)


def in_pieces(text: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


def without_lines(found: list[Record | BrokenRecord]) -> list[Record | BrokenRecord]:
    return [replace(item, line=0) for item in found]


@pytest.mark.chaos
@settings(max_examples=EXAMPLES)
@given(st.lists(records, min_size=1, max_size=5), styles, st.lists(st.integers(0, 10**6), max_size=8))
def test_records_are_the_same_at_any_chunking(written: list[Record], style: Style, cuts: list[int]) -> None:
    text = write(written, style)
    found = list(parse_ldif(in_pieces(text, cuts)))
    assert without_lines(found) == written
    assert found == list(parse_ldif([text])), "lines do not depend on the portions"


rubbish = st.one_of(
    st.binary(max_size=200),
    st.lists(
        st.sampled_from(
            [b"dn: ", b"dn:: ", b"\n", b"\r\n", b"\r", b" ", b"#", b"-", b":", b"changetype: modify", b"x", b"\0"]
        ),
        max_size=30,
    ).map(b"".join),
)


@pytest.mark.chaos
@settings(max_examples=EXAMPLES)
@given(st.lists(rubbish, max_size=4), st.lists(st.integers(0, 10**6), max_size=8))
def test_invalid_input_never_raises_and_never_hides_a_valid_record(pieces: list[bytes], cuts: list[int]) -> None:
    text = b"".join(piece + b"\n\n" + b"dn: cn=good%d\ncn: x\n\n" % number for number, piece in enumerate(pieces))
    found = list(parse_ldif(in_pieces(text, cuts), max_record_bytes=150))
    good = [item.dn for item in found if isinstance(item, Record) and item.dn.startswith("cn=good")]
    assert good == [f"cn=good{number}" for number in range(len(pieces))]
    assert found == list(parse_ldif([text], max_record_bytes=150))


def test_a_file_is_read_whole() -> None:
    text = people(5000)
    found = list(parse_ldif(in_pieces(text, list(range(0, len(text), 4099)))))
    assert [item.dn for item in found if isinstance(item, Record)] == [f"uid=u{n},ou=people" for n in range(1, 5001)]
    assert found[-1].line == 1 + 5 * 4999
