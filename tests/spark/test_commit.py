"""A query with a durable is a consumer like any other: the stream keeps what it needs, and frees what it has done."""

from typing import Any

import pytest
from pyspark.sql import DataFrame

from tests.support.broker import Broker
from tests.support.spark_session import Collector, Read, failure
from tests.support.waiting import PATIENCE_SECONDS, wait_until


def test_an_interest_stream_keeps_what_the_query_has_not_done(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    """Two durables: what both have passed is freed, exactly that, and never before the batch is done."""
    broker.make(unique, retention="interest")
    broker.durable(unique, "other")
    broker.durable(unique, "spark")
    broker.numbers(unique, 1, 30)
    held: list[tuple[int, int]] = []

    def look(batch: DataFrame, number: int) -> None:
        first = min(row.sequence for row in batch.select("sequence").collect())
        held.append((first, broker.floor(unique, "spark")))

    frame = follow(unique, durable="spark", maxOffsetsPerTrigger=10)
    checkpoint = str(collector.directory / "cp")
    writing = frame.writeStream.foreachBatch(look).option("checkpointLocation", checkpoint)
    assert writing.trigger(availableNow=True).start().awaitTermination(PATIENCE_SECONDS)
    assert [first for first, _ in held] == [1, 11, 21]
    assert all(floor < first for first, floor in held), "moved past a batch that was not done"
    assert broker.floor(unique, "spark") == 30, "current when idle"
    assert broker.state(unique)["messages"] == 30, "the other durable has not passed them"
    broker.move(unique, "other", past=17)
    assert broker.sequences(unique) == list(range(18, 31))
    broker.move(unique, "other", past=30)
    assert broker.state(unique)["messages"] == 0


def test_the_durable_is_made_before_anything_is_missed(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    """An interest stream keeps nothing without a consumer; from the first start of the query on, it does."""
    broker.make(unique, retention="interest")
    broker.numbers(unique, 1, 5)  # without a consumer
    collector.finish(follow(unique, durable="spark"))
    assert broker.consumers(unique) == ["spark"]
    broker.numbers(unique, 6, 10)
    assert broker.state(unique)["messages"] == 5
    collector.finish(follow(unique, durable="spark"))
    assert collector.sequences() == list(range(6, 11))
    assert broker.state(unique)["messages"] == 0


def test_a_failed_batch_keeps_its_messages(broker: Broker, follow: Read, collector: Collector, unique: str) -> None:
    broker.make(unique, retention="interest")
    broker.durable(unique, "spark")
    broker.numbers(unique, 1, 10)

    def fail(batch: Any, number: int) -> None:
        if number == 1:
            raise RuntimeError("no")

    frame = follow(unique, durable="spark", maxOffsetsPerTrigger=4)
    checkpoint = str(collector.directory / "cp-checkpoint")
    query = frame.writeStream.foreachBatch(fail).option("checkpointLocation", checkpoint).start()
    failure(query)
    assert broker.sequences(unique) == list(range(5, 11))
    collector.finish(frame)
    assert collector.sequences() == list(range(5, 11))
    assert broker.state(unique)["messages"] == 0


def test_a_running_query_frees_as_it_goes_and_when_idle(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    broker.make(unique, retention="interest")
    broker.durable(unique, "spark")
    query = collector.start(follow(unique, durable="spark", idleWaitMillis=100), available_now=False)
    for last in (5, 10):
        broker.numbers(unique, last - 4, last)
        wait_until(lambda: broker.state(unique)["messages"] == 0)
        assert broker.floor(unique, "spark") == last
    query.stop()
    assert collector.sequences() == list(range(1, 11))


def test_a_commit_may_be_repeated_and_never_goes_back(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    broker.make(unique)
    broker.durable(unique, "spark")
    broker.numbers(unique, 1, 10)
    broker.move(unique, "spark", past=8)  # another client moved it further
    collector.finish(follow(unique, durable="spark", maxOffsetsPerTrigger=4))
    assert broker.floor(unique, "spark") == 10
    collector.finish(follow(unique, durable="spark"))
    assert broker.floor(unique, "spark") == 10
    assert broker.state(unique)["messages"] == 10, "limits retention keeps them"


def test_a_query_that_reads_some_subjects_frees_only_those(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    broker.make(unique, retention="interest")
    broker.durable(unique, "rest", filter_subjects=[f"{unique}.b"])
    frame = follow(unique, durable="spark", subjects=f"{unique}.a,{unique}.c.>,{unique}.c.d")
    collector.finish(frame)
    for number in range(12):  # sequences 1 and up: a, b, c.d, none
        broker.add(f"{unique}.{('a', 'b', 'c.d', 'x')[number % 4]}", ["x"])
    collector.finish(frame)
    assert collector.sequences() == [1, 3, 5, 7, 9, 11]
    assert broker.sequences(unique) == [2, 6, 10]
    for _ in range(10):  # without a consumer: the front of the stream moves past the query, and nothing is lost
        broker.add(f"{unique}.x", ["x"])
    broker.move(unique, "rest", past=12)
    broker.add(f"{unique}.a", ["last"])
    collector.finish(frame)
    assert collector.sequences() == [1, 3, 5, 7, 9, 11, 23]


def test_a_work_queue_is_emptied_as_it_is_read(broker: Broker, follow: Read, collector: Collector, unique: str) -> None:
    broker.make(unique, retention="workqueue")
    broker.numbers(unique, 1, 25)
    collector.finish(follow(unique, durable="spark", maxOffsetsPerTrigger=10))
    assert collector.sequences() == list(range(1, 26))
    assert broker.state(unique)["messages"] == 0
    broker.numbers(unique, 26, 30)
    collector.finish(follow(unique, durable="spark"))
    assert collector.sequences() == list(range(1, 31))
    assert broker.state(unique)["messages"] == 0


def test_a_work_queue_by_subject_leaves_the_others_work_alone(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    broker.make(unique, retention="workqueue")
    for number in range(10):
        broker.add(f"{unique}.{'ab'[number % 2]}", ["x"])
    collector.finish(follow(unique, durable="odd", subjects=f"{unique}.a", maxOffsetsPerTrigger=3), checkpoint="a")
    assert collector.sequences("a") == [1, 3, 5, 7, 9]
    assert broker.sequences(unique) == [2, 4, 6, 8, 10]
    collector.finish(follow(unique, durable="even", subjects=f"{unique}.b"), checkpoint="b")
    assert collector.sequences("b") == [2, 4, 6, 8, 10]
    assert broker.state(unique)["messages"] == 0


@pytest.mark.parametrize("starting", ["latest", "5"])
def test_unread_messages_of_a_work_queue_are_never_removed(
    broker: Broker, follow: Read, collector: Collector, unique: str, starting: str
) -> None:
    broker.make(unique, retention="workqueue")
    broker.numbers(unique, 1, 10)
    reported = failure(collector.start(follow(unique, durable="spark", startingOffsets=starting)))
    assert "would be removed unread" in reported
    assert "leave startingOffsets at earliest" in reported
    assert broker.state(unique)["messages"] == 10


def test_a_durable_for_other_subjects_is_refused(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    broker.make(unique, retention="interest")
    broker.durable(unique, "spark", filter_subjects=[f"{unique}.a"])
    reported = failure(collector.start(follow(unique, durable="spark")))
    assert f"durable 'spark' of stream '{unique}' is for {unique}.a, and the query reads all subjects" in reported


def test_a_start_far_ahead_waits_there(broker: Broker, follow: Read, collector: Collector, unique: str) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 5)
    frame = follow(unique, durable="spark", startingOffsets=8)
    collector.finish(frame)
    broker.numbers(unique, 6, 10)
    collector.finish(frame)
    assert collector.sequences() == [8, 9, 10]
    assert broker.floor(unique, "spark") == 10
