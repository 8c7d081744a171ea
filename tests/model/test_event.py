"""An event is parsed once, where it enters; what passes the limits is decoded to the same event by every reader."""

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from purveyor.model.errors import InvalidInput
from purveyor.model.event import EARLIEST_TS, LATEST_TS, Event, Operation, check_event_id, encode_checked, event_key
from purveyor.model.json_fields import check_json, check_surrogates

GOOD: dict[str, Any] = {
    "publisher_name": "udm-listener",
    "ts": "2026-11-15T12:00:00+01:00",
    "realm": "udm",
    "topic": "users/user",
    "body": {"old": {}, "new": {"uuid": "u-1", "name": "Ada"}},
}
THEN = datetime(2026, 1, 1, tzinfo=UTC)
texts = st.text(st.characters(codec=None), max_size=6)
"""Surrogates and control characters are among them."""
any_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from([10**400, 2**1024, -(2**1024)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
events = st.builds(
    Event,
    publisher_name=texts,
    ts=st.datetimes(timezones=st.just(UTC)),
    realm=texts,
    topic=texts,
    old=st.dictionaries(texts, any_values, max_size=2),
    new=st.dictionaries(texts | st.just("dn"), any_values, max_size=2),
    key=st.none() | texts,
    attributes=st.dictionaries(texts, texts, max_size=2),
)


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
        ({"body": None}, "body of the event is missing"),
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


@given(events)
def test_what_is_accepted_is_decoded_to_the_same_event(event: Event) -> None:
    assume(event.old or event.new)
    try:
        data = encode_checked(event)
    except InvalidInput as error:
        f"{error.message}, {error.fix}".encode()
        return
    data.decode()
    assert Event.decode(data) == event
    for word in (event.realm, event.topic, event.publisher_name, event.object_key or "", *event.attributes):
        assert word.isprintable() or not any(ord(ch) < 32 or 127 <= ord(ch) < 160 for ch in word)


def event(**more: Any) -> Event:
    given: dict[str, Any] = {"publisher_name": "p", "ts": THEN, "realm": "r", "topic": "t", "new": {"id": 1}}
    return Event(**(given | more))


@pytest.mark.parametrize("zone", [UTC, timezone(timedelta(hours=14)), timezone(timedelta(hours=-23))])
def test_a_time_is_bounded_in_utc(zone: timezone) -> None:
    for good in (EARLIEST_TS, LATEST_TS):
        encode_checked(event(ts=good.astimezone(zone)))
    for bad in (EARLIEST_TS - timedelta(seconds=1), LATEST_TS + timedelta(seconds=1)):
        with pytest.raises(InvalidInput, match="ts is"):
            encode_checked(event(ts=bad.astimezone(zone)))
    for bad in (datetime.min.replace(tzinfo=zone), datetime.max.replace(tzinfo=zone)):
        with pytest.raises(InvalidInput, match="ts is"):
            encode_checked(event(ts=bad))


@pytest.mark.parametrize("key", ["", "a\n", "k" * 1025])
def test_a_key_that_counts_is_bounded_and_another_is_not(key: str) -> None:
    with pytest.raises(InvalidInput, match="key"):
        encode_checked(event(key=key))
    if key:
        with pytest.raises(InvalidInput, match="key found in the object") as error:
            encode_checked(event(new={"dn": key}))
        assert "give a 'key'" in (error.value.fix or "")
        encode_checked(event(new={"dn": key, "uuid": "u"}))
        encode_checked(event(new={"dn": key}, key="k"))


@pytest.mark.parametrize("identity", [None, 7, "", " a", "a\u3000", "a\tb", "\ud800", "x" * 257])
def test_what_is_no_id_is_refused(identity: object) -> None:
    with pytest.raises(InvalidInput, match="id"):
        check_event_id(identity)


def test_no_depth_and_no_length_breaks_the_check() -> None:
    deep: Any = "\ud800"
    for level in range(5000):
        deep = [deep] if level % 2 else {"n" * 100: deep}
    with pytest.raises(InvalidInput, match="body is nested more than 100 levels deep"):
        check_json(deep, "body")
    with pytest.raises(InvalidInput, match="holds half") as error:
        check_surrogates(deep, "body")
    assert len(error.value.message) < 400


def test_a_place_is_the_one_in_the_body() -> None:
    with pytest.raises(InvalidInput, match=r"^body\.new\.a\[1\]\.b holds half"):
        encode_checked(event(new=json.loads('{"a": ["x", {"b": "\\ud800"}]}')))
    with pytest.raises(InvalidInput, match=r"^body\.old\.a\[0\] is a number"):
        encode_checked(event(old={"a": [-(10**309)]}))
