"""A failure of one queue, one message or the server loses and duplicates no event."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from purveyor.jetstream.bulk import outgoing, publish_many
from purveyor.model.registration import Record, RecordState
from purveyor.pipeline.dispatch import batch_plan
from purveyor.pipeline.dispatch.batch_job import BatchJob, BatchReport
from purveyor.pipeline.dispatch.dispatch_query import Dispatcher
from tests.support.dispatch_harness import INCOMING, DispatchHarness, event
from tests.support.killing import kill_server
from tests.support.nats_servers import OwnServer
from tests.support.waiting import wait_until


def test_a_missing_queue_is_created_again_and_delays_no_other(harness: DispatchHarness) -> None:
    """Nor is anything written twice into the healthy ones."""
    for name in ("ox", "gone", "zoo"):
        harness.add(name)
    harness.events(1, 3)
    harness.start()
    harness.wait()
    harness.broker.drop("stream:gone")
    harness.events(4, 6)
    harness.wait()
    assert harness.numbers("ox") == harness.numbers("zoo") == [1, 2, 3, 4, 5, 6]
    assert harness.numbers("gone") == [4, 5, 6]
    assert harness.found("gone").suspended is None


def test_one_deleted_and_added_again_while_a_batch_is_written_gets_nothing_of_the_old_one(
    harness: DispatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.add("ox")
    harness.add("zoo")
    harness.events(1, 20)
    run = BatchJob.run
    again: list[Record] = []

    def added_again(self: BatchJob, *args: Any, **more: Any) -> BatchReport:
        if not again:
            harness.delete("ox")
            again.append(harness.add("ox"))
        return run(self, *args, **more)

    monkeypatch.setattr(BatchJob, "run", added_again)
    harness.start()
    harness.wait()
    assert again
    assert harness.numbers("ox") == []
    harness.events(21, 22)
    harness.wait()
    assert harness.numbers("ox") == [21, 22]
    assert harness.numbers("zoo") == list(range(1, 23))
    assert harness.found("ox").suspended is None


def test_a_queue_that_refuses_is_suspended_and_caught_up_when_it_is_resumed(harness: DispatchHarness) -> None:
    for name in ("ox", "full"):
        harness.add(name)
    harness.broker.update("stream:full", max_msgs=2, discard="new")
    harness.events(1, 5)
    harness.start()
    harness.wait()
    harness.events(6, 8)
    harness.wait()
    suspended = harness.found("full").suspended
    assert suspended is not None
    assert "full" in suspended.reason
    written = harness.numbers("full")
    assert len(written) <= 2
    assert suspended.position == 3 + len(written)  # behind the two control events and what was written
    assert harness.numbers("ox") == list(range(1, 9))

    harness.broker.update("stream:full", max_msgs=-1, discard="old")
    harness.resume("full")
    harness.events(9, 10)
    harness.wait()
    assert harness.numbers("full") == list(range(1, 11))
    assert harness.numbers("ox") == list(range(1, 11))


def test_a_resumed_queue_is_caught_up_after_a_restart_too(harness: DispatchHarness) -> None:
    harness.add("full")
    harness.broker.update("stream:full", max_msgs=1, discard="new")
    harness.events(1, 4)
    harness.dispatch()
    harness.events(5, 6)
    harness.dispatch()
    harness.broker.update("stream:full", max_msgs=-1, discard="old")
    harness.resume("full")
    harness.events(7, 8)
    harness.dispatch()
    assert harness.numbers("full") == list(range(1, 9))


def test_a_message_too_large_for_a_queue_is_parked_and_the_rest_is_written(harness: DispatchHarness) -> None:
    for name in ("ox", "narrow"):
        harness.add(name)
    harness.broker.update("stream:narrow", max_msg_size=1000)
    harness.publish(
        [event(1), event(2, new={"text": "x" * 2000}), event(3), event(4, new={"text": "x" * 3000}), event(5)]
    )
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2, 3, 4, 5]
    assert harness.numbers("narrow") == [1, 3, 5]
    parked = harness.letters()
    assert [row["subject"] for row in parked] == ["dead-letters.narrow"] * 2
    assert [json.loads(row["data"])["body"]["new"]["id"] for row in parked] == [2, 4]
    assert dict(parked[0]["headers"])["Purveyor-Position"] == ["4"]
    assert harness.found("narrow").suspended is None


def test_a_batch_repeated_after_the_window_of_duplicates_adds_nothing(harness: DispatchHarness) -> None:
    """The whole batch is run again, as after a crash before Spark's commit; message ids are forgotten by then."""
    harness.add("ox")
    harness.broker.update("stream:ox", duplicate_window=100_000_000)
    harness.events(1, 50)
    harness.broker.add("incoming", [("incoming", b"poison", None, "p")])
    harness.dispatch()
    wait_until(lambda: _forgotten(harness, "ox"))
    found = harness.broker.rows("stream:ox")
    checkpoint = harness.settings().checkpoint
    for commit in (checkpoint / "commits").iterdir():
        commit.unlink()
    harness.events(51, 60)
    harness.dispatch()
    assert harness.broker.rows("stream:ox")[: len(found)] == found
    assert harness.numbers("ox") == list(range(1, 61))
    assert len(harness.letters()) == 1


def _forgotten(harness: DispatchHarness, name: str) -> bool:
    """Whether the server takes a message id of the queue for a new one."""
    probe = (f"{name}.prefill", b"", None, "2")
    report = publish_many(harness.address, outgoing([probe]))
    if report.stored:
        harness.broker.purge(f"stream:{name}", filter=f"{name}.prefill")
    return bool(report.stored)


def test_acknowledged_messages_are_not_written_again(harness: DispatchHarness) -> None:
    """The queue is empty, the position last acknowledged says that it was not always."""
    record = harness.add("ox")
    harness.events(1, 5)
    harness.dispatch()
    acknowledged = json.dumps({"incarnation": record.incarnation, "position": harness.last()}).encode()
    harness.broker.add("", [("$KV.acknowledged.ox", acknowledged, None, None)])
    harness.broker.purge("stream:ox")
    for commit in (harness.settings().checkpoint / "commits").iterdir():
        commit.unlink()
    harness.events(6, 7)
    harness.dispatch()
    assert harness.numbers("ox") == [6, 7]


def test_a_subscription_deleted_and_added_again_gets_what_follows_its_own_beginning(harness: DispatchHarness) -> None:
    harness.add("ox")
    harness.add("zoo")
    harness.start()
    harness.events(1, 5)
    harness.wait()
    harness.delete("ox")
    harness.events(6, 8)
    harness.add("ox")
    harness.events(9, 12)
    harness.wait()
    assert harness.numbers("ox") == [9, 10, 11, 12]
    assert harness.numbers("zoo") == list(range(1, 13))


def test_a_subscription_deleted_before_its_events_are_dispatched_is_dropped_quietly(harness: DispatchHarness) -> None:
    harness.add("ox")
    harness.add("zoo")
    harness.events(1, 5)
    harness.delete("ox")
    harness.events(6, 7)
    harness.dispatch()
    assert harness.numbers("zoo") == list(range(1, 8))
    assert "stream:ox" not in harness.broker.ask("STREAM.NAMES")["streams"]
    assert not harness.letters()


def test_a_deletion_that_was_begun_and_left_is_ended(harness: DispatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_plan, "ABANDONED_SECONDS", 0.0)
    harness.add("ox")
    harness.add("zoo")
    found = harness.begin_deletion("ox")
    assert found.record.state is RecordState.DELETING
    harness.events(1, 2)
    harness.dispatch()
    assert "stream:ox" not in harness.broker.ask("STREAM.NAMES")["streams"]
    with pytest.raises(KeyError):
        harness.found("ox")
    assert harness.numbers("zoo") == [1, 2]


def test_a_server_that_is_away_for_seconds_ends_nothing_and_loses_nothing(
    own_server: OwnServer, spark: SparkSession, tmp_path: Path
) -> None:
    """The dispatcher and the publishers wait."""
    server = own_server()
    harness = DispatchHarness(server.address, spark, tmp_path)
    harness.add("ox")
    harness.events(1, 20)
    query = harness.start()
    harness.wait()
    for round_ in range(2):
        kill_server(server)
        harness.events(21 + 20 * round_, 40 + 20 * round_)
        harness.wait()
    assert query.exception() is None
    query.stop()
    assert harness.numbers("ox") == list(range(1, 61))


def test_a_task_that_fails_in_the_middle_of_a_batch_leaves_no_trace(
    harness: DispatchHarness, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver dies between writing and Spark's commit, several times."""
    harness.add("ox")
    harness.add("groups", "groups/.*")
    harness.publish([event(number, "groups/group" if number % 2 else "users/user") for number in range(100)])
    real = Dispatcher._record_progress

    def die(*_: object) -> None:
        raise RuntimeError("died here")

    for _ in range(2):
        monkeypatch.setattr(Dispatcher, "_record_progress", die)
        query = harness.start(max_offsets=40)
        wait_until(query.exception)
    monkeypatch.setattr(Dispatcher, "_record_progress", real)
    harness.dispatch(max_offsets=40)
    assert harness.numbers("ox") == list(range(0, 100, 2))
    assert harness.numbers("groups") == list(range(1, 100, 2))
    assert harness.broker.state(INCOMING)["last_seq"] == 102
