"""A long move of a durable runs beside the next batch; its error is raised, and nothing is lost."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame

from purveyor.jetstream import EmbeddedServer
from purveyor.model.errors import UnknownConsumer
from purveyor.spark.offsets import Offset
from purveyor.spark.options import read_settings
from purveyor.spark.readers import JetStreamStreamReader
from purveyor.spark.stream_control import LONG_MOVE_MESSAGES, DurableMover, StreamControl
from tests.support.broker import Broker
from tests.support.killing import kill_server
from tests.support.spark_session import Collector, Read, failure
from tests.support.waiting import PATIENCE_SECONDS


def settings(broker: Broker, stream: str) -> Any:
    return read_settings({"servers": broker.url, "stream": stream, "durable": "spark"})


@pytest.fixture
def queue(broker: Broker, unique: str) -> str:
    """A queue with more than one move that is long."""
    broker.make(unique, retention="interest")
    broker.durable(unique, "spark")
    broker.numbers(unique, 1, 2 * LONG_MOVE_MESSAGES + 5)
    return unique


def test_long_moves_free_what_is_done_and_no_more(
    broker: Broker, follow: Read, collector: Collector, queue: str
) -> None:
    held: list[tuple[int, int]] = []

    def look(batch: DataFrame, number: int) -> None:
        first = min(row.sequence for row in batch.select("sequence").collect())
        held.append((first, broker.floor(queue, "spark")))

    frame = follow(queue, durable="spark", maxOffsetsPerTrigger=LONG_MOVE_MESSAGES)
    writing = frame.writeStream.foreachBatch(look).option("checkpointLocation", str(collector.directory / "cp"))
    assert writing.trigger(availableNow=True).start().awaitTermination(PATIENCE_SECONDS)
    assert [first for first, _ in held] == [1, LONG_MOVE_MESSAGES + 1, 2 * LONG_MOVE_MESSAGES + 1]
    assert all(floor < first for first, floor in held), "moved past a batch that was not done"
    assert broker.floor(queue, "spark") == 2 * LONG_MOVE_MESSAGES + 5, "a query that ends has moved it all the way"
    assert broker.state(queue)["messages"] == 0


def test_what_went_wrong_with_a_long_move_is_raised_by_the_next_commit(broker: Broker, queue: str) -> None:
    """So the commit itself did not wait for it."""
    reader = JetStreamStreamReader(settings(broker, queue))
    start = reader.initialOffset()
    broker.ask(f"CONSUMER.DELETE.{queue}.spark")
    reader.commit({**start, "sequence": LONG_MOVE_MESSAGES})
    with pytest.raises(UnknownConsumer):
        reader.commit({**start, "sequence": 2 * LONG_MOVE_MESSAGES})


def test_a_short_move_is_made_at_once(broker: Broker, queue: str) -> None:
    reader = JetStreamStreamReader(settings(broker, queue))
    start = reader.initialOffset()
    reader.commit({**start, "sequence": LONG_MOVE_MESSAGES - 1})
    assert broker.floor(queue, "spark") == LONG_MOVE_MESSAGES - 1


def test_a_failed_move_ends_the_query(broker: Broker, follow: Read, collector: Collector, queue: str) -> None:
    broker.durable(queue, "other")  # for which the messages stay

    def spoil(batch: DataFrame, number: int) -> None:
        if number == 0:
            broker.ask(f"CONSUMER.DELETE.{queue}.spark")

    frame = follow(queue, durable="spark", maxOffsetsPerTrigger=LONG_MOVE_MESSAGES)
    writing = frame.writeStream.foreachBatch(spoil).option("checkpointLocation", str(collector.directory / "cp"))
    assert "consumer" in failure(writing.start())


def test_a_copy_for_an_executor_has_nothing_under_way(broker: Broker, queue: str) -> None:
    mover = DurableMover(StreamControl(settings(broker, queue)))
    mover.begin(Offset(queue, broker.created(queue), LONG_MOVE_MESSAGES))
    copy = pickle.loads(pickle.dumps(mover))
    copy.settle()
    mover.end()
    assert broker.floor(queue, "spark") == LONG_MOVE_MESSAGES


def test_a_server_that_is_killed_in_the_midst_of_a_move_is_waited_for(tmp_path: Path, unique: str) -> None:
    with EmbeddedServer(tmp_path) as server:
        broker = Broker(server.address)
        broker.make(unique, retention="interest")
        broker.durable(unique, "spark")
        broker.numbers(unique, 1, 3 * LONG_MOVE_MESSAGES)
        mover = DurableMover(StreamControl(settings(broker, unique)))
        mover.begin(Offset(unique, broker.created(unique), 2 * LONG_MOVE_MESSAGES))
        kill_server(server)  # it is started again by its supervisor
        mover.settle()
        assert broker.floor(unique, "spark") == 2 * LONG_MOVE_MESSAGES
        assert broker.state(unique)["first_seq"] == 2 * LONG_MOVE_MESSAGES + 1
