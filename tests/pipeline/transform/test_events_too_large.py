"""Events that are larger than a message: what subscribers miss, and that every `old` is what they have."""

import base64
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from purveyor.jetstream.server import ServerOptions
from purveyor.model.event import Event
from purveyor.model.ldif_changes import Gone, RefreshBegin, RefreshEnd
from purveyor.pipeline.transform.record_transform import Output
from purveyor.sources.ldif.live_records import LiveEntry, LiveRecord, encode_live_record
from tests.pipeline.transform.memory import body, modify, person
from tests.pipeline.transform.transformer import ADA, Transformer
from tests.support.scale import chance


def test_old_is_what_subscribers_have_after_events_that_were_too_large() -> None:
    transformer = Transformer(max_payload=4096)
    (created,) = transformer.events(body(ADA, "content", attributes=person("ada", description=["x" * 2000])))
    for name in ("y", "z"):
        assert "an event of" in transformer.letter(modify(ADA, ("replace", "sn", [name])))
    assert "an event of" in transformer.letter(body(ADA, "modrdn", new_rdn="uid=eve", delete_old_rdn=True))
    (changed,) = transformer.events(modify("uid=eve,dc=e", ("replace", "description", ["short"])))
    assert changed.old == created.new
    assert (changed.new["dn"], changed.new["sn"], changed.new["description"]) == ("uid=eve,dc=e", "z", ["short"])
    (gone,) = transformer.events(body("uid=eve,dc=e", "delete"))
    assert (gone.old, gone.new) == (changed.new, {})


def test_an_object_whose_first_event_was_too_large_is_new_when_it_fits() -> None:
    transformer = Transformer(max_payload=4096)
    large = person("ada", description=["x" * 3000])
    assert "an event of" in transformer.letter(body(ADA, "content", attributes=large))
    (created,) = transformer.events(modify(ADA, ("replace", "description", ["short"])))
    assert (created.old, created.new["description"]) == ({}, ["short"])
    bob = "uid=bob,dc=e"
    assert "an event of" in transformer.letter(body(bob, "content", attributes=large))
    assert transformer.events(body(bob, "delete")) == []


def test_a_new_type_that_is_too_large_leaves_subscribers_with_nothing_until_it_fits() -> None:
    transformer = Transformer(max_payload=4096)
    (created,) = transformer.events(body(ADA, "content", attributes=person("ada")))
    group = {"objectClass": ["groupOfNames"], "cn": ["ada"], "description": ["x" * 3000]}
    gone, letter = transformer.outputs(body(ADA, "content", attributes=group))
    assert (Event.decode(gone.data).old, Event.decode(gone.data).new, letter.parked) == (created.new, {}, True)
    (again,) = transformer.events(modify(ADA, ("replace", "description", ["short"])))
    assert (again.topic, again.old, again.new["description"]) == ("groups/group", {}, ["short"])


@dataclass
class Subscriber:
    """Builds the objects from the events, and checks each `old`."""

    objects: dict[str, Any] = field(default_factory=dict)
    parked: int = 0

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.parked += output.parked
            if not output.parked:
                event = Event.decode(output.data)
                key = str(event.key)
                assert dict(event.old) == self.objects.get(key, {})
                self.objects[key] = dict(event.new)
        self.objects = {key: known for key, known in self.objects.items() if known}


def uuid_of(number: int) -> str:
    return f"00000000-0000-1000-8000-{number:012x}"


@dataclass
class People:
    """People below one unit, as a source of LDIF files or a live one reports them, and a subscriber."""

    is_live: bool
    dice: Random
    transformer: Transformer = field(default_factory=lambda: Transformer(max_payload=4096))
    subscriber: Subscriber = field(default_factory=Subscriber)
    known: dict[int, dict[str, Any]] = field(default_factory=dict)
    unit: int = 0

    def __post_init__(self) -> None:
        if self.is_live:
            self.send_live(RefreshBegin(full=True))
            self.send_live(RefreshEnd(remove_unseen=True))
        self.set(0, 10)

    def dn(self, number: int) -> str:
        return f"uid=p{number},ou=u{self.unit},dc=e" if number else f"ou=u{self.unit},dc=e"

    def send(self, data: bytes) -> None:
        self.subscriber.take(self.transformer.outputs(data))

    def send_live(self, record: LiveRecord) -> None:
        self.send(encode_live_record(record, 1))

    def send_entry(self, number: int) -> None:
        attributes = self.known[number]
        if self.is_live:
            values = {name: tuple(map(str.encode, given)) for name, given in attributes.items()}
            self.send_live(LiveEntry(uuid_of(number), self.dn(number), values))
        else:
            self.send(body(self.dn(number), "content", attributes=attributes))

    def set(self, number: int, size: int) -> None:
        """Add or change the unit, which is 0, or a person, who may become a group."""
        kind = self.dice.choice(["inetOrgPerson", "inetOrgPerson", "groupOfNames"]) if number else "organizationalUnit"
        name = {"uid": [f"p{number}"], "cn": [f"p{number}"]} if number else {"ou": [f"u{self.unit}"]}
        text = {"description": ["x" * size], "entryUUID": [uuid_of(number)]}
        self.known[number] = {"objectClass": [kind], **name, **text}
        self.send_entry(number)

    def delete(self, number: int) -> None:
        if self.known.pop(number, None) is None:
            return
        if self.is_live:
            self.send_live(Gone((uuid_of(number),)))
        else:
            self.send(body(self.dn(number), "delete"))

    def rename(self) -> None:
        before, self.unit = self.dn(0), self.unit + 1
        self.known[0]["ou"] = [f"u{self.unit}"]
        if self.is_live:
            self.send_entry(0)
        else:
            self.send(body(before, "modrdn", new_rdn=f"ou=u{self.unit}", delete_old_rdn=True))


@pytest.mark.parametrize("is_live", [False, True])
def test_every_old_is_what_a_subscriber_has_whatever_was_too_large(is_live: bool) -> None:
    """Changes of random sizes, other types, renames of the unit; at the end everything is small."""
    dice = chance("events that are too large")
    people = People(is_live, dice)
    for _ in range(300):
        number, wish = dice.randrange(1, 6), dice.random()
        if wish < 0.6:
            people.set(number, dice.choice([10, 600, 1800, 2600]))
        elif wish < 0.75:
            people.delete(number)
        else:
            people.rename()
    parked = people.subscriber.parked
    assert parked > 10
    for number in list(people.known):
        people.set(number, number)
    assert people.subscriber.parked == parked
    found = {each["uuid"]: (each["dn"], each["description"]) for each in people.subscriber.objects.values()}
    assert found == {
        uuid_of(number): (people.dn(number), known["description"]) for number, known in people.known.items()
    }


def test_a_change_of_an_entry_with_a_value_of_5_mb_is_one_event_on_the_embedded_server() -> None:
    transformer = Transformer(max_payload=ServerOptions().max_payload, mapping="udm")
    photo = base64.b64encode(bytes(range(256)) * (5 << 12)).decode()
    attributes = person("ada", jpegPhoto=[{"base64": photo}])
    (created,) = transformer.events(body(ADA, "content", attributes=attributes))
    (changed,) = transformer.events(modify(ADA, ("replace", "sn", ["Lovelace"])))
    assert changed.old == created.new
    assert (changed.new["properties"]["lastname"], changed.new["properties"]["jpegPhoto"]) == ("Lovelace", photo)
