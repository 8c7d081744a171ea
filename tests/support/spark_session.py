"""Fixtures: one Spark session per worker, and readers, writers and queries on it."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.jetstream.address import Address
from purveyor.spark import session
from tests.support.broker import Broker
from tests.support.waiting import PATIENCE_SECONDS

QUIET = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.extraJavaOptions": os.environ.get("SPARK_SUBMIT_OPTS", ""),
}

SMALL = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
}


Read = Callable[..., DataFrame]


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    home = tmp_path_factory.mktemp("spark")
    options = {
        **SMALL,
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.local.dir": str(home / "local"),
    }
    spark = session("tests", master="local[2]", options=options)
    spark.sparkContext.setLogLevel("OFF")  # what queries say when they are broken on purpose
    yield spark
    spark.stop()


@pytest.fixture
def broker(address: Address) -> Broker:
    return Broker(address)


@pytest.fixture
def read(spark: SparkSession, broker: Broker) -> Read:
    """Return `read(stream, option=value, ...)`, a batch read."""

    def reading(stream: str, **options: Any) -> DataFrame:
        given = {"servers": broker.url, **options}
        return spark.read.format("jetstream").options(stream=stream, **given).load()

    return reading


@pytest.fixture
def follow(spark: SparkSession, broker: Broker) -> Read:
    """Return `follow(stream, option=value, ...)`, a streaming read."""

    def following(stream: str, **options: Any) -> DataFrame:
        given = {"servers": broker.url, **options}
        return spark.readStream.format("jetstream").options(stream=stream, **given).load()

    return following


class Collector:
    """Collects the rows of micro-batches in a directory, one JSON file for each batch."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self, frame: DataFrame, *, checkpoint: str = "checkpoint", available_now: bool = True) -> StreamingQuery:
        """Start a query that stores sequences and payloads of each batch; a repeated batch replaces its file."""
        target = self.directory / f"rows-{checkpoint}"
        target.mkdir(exist_ok=True)

        def keep(batch: DataFrame, number: int) -> None:
            rows = sorted((row.sequence, bytes(row.data).decode("utf-8", "replace")) for row in batch.collect())
            (target / f"{number:06}.json").write_text(json.dumps(rows))

        writing = frame.writeStream.foreachBatch(keep).option(
            "checkpointLocation", str(self.directory / f"cp-{checkpoint}")
        )
        return (writing.trigger(availableNow=True) if available_now else writing).start()

    def finish(self, frame: DataFrame, *, checkpoint: str = "checkpoint") -> StreamingQuery:
        """Run a query on all present messages to its end."""
        query = self.start(frame, checkpoint=checkpoint)
        query.awaitTermination(PATIENCE_SECONDS)
        assert not query.isActive
        return query

    def batches(self, checkpoint: str = "checkpoint") -> list[list[int]]:
        """Return the sequences of each batch."""
        return [[sequence for sequence, _ in rows] for rows in self._rows(checkpoint)]

    def texts(self, checkpoint: str = "checkpoint") -> list[str]:
        return [text for rows in self._rows(checkpoint) for _, text in rows]

    def _rows(self, checkpoint: str) -> list[list[tuple[int, str]]]:
        files = sorted((self.directory / f"rows-{checkpoint}").glob("*.json"))
        return [json.loads(file.read_text()) for file in files]

    def sequences(self, checkpoint: str = "checkpoint") -> list[int]:
        return [sequence for batch in self.batches(checkpoint) for sequence in batch]


@pytest.fixture
def collector(tmp_path: Path, spark: SparkSession) -> Iterator[Collector]:
    yield Collector(tmp_path)
    for query in spark.streams.active:
        query.stop()


def error_text(action: Callable[[], object]) -> str:
    """Return the message with which a call fails."""
    with pytest.raises(PySparkException) as caught:
        action()
    return str(caught.value)


def failure(query: StreamingQuery) -> str:
    """Return the message with which a query fails."""
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(PATIENCE_SECONDS)
    return str(caught.value)
