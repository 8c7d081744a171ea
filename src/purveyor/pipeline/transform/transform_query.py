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
from purveyor.jetstream.bulk.options import AppendOptions
from purveyor.model import metrics
from purveyor.model.errors import InvalidConfig
from purveyor.pipeline.checkpoints import recover, transform_rule
from purveyor.pipeline.transform.mapping_file import DEFAULT_MAPPING, load_mapping
from purveyor.pipeline.transform.output_writer import (
    RESULT,
    OutputWriter,
    advance_receipts,
    create_receipts,
    max_payload,
)
from purveyor.pipeline.transform.record_transform import ORIGIN, TransformRules
from purveyor.pipeline.transform.state_processor import (
    CHUNK_ROW,
    OUTPUT_ROW,
    STATE_OPTIONS,
    DirectoryProcessor,
    chunk_messages,
)
from purveyor.queues.catalogue import LDIF
from purveyor.spark.options import connection_options, read_settings
from purveyor.spark.pyspark_internals import map_in_arrow, transform_with_state

QUERY_NAME: Final = "transform"
_STARTING: Final = threading.Lock()
Write = Callable[[DataFrame, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformSettings:
    """The settings of the query. The queues exist already (`ensure`)."""

    address: Address
    checkpoint: str
    """A directory that the driver and all executors reach: offsets, and the state of the directories."""
    mapping: str | Path = DEFAULT_MAPPING
    """The name of a built-in mapping, or a TOML file."""
    max_offsets_per_trigger: int = 20_000
    """The most messages in one batch: their outputs are in the memory of one task."""
    partitions: int = 1
    """How many tasks share the sources. Fixed when the checkpoint is created; more only help if there are many
    sources."""
    available_now: bool = False
    """End when all current messages are done."""
    patience_seconds: float = 60.0
    """How long the query waits for a lost server before it fails."""
    hold_seconds: int = 120
    """How long `stream:ldif` keeps transformed messages: a checkpoint that is a little older can continue from
    there."""

    def __post_init__(self) -> None:
        for name in ("max_offsets_per_trigger", "partitions"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}", fix="1 or more")


def start_transform(spark: SparkSession, settings: TransformSettings) -> StreamingQuery:
    """Start the query; it continues where its checkpoint ends. Raise InvalidConfig for an invalid mapping.

    Spark copies the settings of the session when a query starts. The settings of this query (its state store, its
    partitions) are set for that moment only.
    """
    rules = TransformRules(load_mapping(settings.mapping), max_payload(settings.address))
    create_receipts(settings.address)
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
    return map_in_arrow(frame, chunk_messages, CHUNK_ROW)


def write_batch(settings: TransformSettings) -> Write:
    """Return the function that writes the outputs of a batch: steps 2 and 3 of `output_writer`."""
    writer = OutputWriter(settings.address, AppendOptions(patience_seconds=settings.patience_seconds))

    def write(outputs: DataFrame, batch: int) -> None:
        del batch
        # The task of a single partition of state also writes: a shuffle costs a small batch as much as the rules do.
        partitions = outputs.sparkSession.conf.get("spark.sql.shuffle.partitions")
        in_one = outputs if partitions == "1" else outputs.repartition(1)
        for row in map_in_arrow(in_one, writer, RESULT).collect():
            metrics.PUBLISHED.add("stored", by=row.events)
            if row.letters:
                metrics.DEAD_LETTERS.add(ORIGIN, by=row.letters)
            metrics.MIGRATION_WAITS.add_finished(row.waits)
        advance_receipts(settings.address)

    return write
