"""A failure of one queue, one message or the server loses and duplicates no event."""

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from purveyor.jetstream.bulk import outgoing, publish_many
from purveyor.model.registration import Record, RecordState
from purveyor.pipeline.dispatch import subscription_snapshot
from purveyor.pipeline.dispatch.batch_job import BatchJob, BatchReport
from purveyor.pipeline.dispatch.dispatch_query import Dispatcher
from tests.support.dispatch_world import INCOMING, World, event
from tests.support.killing import kill_server
from tests.support.nats_servers import OwnServer
from tests.support.waiting import wait_until


def test_a_missing_queue_is_created_again_and_delays_no_other(world: World) -> None:
    """Nor is anything written twice into the healthy ones."""
    for name in ("ox", "gone", "zoo"):
        world.add(name)
    world.events(1, 3)
    world.start()
    world.wait()
    world.broker.drop("stream:gone")
    world.events(4, 6)
    world.wait()
    assert world.numbers("ox") == world.numbers("zoo") == [1, 2, 3, 4, 5, 6]
    assert world.numbers("gone") == [4, 5, 6]
    assert world.found("gone").suspended is None


def test_one_deleted_and_added_again_while_a_batch_is_written_gets_nothing_of_the_old_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add("ox")
    world.add("zoo")
    world.events(1, 20)
    run = BatchJob.run
    again: list[Record] = []

    def added_again(self: BatchJob, *args: Any, **more: Any) -> BatchReport:
        if not again:
            world.delete("ox")
            again.append(world.add("ox"))
        return run(self, *args, **more)

    monkeypatch.setattr(BatchJob, "run", added_again)
    world.start()
    world.wait()
    assert again
    assert world.numbers("ox") == []
    world.events(21, 22)
    world.wait()
    assert world.numbers("ox") == [21, 22]
    assert world.numbers("zoo") == list(range(1, 23))
    assert world.found("ox").suspended is None


def test_a_queue_that_refuses_is_suspended_and_caught_up_when_it_is_resumed(world: World) -> None:
    for name in ("ox", "full"):
        world.add(name)
    world.broker.update("stream:full", max_msgs=2, discard="new")
    world.events(1, 5)
    world.start()
    world.wait()
    world.events(6, 8)
    world.wait()
    suspended = world.found("full").suspended
    assert suspended is not None
    assert "full" in suspended.reason
    written = world.numbers("full")
    assert len(written) <= 2
    assert suspended.position == 3 + len(written)  # behind the two control events and what was written
    assert world.numbers("ox") == list(range(1, 9))

    world.broker.update("stream:full", max_msgs=-1, discard="old")
    world.resume("full")
    world.events(9, 10)
    world.wait()
    assert world.numbers("full") == list(range(1, 11))
    assert world.numbers("ox") == list(range(1, 11))


def test_a_resumed_queue_is_caught_up_after_a_restart_too(world: World) -> None:
    world.add("full")
    world.broker.update("stream:full", max_msgs=1, discard="new")
    world.events(1, 4)
    world.dispatch()
    world.events(5, 6)
    world.dispatch()
    world.broker.update("stream:full", max_msgs=-1, discard="old")
    world.resume("full")
    world.events(7, 8)
    world.dispatch()
    assert world.numbers("full") == list(range(1, 9))


def test_a_message_too_large_for_a_queue_is_parked_and_the_rest_is_written(world: World) -> None:
    for name in ("ox", "narrow"):
        world.add(name)
    world.broker.update("stream:narrow", max_msg_size=1000)
    world.publish(
        [event(1), event(2, new={"text": "x" * 2000}), event(3), event(4, new={"text": "x" * 3000}), event(5)]
    )
    world.dispatch()
    assert world.numbers("ox") == [1, 2, 3, 4, 5]
    assert world.numbers("narrow") == [1, 3, 5]
    parked = world.letters()
    assert [row["subject"] for row in parked] == ["dead-letters.narrow"] * 2
    assert [json.loads(row["data"])["body"]["new"]["id"] for row in parked] == [2, 4]
    assert dict(parked[0]["headers"])["Purveyor-Position"] == ["4"]
    assert world.found("narrow").suspended is None


def test_a_batch_repeated_after_the_window_of_duplicates_adds_nothing(world: World) -> None:
    """The whole batch is run again, as after a crash before Spark's commit; message ids are forgotten by then."""
    world.add("ox")
    world.broker.update("stream:ox", duplicate_window=100_000_000)
    world.events(1, 50)
    world.broker.add("incoming", [("incoming", b"poison", None, "p")])
    world.dispatch()
    wait_until(lambda: _forgotten(world, "ox"))
    found = world.broker.rows("stream:ox")
    checkpoint = world.settings().checkpoint
    for commit in (checkpoint / "commits").iterdir():
        commit.unlink()
    world.events(51, 60)
    world.dispatch()
    assert world.broker.rows("stream:ox")[: len(found)] == found
    assert world.numbers("ox") == list(range(1, 61))
    assert len(world.letters()) == 1


def _forgotten(world: World, name: str) -> bool:
    """Whether the server takes a message id of the queue for a new one."""
    probe = (f"{name}.prefill", b"", None, "2")
    report = publish_many(world.address, outgoing([probe]))
    if report.stored:
        world.broker.purge(f"stream:{name}", filter=f"{name}.prefill")
    return bool(report.stored)


def test_acknowledged_messages_are_not_written_again(world: World) -> None:
    """The queue is empty, the position last acknowledged says that it was not always."""
    record = world.add("ox")
    world.events(1, 5)
    world.dispatch()
    acknowledged = json.dumps({"incarnation": record.incarnation, "position": world.last()}).encode()
    world.broker.add("", [("$KV.acknowledged.ox", acknowledged, None, None)])
    world.broker.purge("stream:ox")
    for commit in (world.settings().checkpoint / "commits").iterdir():
        commit.unlink()
    world.events(6, 7)
    world.dispatch()
    assert world.numbers("ox") == [6, 7]


def test_a_subscription_deleted_and_added_again_gets_what_follows_its_own_beginning(world: World) -> None:
    world.add("ox")
    world.add("zoo")
    world.start()
    world.events(1, 5)
    world.wait()
    world.delete("ox")
    world.events(6, 8)
    world.add("ox")
    world.events(9, 12)
    world.wait()
    assert world.numbers("ox") == [9, 10, 11, 12]
    assert world.numbers("zoo") == list(range(1, 13))


def test_a_subscription_deleted_before_its_events_are_dispatched_is_dropped_quietly(world: World) -> None:
    world.add("ox")
    world.add("zoo")
    world.events(1, 5)
    world.delete("ox")
    world.events(6, 7)
    world.dispatch()
    assert world.numbers("zoo") == list(range(1, 8))
    assert "stream:ox" not in world.broker.ask("STREAM.NAMES")["streams"]
    assert not world.letters()


def test_a_deletion_that_was_begun_and_left_is_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_snapshot, "ABANDONED_SECONDS", 0.0)
    world.add("ox")
    world.add("zoo")
    found = world.begin_deletion("ox")
    assert found.record.state is RecordState.DELETING
    world.events(1, 2)
    world.dispatch()
    assert "stream:ox" not in world.broker.ask("STREAM.NAMES")["streams"]
    with pytest.raises(KeyError):
        world.found("ox")
    assert world.numbers("zoo") == [1, 2]


def test_a_server_that_is_away_for_seconds_ends_nothing_and_loses_nothing(
    own_server: OwnServer, spark: SparkSession, tmp_path: Path
) -> None:
    """The dispatcher and the publishers wait."""
    server = own_server()
    world = World(server.address, spark, tmp_path)
    world.add("ox")
    world.events(1, 20)
    query = world.start()
    world.wait()
    for round_ in range(2):
        kill_server(server)
        world.events(21 + 20 * round_, 40 + 20 * round_)
        world.wait()
    assert query.exception() is None
    query.stop()
    assert world.numbers("ox") == list(range(1, 61))


def test_a_task_that_fails_in_the_middle_of_a_batch_leaves_no_trace(
    world: World, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver dies between writing and Spark's commit, several times."""
    world.add("ox")
    world.add("groups", "groups/.*")
    world.publish([event(number, "groups/group" if number % 2 else "users/user") for number in range(100)])
    real = Dispatcher._record_progress

    def die(*_: object) -> None:
        raise RuntimeError("died here")

    for _ in range(2):
        monkeypatch.setattr(Dispatcher, "_record_progress", die)
        query = world.start(max_offsets=40)
        wait_until(query.exception)
    monkeypatch.setattr(Dispatcher, "_record_progress", real)
    world.dispatch(max_offsets=40)
    assert world.numbers("ox") == list(range(0, 100, 2))
    assert world.numbers("groups") == list(range(1, 100, 2))
    assert world.broker.state(INCOMING)["last_seq"] == 102
