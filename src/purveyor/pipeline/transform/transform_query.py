"""The transform as a Structured Streaming query: `stream:ldif` in, `stream:incoming` and `stream:dead-letters` out.

source (durable `transformer`) -> chunks by source -> directory in Spark's state -> outputs -> one task -> append_once
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.append.types import AppendOptions
from purveyor.model import metrics
from purveyor.model.errors import InvalidConfig
from purveyor.pipeline.checkpoint_recovery import recover, transform_rule
from purveyor.pipeline.transform.mapping_file import load_mapping
from purveyor.pipeline.transform.output_writer import (
    WRITTEN,
    Writer,
    make_receipts,
    max_payload,
    settle_receipts,
)
from purveyor.pipeline.transform.record_transform import ORIGIN, Rules
from purveyor.pipeline.transform.row_chunks import PACKED, pack
from purveyor.pipeline.transform.state_processor import OUTPUT_ROW, DirectoryProcessor
from purveyor.pipeline.transform.transform_with_state import STATE_OPTIONS, transform_with_state
from purveyor.queues.catalogue import LDIF
from purveyor.spark.map_in_arrow import map_in_arrow
from purveyor.spark.options import connection_options, read_settings

QUERY_NAME: Final = "transform"
_STARTING: Final = threading.Lock()
Write = Callable[[DataFrame, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformSettings:
    """What the query needs to know. The queues are there already (`ensure`)."""

    address: Address
    checkpoint: str
    """A directory that the driver and all executors reach: offsets, and the state of the directories."""
    mapping: Path | None = None
    """A TOML file; None is the default mapping."""
    max_offsets_per_trigger: int = 20_000
    """At most so many messages in one batch: their outputs are in the memory of one task."""
    partitions: int = 1
    """How many tasks share the sources. It is fixed when the checkpoint is made; more only help if there are many."""
    available_now: bool = False
    """End when what is there now is done."""
    patience_seconds: float = 60.0
    """How long a lost server is waited for before the query fails."""
    hold_seconds: int = 120
    """How long `stream:ldif` keeps what was transformed: a checkpoint that is a little older can go on from there."""

    def __post_init__(self) -> None:
        for name in ("max_offsets_per_trigger", "partitions"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}", fix="1 or more")


def start_transform(spark: SparkSession, settings: TransformSettings) -> StreamingQuery:
    """Start the query; it goes on where its checkpoint ends. InvalidConfig for a mapping that is wrong.

    Spark copies the settings of the session when a query starts. Those of this one (its state store, its partitions)
    are set for that moment only.
    """
    rules = Rules(load_mapping(settings.mapping), max_payload(settings.address))
    make_receipts(settings.address)
    (reader,) = LDIF.readers
    reading = {**connection_options(settings.address), "stream": LDIF.stream, "durable": reader.durable}
    recover(Path(settings.checkpoint), read_settings(reading), transform_rule)
    messages = _messages(spark, settings)
    outputs = transform_with_state(messages, "subject", DirectoryProcessor(rules), OUTPUT_ROW)
    writing = (
        outputs.writeStream.queryName(QUERY_NAME)
        .outputMode("append")
        .option("checkpointLocation", settings.checkpoint)
        .foreachBatch(write_batch(settings))
    )
    with _settings(spark, {**STATE_OPTIONS, "spark.sql.shuffle.partitions": str(settings.partitions)}):
        return (writing.trigger(availableNow=True) if settings.available_now else writing).start()


@contextmanager
def _settings(spark: SparkSession, options: Mapping[str, str]) -> Iterator[None]:
    with _STARTING:
        before = {name: spark.conf.get(name, None) for name in options}
        try:
            for name, value in options.items():
                spark.conf.set(name, value)
            yield
        finally:
            for name, known in before.items():
                spark.conf.unset(name) if known is None else spark.conf.set(name, known)


def _messages(spark: SparkSession, settings: TransformSettings) -> DataFrame:
    (reader,) = LDIF.readers
    frame = (
        spark.readStream.format("jetstream")
        .options(**connection_options(settings.address))
        .option("stream", LDIF.stream)
        .option("durable", reader.durable)
        .option("holdSeconds", str(settings.hold_seconds))
        .option("syncCheckpoint", str(Path(settings.checkpoint).absolute()))
        .option("maxOffsetsPerTrigger", str(settings.max_offsets_per_trigger))
        .option("patienceSeconds", str(round(settings.patience_seconds)))
        .load()
    )
    return map_in_arrow(frame, pack, PACKED)


def write_batch(settings: TransformSettings) -> Write:
    """What is done with the outputs of a batch: steps 2 and 3 of `writing`."""
    writer = Writer(settings.address, AppendOptions(patience_seconds=settings.patience_seconds))

    def write(outputs: DataFrame, batch: int) -> None:
        del batch
        for row in map_in_arrow(outputs.repartition(1), writer, WRITTEN).collect():
            metrics.PUBLISHED.add("stored", by=row.events)
            if row.letters:
                metrics.DEAD_LETTERS.add(ORIGIN, by=row.letters)
            metrics.MIGRATION_WAITS.put(row.waits)
        settle_receipts(settings.address)

    return write
