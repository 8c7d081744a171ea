"""What Spark takes for an event is what the model takes for one: kind, key, operation and fields."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from purveyor.model.errors import InvalidInput
from purveyor.model.event import KEY_FIELDS, Event
from purveyor.pipeline.archive.columns import COLUMNS, parsed
from tests.pipeline.archive.conftest import event

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
    b"", b"{", b"[]", b"5", b"null", b'"text"', b"\xff", b'{"realm": "\xff"}', changed()[:-1], b" " + changed() + b"\n",
    changed().replace(b'"udm"', b"'udm'"), changed().replace(b'"udm"', b"NaN"),
    changed().replace(b'"udm"', b'"x", "realm": "udm"'),
    *(changed() + behind for behind in (b" trailing", b" x}", b"{}", b", {}", b', "x": 1', b"]", b"]}", b"}", b"} {",
                                        b'], "x": [', b', 5', b"," + changed(), b"\x00")),
]  # fmt: skip


def expected(data: bytes) -> tuple[Any, ...]:
    try:
        told = Event.decode(data)
    except InvalidInput:
        return ("invalid", None, None, None, None, None)
    return ("event", told.realm, told.topic, told.object_key, told.publisher_name, told.operation.value)


def seen(spark: SparkSession, messages: list[bytes], subject: str = "incoming") -> list[tuple[Any, ...]]:
    schema = "sequence bigint, timestamp timestamp, subject string, headers map<string,array<string>>, data binary"
    rows = [(number, None, subject, None, bytearray(data)) for number, data in enumerate(messages)]
    result = parsed(spark.createDataFrame(rows, schema).coalesce(1))
    assert result.columns == list(COLUMNS)
    found = sorted(result.collect(), key=lambda row: row.position)
    return [(row.kind, row.realm, row.topic, row.key, row.publisher_name, row.operation) for row in found]


def test_spark_and_the_model_agree(spark: SparkSession) -> None:
    wrong = [
        (data, told, right)
        for data, told, right in zip(CASES, seen(spark, CASES), map(expected, CASES), strict=True)
        if told != right
    ]
    assert wrong == []


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


@settings(max_examples=1, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.lists(EVENTS, min_size=150, max_size=150))
def test_spark_and_the_model_agree_on_whatever_comes(spark: SparkSession, values: list[Any]) -> None:
    messages = [json.dumps(value).encode() for value in values]
    for data, told, right in zip(messages, seen(spark, messages), map(expected, messages), strict=True):
        assert told == right, data


def test_a_control_event_is_none_of_the_events(spark: SparkSession) -> None:
    assert seen(spark, [changed()], "incoming.control") == [("control", None, None, None, None, None)]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_a_time_without_a_zone_is_in_utc(spark: SparkSession, zone: str) -> None:
    schema = "sequence bigint, timestamp timestamp, subject string, headers map<string,array<string>>, data binary"
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        rows = [(1, None, "incoming", {"Nats-Msg-Id": ["i"]}, bytearray(changed(ts="2026-01-31T12:00:00")))]
        row = parsed(spark.createDataFrame(rows, schema)).selectExpr("unix_seconds(ts) as seconds", "id").first()
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")
    assert row is not None
    assert (row.seconds, row.id) == (1769860800, "i")
