"""The message of a record: the contract with the transform."""

import json

import pytest

from purveyor.model.errors import InvalidName
from purveyor.sources.ldif.ldif_parser import parse_ldif
from purveyor.sources.ldif.records import Record, default_source_name, encode_record, source_subject


def message(text: bytes) -> object:
    (record,) = parse_ldif([text])
    assert isinstance(record, Record), record
    return json.loads(encode_record(record))


def test_an_entry() -> None:
    assert message(b"dn: cn=\xc3\xa4\nchangetype: add\ncn:: w6Q=\ncn: b\nphoto: \xff\ncert;binary:: YQ==\nx: \n") == {
        "dn": "cn=ä",
        "change": "add",
        "attributes": {"cn": ["ä", "b"], "photo": [{"base64": "/w=="}], "cert;binary": [{"base64": "YQ=="}], "x": [""]},
        "line": 1,
    }
    assert "ä".encode() in encode_record(
        next(r for r in parse_ldif([b"dn: cn=\xc3\xa4\ncn: a"]) if isinstance(r, Record))
    )


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
    assert default_source_name(name) == source
    assert source_subject(source) == f"ldif.{source}"


@pytest.mark.parametrize("source", ["", "a.b", "a b", "*", ">", "x" * 65, "ä"])
def test_a_source_that_is_no_token_is_refused(source: str) -> None:
    with pytest.raises(InvalidName, match="source"):
        source_subject(source)
