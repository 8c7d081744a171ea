"""Records of a live directory through the real transform, with restarts in the middle of a refresh."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from purveyor.model.ldif_changes import Change, Gone, Present, RefreshBegin, RefreshEnd, Step
from purveyor.sources.ldif.live_records import LiveEntry, LiveRecord, Operation, encode_live_record
from purveyor.sources.ldif.records import Modification, Record
from tests.pipeline.transform.flow import Flow, summary
from tests.pipeline.transform.memory import body, person
from tests.support.nats_servers import OwnServer

COUNT = 300


@pytest.fixture
def flow(own_server: OwnServer, spark: SparkSession, tmp_path: Path) -> Flow:
    return Flow(own_server().address, spark, tmp_path)


def uuid(number: int) -> str:
    return f"{number:08x}-0000-1000-8000-000000000000"


def csn(number: int) -> str:
    return f"20261119000000.{number:06}Z#000000#001#000000"


def container(number: int, name: str) -> LiveEntry:
    values = {"objectClass": (b"organizationalUnit",), "ou": (name.encode(),)}
    return LiveEntry(uuid(number), f"ou={name},dc=e", values)


def user(number: int, above: str, title: str = "x") -> LiveEntry:
    name = f"u{number}"
    values = {"objectClass": (b"inetOrgPerson",), "uid": (name.encode(),), "title": (title.encode(),)}
    return LiveEntry(uuid(number), f"uid={name},ou={above},dc=e", values)


def send(flow: Flow, *records: LiveRecord, epoch: int = 1) -> None:
    flow.send(*(encode_live_record(each, epoch) for each in records))


def fold(events: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The DN of each object at the end; every event starts from what the subscriber knows."""
    known: dict[str, Any] = {}
    for event in events:
        old, new = event["body"]["old"], event["body"]["new"]
        assert known.get(event["key"], {}) == old
        known[event["key"]] = new
    return {key: new["dn"] for key, new in known.items() if new}


def test_a_directory_is_followed_over_restarts_in_the_middle_of_a_refresh(flow: Flow) -> None:
    people = [user(number, "a") for number in range(10, COUNT)]
    send(flow, RefreshBegin(full=True), *people[:150])
    flow.run()
    send(flow, container(1, "a"), container(2, "b"), *people[150:], RefreshEnd(True, (csn(1),)))

    # The containers exchange their names, one entry changes, the others are present, two are gone.
    send(flow, RefreshBegin(full=False), container(2, "a"), user(10, "b", "y"))
    flow.run(max_offsets_per_trigger=100)
    send(flow, RefreshEnd(True), user(11, "never"), epoch=0)
    send(flow, container(1, "b"), Present(tuple(uuid(number) for number in range(11, COUNT - 2))))
    send(flow, RefreshEnd(True, (csn(2),)))
    flow.run()
    expected = {uuid(1): "ou=b,dc=e", uuid(2): "ou=a,dc=e"}
    expected |= {uuid(number): f"uid=u{number},ou=b,dc=e" for number in range(10, COUNT - 2)}
    assert fold(flow.events()) == expected

    # Changes as they happen, some of them twice.
    change = Modification(Step.REPLACE, "title", (b"z",))
    modify = Operation(Record(0, "uid=u12,ou=b,dc=e", Change.MODIFY, modifications=(change,)), uuid(12), csn(3))
    for _ in range(2):
        send(flow, container(2, "c"), container(1, "a"), Gone((uuid(11),)), modify)
    flow.run()
    expected = {uuid(1): "ou=a,dc=e", uuid(2): "ou=c,dc=e"}
    expected |= {uuid(number): f"uid=u{number},ou=a,dc=e" for number in (10, *range(12, COUNT - 2))}
    assert fold(flow.events()) == expected
    assert not flow.letters()


def test_a_checkpoint_of_ldif_alone_is_continued_by_a_live_source(flow: Flow) -> None:
    flow.send(
        body("ou=a,dc=e", "content", attributes={"objectClass": ["organizationalUnit"], "ou": ["a"]}),
        *(
            body(f"uid=u{number},ou=a,dc=e", "content", attributes=person(f"u{number}", title=["x"]))
            for number in range(10, 40)
        ),
    )
    flow.run()
    before = flow.events()
    send(flow, RefreshBegin(full=True), container(1, "a"), *(live_person(number) for number in range(10, 39)))
    send(flow, RefreshEnd(True))
    flow.run()
    assert summary(flow.events()[len(before) :]) == [("users/user", "uid=u39,ou=a,dc=e", None)]
    assert not flow.letters()


def live_person(number: int) -> LiveEntry:
    values = {name: tuple(value.encode() for value in values) for name, values in person(f"u{number}").items()}
    return LiveEntry(uuid(number), f"uid=u{number},ou=a,dc=e", {**values, "title": (b"x",)})


def test_what_is_no_record_of_a_live_source_is_parked_with_its_reason(flow: Flow) -> None:
    bad = json.dumps({"change": "entry", "epoch": 1, "dn": "cn=a", "attributes": {}})
    flow.send(bad)
    send(flow, Operation(Record(0, "cn=a", Change.DELETE), uuid(1), csn(1)))
    flow.run()
    assert [letter["Purveyor-Reason"] for letter in flow.letters()] == [
        "the message has nothing as 'uuid'", "delete: there is no such entry"
    ]  # fmt: skip
