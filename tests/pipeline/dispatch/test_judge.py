"""What is an event is decided as the model decides it; the quick look is never wrong, only in doubt."""

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from purveyor.model.errors import InvalidInput
from purveyor.model.event import Event
from purveyor.pipeline.dispatch.judge import judged
from purveyor.pipeline.dispatch.messages import valid

GOOD: dict[str, Any] = {
    "publisher_name": "udm",
    "ts": "2026-01-31T12:00:00+00:00",
    "realm": "udm",
    "topic": "users/user",
    "body": {"old": {}, "new": {"uuid": "1"}},
}
ODD: tuple[Any, ...] = (
    *(None, "", " ", "x", "true", "1", "-1.5e3", "a\nb", "ä", "\x85"),
    *(1, 1.5, True, [], ["x"], {}, {"a": 1}),
)
TIMES = (
    *("2026-02-29T00:00:00Z", "2024-02-29T00:00:00Z", "2026-12-31T23:59:59.123Z", "2026-01-01T00:00:00.5"),
    *("2026-04-31T00:00:00Z", "2026-01-01T24:00:00Z", "yesterday", "2026-01-01", "0000-01-01T00:00:00Z"),
)
BODIES: tuple[Any, ...] = (
    {},
    {"new": {"a": 1}},
    {"old": {"uuid": "1"}, "new": {}},
    {"old": None, "new": {"id": 1}},
    {"old": {}, "new": {}},
    {"old": "x", "new": {"id": 1}},
    {"old": [], "new": {"id": 1}},
    {"old": {}, "new": {"name": 1}},
)
BYTES = (b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"{} {}", b"'a'", b"{'realm': 'udm'}")

changes = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.sampled_from(ODD) for name in ("publisher_name", "realm", "topic", "key")},
        "ts": st.sampled_from((*TIMES, *ODD)),
        "body": st.sampled_from((*BODIES, *ODD)),
        "attributes": st.sampled_from(ODD) | st.dictionaries(st.just("a"), st.sampled_from(ODD)),
    },
)
endings = st.sampled_from((b"", b"", b"", b" ", b"x", b"\xff", b" x}", b"{}", b",{}", b"],[{}", b"}"))
messages = st.tuples(changes, endings).map(lambda drawn: json.dumps({**GOOD, **drawn[0]}).encode() + drawn[1])


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(messages, max_size=60))
def test_the_verdict_is_the_models(spark: SparkSession, drawn: list[bytes]) -> None:
    bodies = [*drawn, *BYTES, json.dumps(GOOD).encode()]
    rows = judged(incoming(spark, bodies)).collect()
    batch = pa.RecordBatch.from_pylist([row.asDict() for row in sorted(rows, key=lambda row: row.position)])
    assert valid(batch).tolist() == [is_event(body) for body in bodies]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"key": "k-1"},
        {"attributes": {"a": "b"}},
        {"ts": "2026-02-28T00:00:00.123456"},
        {"topic": "größe/x y"},
        {"body": {"old": {"dn": "x"}, "new": {}}},
    ],
)
def test_ordinary_events_are_never_in_doubt(spark: SparkSession, change: dict[str, Any]) -> None:
    [row] = judged(incoming(spark, [json.dumps({**GOOD, **change}).encode()])).collect()
    assert not row.doubtful
    assert row.realm == "udm"


def incoming(spark: SparkSession, bodies: list[bytes]) -> DataFrame:
    columns = {"sequence": pa.array(range(len(bodies)), pa.int64()), "data": pa.array(bodies, pa.binary())}
    frame = spark.createDataFrame(pa.table(columns))
    return frame.selectExpr("*", "'incoming' as subject", "cast(null as map<string,array<string>>) as headers")


def is_event(body: bytes) -> bool:
    try:
        Event.decode(body)
    except InvalidInput:
        return False
    return True
