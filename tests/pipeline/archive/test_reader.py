"""A range is read completely, from the archive and from the stream; objects are exact at a position."""

import pytest
from pyspark.errors import PySparkException

from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model.control_events import CONTROL_SUBJECT
from purveyor.pipeline.archive import reader as reading
from purveyor.pipeline.archive.layout import COLUMNS
from purveyor.pipeline.archive.maintenance import snapshot
from purveyor.pipeline.archive.reader import ArchiveSource, as_archived, events, objects_at
from purveyor.pipeline.event_rows import COLUMN_TYPES
from purveyor.pipeline.event_sources import event_format
from purveyor.pipeline.job_failures import explain
from tests.support.archive import Archive, event


def objects(archive: Archive, position: int) -> dict[str, int]:
    """The objects as of a position, each with the position of its last change."""
    rows = objects_at(archive.spark, archive.source, position).collect()
    assert len(rows) == len({(row.realm, row.topic, row.key) for row in rows})
    return {f"{row.topic}:{row.key}": row.position for row in rows}


def test_an_archive_without_anything_has_no_events_and_no_objects(archive: Archive) -> None:
    nobody = ArchiveSource(None, archive.directory)
    assert events(archive.spark, nobody, 1, 100).columns == list(COLUMNS)
    assert events(archive.spark, nobody, 1, 100).collect() == []
    assert objects(archive, 100) == {}


def test_what_is_not_archived_yet_comes_from_the_stream(archive: Archive) -> None:
    archive.publish(*(event(str(number)) for number in range(6)))
    archive.broker.delete(archive.stream, 1)
    assert archive.positions() == [2, 3, 4, 5, 6]
    archive.add(1, 4, *(event(str(number)) for number in range(3)))
    assert archive.positions() == [1, 2, 3, 5, 6]
    assert archive.positions(2, 5) == [2, 3, 5]
    assert archive.positions(5, 5) == [5]
    assert archive.positions(7, 9) == []
    tail = events(archive.spark, archive.source, 5, 6).collect()
    assert {(row.kind, row.topic, row.operation) for row in tail} == {("event", "users/user", "create")}


def test_control_events_alone_behind_the_archive_cost_objects_no_scan_of_the_stream(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = f"{archive.stream}.control"
    monkeypatch.setattr(reading, "CONTROL_SUBJECT", control)

    def scans_the_stream(position: int) -> bool:
        found = objects_at(archive.spark, archive.source, position)
        return "jetstream" in found._jdf.queryExecution().toString().lower()

    archive.publish(event("a"), event("b"))
    archive.catch_up()
    archive.broker.add(control, ["{}"])
    assert not scans_the_stream(3)
    assert objects(archive, 3) == {"users/user:a": 1, "users/user:b": 2}
    archive.publish(event("c"))
    assert scans_the_stream(4)
    assert objects(archive, 4) == {"users/user:a": 1, "users/user:b": 2, "users/user:c": 4}
    archive.broker.delete(archive.stream, 4)
    archive.broker.add(control, ["{}"])
    assert scans_the_stream(5)  # something is missing: the scan says whether that is a loss
    assert objects(archive, 5) == {"users/user:a": 1, "users/user:b": 2}


def test_what_was_removed_from_the_front_of_the_stream_is_no_loss(archive: Archive) -> None:
    archive.publish(*(event(str(number)) for number in range(6)))
    archive.add(1, 2, event("a"), event("b"))
    archive.broker.delete(archive.stream, 1, 2, 3, 4)
    assert archive.positions() == [1, 2, 5, 6]


def test_a_plan_that_the_archive_has_overtaken_fails_rather_than_leave_rows_out(archive: Archive) -> None:
    archive.publish(*(event(str(number)) for number in range(4)))
    planned = events(archive.spark, archive.source, 1, 4)
    archive.catch_up()
    archive.broker.purge(archive.stream)
    with pytest.raises(PySparkException, match="1 to 4 of stream") as late:
        planned.count()
    assert not explain(late.value).permanent  # another attempt plans again and finds it
    assert archive.positions() == [1, 2, 3, 4]


def test_an_archive_that_moves_on_during_planning_is_read_again(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.publish(event("a"), event("b"))
    real, first_look = request_api, [True]

    def overtaken(*args: object, **more: object) -> object:
        if first_look:
            first_look.clear()
            archive.add(1, 2, event("a"), event("b"))
            archive.broker.purge(archive.stream)
        return real(*args, **more)  # type: ignore[arg-type]  # handed on as it came

    monkeypatch.setattr(reading, "request_api", overtaken)
    assert archive.positions() == [1, 2]


def test_objects_are_exact_at_every_position(archive: Archive) -> None:
    history = [
        event("a"),
        event("b"),
        event("a", {"id": "a", "n": 2}, old={"id": "a"}),
        event("a", topic="groups/group"),
        event("b", old={"id": "b"}),
        event("b", {"id": "b", "again": True}),
        event("a", old={"id": "a"}),
        "no event",
    ]
    archive.add(1, 4, *history[:4])
    archive.publish(*history)
    expected = {
        3: {"users/user:a": 3, "users/user:b": 2},
        4: {"users/user:a": 3, "users/user:b": 2, "groups/group:a": 4},
        5: {"users/user:a": 3, "groups/group:a": 4},
        8: {"users/user:b": 6, "groups/group:a": 4},
    }
    assert {position: objects(archive, position) for position in expected} == expected
    assert snapshot(archive.spark, archive.store) == 4
    assert {position: objects(archive, position) for position in expected} == expected
    (row,) = objects_at(archive.spark, archive.source, 8).where("topic = 'groups/group'").collect()
    assert bytes(row.data) == history[3].encode()


def test_a_query_for_a_topic_skips_the_row_groups_of_others(archive: Archive) -> None:
    archive.add(1, 2, event("a"), event("b", topic="groups/group"))
    plan = events(archive.spark, archive.source, 1, 2).where("realm = 'udm' and topic = 'groups/group'")
    text = plan._jdf.queryExecution().executedPlan().toString()
    assert "EqualTo(topic,groups/group)" in text
    assert [row.position for row in plan.collect()] == [2]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_each_kind_of_message_has_its_columns(archive: Archive, zone: str) -> None:
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
    ).selectExpr("*", *(f"cast(null as {kind}) as {name}" for name, kind in COLUMN_TYPES.items()))
    rows = as_archived(frame).orderBy("position").collect()
    assert [(row.kind, row.realm, row.id) for row in rows] == [
        ("control", None, "i"),
        ("invalid", None, "mine"),
        ("invalid", None, None),
    ]
