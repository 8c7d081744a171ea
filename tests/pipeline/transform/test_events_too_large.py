"""Events that are larger than a message: what subscribers miss, and that every `old` is what they have."""

import base64
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from purveyor.jetstream.server import ServerOptions
from purveyor.model.event import Event
from purveyor.pipeline.transform.record_transform import Output
from purveyor.sources.ldif.live_records import Gone, LiveEntry, LiveRecord, RefreshBegin, RefreshEnd, encode_live_record
from tests.pipeline.transform.memory import body, modify, person
from tests.pipeline.transform.test_record_transform import ADA, Transformer
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


@pytest.mark.parametrize("is_live", [False, True])
def test_every_old_is_what_a_subscriber_has_whatever_was_too_large(is_live: bool) -> None:
    """Changes of random sizes, renames of the container, other types, refreshes; at the end everything is small."""
    dice, transformer, subscriber = chance("events that are too large"), Transformer(max_payload=4096), Subscriber()
    known: dict[int, dict[str, Any]] = {}
    unit = 0

    def send(number: int, record: LiveRecord | None = None) -> None:
        if record is not None:
            subscriber.take(transformer.outputs(encode_live_record(record, 1)))
        elif is_live:
            attributes = {name: tuple(map(str.encode, values)) for name, values in known[number].items()}
            subscriber.take(
                transformer.outputs(encode_live_record(LiveEntry(uuid_of(number), dn(number), attributes), 1))
            )
        else:
            subscriber.take(transformer.outputs(body(dn(number), "content", attributes=known[number])))

    def dn(number: int) -> str:
        return f"ou=u{unit},dc=e" if not number else f"uid=p{number},ou=u{unit},dc=e"

    def attributes_of(number: int, size: int) -> dict[str, Any]:
        text = {"description": ["x" * size], "entryUUID": [uuid_of(number)]}
        if not number:
            return {"objectClass": ["organizationalUnit"], "ou": [f"u{unit}"], **text}
        kind = dice.choice(["inetOrgPerson", "inetOrgPerson", "groupOfNames"])
        return {"objectClass": [kind], "uid": [f"p{number}"], "cn": [f"p{number}"], **text}

    if is_live:
        send(0, RefreshBegin(full=True))
        send(0, RefreshEnd(remove_unseen=True))
    known[0] = attributes_of(0, 10)
    send(0)
    for _ in range(300):
        number, wish = dice.randrange(1, 6), dice.random()
        if wish < 0.6:
            known[number] = attributes_of(number, dice.choice([10, 600, 1800, 2600]))
            send(number)
        elif wish < 0.75 and number in known:
            if is_live:
                send(number, Gone((uuid_of(number),)))
            else:
                subscriber.take(transformer.outputs(body(dn(number), "delete")))
            del known[number]
        else:
            before, unit = dn(0), unit + 1
            known[0]["ou"] = [f"u{unit}"]
            if is_live:
                send(0)
            else:
                rename = body(before, "modrdn", new_rdn=f"ou=u{unit}", delete_old_rdn=True)
                subscriber.take(transformer.outputs(rename))
    assert subscriber.parked > 10
    parked = subscriber.parked
    for number in list(known):
        known[number] = attributes_of(number, Random(number).randrange(20))
        send(number)
    assert subscriber.parked == parked
    assert {each["uuid"]: (each["dn"], each["description"]) for each in subscriber.objects.values()} == {
        uuid_of(number): (dn(number), known[number]["description"]) for number in known
    }


def test_a_change_of_an_entry_with_a_value_of_5_mb_is_one_event_on_the_embedded_server() -> None:
    transformer = Transformer(max_payload=ServerOptions().max_payload, mapping="udm")
    photo = base64.b64encode(bytes(range(256)) * (5 << 12)).decode()
    attributes = person("ada", jpegPhoto=[{"base64": photo}])
    (created,) = transformer.events(body(ADA, "content", attributes=attributes))
    (changed,) = transformer.events(modify(ADA, ("replace", "sn", ["Lovelace"])))
    assert changed.old == created.new
    assert (changed.new["properties"]["lastname"], changed.new["properties"]["jpegPhoto"]) == ("Lovelace", photo)
