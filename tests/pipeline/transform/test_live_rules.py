"""How each record of a live directory changes what is known."""

from typing import Any

import pytest

from purveyor.model import json_fields
from purveyor.pipeline.transform import directory_rules
from purveyor.pipeline.transform.directory_pages import PagedDirectory
from purveyor.pipeline.transform.directory_records import InvalidRecord, Record
from purveyor.pipeline.transform.directory_rules import Entry, apply_record
from purveyor.pipeline.transform.live_directory import LiveDirectory
from purveyor.pipeline.transform.live_records import InvalidEntry, parse_message
from purveyor.pipeline.transform.live_rules import PartlyApplied, apply_live_record, note_invalid
from tests.pipeline.transform.memory import MemoryPages, body, modify

PEOPLE, ADA, BOB, EVE = (f"0000000{number}-0000-1000-8000-000000000000" for number in range(1, 5))
Summary = list[tuple[str | None, str | None]]


def csn(number: int, server: int = 1) -> str:
    return f"20261119000000.{number:06}Z#000000#{server:03x}#000000"


class FollowedDirectory:
    """A directory over pages in memory, and short ways to apply records; a batch for each record."""

    def __init__(self) -> None:
        self.pages = MemoryPages()
        self.epoch = 1
        self.count = 0

    def open(self) -> LiveDirectory:
        return LiveDirectory(PagedDirectory(self.pages), self.pages)

    def do(self, data: bytes) -> Summary:
        """The old and the new DN of each change."""
        directory = self.open()
        self.count += 1
        directory.begin()
        try:
            record = parse_message(data)
            if isinstance(record, Record):
                changes = apply_record(directory, record, f"made-{self.count}")
            else:
                changes = apply_live_record(directory, record)
        except InvalidRecord as error:
            directory.undo()
            note_invalid(directory, error)
            raise
        finally:
            directory.flush()
        return [(each.before and each.before.dn, each.after and each.after.dn) for each in changes]

    def live(self, change: str, **fields: Any) -> Summary:
        return self.do(json_fields.dump({"change": change, "epoch": self.epoch, **fields}))

    def entry(self, uuid: str, dn: str, **attributes: Any) -> Summary:
        return self.live("entry", uuid=uuid, dn=dn, attributes={"objectClass": ["device"], **attributes})

    def begin(self, *, full: bool = False) -> None:
        assert self.live("refresh-begin", full=full) == []

    def end(self, *, remove_unseen: bool = False, csns: tuple[str, ...] = ()) -> Summary:
        return self.live("refresh-end", remove_unseen=remove_unseen, csns=list(csns))

    def operation(self, change: str, uuid: str, number: int, dn: str, **fields: Any) -> Summary:
        return self.live(change, uuid=uuid, csn=csn(number), dn=dn, **fields)

    def known(self, uuid: str) -> Entry:
        found = self.open().find(uuid)
        assert found is not None
        return found[1]

    def names(self) -> dict[str, str]:
        return {entry.uuid: entry.dn for _, entry in PagedDirectory(self.pages).items()}


@pytest.fixture
def followed() -> FollowedDirectory:
    return FollowedDirectory()


@pytest.fixture
def people(followed: FollowedDirectory) -> FollowedDirectory:
    """A container with two entries, known from a refresh."""
    followed.begin(full=True)
    followed.entry(PEOPLE, "ou=people,dc=e")
    followed.entry(ADA, "uid=ada,ou=people,dc=e")
    followed.entry(BOB, "uid=bob,ou=people,dc=e")
    assert followed.end(remove_unseen=True, csns=(csn(10),)) == []
    return followed


def test_an_entry_is_new_then_changed_and_an_equal_one_is_nothing(followed: FollowedDirectory) -> None:
    assert followed.entry(ADA, "uid=ada,dc=e", cn=["Ada"]) == [(None, "uid=ada,dc=e")]
    assert followed.entry(ADA, "uid=ada,dc=e", cn=["Ada"]) == []
    assert followed.entry(ADA.upper(), "uid=ada,dc=e", cn=["Ada L."]) == [("uid=ada,dc=e", "uid=ada,dc=e")]
    assert followed.known(ADA) == Entry(
        "uid=ada,dc=e", ADA, {"objectclass": ["device"], "cn": ["Ada L."], "entryuuid": [ADA]}
    )


def test_gone_removes_exactly_these_entries_children_first(people: FollowedDirectory) -> None:
    assert people.live("gone", uuids=[PEOPLE, EVE]) == [("ou=people,dc=e", None)]
    assert people.live("gone", uuids=[PEOPLE]) == []
    people.entry(PEOPLE, "ou=people,dc=e")
    assert people.live("gone", uuids=[PEOPLE, ADA, BOB]) == [
        ("uid=bob,ou=people,dc=e", None), ("uid=ada,ou=people,dc=e", None), ("ou=people,dc=e", None)
    ]  # fmt: skip
    assert people.names() == {}


def test_a_rename_outside_of_a_refresh_applies_below_at_once(people: FollowedDirectory) -> None:
    assert people.entry(PEOPLE, "ou=staff,dc=e") == [
        ("ou=people,dc=e", "ou=staff,dc=e"),
        ("uid=ada,ou=people,dc=e", "uid=ada,ou=staff,dc=e"),
        ("uid=bob,ou=people,dc=e", "uid=bob,ou=staff,dc=e"),
    ]
    assert people.entry(PEOPLE, "OU=Staff,dc=e")[1] == ("uid=ada,ou=staff,dc=e", "uid=ada,OU=Staff,dc=e")


def test_a_rename_in_a_refresh_applies_below_at_its_end(people: FollowedDirectory) -> None:
    people.begin()
    assert people.entry(PEOPLE, "ou=staff,dc=e") == [("ou=people,dc=e", "ou=staff,dc=e")]
    assert people.entry(BOB, "uid=bob,dc=e") == [("uid=bob,ou=people,dc=e", "uid=bob,dc=e")]
    assert people.end() == [("uid=ada,ou=people,dc=e", "uid=ada,ou=staff,dc=e")]
    assert people.end() == []


def test_two_entries_exchange_their_names(people: FollowedDirectory) -> None:
    people.begin()
    assert people.entry(BOB, "uid=ada,ou=people,dc=e") == [("uid=bob,ou=people,dc=e", "uid=ada,ou=people,dc=e")]
    assert people.entry(ADA, "uid=bob,ou=people,dc=e") == [("uid=ada,ou=people,dc=e", "uid=bob,ou=people,dc=e")]
    assert people.end() == []
    assert people.names() == {
        PEOPLE: "ou=people,dc=e", ADA: "uid=bob,ou=people,dc=e", BOB: "uid=ada,ou=people,dc=e"
    }  # fmt: skip


def test_an_entry_whose_name_was_taken_is_deleted_with_its_old_state_when_it_is_gone(people: FollowedDirectory) -> None:
    people.begin()
    people.entry(EVE, "uid=ada,ou=people,dc=e", cn=["Eve"])
    people.live("present", uuids=[PEOPLE, BOB])
    assert people.known(ADA).dn == "uid=ada,ou=people,dc=e"
    assert people.end(remove_unseen=True) == [("uid=ada,ou=people,dc=e", None)]
    assert people.known(EVE).attributes["cn"] == ["Eve"]
    assert people.open().state.displaced == 0


def test_a_name_that_is_free_again_goes_back_to_the_entry_that_had_it(people: FollowedDirectory) -> None:
    people.begin()
    people.entry(EVE, "uid=ada,ou=people,dc=e")
    assert people.live("gone", uuids=[EVE]) == [("uid=ada,ou=people,dc=e", None)]
    people.entry(EVE, "uid=ada,ou=people,dc=e")
    assert people.entry(EVE, "uid=eve,dc=e") == [("uid=ada,ou=people,dc=e", "uid=eve,dc=e")]
    people.end()
    assert people.do(modify("uid=ada,ou=people,dc=e", ("add", "cn", ["x"]))) == [
        ("uid=ada,ou=people,dc=e", "uid=ada,ou=people,dc=e")
    ]
    assert people.known(ADA).attributes["cn"] == ["x"]
    people.begin()
    people.entry(EVE, "uid=ada,ou=people,dc=e")
    people.entry(PEOPLE, "ou=staff,dc=e")
    people.entry(EVE, "uid=ada,dc=e")
    assert ("uid=ada,ou=people,dc=e", "uid=ada,ou=staff,dc=e") in people.end()
    assert people.open().state.displaced == 0


def test_an_entry_reported_twice_brings_along_only_what_was_below_it_before(people: FollowedDirectory) -> None:
    """The second name was that of another container, whose entries are not its own."""
    people.begin()
    people.entry(EVE, "ou=new,dc=e")
    people.entry(EVE, "ou=people,dc=e")
    people.entry(EVE, "ou=newer,dc=e")
    people.entry(PEOPLE, "ou=staff,dc=e")
    assert people.end() == [
        ("uid=ada,ou=people,dc=e", "uid=ada,ou=staff,dc=e"), ("uid=bob,ou=people,dc=e", "uid=bob,ou=staff,dc=e")
    ]  # fmt: skip


def test_a_container_that_was_moved_to_its_old_name_holds_what_is_below(people: FollowedDirectory) -> None:
    """Its parent was renamed, another one took the name of the parent, and the container moved there."""
    inner, other = "00000009-0000-1000-8000-000000000000", "00000008-0000-1000-8000-000000000000"
    people.entry(inner, "ou=in,ou=people,dc=e")
    people.entry(EVE, "uid=eve,ou=in,ou=people,dc=e")
    people.begin()
    people.entry(PEOPLE, "ou=staff,dc=e")
    people.entry(other, "ou=people,dc=e")
    assert people.entry(inner, "ou=in,ou=people,dc=e") == []
    assert people.end() == [
        ("uid=ada,ou=people,dc=e", "uid=ada,ou=staff,dc=e"), ("uid=bob,ou=people,dc=e", "uid=bob,ou=staff,dc=e")
    ]  # fmt: skip
    assert people.known(EVE).dn == "uid=eve,ou=in,ou=people,dc=e"


def test_what_a_refresh_did_not_see_is_deleted_children_first(people: FollowedDirectory) -> None:
    people.begin()
    people.live("present", uuids=[BOB])
    assert people.end(remove_unseen=True) == [("uid=ada,ou=people,dc=e", None), ("ou=people,dc=e", None)]


def test_a_refresh_that_begins_again_has_seen_nothing(people: FollowedDirectory) -> None:
    people.begin()
    people.live("present", uuids=[PEOPLE, ADA, BOB])
    people.begin()
    people.live("present", uuids=[PEOPLE, ADA])
    assert people.end(remove_unseen=True) == [("uid=bob,ou=people,dc=e", None)]


def test_records_of_an_earlier_process_are_dropped(people: FollowedDirectory) -> None:
    people.epoch = 5
    people.begin()
    people.epoch = 4
    assert people.entry(EVE, "uid=eve,dc=e") == []
    assert people.end(remove_unseen=True) == []
    people.epoch = 5
    people.live("present", uuids=[PEOPLE, ADA, BOB])
    assert people.end(remove_unseen=True) == []
    assert people.open().state.epoch == 5


def test_an_entry_that_cannot_be_applied_is_still_there(people: FollowedDirectory) -> None:
    people.begin()
    people.live("present", uuids=[PEOPLE, BOB])
    with pytest.raises(InvalidEntry):
        people.entry(ADA, "no name")
    assert people.end(remove_unseen=True) == []


def test_a_message_of_a_refresh_that_is_not_understood_deletes_nothing(people: FollowedDirectory) -> None:
    people.begin()
    people.live("present", uuids=[PEOPLE, BOB])
    with pytest.raises(InvalidRecord):
        people.live("present", uuids=["no uuid"])
    people.entry(PEOPLE, "ou=staff,dc=e")
    with pytest.raises(PartlyApplied, match="so nothing is deleted") as raised:
        people.end(remove_unseen=True)
    assert len(raised.value.changes) == 2, "what is below the container followed it"
    assert people.known(ADA).dn == "uid=ada,ou=staff,dc=e"
    assert people.open().state.refresh is None
    people.begin()
    people.live("present", uuids=[PEOPLE, BOB])
    assert people.end(remove_unseen=True) == [("uid=ada,ou=staff,dc=e", None)]


def test_operations_apply_once_by_their_csn(people: FollowedDirectory) -> None:
    added = {"attributes": {"objectClass": ["device"], "uid": ["eve"]}}
    assert people.operation("add", EVE, 11, "uid=eve,dc=e", **added) == [(None, "uid=eve,dc=e")]
    change = {"modifications": [{"op": "add", "attribute": "cn", "values": ["Eve"]}]}
    assert people.operation("modify", EVE, 12, "uid=eve,dc=e", **change) == [("uid=eve,dc=e", "uid=eve,dc=e")]
    assert people.known(EVE).attributes["entrycsn"] == [csn(12)]
    rename = {"new_rdn": "uid=eva", "delete_old_rdn": True, "new_superior": "ou=people,dc=e"}
    assert people.operation("modrdn", EVE, 13, "uid=eve,dc=e", **rename) == [("uid=eve,dc=e", "uid=eva,ou=people,dc=e")]
    assert people.known(EVE).attributes["uid"] == ["eva"]
    assert people.operation("delete", ADA, 14, "uid=ada,ou=people,dc=e") == [("uid=ada,ou=people,dc=e", None)]
    assert people.operation("add", EVE, 11, "uid=eve,dc=e", **added) == []
    assert people.operation("delete", ADA, 14, "uid=ada,ou=people,dc=e") == []
    assert people.operation("modify", EVE, 9, "uid=eva,ou=people,dc=e", **change) == []


def test_a_full_refresh_replaces_the_newest_operation_and_another_does_not(people: FollowedDirectory) -> None:
    """The server may have been restored from a copy, so its CSNs begin again at an earlier one."""
    change = {"modifications": [{"op": "add", "attribute": "cn", "values": ["x"]}]}
    ada = "uid=ada,ou=people,dc=e"
    people.begin()
    people.end(csns=(csn(5), csn(7, server=2)))
    assert people.operation("modify", ADA, 6, ada, **change) == []
    people.begin(full=True)
    for uuid, dn in ((PEOPLE, "ou=people,dc=e"), (ADA, ada), (BOB, "uid=bob,ou=people,dc=e")):
        people.entry(uuid, dn)
    people.end(remove_unseen=True, csns=(csn(5),))
    assert people.open().state.csns == {"001": csn(5)}
    assert people.operation("modify", ADA, 6, ada, **change) == [(ada, ada)]


def test_an_operation_that_is_not_possible_is_invalid_unless_the_refresh_explains_it(people: FollowedDirectory) -> None:
    change = {"modifications": [{"op": "add", "attribute": "cn", "values": ["x"]}]}
    with pytest.raises(InvalidRecord, match="modify: there is no such entry"):
        people.operation("modify", EVE, 11, "uid=eve,dc=e", **change)
    assert people.operation("modify", EVE, 11, "uid=eve,dc=e", catch_up=True, **change) == []
    with pytest.raises(InvalidRecord, match="add: there is such an entry already"):
        people.operation("add", ADA, 12, "uid=ada,ou=people,dc=e", attributes={"uid": ["ada"]})
    assert people.operation("add", ADA, 12, "uid=x,dc=e", attributes={"uid": ["x"]}, catch_up=True) == []
    assert people.operation("delete", EVE, 13, "uid=eve,dc=e", catch_up=True) == []


def test_an_operation_that_the_refreshed_entry_contains_has_no_effect(people: FollowedDirectory) -> None:
    ada = "uid=ada,ou=people,dc=e"
    people.entry(ADA, ada, entryCSN=[csn(20)])
    change = {"modifications": [{"op": "add", "attribute": "cn", "values": ["x"]}]}
    assert people.operation("modify", ADA, 20, ada, catch_up=True, **change) == []
    assert people.operation("modify", ADA, 21, ada, catch_up=True, **change) == [(ada, ada)]


def test_entries_of_an_ldif_file_are_recognised_by_uuid_or_name(followed: FollowedDirectory) -> None:
    followed.do(body("ou=people,dc=e", "content", attributes={"ou": ["people"]}))
    followed.do(body("uid=ada,ou=people,dc=e", "content", attributes={"uid": ["ada"], "entryUUID": [ADA.upper()]}))
    followed.do(body("uid=bob,ou=people,dc=e", "content", attributes={"uid": ["bob"]}))
    followed.do(body("uid=old,dc=e", "content", attributes={"uid": ["old"]}))
    assert not followed.open().is_live
    followed.begin(full=True)
    assert followed.live("entry", uuid=ADA, dn="uid=ada,dc=e", attributes={"uid": ["ada"]}) == [
        ("uid=ada,ou=people,dc=e", "uid=ada,dc=e")
    ]
    followed.live("entry", uuid=PEOPLE, dn="ou=people,dc=e", attributes={"ou": ["people"]})
    followed.live("entry", uuid=BOB, dn="uid=bob,ou=people,dc=e", attributes={"uid": ["bob"]})
    assert followed.end(remove_unseen=True) == [("uid=old,dc=e", None)]
    assert followed.names() == {"made-1": "ou=people,dc=e", ADA: "uid=ada,dc=e", "made-3": "uid=bob,ou=people,dc=e"}
    assert followed.do(modify("uid=bob,ou=people,dc=e", ("add", "cn", ["x"]))), "and keeps its identity"
    assert followed.known(BOB).uuid == "made-3"


def test_records_of_ldif_keep_the_index_of_a_live_source_up_to_date(people: FollowedDirectory) -> None:
    people.do(body("ou=people,dc=e", "modrdn", new_rdn="ou=staff", delete_old_rdn=True))
    assert people.known(ADA).dn == "uid=ada,ou=staff,dc=e"
    people.do(body("uid=ada,ou=staff,dc=e", "delete"))
    assert people.open().find(ADA) is None


def test_the_end_of_a_refresh_in_pieces(people: FollowedDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """More entries change than one record may change: the rest follows with the next records."""
    monkeypatch.setattr(directory_rules, "MAX_CHANGED_ENTRIES", 2)
    gone = [f"0000000{number}-0000-1000-8000-00000000000a" for number in range(5)]
    for number, uuid in enumerate(gone):
        people.entry(uuid, f"uid=u{number},dc=e")
    people.begin()
    people.live("present", uuids=[ADA, BOB])
    people.entry(PEOPLE, "ou=staff,dc=e")
    assert people.end(remove_unseen=True, csns=(csn(30),)) == [("uid=u4,dc=e", None), ("uid=u3,dc=e", None)]
    assert people.entry(EVE, "uid=eve,dc=e") == [(None, "uid=eve,dc=e"), ("uid=u2,dc=e", None)]
    assert people.end(remove_unseen=True, csns=(csn(30),)) == [("uid=u1,dc=e", None), ("uid=u0,dc=e", None)]
    assert people.live("refresh-begin", full=False) == [
        ("uid=ada,ou=people,dc=e", "uid=ada,ou=staff,dc=e"), ("uid=bob,ou=people,dc=e", "uid=bob,ou=staff,dc=e")
    ]  # fmt: skip
    assert people.end() == []
    assert people.open().state.csns == {"001": csn(30)}
    assert people.names() == {
        PEOPLE: "ou=staff,dc=e",
        ADA: "uid=ada,ou=staff,dc=e",
        BOB: "uid=bob,ou=staff,dc=e",
        EVE: "uid=eve,dc=e",
    }


def test_a_rename_of_too_many_entries_is_invalid_and_the_entry_is_there(
    people: FollowedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_rules, "MAX_CHANGED_ENTRIES", 2)
    with pytest.raises(InvalidRecord, match="more than 2 entries would change at once"):
        people.entry(PEOPLE, "ou=staff,dc=e")
    assert people.known(ADA).dn == "uid=ada,ou=people,dc=e"


def test_an_end_without_a_refresh_is_invalid_unless_it_came_before(people: FollowedDirectory) -> None:
    assert people.end(remove_unseen=True, csns=(csn(10),)) == []
    with pytest.raises(InvalidRecord, match="no refresh is in progress"):
        people.end(remove_unseen=True, csns=(csn(11),))


def test_a_change_that_is_undone_leaves_everything_as_it_was(people: FollowedDirectory) -> None:
    people.begin()
    people.live("present", uuids=[ADA])
    people.entry(PEOPLE, "ou=staff,dc=e")
    before = people.names()
    directory = people.open()
    directory.begin()
    end = parse_message(
        json_fields.dump({"change": "refresh-end", "epoch": 1, "remove_unseen": True, "csns": [csn(40)]})
    )
    assert not isinstance(end, Record)
    assert len(apply_live_record(directory, end)) == 2
    directory.undo()
    directory.flush()
    assert people.names() == before
    assert people.open().state.refresh is not None
    assert people.end(remove_unseen=True) == [
        ("uid=bob,ou=people,dc=e", None), ("uid=ada,ou=people,dc=e", "uid=ada,ou=staff,dc=e")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"change": "explode"},
        {"change": "content", "dn": "cn=a", "attributes": {}},
        {"change": "entry", "dn": "cn=a", "attributes": {}},
        {"change": "entry", "uuid": "7", "dn": "cn=a", "attributes": {}},
        {"change": "entry", "uuid": ADA, "dn": "a", "attributes": {}},
        {"change": "entry", "uuid": ADA, "dn": "cn=a"},
        {"change": "entry", "uuid": ADA, "dn": "cn=a", "attributes": {"entryUUID": [BOB]}},
        {"change": "gone"},
        {"change": "gone", "uuids": [7]},
        {"change": "present", "uuids": "x"},
        {"change": "refresh-begin"},
        {"change": "refresh-begin", "full": 1},
        {"change": "refresh-end", "csns": []},
        {"change": "refresh-end", "remove_unseen": True, "csns": ["x"]},
        {"change": "refresh-end", "remove_unseen": True},
        {"change": "delete", "dn": "cn=a", "uuid": ADA},
        {"change": "delete", "dn": "cn=a", "csn": csn(1)},
        {"change": "delete", "dn": "cn=a", "uuid": ADA, "csn": "x"},
        {"change": "delete", "dn": "cn=a", "uuid": ADA, "csn": csn(1), "catch_up": 1},
        {"change": "gone", "uuids": [], "epoch": "1"},
        {"change": "gone", "uuids": [], "epoch": -1},
    ],
)
def test_what_is_no_record_is_invalid(followed: FollowedDirectory, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRecord):
        followed.do(json_fields.dump({"epoch": 1, **fields}))
    assert followed.names() == {}
