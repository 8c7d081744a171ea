"""The entries of an access log: the forms of reqMod and reqOld, and what is no write."""

import re

import pytest

from purveyor.model.ldif_changes import Change, Step
from purveyor.sources.ldap.accesslog import AccesslogError, AttributeChange, Operation, read_operation
from tests.support.sync_messages import make_csn, make_uuid

DN = "reqStart=20260101000000.000000Z,cn=accesslog"
CSN, UUID = make_csn(1), make_uuid(1)


def log_entry(kind: str, *lines: bytes, **more: str) -> dict[str, list[bytes]]:
    texts = {
        "reqType": kind,
        "reqDN": "uid=a,dc=x",
        "reqResult": "0",
        "reqEntryUUID": UUID,
        "entryCSN": CSN,
        "reqStart": "20260101000000.000000Z",
        "reqAuthzID": "cn=admin",
        "objectClass": f"audit{kind}",
    } | more
    return {name: [text.encode()] for name, text in texts.items()} | ({"reqMod": list(lines)} if lines else {})


def read(kind: str, *lines: bytes, **more: str) -> Operation:
    operation = read_operation(DN, log_entry(kind, *lines, **more))
    assert operation is not None
    return operation


def test_an_add_has_the_whole_entry() -> None:
    operation = read("add", b"cn:+ a", b"cn:+ b", b"photo:+ \xff: \n", b"cn;lang-de:+ \xc3\xa4", b"x:+ ")
    assert operation == Operation(
        change=Change.ADD,
        dn="uid=a,dc=x",
        uuid=UUID,
        csn=CSN,
        attributes={"cn": (b"a", b"b"), "photo": (b"\xff: \n",), "cn;lang-de": ("ä".encode(),), "x": (b"",)},
        started="20260101000000.000000Z",
        author="cn=admin",
    )


def test_each_form_of_a_modification() -> None:
    operation = read(
        "modify",
        b"mail:+ a",
        b"mail:+ b",
        b":",
        b"mail:+ c",
        b"sn:- y",
        b"sn:-",
        b"title:= 1",
        b"title:= 2",
        b"fax:=",
        b"n:# 5",
        b"entryCSN:= " + make_csn(9).encode(),
    )
    assert operation.changes[:-1] == (
        AttributeChange(Step.ADD, "mail", (b"a", b"b")),
        AttributeChange(Step.ADD, "mail", (b"c",)),
        AttributeChange(Step.DELETE, "sn", (b"y",)),
        AttributeChange(Step.DELETE, "sn"),
        AttributeChange(Step.REPLACE, "title", (b"1", b"2")),
        AttributeChange(Step.REPLACE, "fax"),
        AttributeChange(Step.INCREMENT, "n", (b"5",)),
    )
    assert operation.csn == make_csn(9)


def test_a_rename_has_its_parts() -> None:
    operation = read("modrdn", reqNewRDN="uid=b", reqDeleteOldRDN="TRUE", reqNewSuperior="dc=y", reqNewDN="uid=b,dc=y")
    assert operation.change is Change.MODRDN
    assert (operation.new_rdn, operation.delete_old_rdn, operation.new_superior, operation.new_dn) == (
        "uid=b", True, "dc=y", "uid=b,dc=y",
    )  # fmt: skip
    plain = read("modrdn", reqNewRDN="uid=b", reqDeleteOldRDN="FALSE")
    assert (plain.delete_old_rdn, plain.new_superior, plain.new_dn) == (False, None, None)


def test_a_delete_has_the_old_entry() -> None:
    entry = log_entry("delete") | {"reqOld": [b"cn: a", b"cn: b", b"photo: \xff", b"empty: "]}
    operation = read_operation(DN, entry)
    assert operation is not None
    assert operation.change is Change.DELETE
    assert operation.old == {"cn": (b"a", b"b"), "photo": (b"\xff",), "empty": (b"",)}


def test_names_are_compared_without_case_and_the_uuid_may_come_from_the_entry() -> None:
    entry = {name.upper(): values for name, values in log_entry("add", b"entryuuid:+ " + UUID.encode()).items()}
    del entry["REQENTRYUUID"]
    operation = read_operation(DN, entry)
    assert operation is not None
    assert operation.uuid == UUID


@pytest.mark.parametrize("kind", ["bind", "unbind", "search", "compare", "abandon", "extended{1.3.6.1}"])
def test_what_changes_nothing_is_left_out(kind: str) -> None:
    assert read_operation(DN, log_entry(kind)) is None


def test_failed_operations_and_the_root_of_the_log_are_left_out() -> None:
    assert read_operation(DN, log_entry("delete", reqResult="32")) is None
    assert read_operation("cn=accesslog", {"objectClass": [b"auditContainer"]}) is None


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (log_entry("merge"), "unknown reqType 'merge'"),
        (log_entry("modify", b"cn:? a"), "unknown form of reqMod: 'cn'"),
        (log_entry("modify", b"cn"), "unknown form of reqMod: 'cn' only"),
        (log_entry("modify", b":+ a"), "unknown form"),
        (log_entry("modify", b"cn:+a"), "unknown form"),
        (log_entry("modify", b"c\xff:+ a"), "not ASCII"),
        (log_entry("add", b"cn:- a"), "an add with the step delete on cn"),
        (log_entry("delete") | {"reqOld": [b"cn"]}, "unknown form of reqOld"),
        (log_entry("delete") | {"reqDN": [b"\xff"]}, "reqDN is not UTF-8"),
        (log_entry("modrdn"), "it has no reqNewRDN"),
        ({"objectClass": [b"auditAdd"]}, "it has no reqType"),
    ],
)
def test_what_is_not_understood_names_the_entry_and_the_reason(entry: dict[str, list[bytes]], reason: str) -> None:
    with pytest.raises(AccesslogError, match=re.escape(DN)) as caught:
        read_operation(DN, entry)
    assert reason in str(caught.value)


def test_secrets_are_not_in_an_error() -> None:
    with pytest.raises(AccesslogError) as caught:
        read("modify", b"userPassword:? hunter2")
    assert "hunter2" not in str(caught.value)
