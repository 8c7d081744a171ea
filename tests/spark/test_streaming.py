"""Following a stream: bounded batches, exact restarts, and what happens when the stream changes under a query."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.spark import progress_of
from tests.support.broker import Broker, offset
from tests.support.killing import restart_server
from tests.support.nats_servers import OwnServer
from tests.support.spark_session import Collector, Read, failure
from tests.support.waiting import PATIENCE_SECONDS


def reports(query: StreamingQuery) -> list[dict[str, Any]]:
    """The source's part of each progress report that moved on."""
    return [each for report in query.recentProgress for each in report["sources"] if report["numInputRows"] is not None]


def test_each_batch_is_bounded(broker: Broker, follow: Read, collector: Collector, unique: str) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 25)
    broker.delete(unique, 3, 4, 22)
    collector.finish(follow(unique, maxOffsetsPerTrigger=10))
    present = [n for n in range(1, 26) if n not in (3, 4, 22)]
    assert collector.batches() == [[n for n in present if low < n <= low + 10] for low in (0, 10, 20)]


def test_available_now_takes_what_is_there_and_a_restart_continues(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 7)
    collector.finish(follow(unique))
    assert collector.sequences() == list(range(1, 8))
    collector.finish(follow(unique))  # nothing new
    assert collector.sequences() == list(range(1, 8))
    broker.numbers(unique, 8, 20)
    collector.finish(follow(unique, maxOffsetsPerTrigger=4, minPartitions=2))
    assert collector.sequences() == list(range(1, 21))


def test_available_now_ends_though_messages_keep_coming(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    """Each batch makes more messages; those that came after the start are left for the next run."""
    broker.make(unique)
    broker.numbers(unique, 1, 6)

    def grow(batch: Any, number: int) -> None:
        collector.directory.joinpath(f"{number}").write_text(str([row.sequence for row in batch.collect()]))
        broker.add(unique, ["more"] * 3)

    frame = follow(unique, maxOffsetsPerTrigger=2)
    writing = frame.writeStream.foreachBatch(grow).option("checkpointLocation", str(collector.directory / "cp"))
    query = writing.trigger(availableNow=True).start()
    assert query.awaitTermination(PATIENCE_SECONDS)
    assert [collector.directory.joinpath(str(n)).read_text() for n in range(3)] == ["[1, 2]", "[3, 4]", "[5, 6]"]
    assert broker.state(unique)["last_seq"] == 15


@pytest.mark.parametrize(("starting", "expected"), [("latest", [6, 7]), ("3", [3, 4, 5, 6, 7]), ("7", [7])])
def test_a_query_begins_at_its_starting_offset(  # noqa: PLR0917 - fixtures
    broker: Broker, follow: Read, collector: Collector, unique: str, starting: str, expected: list[int]
) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 5)
    frame = follow(unique, startingOffsets=starting)
    collector.finish(frame)
    broker.numbers(unique, 6, 7)
    collector.finish(frame)
    assert collector.sequences() == expected


def test_subjects_and_columns_of_a_following_query(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    broker.make(unique)
    broker.add("", [(f"{unique}.{n % 3}", b"x", None, None) for n in range(12)])
    collector.finish(follow(unique, subjects=f"{unique}.1,{unique}.2", columns="sequence,data", maxOffsetsPerTrigger=5))
    assert collector.sequences() == [2, 3, 5, 6, 8, 9, 11, 12]


def test_a_stream_of_nothing_but_gaps(broker: Broker, follow: Read, collector: Collector, unique: str) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 30)
    broker.delete(unique, *range(2, 30))
    collector.finish(follow(unique, maxOffsetsPerTrigger=7))
    assert collector.sequences() == [1, 30]


def test_lost_messages_fail_the_query_by_name(broker: Broker, follow: Read, collector: Collector, unique: str) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 5)
    collector.finish(follow(unique))
    broker.numbers(unique, 6, 20)
    broker.purge(unique, seq=11)
    reported = failure(collector.start(follow(unique)))
    assert f"sequences 6 to 10 of stream '{unique}' are gone" in reported
    assert "set failOnDataLoss to false" in reported


def test_lost_messages_are_counted_and_left_behind_if_allowed(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 5)
    frame = follow(unique, failOnDataLoss=False, maxOffsetsPerTrigger=4)
    collector.finish(frame)
    broker.numbers(unique, 6, 20)
    broker.purge(unique, seq=11)
    query = collector.finish(frame)
    assert collector.sequences() == [*range(1, 6), *range(11, 21)]
    ends = [offset(source["endOffset"]) for source in reports(query)]
    assert [end["lost"] for end in ends if end["sequence"] == 20][-1] == 5
    assert progress_of(query)[0].lost == 5


def test_a_purge_of_everything_while_a_query_runs(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 10)
    query = collector.start(follow(unique, failOnDataLoss=False), available_now=False)
    query.processAllAvailable()
    broker.purge(unique)  # all of it was read: nothing is lost
    broker.numbers(unique, 11, 15)
    query.processAllAvailable()
    query.stop()
    assert collector.sequences() == list(range(1, 16))
    assert progress_of(query)[0].lost == 0


def test_a_stream_created_again_under_a_running_query_is_an_error(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 10)
    before = broker.created(unique)
    query = collector.start(follow(unique), available_now=False)
    query.processAllAvailable()
    broker.drop(unique)
    broker.make(unique)
    broker.numbers(unique, 1, 20)
    reported = failure(query)
    # Between the two the stream may be missing; a restart reports the identity.
    if "deleted and created again" not in reported:
        assert f"no stream '{unique}'" in reported
        reported = failure(collector.start(follow(unique), available_now=False))
    assert before in reported
    assert broker.created(unique) in reported
    assert "new checkpoint" in reported
    assert collector.sequences() == list(range(1, 11))


def test_a_stream_created_again_is_not_read_in_place_of_the_old_one(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    """A batch that failed is read again, but not from another stream which happens to have those sequences."""
    broker.make(unique)
    broker.numbers(unique, 1, 10)
    before = broker.created(unique)

    def fail(batch: Any, number: int) -> None:
        raise RuntimeError(f"batch {number} of {batch.count()} fails")

    checkpoint = str(collector.directory / "cp-checkpoint")
    frame = follow(unique)
    query = frame.writeStream.foreachBatch(fail).option("checkpointLocation", checkpoint).start()
    assert "batch 0 of 10 fails" in failure(query)
    broker.drop(unique)
    broker.make(unique)
    broker.numbers(unique, 1, 10)
    reported = failure(collector.start(frame))
    assert before in reported
    assert broker.created(unique) in reported
    assert collector.sequences() == []


def test_a_missing_stream_is_an_error(follow: Read, collector: Collector) -> None:
    assert "no stream 'NO-SUCH-STREAM'" in failure(collector.start(follow("NO-SUCH-STREAM")))


def test_a_server_restart_under_a_running_query_is_a_wait(
    own_server: OwnServer, follow: Read, collector: Collector
) -> None:
    server = own_server()
    broker = Broker(server.address)
    broker.make("S")
    broker.numbers("S", 1, 10)
    query = collector.start(follow("S", servers=broker.url, maxOffsetsPerTrigger=3), available_now=False)
    query.processAllAvailable()
    for round_ in (1, 2):
        restart_server(server)
        broker.numbers("S", round_ * 10 + 1, round_ * 10 + 10)
        query.processAllAvailable()
    assert query.isActive
    query.stop()
    assert collector.sequences() == list(range(1, 31))


def test_progress_has_position_lag_and_rates(broker: Broker, follow: Read, collector: Collector, unique: str) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 30)
    query = collector.finish(follow(unique, maxOffsetsPerTrigger=10))
    seen = [
        (end["sequence"], latest["sequence"])
        for source in reports(query)
        if (end := offset(source["endOffset"])) and (latest := offset(source["latestOffset"]))
    ]
    assert [sequence for sequence, _ in seen][:3] == [10, 20, 30]
    assert {latest for _, latest in seen} == {30}
    (progress,) = progress_of(query)
    assert (progress.stream, progress.sequence, progress.latest, progress.lag) == (unique, 30, 30, 0)
    rates = [source["processedRowsPerSecond"] for source in reports(query) if source["numInputRows"]]
    assert rates
    assert all(rate > 0 for rate in rates)


def test_progress_before_the_first_report_is_empty(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    class Quiet:
        lastProgress = None  # noqa: N815 - Spark's name

    assert progress_of(Quiet()) == []  # type: ignore[arg-type]


def test_two_sources_in_one_query(broker: Broker, follow: Read, collector: Collector, unique: str) -> None:
    names = [broker.make(f"{unique}-{side}") for side in "ab"]
    broker.numbers(names[0], 1, 5)
    broker.numbers(names[1], 1, 3)
    both = follow(names[0], idleWaitMillis=0).union(follow(names[1], idleWaitMillis=0))
    query = collector.finish(both)
    assert sorted(collector.sequences()) == [1, 1, 2, 2, 3, 3, 4, 5]
    assert {each.stream: each.sequence for each in progress_of(query)} == {names[0]: 5, names[1]: 3}


def test_the_checkpoint_holds_no_secret(broker: Broker, follow: Read, collector: Collector, unique: str) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 2)
    collector.finish(follow(unique))
    assert broker.address.password is not None
    secret = broker.address.password.encode()
    files = [path for path in Path(collector.directory).rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if secret in path.read_bytes()]


def test_a_micro_batch_writes_no_files_of_checksums(
    spark: SparkSession, broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    """And a checkpoint that has some, as a session with Spark's settings leaves them, is gone on with."""
    local = spark._jvm.org.apache.hadoop.fs.FileSystem.getLocal(spark._jsc.hadoopConfiguration())  # type: ignore[union-attr]
    broker.make(unique)
    broker.numbers(unique, 1, 3)
    local.setWriteChecksum(True)
    try:
        collector.finish(follow(unique, maxOffsetsPerTrigger=1))
    finally:
        local.setWriteChecksum(False)
    before = set(collector.directory.rglob(".*.crc"))
    broker.numbers(unique, 4, 6)
    collector.finish(follow(unique, maxOffsetsPerTrigger=1))
    assert collector.sequences() == [1, 2, 3, 4, 5, 6]
    assert before
    assert not set(collector.directory.rglob(".*.crc")) - before
