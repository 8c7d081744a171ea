"""The message of a record: the contract with the transform."""

import json

import pytest

from purveyor.model.errors import InvalidName
from purveyor.sources.ldif.record_messages import body, source_of, subject
from purveyor.sources.ldif.records import Record
from purveyor.sources.ldif.stream_parser import read


def message(text: bytes) -> object:
    (record,) = read([text])
    assert isinstance(record, Record), record
    return json.loads(body(record))


def test_an_entry() -> None:
    assert message(b"dn: cn=\xc3\xa4\nchangetype: add\ncn:: w6Q=\ncn: b\nphoto: \xff\ncert;binary:: YQ==\nx: \n") == {
        "dn": "cn=ä",
        "change": "add",
        "attributes": {"cn": ["ä", "b"], "photo": [{"base64": "/w=="}], "cert;binary": [{"base64": "YQ=="}], "x": [""]},
        "line": 1,
    }
    assert "ä".encode() in body(next(r for r in read([b"dn: cn=\xc3\xa4\ncn: a"]) if isinstance(r, Record)))


def test_a_modify() -> None:
    assert message(
        b"dn: cn=a\ncontrol: 1.2.3 true: x\nchangetype: modify\nadd: cn\ncn: b\n-\ndelete: cert;Binary\n"
        b"cert;Binary: a\n-\nreplace: sn\n-\nincrement: n\nn: 5\n"
    ) == {
        "dn": "cn=a",
        "change": "modify",
        "modifications": [
            {"op": "add", "attribute": "cn", "values": ["b"]},
            {"op": "delete", "attribute": "cert;Binary", "values": [{"base64": "YQ=="}]},
            {"op": "replace", "attribute": "sn", "values": []},
            {"op": "increment", "attribute": "n", "values": ["5"]},
        ],
        "controls": [{"oid": "1.2.3", "critical": True, "value": "x"}],
        "line": 1,
    }


def test_a_modify_of_nothing_is_still_one() -> None:
    assert message(b"dn: cn=a\nchangetype: modify") == {
        "dn": "cn=a", "change": "modify", "modifications": [], "line": 1
    }  # fmt: skip


def test_renames_and_deletions() -> None:
    assert message(b"\ndn: cn=a\nchangetype: moddn\nnewrdn: cn=b\ndeleteoldrdn: 1") == {
        "dn": "cn=a", "change": "modrdn", "new_rdn": "cn=b", "delete_old_rdn": True, "line": 2
    }  # fmt: skip
    assert message(b"dn: cn=a\nchangetype: modrdn\nnewrdn: cn=b\ndeleteoldrdn: 0\nnewsuperior:") == {
        "dn": "cn=a", "change": "modrdn", "new_rdn": "cn=b", "delete_old_rdn": False, "new_superior": "", "line": 1
    }  # fmt: skip
    assert message(b"dn: cn=a\nchangetype: delete") == {"dn": "cn=a", "change": "delete", "line": 1}


@pytest.mark.parametrize(
    ("name", "source"),
    [("people.ldif", "people"), ("a b.c.ldif", "a-b-c"), ("-", "stdin"), (".ldif", "unnamed"), ("x" * 99, "x" * 64)],
)
def test_a_source_is_a_token(name: str, source: str) -> None:
    assert source_of(name) == source
    assert subject(source) == f"ldif.{source}"


@pytest.mark.parametrize("source", ["", "a.b", "a b", "*", ">", "x" * 65, "ä"])
def test_a_source_that_is_no_token_is_refused(source: str) -> None:
    with pytest.raises(InvalidName, match="source"):
        subject(source)
