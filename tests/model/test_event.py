"""An event is parsed once, where it enters, and has the key of its object."""

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.model.errors import InvalidInput
from purveyor.model.event import Event, Operation, event_key

GOOD: dict[str, Any] = {
    "publisher_name": "udm-listener",
    "ts": "2026-11-15T12:00:00+01:00",
    "realm": "udm",
    "topic": "users/user",
    "body": {"old": {}, "new": {"uuid": "u-1", "name": "Ada"}},
}


def test_an_event_is_the_same_after_the_way_through_the_queue() -> None:
    event = Event.from_json(GOOD | {"key": "k", "attributes": {"tenant": "north"}})
    assert event.ts == datetime(2026, 11, 15, 12, tzinfo=timezone(timedelta(hours=1)))
    assert Event.decode(event.encode()) == event
    assert json.loads(event.encode())["attributes"] == {"tenant": "north"}
    assert "key" not in json.loads(Event.from_json(GOOD).encode())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(new=st.dictionaries(st.text(), values, min_size=1, max_size=4), word=st.text("ab/:é", min_size=1))
def test_any_object_survives(new: dict[str, Any], word: str) -> None:
    event = Event(publisher_name=word, ts=datetime(2026, 1, 1, tzinfo=UTC), realm=word, topic=word, new=new)
    assert Event.decode(event.encode()) == event


def test_half_a_surrogate_pair_that_an_older_version_stored_can_be_read() -> None:
    event = Event.decode(json.dumps(GOOD | {"body": {"new": {"name": "\ud800"}}}))
    assert Event.decode(event.encode()) == event


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"realm": ""}, "'realm'"),
        ({"realm": None}, "'realm'"),
        ({"topic": 7}, "'topic'"),
        ({"topic": "a\nb"}, "control character"),
        ({"topic": "a\u2028b"}, "control character"),
        ({"publisher_name": []}, "'publisher_name'"),
        ({"ts": "yesterday"}, "'yesterday'"),
        ({"ts": 12}, "'ts'"),
        ({"body": None}, "body of the event is nothing"),
        ({"body": {"old": {}, "new": {}}}, "neither"),
        ({"body": {}}, "neither"),
        ({"body": {"new": []}}, "new object of the event is a list"),
        ({"key": ""}, "'key'"),
        ({"key": 7}, "'key'"),
        ({"attributes": {"a": 1}}, "attribute 'a'"),
        ({"attributes": ["a"]}, "attributes"),
    ],
)
def test_an_error_names_the_wrong_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Event.from_json(GOOD | change)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"\xff{}", b'{"a": NaN}', b'{"a": 1e999}', b"[" * 100_000],
    ids=lambda text: str(text[:6]),
)
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidInput):
        Event.decode(text)


def test_a_side_left_out_is_empty_and_a_time_without_zone_is_utc() -> None:
    event = Event.from_json(GOOD | {"body": {"old": {"id": 1}}, "ts": "2026-11-15T12:00:00"})
    assert (event.new, event.operation) == ({}, Operation.DELETE)
    assert event.ts == datetime(2026, 11, 15, 12, tzinfo=UTC)


def test_old_and_new_decide_the_operation() -> None:
    def operation(old: dict[str, Any], new: dict[str, Any]) -> Operation:
        return Event.from_json(GOOD | {"body": {"old": old, "new": new}}).operation

    assert operation({}, {"a": 1}) is Operation.CREATE
    assert operation({"a": 1}, {"a": 2}) is Operation.MODIFY
    assert operation({"a": 1}, {}) is Operation.DELETE


@pytest.mark.parametrize(
    ("new", "old", "given", "key"),
    [
        ({"uuid": "u", "id": "i"}, {}, "mine", "mine"),
        ({"dn": "cn=a", "uuid": "u", "entryUUID": "e", "id": "i", "univentionObjectIdentifier": "o"}, {}, None, "u"),
        ({"dn": "cn=a", "entryUUID": "e", "id": "i", "univentionObjectIdentifier": "o"}, {}, None, "o"),
        ({"dn": "cn=a", "entryUUID": "e", "id": "i"}, {}, None, "e"),
        ({"dn": "cn=a", "id": 7}, {}, None, "7"),
        ({"dn": "cn=b"}, {"uuid": "u"}, None, "cn=b"),
        ({}, {"uuid": "u"}, None, "u"),
        ({"uuid": "", "id": True, "dn": ["cn=a"]}, {"dn": "cn=old"}, None, "cn=old"),
        ({"name": "x"}, {}, None, None),
    ],
)
def test_the_key_is_the_one_given_or_the_first_found_in_new_then_in_old(
    new: dict[str, Any], old: dict[str, Any], given: str | None, key: str | None
) -> None:
    assert event_key(new, old, given=given) == key
