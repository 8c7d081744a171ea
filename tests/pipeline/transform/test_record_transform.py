"""From messages to events and dead letters, message by message."""

import json
from typing import Any

import pytest

from purveyor.model.errors import DataLost, InvalidName, Unavailable
from purveyor.model.event import Event
from purveyor.pipeline.transform import directory_rules
from purveyor.pipeline.transform.directory_records import DistinguishedName, parse_dn
from purveyor.pipeline.transform.directory_rules import Entry
from purveyor.pipeline.transform.mapping import MappedObject, Mapping, Unmatched
from purveyor.queues.dead_letters.letter import DeadLetter
from tests.pipeline.transform.memory import body, modify, person
from tests.pipeline.transform.transformer import ADA, MOMENT, Transformer


@pytest.fixture
def transformer() -> Transformer:
    return Transformer()


def test_an_event_has_old_new_key_and_time(transformer: Transformer) -> None:
    (created,) = transformer.events(body(ADA, "content", attributes=person("ada")))
    assert (created.publisher_name, created.ts, created.realm, created.topic) == ("ldif", MOMENT, "ldap", "users/user")
    assert created.old == {}
    assert created.new == {"dn": ADA, "uuid": created.key, "uid": "ada"}
    (changed,) = transformer.events(modify(ADA, ("add", "sn", ["Lovelace"])))
    assert changed.key == created.key
    assert changed.old == created.new
    assert changed.new == {**created.new, "sn": "Lovelace"}
    (gone,) = transformer.events(body(ADA, "delete"))
    assert (gone.old, gone.new) == (changed.new, {})


def test_add_modify_and_delete_look_as_in_the_older_system() -> None:
    transformer = Transformer(mapping="udm")
    outputs = [
        *transformer.outputs(body(ADA, "add", attributes=person("ada", mail=["ada@e"]))),
        *transformer.outputs(modify(ADA, ("replace", "sn", ["Lovelace"]))),
        *transformer.outputs(body(ADA, "delete")),
    ]
    bodies = [json.loads(output.data)["body"] for output in outputs]
    added, changed = bodies[0]["new"], bodies[1]["new"]
    assert [list(each) for each in bodies] == [["old", "new"]] * 3
    assert bodies == [{"old": {}, "new": added}, {"old": added, "new": changed}, {"old": changed, "new": {}}]
    assert (added["properties"]["lastname"], changed["properties"]["lastname"]) == (None, "Lovelace")
    assert {json.loads(output.data)["publisher_name"] for output in outputs} == {"udm-listener"}


def test_an_event_carries_the_publisher_of_its_prefilled_copy() -> None:
    ada = body(ADA, "content", attributes=person("ada"))
    (output,) = Transformer(mapping="udm").outputs(ada)
    assert output.headers == {"Purveyor-Prefill-Publisher": ("udm-pre-fill",)}
    (output,) = Transformer(mapping="plain").outputs(ada)
    assert output.headers == {}


def test_an_entry_of_an_unknown_kind_is_an_event_of_the_default_mapping() -> None:
    transformer = Transformer(mapping="udm")
    sudo = {"objectClass": ["sudoRole"], "cn": ["root"], "sudoUser": ["ada"]}
    (created,) = transformer.events(body("cn=root,dc=e", "content", attributes=sudo))
    assert (created.realm, created.topic) == ("udm", "directory/entry")
    assert created.new["properties"]["sudouser"] == ["ada"]


def test_a_made_identity_depends_on_the_message_alone(transformer: Transformer) -> None:
    (one,) = transformer.events(body(ADA, "content", attributes=person("ada")))
    (same,) = Transformer().events(body(ADA, "content", attributes=person("ada")))
    (other,) = transformer.events(body("uid=bob,dc=e", "content", attributes=person("bob")))
    assert one.key == same.key != other.key


def test_what_subscribers_cannot_see_is_no_event(transformer: Transformer) -> None:
    transformer.events(body(ADA, "content", attributes=person("ada")))
    assert transformer.events(modify(ADA, ("replace", "userPassword", ["new"]), ("add", "modifiersName", ["x"]))) == []
    assert transformer.events(body(ADA, "content", attributes=person("ada"))) == []


def test_another_topic_is_a_deletion_there_and_a_creation_here(transformer: Transformer) -> None:
    transformer.events(body(ADA, "content", attributes=person("ada")))
    gone, created = transformer.events(modify(ADA, ("replace", "objectClass", ["device"])))
    assert (gone.topic, gone.new, created.topic, created.old) == ("users/user", {}, "computers/device", {})
    assert gone.key == created.key


def test_another_entry_uuid_is_a_deletion_and_a_creation(transformer: Transformer) -> None:
    transformer.events(body(ADA, "content", attributes=person("ada", entryUUID=["u1"])))
    gone, created = transformer.events(body(ADA, "content", attributes=person("ada", entryUUID=["u2"])))
    assert (gone.key, gone.new, created.key, created.old) == ("u1", {}, "u2", {})


def test_an_entry_that_no_rule_matches_is_parked_and_known(transformer: Transformer) -> None:
    reason = transformer.letter(body(ADA, "content", attributes={"objectClass": ["sudoRole", "top"]}))
    assert reason == "no rule matches the object classes sudorole, top"
    (created,) = transformer.events(modify(ADA, ("add", "objectClass", ["inetOrgPerson"])))
    assert created.old == {}
    event, letter = transformer.outputs(modify(ADA, ("delete", "objectClass", ["inetOrgPerson"])))
    assert Event.decode(event.data).new == {}
    assert letter.parked
    assert letter.position == event.position + 1
    assert transformer.events(body(ADA, "delete")) == []


def test_a_value_that_does_not_fit_is_parked_and_the_rest_is_an_event(transformer: Transformer) -> None:
    event, letter = transformer.outputs(body(ADA, "content", attributes=person("ada", uidNumber=["many"])))
    assert "uidNumber" not in Event.decode(event.data).new
    assert letter.headers["Purveyor-Reason"] == ("a value of uidNumber is no int",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"dn": 7, "change": "delete"}',
        b'{"dn": "", "change": "delete"}',
        b'{"dn": "cn=a", "change": "explode"}',
        b'{"dn": "no name", "change": "delete"}',
        b'{"dn": "cn=a", "change": "add"}',
        b'{"dn": "cn=a", "change": "add", "attributes": {"cn": "a"}}',
        b'{"dn": "cn=a", "change": "add", "attributes": {"cn": [7]}}',
        b'{"dn": "cn=a", "change": "add", "attributes": {"cn": [{"base64": "?"}]}}',
        b'{"dn": "cn=a", "change": "add", "attributes": {"cn": [{"base64": 7}]}}',
        b'{"dn": "cn=a", "change": "modify"}',
        b'{"dn": "cn=a", "change": "modify", "modifications": [7]}',
        b'{"dn": "cn=a", "change": "modify", "modifications": [{"op": "eat", "attribute": "cn"}]}',
        b'{"dn": "cn=a", "change": "modrdn"}',
        b'{"dn": "cn=a", "change": "modrdn", "new_rdn": "cn=b", "delete_old_rdn": 7}',
        b'{"dn": "cn=a", "change": "modrdn", "new_rdn": "cn=b", "delete_old_rdn": true, "new_superior": 7}',
    ],
)
def test_what_is_no_record_is_parked_as_it_is(transformer: Transformer, data: bytes) -> None:
    assert transformer.letter(data)


def test_a_message_on_which_the_rules_fail_is_parked_and_later_ones_continue(
    transformer: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformer.events(body("ou=a,dc=e", "content", attributes={"objectClass": ["organizationalUnit"], "ou": ["a"]}))
    transformer.events(body("uid=eve,ou=a,dc=e", "content", attributes=person("eve")))
    before = dict(transformer.store.entries)

    def fails(text: str) -> DistinguishedName:
        if "eve" in text:
            raise KeyError("not expected")
        return parse_dn(text)

    with monkeypatch.context() as patch:
        patch.setattr(directory_rules, "parse_dn", fails)
        renamed = body("ou=a,dc=e", "modrdn", new_rdn="ou=b", delete_old_rdn=True)
        assert transformer.letter(renamed) == "the transform fails on it: KeyError: 'not expected'"
    assert transformer.store.entries == before, "nothing of it has happened"
    assert transformer.events(body(ADA, "content", attributes=person("ada")))


def test_a_message_that_the_mapping_fails_on_leaves_the_directory_as_it_was(
    transformer: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it gives its events when it is put back."""
    transformer.events(body("ou=a,dc=e", "content", attributes={"objectClass": ["organizationalUnit"], "ou": ["a"]}))
    transformer.events(body("uid=eve,ou=a,dc=e", "content", attributes=person("eve")))
    before = dict(transformer.store.entries)
    renamed = body("ou=a,dc=e", "modrdn", new_rdn="ou=b", delete_old_rdn=True)
    map_entry = Mapping.map

    def fails(mapping: Mapping, entry: Entry) -> MappedObject | Unmatched:
        if entry.dn.startswith("uid=eve,ou=b"):
            raise InvalidName("not expected")
        return map_entry(mapping, entry)

    with monkeypatch.context() as patch:
        patch.setattr(Mapping, "map", fails)
        assert transformer.letter(renamed) == "the transform fails on it: not expected"
        assert transformer.store.entries == before
        assert transformer.letter(body("uid=eve,ou=b,dc=e", "content", attributes=person("eve")))
        assert transformer.store.entries == before
    assert len(transformer.events(renamed)) == 2


@pytest.mark.parametrize("error", [Unavailable("away"), DataLost("gone"), MemoryError(), OSError("disk")])
def test_an_outage_in_the_rules_is_no_fault_of_the_message(
    transformer: Transformer, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(_: Mapping, __: Entry) -> MappedObject:
        raise error

    monkeypatch.setattr(Mapping, "map", fails)
    with pytest.raises(type(error)):
        transformer.outputs(body(ADA, "content", attributes=person("ada")))


def test_an_error_of_the_store_is_no_fault_of_the_message(
    transformer: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: str) -> None:
        raise Unavailable("the state cannot be used")

    monkeypatch.setattr(transformer.store, "get", away)
    with pytest.raises(Unavailable):
        transformer.outputs(body(ADA, "content", attributes=person("ada")))


def test_a_dead_letter_carries_its_origin(transformer: Transformer) -> None:
    (output,) = transformer.outputs(b"x", {"Nats-Msg-Id": ("abc",)})
    letter = DeadLetter.from_message(output.headers, output.data)
    assert (letter.origin, letter.subject, letter.position) == ("transform", "ldif.people", 1)
    assert letter.headers == {"Nats-Msg-Id": ("abc",)}


def test_positions_and_ids_repeat_with_the_message_and_never_else(transformer: Transformer) -> None:
    first = transformer.outputs(body("dc=e", "content", attributes={"objectClass": ["domain"], "dc": ["e"]}))
    more = transformer.outputs(body(ADA, "content", attributes=person("ada")))
    both = transformer.outputs(body("dc=e", "delete"))
    outputs = [*first, *more, *both]
    assert [output.position for output in outputs] == [1 << 20, 2 << 20, 3 << 20, (3 << 20) + 1]
    assert len({output.msg_id for output in outputs}) == 4
    again = Transformer().outputs(body("dc=e", "content", attributes={"objectClass": ["domain"], "dc": ["e"]}))
    assert again == first


def test_an_event_or_a_letter_too_large_for_a_message_is_parked_cut(transformer: Transformer) -> None:
    transformer = Transformer(max_payload=4096)
    big: dict[str, Any] = person("ada", description=["x" * 2000])
    (created,) = transformer.events(body(ADA, "content", attributes=big))
    assert created.new["description"] == ["x" * 2000]
    (letter,) = transformer.outputs(modify(ADA, ("add", "sn", ["y"])))
    assert "an event of" in letter.headers["Purveyor-Reason"][0]
    (cut,) = transformer.outputs(b"z" * 10_000)
    assert 0 < len(cut.data) < 4096


@pytest.mark.parametrize(
    ("identity", "reason"),
    [
        ("u" * 1025, "key is 1025 bytes long"),
        ("a\nb", "key holds the control character"),
        ("\ud800", "holds half of a surrogate pair"),
    ],
)
def test_an_entry_whose_event_exceeds_the_limits_is_parked_and_others_continue(
    transformer: Transformer, identity: str, reason: str
) -> None:
    assert reason in transformer.letter(body(ADA, "content", attributes=person("ada", entryUUID=[identity])))
    assert transformer.events(body("uid=bob,dc=e", "content", attributes=person("bob")))
    assert transformer.outputs(body(ADA, "delete")) == [], "subscribers never had it"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"uidNumber": ["9" * 400]}, "body.new.uidNumber is a number beyond the range of a double"),
        ({"uidNumber": ["9" * 5000]}, "uidNumber is no int"),
        ({"sn": ["\udfff"]}, "body.new.sn holds half of a surrogate pair"),
    ],
)
def test_a_value_beyond_the_limits_is_parked(
    transformer: Transformer, values: dict[str, list[str]], reason: str
) -> None:
    *_, letter = transformer.outputs(body(ADA, "content", attributes=person("ada", **values)))
    assert letter.parked
    assert reason in letter.headers["Purveyor-Reason"][0]
