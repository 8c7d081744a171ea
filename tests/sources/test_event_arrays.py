"""Arrays of events: reading all at once gives what reading one by one gives, and accepts nothing else."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from purveyor.model import json_fields
from purveyor.model.errors import PurveyorError
from purveyor.model.event import Event
from purveyor.sources.event_arrays import read_events
from purveyor.sources.http_events import IncomingEvent
from purveyor.sources.schemas.event_validator import EventValidator, ValidatorBuilder
from purveyor.sources.schemas.schema import SCHEMA, TOPIC, topic_key

ANYTHING = EventValidator({}, {})
TS = "2026-01-01T12:00:00+00:00"


def event(**fields: Any) -> dict[str, Any]:
    given = {"publisher_name": "hr", "ts": TS, "realm": "udm", "topic": "users/user"}
    return {**given, "body": {"old": {}, "new": {"uuid": "u-1"}}, **fields}


def one_by_one(data: bytes, validator: EventValidator = ANYTHING) -> list[IncomingEvent] | None:
    try:
        found = json_fields.load(data)
        return [IncomingEvent.read(each, validator, f"key:{number}") for number, each in enumerate(found)]
    except (PurveyorError, ValueError, RecursionError):
        return None


def summary(found: IncomingEvent) -> tuple[Event, str, Any]:
    # Python keeps the order of fields, and tells 1 from 1.0 and from true in text.
    return found.event, found.id, json.dumps(json.loads(found.data))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**320), 10**320) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from(["uuid", "id", "dn", "é"]) | st.text(max_size=5), JSON, max_size=3)
TEXTS = st.sampled_from(["", "udm", "a*", "\x00", "\u2028", "é" * 200, "x" * 1100, " i", "\ud800"]) | st.text(
    max_size=9
)
TIMES = st.sampled_from([TS, "2026-01-01", "2026-01-01T12:00:00Z", "1899-01-01", "9999-12-31T00:00:00Z", "soon", ""])
BODIES = st.fixed_dictionaries({}, optional={"old": OBJECTS, "new": OBJECTS, "more": JSON})
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "publisher_name": TEXTS | JSON,
        "ts": TIMES | JSON,
        "realm": TEXTS | JSON,
        "topic": TEXTS | JSON,
        "body": BODIES | JSON,
        "key": TEXTS | JSON,
        "attributes": st.dictionaries(TEXTS, TEXTS, max_size=2) | JSON,
        "id": TEXTS | JSON,
        "more": JSON,
    },
)


@given(st.lists(FIELDS, max_size=3), st.booleans())
@example([{"body": {"new": {"x": 1e300 * 1e10}}}], True)
@example([{"body": {"new": {"x": 10**309}}}], False)
@example([{"body": {"new": {"n": 2**64, "f": 1e16, "z": -0.0}, "old": {"\x7f": "\u2028"}}}], False)
@example([{"key": None, "attributes": None, "id": None}], True)
def test_what_is_read_at_once_is_what_is_read_one_by_one(changes: list[dict[str, Any]], escaped: bool) -> None:
    data = json.dumps([event(**each) for each in changes], ensure_ascii=escaped).encode("utf-8", "surrogatepass")
    at_once = read_events(data, ANYTHING, key="key")
    if at_once is not None:
        expected = one_by_one(data)
        assert expected is not None
        assert [*map(summary, at_once)] == [*map(summary, expected)]
        assert [Event.decode(each.data) for each in at_once] == [each.event for each in expected]


def test_what_publishers_send_is_read_at_once() -> None:
    full = event(key="k", attributes={"a": "b", "ü": ""}, id="e-1", ts="2026-01-01T12:00:00Z")
    deleted = event(body={"old": {"dn": "cn=ä", "list": [1, 2.5, None, {"deep": [True]}]}})
    data = json.dumps([full, deleted, event()], indent=2).encode()
    found, expected = read_events(data, ANYTHING, key="key"), one_by_one(data)
    assert found is not None
    assert expected is not None
    assert [*map(summary, found)] == [*map(summary, expected)]
    assert [each.data for each in found] == [each.data for each in expected]
    assert [each.id for each in found] == ["e-1", "key:1", "key:2"]
    lines = [json.dumps(each).encode() for each in (full, deleted, event())]
    assert read_events(lines, ANYTHING, key="key") == found


def test_events_without_an_id_get_new_ones() -> None:
    data = json.dumps([event()] * 1000).encode()
    found = [read_events(data, ANYTHING) or [] for _ in range(2)]
    assert len({each.id for events in found for each in events}) == 2000


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"[",
        b"[]",
        json.dumps([event()] * 1001).encode(),
        b"{}",
        b"[{}]",
        b"[1]",
        b"\xef\xbb\xbf[]",
        b"[] []",
        json.dumps([event()]).encode("utf-16"),
        json.dumps([event(more=1)]).encode(),
        json.dumps([event(body={"new": {"x": 1}, "more": {}})]).encode(),
        json.dumps([event(body={"old": {}, "new": {}})]).encode(),
        json.dumps([event(body={"new": {"x": float("nan")}})]).encode(),
        json.dumps([event(body={"new": {"x": "\ud800"}})]).encode(),
        json.dumps([event(body={"new": {"x": 10**400}})]).encode(),
        json.dumps([event(body={"new": {"x" * 5000: 1}})]).encode(),
        json.dumps([event()]).encode().replace(b'"u-1"', b"1e400"),
        json.dumps([event()]).encode().replace(b'"u-1"', b"[" * 100 + b"]" * 100),
        json.dumps([event()]).encode().replace(b'"u-1"', b"[" * 100_000 + b"]" * 100_000),
        json.dumps([event()]).encode().replace(b"u-1", b"\xff"),
        json.dumps([event(), event(realm="x*")]).encode(),
        json.dumps([event(topic="a\nb")]).encode(),
        json.dumps([event(key="")]).encode(),
        json.dumps([event(key="k" * 1025)]).encode(),
        json.dumps([event(id=" x")]).encode(),
        json.dumps([event(id="")]).encode(),
        json.dumps([event(attributes={str(number): "" for number in range(101)})]).encode(),
        json.dumps([event(ts="1899-01-01")]).encode(),
        json.dumps([event(ts="today")]).encode(),
        json.dumps([event(publisher_name="")]).encode(),
    ],
)
def test_what_is_unusual_or_wrong_is_left_to_reading_one_by_one(given: bytes) -> None:
    assert read_events(given, ANYTHING) is None


def test_an_event_of_another_realm_is_left_to_reading_one_by_one() -> None:
    data = json.dumps([event(), event(realm="shop")]).encode()
    assert read_events(data, ANYTHING, realms=frozenset({"udm"})) is None
    assert read_events(data, ANYTHING, realms=frozenset({"udm", "shop"})) is not None
    assert read_events(data, ANYTHING, realms=frozenset()) is None


def with_schema(**more: Any) -> EventValidator:
    """Return the validator of a registry with one schema and a strict realm with one declared topic."""
    definition = {"type": "object", "properties": {"uuid": {"type": "string"}}, "required": ["uuid"]}
    fields = {
        "name": "s",
        "type": "json-schema",
        "encoding": "json",
        "compatibility": "none",
        "realms_topics": [{"realm": "udm", "topic": "users/.*"}],
        "revisions": [{"number": 1, "created": TS, "definition": definition}],
    }
    topic = {"realm": "shop", "topic": "orders", "since": TS, "declared": True, "strict": True, "description": ""}
    builder = ValidatorBuilder()
    builder.apply("schema.s", 1, SCHEMA.dump({**fields, **more}))
    builder.apply(topic_key("shop", "orders"), 2, TOPIC.dump(topic))
    return builder.build()


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({}, True),
        ({"body": {"new": {"uuid": 7}}}, False),
        ({"body": {"old": {"uuid": 7}}}, True),  # a deletion
        ({"topic": "groups/group", "body": {"new": {"uuid": 7}}}, True),
        ({"attributes": {"schema-revision": "1"}}, True),
        ({"attributes": {"schema-revision": "2"}}, False),
        ({"realm": "shop", "topic": "orders"}, True),
        ({"realm": "shop", "topic": "returns"}, False),
    ],
)
def test_events_are_checked_against_schemas(fields: dict[str, Any], fits: bool) -> None:
    validator, data = with_schema(), json.dumps([event(), event(**fields)]).encode()
    expected, found = one_by_one(data, validator), read_events(data, validator, key="key")
    assert (expected is not None, found is not None) == (fits, fits)
    if found is not None and expected is not None:
        assert [*map(summary, found)] == [*map(summary, expected)]


def test_events_in_binary_form_are_left_to_reading_one_by_one() -> None:
    record = {"type": "record", "name": "User", "fields": [{"name": "uuid", "type": "string"}]}
    revisions = [{"number": 1, "created": TS, "definition": record}]
    binary = with_schema(type="avro", encoding="binary", revisions=revisions)
    in_base64 = json.dumps([event(body={"new": "BnUtMQ=="})]).encode()
    assert [each.event.new for each in one_by_one(in_base64, binary) or []] == [{"uuid": "u-1"}]
    assert read_events(in_base64, binary) is None
    assert read_events(json.dumps([event()]).encode(), binary) is None


def test_no_event_is_accepted_whose_schema_cannot_be_read() -> None:
    unreadable = with_schema(version=99)
    assert read_events(json.dumps([event()]).encode(), unreadable) is None
    assert read_events(json.dumps([event(topic="groups/group")]).encode(), unreadable) is not None
