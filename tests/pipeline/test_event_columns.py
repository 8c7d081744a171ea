"""The columns of events agree with the model: the fast parser is never wrong, only in doubt."""

import json
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purveyor.model.control_events import CONTROL_SUBJECT
from purveyor.model.errors import InvalidInput
from purveyor.model.event import KEY_FIELDS, Event
from purveyor.pipeline import event_rows
from purveyor.pipeline.event_rows import COLUMN_TYPES, ROUTE_COLUMNS, parse_columns
from tests.support.archive import event

BASE: dict[str, Any] = json.loads(event("k", {"id": "1"}))


def changed(**fields: Any) -> bytes:
    return json.dumps({name: value for name, value in (BASE | fields).items() if value != "left out"}).encode()


def body(new: Any, old: Any = "left out") -> bytes:
    sides = {"new": new, "old": old}
    return changed(key="left out", body={name: side for name, side in sides.items() if side != "left out"})


ODD: list[Any] = ["left out", None, "", 5, 1.5, True, [], {"a": 1}, "true", "5", "[x]", "{x}", "1e5"]
TIMES = ["2026-01-31", "2026-01-31T12:00", "2026-01-31 12:00:00.123456", "2026-13-01", "2026-01-31T12:00:00Z", "2026",
         "2026-01-31T12:00+01:00", "2026-01-31T12:00:00+02:00", "yesterday"]  # fmt: skip
ATTRIBUTES: list[Any] = [
    None,
    {},
    {"a": "1"},
    {"a": "true"},
    {"a": 1},
    {"a": None},
    {"a": "x", "b": ["y"]},
    [1],
    "x",
    5,
]
BODIES: list[Any] = ["left out", None, [], "x", 5, {}]
SIDES: list[Any] = [{}, {"n": 1}, {"id": "1"}, None, [], 5, "left out"]
KEYS: list[Any] = ["u", "", 7, -7, 0, 10**30, 1.5, 1e300, True, False, None, ["a"], {"a": 1}, "true", "[a]", "{6F96}",
                   "12e4567", "1.5", "007"]  # fmt: skip
DEEP: Any = json.loads("[" * 400 + "]" * 400)
CASES = [
    changed(),
    *(changed(**{name: odd}) for name in ("realm", "topic", "publisher_name", "key", "ts") for odd in ODD),
    *(changed(realm=word) for word in ("a\nb", "a\x00", "a\x7fb", "a\u2028b", "\u00fc", "a b")),
    *(changed(ts=ts) for ts in TIMES),
    *(changed(attributes=attributes) for attributes in ATTRIBUTES),
    *(changed(body=value) for value in BODIES),
    *(body(new, old) for new in SIDES for old in SIDES),
    *(body({name: key, "dn": "d"}) for name in KEY_FIELDS[:-1] for key in KEYS),
    body({"n": 1}, {"entryUUID": "e", "id": "i"}), body({"x": {"id": "nested"}}),
    body({"id": "\u00e9\u4e2d\U0001f600"}),
    *(changed(unread=odd) for odd in ODD),
    *(changed().replace(b'"udm"', odd) for odd in (b'"\\ud800"', b'"\\x"', b'"\t"', b'"\xed\xa0\x80"', b"01", b"nul")),
    b"\xef\xbb\xbf" + changed(), changed().decode().encode("utf-16"), body({"x": "\ud800"}), body({"deep": DEEP}),
    changed().replace(b'"1"', b'"\xff"'), changed().replace(b'"1"', b'"\xc0\x80"'), changed().replace(b'"1"', b"NaN"),
    b"", b"{", b"[]", b"5", b"null", b'"text"', b"\xff", b'{"realm": "\xff"}', changed()[:-1], b" " + changed() + b"\n",
    changed().replace(b'"udm"', b"'udm'"), changed().replace(b'"udm"', b"NaN"),
    changed().replace(b'"udm"', b'"x", "realm": "udm"'),
    *(changed() + behind for behind in (b" trailing", b" x}", b"{}", b", {}", b', "x": 1', b"]", b"]}", b"}", b"} {",
                                        b'], "x": [', b', 5', b"," + changed(), b"\x00")),
]  # fmt: skip


def batch(bodies: list[bytes], subject: str = "incoming") -> pa.RecordBatch:
    return pa.record_batch({"subject": pa.array([subject] * len(bodies)), "data": pa.array(bodies, pa.binary())})


def seen(bodies: list[bytes], columns: tuple[str, ...] = tuple(COLUMN_TYPES)) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in parse_columns(batch(bodies), columns)), strict=True))


def expected(body: bytes) -> tuple[Any, ...]:
    try:
        event = Event.decode(body)
        f"{event.realm} {event.topic} {event.publisher_name} {event.object_key}".encode()
    except (InvalidInput, UnicodeEncodeError):  # what has no UTF-8 can be no column
        return (None,) * len(COLUMN_TYPES)
    return event.realm, event.topic, event.object_key, event.publisher_name, event.ts, event.operation.value


@pytest.mark.parametrize("body", CASES)
def test_the_verdict_is_the_models(body: bytes) -> None:
    right = expected(body)
    assert seen([body]) == [right]
    assert seen([body], ROUTE_COLUMNS) == [right[:2]]


def test_a_row_does_not_change_the_result_of_others() -> None:
    right = [expected(body) for body in CASES]
    assert seen(CASES) == right
    assert seen(CASES, ROUTE_COLUMNS) == [each[:2] for each in right]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
OBJECTS = st.dictionaries(st.sampled_from(["uuid", "id", "dn", "x"]), VALUES, max_size=3)
EVENTS = st.fixed_dictionaries(
    {"publisher_name": st.just("p") | VALUES, "realm": st.just("r") | VALUES, "topic": st.just("t") | VALUES,
     "ts": st.just("2026-01-31T12:00:00Z"), "body": st.fixed_dictionaries({"new": OBJECTS, "old": OBJECTS}) | VALUES},
    optional={"key": VALUES,
              "attributes": st.dictionaries(st.text(max_size=3), st.text(max_size=3) | VALUES, max_size=2)},
)  # fmt: skip


@settings(max_examples=150)
@given(st.lists(EVENTS, max_size=12))
def test_the_verdict_is_the_models_whatever_comes(values: list[Any]) -> None:
    bodies = [json.dumps(value).encode() for value in values]
    right = [expected(body) for body in bodies]
    assert seen(bodies) == right
    assert seen(bodies, ROUTE_COLUMNS) == [each[:2] for each in right]


@settings(max_examples=300)
@given(st.sampled_from([body for body in CASES if len(body) > 100]), st.data())
def test_the_verdict_is_the_models_of_broken_text(body: bytes, data: st.DataObject) -> None:
    """Some byte is another one, or missing, or there twice. (Not a digit: numbers beyond all bounds are let pass.)"""
    at = data.draw(st.integers(0, len(body) - 1))
    put = data.draw(st.binary(max_size=2).filter(lambda drawn: not any(48 <= byte < 58 for byte in drawn)))
    broken = body[:at] + put + body[at + data.draw(st.integers(0, 1)) :]
    assert seen([broken]) == [expected(broken)]
    assert seen([broken], ROUTE_COLUMNS) == [expected(broken)[:2]]


@pytest.mark.parametrize(
    "ordinary",
    [
        changed(),
        changed(key="k-1", attributes={"a": "b"}),
        changed(ts="2026-02-28T00:00:00.123456"),
        changed(topic="gr\u00f6\u00dfe/x y"),
        body({}, {"dn": "x"}),
        body({"id": 7, "x": [1, {"y": None}]}, {}),
        body({"name": "no field of it is a key"}),
        body({}, {"name": 1}),
    ],
)
def test_ordinary_events_are_never_in_doubt(ordinary: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    right = expected(ordinary)
    monkeypatch.setattr(event_rows, "_parse_by_rule", lambda body: pytest.fail(f"in doubt: {body!r}"))
    assert seen([ordinary] * 3) == [right] * 3
    assert seen([ordinary] * 3, ROUTE_COLUMNS) == [right[:2]] * 3


def test_a_control_event_is_not_an_event_and_affects_no_other_row() -> None:
    messages = pa.concat_batches([batch([changed()], CONTROL_SUBJECT), batch([changed(), b"x"])])
    realms, times = parse_columns(messages, ("realm", "ts"))
    assert realms.to_pylist() == [None, "udm", None]
    assert [type(each) for each in times.to_pylist()] == [type(None), datetime, type(None)]


def test_a_batch_without_rows_has_no_events() -> None:
    assert [len(column) for column in parse_columns(batch([]), tuple(COLUMN_TYPES))] == [0] * len(COLUMN_TYPES)
