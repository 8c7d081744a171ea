"""What passes the limits is text in UTF-8 and JSON that every reader decodes to the same event."""

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from purveyor.model.errors import InvalidInput
from purveyor.model.event import Event
from purveyor.model.event_limits import EARLIEST_TS, LATEST_TS, check_event_id, encode_checked
from purveyor.model.json_fields import check_json, check_surrogates

THEN = datetime(2026, 1, 1, tzinfo=UTC)
texts = st.text(st.characters(codec=None), max_size=6)
"""Surrogates and control characters are among them."""
values = st.recursive(
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
    old=st.dictionaries(texts, values, max_size=2),
    new=st.dictionaries(texts | st.just("dn"), values, max_size=2),
    key=st.none() | texts,
    attributes=st.dictionaries(texts, texts, max_size=2),
)


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
