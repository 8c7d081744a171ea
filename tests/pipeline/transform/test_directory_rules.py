"""How each kind of record changes the directory."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purveyor.pipeline.transform.directory_pages import PagedDirectory
from purveyor.pipeline.transform.directory_records import InvalidRecord, Record, parse_dn, parse_record
from purveyor.pipeline.transform.directory_rules import Entry, EntryChange, Store, apply_record
from tests.pipeline.transform.memory import MemoryPages, MemoryStore, body, modify, person

ADA = "uid=ada,ou=people,dc=e"
PEOPLE = "ou=people,dc=e"


class StoredDirectory:
    """A directory in memory, with a short way to apply messages."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.count = 0

    def do(self, data: bytes) -> list[EntryChange]:
        self.count += 1
        return apply_record(self.store, parse_record(data), f"id-{self.count}")

    def add(self, dn: str, **attributes: Any) -> Entry:
        (change,) = self.do(body(dn, "add", attributes=attributes or person("someone")))
        assert change.after is not None
        return change.after

    def entry(self, dn: str) -> Entry:
        found = self.store.get(parse_dn(dn).key)
        assert found is not None
        return found

    def refused(self, data: bytes) -> str:
        before = dict(self.store.entries)
        with pytest.raises(InvalidRecord) as caught:
            self.do(data)
        assert self.store.entries == before
        return str(caught.value)


@pytest.fixture
def directory() -> StoredDirectory:
    return StoredDirectory()


def test_the_identity_is_the_entry_uuid_or_one_made_at_first_sight(directory: StoredDirectory) -> None:
    assert directory.add(ADA, uid=["ada"]).uuid == "id-1"
    assert directory.add("uid=bob,dc=e", entryUUID=["AB-1"], uid=["bob"]).uuid == "ab-1"


def test_content_replaces_and_the_same_content_changes_nothing(directory: StoredDirectory) -> None:
    content = body(ADA, "content", attributes=person("ada", mail=["a@e"]))
    (created,) = directory.do(content)
    assert created.before is None
    assert directory.do(content) == []
    (changed,) = directory.do(body(ADA.upper(), "content", attributes=person("ada")))
    assert changed.before == created.after
    assert changed.after is not None
    assert "mail" not in changed.after.attributes
    assert changed.after.uuid == "id-1"


def test_another_entry_uuid_is_another_entry(directory: StoredDirectory) -> None:
    directory.add(ADA, entryUUID=["u1"], uid=["ada"])
    (change,) = directory.do(body(ADA, "content", attributes={"entryUUID": ["u2"], "uid": ["ada"]}))
    assert change.before is not None
    assert change.after is not None
    assert (change.before.uuid, change.after.uuid) == ("u1", "u2")


def test_modify_adds_deletes_replaces_and_increments(directory: StoredDirectory) -> None:
    directory.add(ADA, uid=["ada"], mail=["a@e", "B@e", {"base64": "/w=="}], uidNumber=["7"], title=["x"])
    directory.do(
        modify(
            ADA,
            ("add", "MAIL", ["c@e", "a@e"]),
            ("delete", "mail", ["b@E"]),
            ("replace", "title", ["y", "z"]),
            ("increment", "uidnumber", ["-3"]),
            ("add", "cn;lang-de", ["Ada"]),
            ("delete", "uid", []),
        )
    )
    assert directory.entry(ADA).attributes == {
        "mail": ["a@e", {"base64": "/w=="}, "c@e"],
        "uidnumber": ["4"],
        "title": ["y", "z"],
        "cn;lang-de": ["Ada"],
    }
    directory.do(modify(ADA, ("replace", "title", []), ("delete", "mail", [{"base64": "/w=="}, "a@e", "c@e", "x@e"])))
    assert set(directory.entry(ADA).attributes) == {"uidnumber", "cn;lang-de"}


def test_a_modify_without_effect_changes_nothing(directory: StoredDirectory) -> None:
    directory.add(ADA, uid=["ada"], title=["x"])
    assert (
        directory.do(modify(ADA, ("replace", "title", ["x"]), ("delete", "mail", ["a"]), ("add", "uid", ["ada"]))) == []
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (modify("uid=eve,dc=e", ("add", "cn", ["x"])), "modify: there is no such entry"),
        (body("uid=eve,dc=e", "delete"), "delete: there is no such entry"),
        (body("uid=eve,dc=e", "modrdn", new_rdn="uid=x", delete_old_rdn=True), "modrdn: there is no such entry"),
        (body(ADA, "add", attributes=person("ada")), "add: there is such an entry already"),
        (modify(ADA, ("replace", "sn", ["x"]), ("increment", "uid", ["1"])), "no whole number"),
        (modify(ADA, ("increment", "uidNumber", ["1"])), "the entry has no uidnumber"),
        (modify(ADA, ("increment", "uid", ["1", "2"])), "no whole number"),
        (body(ADA, "modrdn", new_rdn="uid=bob", delete_old_rdn=True), "there is an entry 'uid=bob,"),
        (
            body(PEOPLE, "modrdn", new_rdn="ou=x", delete_old_rdn=True, new_superior=ADA),
            "cannot be moved below itself",
        ),
        (body(ADA, "modrdn", new_rdn="uid", delete_old_rdn=True), "no rdn"),
    ],
)
def test_an_invalid_record_is_an_error_and_changes_nothing(
    directory: StoredDirectory, data: bytes, reason: str
) -> None:
    directory.add(PEOPLE, objectClass=["organizationalUnit"], ou=["people"])
    directory.add(ADA)
    directory.add("uid=bob,ou=people,dc=e")
    assert reason in directory.refused(data)


def test_deleting_a_subtree_deletes_the_deepest_first(directory: StoredDirectory) -> None:
    for dn in ("ou=x,dc=e", "ou=y,ou=x,dc=e", "uid=a,ou=y,ou=x,dc=e", "uid=b,ou=x,dc=e", "ou=xx,dc=e"):
        directory.add(dn, ou=["o"])
    gone = directory.do(body("OU=X,dc=e", "delete"))
    assert [change.after for change in gone] == [None] * 4
    dns = [change.before.dn for change in gone if change.before]
    assert dns[-1] == "ou=x,dc=e"
    assert dns.index("uid=a,ou=y,ou=x,dc=e") < dns.index("ou=y,ou=x,dc=e")
    assert [entry.dn for entry in directory.store.entries.values()] == ["ou=xx,dc=e"]


def test_a_rename_keeps_the_identity_and_moves_what_is_below(directory: StoredDirectory) -> None:
    directory.add(PEOPLE, ou=["people"])
    directory.add("ou=old,dc=e", ou=["old"])
    ada = directory.add("uid=Ada,OU=People,dc=e", uid=["Ada", "a2"])
    done = directory.do(body(PEOPLE, "modrdn", new_rdn="ou=staff", delete_old_rdn=True, new_superior="OU=old,dc=e"))
    dns = [change.after.dn for change in done if change.after]
    assert dns == ["ou=staff,OU=old,dc=e", "uid=Ada,ou=staff,OU=old,dc=e"]
    renamed_dn = directory.entry("uid=ada,ou=staff,ou=old,dc=e")
    assert (renamed_dn.uuid, renamed_dn.attributes) == (ada.uuid, ada.attributes)
    assert directory.entry("ou=staff,ou=old,dc=e").attributes == {"ou": ["staff"]}
    assert directory.store.get(parse_dn(PEOPLE).key) is None


@pytest.mark.parametrize(("delete", "expected"), [(True, ["a2", "countess"]), (False, ["Ada", "a2", "countess"])])
def test_the_record_can_keep_the_old_rdn_as_a_value(
    directory: StoredDirectory, delete: bool, expected: list[str]
) -> None:
    directory.add("uid=ada,dc=e", uid=["Ada", "a2"])
    directory.do(body("uid=ada,dc=e", "modrdn", new_rdn="uid=countess", delete_old_rdn=delete))
    assert directory.entry("uid=countess,dc=e").attributes == {"uid": expected}


def test_a_rename_in_case_only_and_one_to_the_root(directory: StoredDirectory) -> None:
    directory.add("uid=ada,dc=e", uid=["ada"])
    (change,) = directory.do(body("uid=ada,dc=e", "modrdn", new_rdn="UID=Ada", delete_old_rdn=True))
    assert change.after is not None
    assert change.after.dn == "UID=Ada,dc=e"
    directory.do(body("uid=ada,dc=e", "modrdn", new_rdn="uid=ada", delete_old_rdn=True, new_superior=""))
    assert directory.entry("uid=ada").uuid == "id-1"


DNS = st.lists(st.sampled_from(["cn=a", "cn=b", "CN=A", "ou=c+cn=d"]), min_size=1, max_size=4).map(",".join)
VALUES = st.lists(st.sampled_from(["1", "2", "x", "X", "u1"]), max_size=3)
ATTRIBUTES = st.dictionaries(st.sampled_from(["cn", "CN", "sn", "entryUUID"]), VALUES, max_size=3)
STEPS = st.tuples(
    st.sampled_from(["add", "delete", "replace", "increment"]), st.sampled_from(["cn", "SN", "n"]), VALUES
)
RECORDS = st.one_of(
    st.builds(lambda dn, attributes: body(dn, "content", attributes=attributes), DNS, ATTRIBUTES),
    st.builds(lambda dn, attributes: body(dn, "add", attributes=attributes), DNS, ATTRIBUTES),
    st.builds(lambda dn, steps: modify(dn, *steps), DNS, st.lists(STEPS, max_size=3)),
    st.builds(lambda dn: body(dn, "delete"), DNS),
    st.builds(
        lambda dn, rdn, delete, superior: body(
            dn, "modrdn", new_rdn=rdn, delete_old_rdn=delete, **({} if superior is None else {"new_superior": superior})
        ),
        DNS,
        st.sampled_from(["cn=a", "cn=b", "cn=new"]),
        st.booleans(),
        st.none() | DNS,
    ),
)


def outcome(store: Store, record: Record, fresh_id: str) -> list[EntryChange] | str:
    """What changed, or why nothing did."""
    try:
        return apply_record(store, record, fresh_id)
    except InvalidRecord as error:
        return str(error)


@settings(max_examples=200)
@given(st.lists(st.tuples(RECORDS, st.booleans()), max_size=40))
def test_any_sequence_of_changes_keeps_the_books_straight(steps: list[tuple[bytes, bool]]) -> None:
    """Pages give what a dictionary gives; changes tell exactly how the directory moved; identities are never lost."""
    model, pages = MemoryStore(), MemoryPages()
    paged = PagedDirectory(pages, max_held_bytes=300)
    reported: dict[str, Entry] = {}
    for number, (data, batch_ends) in enumerate(steps):
        record = parse_record(data)
        before = dict(model.entries)
        changes = outcome(model, record, f"id-{number}")
        assert outcome(paged, record, f"id-{number}") == changes
        if isinstance(changes, str):
            assert model.entries == before
            continue
        for change in changes:
            assert change.before != change.after
            if change.before is not None:
                reported.pop(change.before.dn)
        for change in changes:
            if change.after is not None:
                assert change.after.dn not in reported
                reported[change.after.dn] = change.after
        assert sorted(reported.values(), key=repr) == sorted(model.entries.values(), key=repr)
        for key, entry in model.entries.items():
            assert parse_dn(entry.dn).key == key
        if batch_ends:
            paged.flush()
            paged = PagedDirectory(pages, max_held_bytes=300)
    paged.flush()
    kept = PagedDirectory(pages)
    assert {key: kept.get(key) for key in model.entries} == model.entries
    assert dict(kept.descendants("cn=a")) == dict(model.descendants("cn=a"))
