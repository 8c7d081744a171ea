"""The archive's columns, from what the stream holds: events, control events, and what is neither."""

import pytest

from purveyor.model.control_events import CONTROL_SUBJECT
from purveyor.pipeline.archive.schema import COLUMNS, as_archived
from purveyor.pipeline.event_columns import TYPES
from purveyor.pipeline.event_source import event_format
from tests.pipeline.archive.conftest import Archive, event


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_each_kind_has_what_it_says(archive: Archive, zone: str) -> None:
    spark = archive.spark
    archive.publish(
        event("k", {"a": 1}, old={"a": 0}, ts="2026-01-31T12:00:00"), b"\xff", event("gone", {}, old={"b": 1})
    )
    options = {"servers": archive.broker.url, "stream": archive.stream}
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        read = as_archived(spark.read.format(event_format(spark)).options(**options).load())
        assert read.columns == list(COLUMNS)
        wanted = "kind", "realm", "topic", "key", "operation", "publisher_name", "unix_seconds(ts) as ts"
        rows = [tuple(row) for row in read.orderBy("position").selectExpr(*wanted).collect()]
    finally:
        spark.conf.set("spark.sql.session.timeZone", before or "UTC")
    assert rows == [
        ("event", "udm", "users/user", "k", "modify", "test", 1769860800),
        ("invalid", None, None, None, None, None, None),
        ("event", "udm", "users/user", "gone", "delete", "test", 1769860800),
    ]


def test_a_control_event_is_none_of_the_events_and_an_id_is_the_one_given(archive: Archive) -> None:
    frame = archive.spark.createDataFrame(
        [
            (1, None, CONTROL_SUBJECT, {"Nats-Msg-Id": ["i"]}, bytearray(b"x")),
            (2, None, "incoming", {"Nats-Msg-Id": ["event:1a"], "Purveyor-Id": ["mine"]}, bytearray(b"x")),
            (3, None, "incoming", {}, bytearray(b"x")),
        ],
        "sequence bigint, timestamp timestamp, subject string, headers map<string,array<string>>, data binary",
    ).selectExpr("*", *(f"cast(null as {kind}) as {name}" for name, kind in TYPES.items()))
    rows = as_archived(frame).orderBy("position").collect()
    assert [(row.kind, row.realm, row.id) for row in rows] == [
        ("control", None, "i"),
        ("invalid", None, "mine"),
        ("invalid", None, None),
    ]
