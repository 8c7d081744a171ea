"""From the archive to the rows that `fill` writes: which events a subscription gets, and in which order.

All of it is Spark SQL; headers, and the body of an object that was modified, are made where they are written.
"""

from dataclasses import replace
from datetime import datetime

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from purveyor.model.control_events import ReplayJob
from purveyor.model.subscription import Subscription
from purveyor.pipeline.archive.reader import ArchiveSource, events, objects_at
from purveyor.pipeline.archive.schema import EVENT
from purveyor.pipeline.matching import Matcher, deliveries

_ONE_TASK = 500_000
"""Positions that one task looks at sooner than what is found among them is exchanged."""

Range = tuple[int, int]
"""Positions, both included."""


def objects(spark: SparkSession, archive: ArchiveSource, definition: Subscription, position: int) -> DataFrame:
    """The objects as of a position that a subscription gets, ranked by the first of its topics that they match."""
    found = objects_at(spark, archive, position)
    emptied = f.col("operation") != "create"
    # One question for each topic: the first that says yes is the rank.
    topics = Matcher([replace(definition, realms_topics=(topic,)) for topic in definition.realms_topics])
    if definition.filter.fields:
        # A filter is asked about the message that will be sent, whose old is empty; what is sent is the original.
        looked_at = f.when(emptied, _without_old(f.col("data").cast("string"))).otherwise(f.col("data"))
        asked = found.withColumn("original", f.col("data")).withColumn("data", looked_at)
        found = topics.add_targets(asked).withColumn("data", f.col("original"))
    else:
        found = topics.add_targets(found)
    wanted = found.where(f.size("targets") > 0).select(
        f.get("targets", f.lit(0)).alias("rank"),
        "position",
        emptied.alias("emptied"),
        "headers",
        "data",
    )
    return _spread(wanted, position)


def history(
    spark: SparkSession, archive: ArchiveSource, definition: Subscription, job: ReplayJob, range_: Range
) -> DataFrame:
    """The events of a range that a subscription gets, perhaps only those of some topics."""
    found = deliveries(_events(spark, archive, range_), [definition]).drop("subscription")
    if job.topics:
        narrow = Subscription(name=definition.name, realms_topics=job.topics)
        found = deliveries(found, [narrow])
    wanted = found.select(f.lit(0).alias("rank"), "position", f.lit(False).alias("emptied"), "headers", "data")
    return _spread(wanted, range_[1] - range_[0] + 1)


def _spread(rows: DataFrame, looked_at: int) -> DataFrame:
    """Rows for one task: found by that task itself if few positions are looked at, else by all cores."""
    return rows if looked_at <= _ONE_TASK else rows.repartition(1)


def first_stored_at(spark: SparkSession, archive: ArchiveSource, moment: datetime, newest: int) -> int | None:
    """The first position that was stored at or after a time."""
    found = events(spark, archive, 1, newest).where(f.col("stored") >= f.lit(moment))
    return found.agg(f.min("position").alias("position")).collect()[0].position  # type: ignore[no-any-return]


def _events(spark: SparkSession, archive: ArchiveSource, range_: Range) -> DataFrame:
    return events(spark, archive, *range_).where(f.col("kind") == EVENT)


def _without_old(text: Column) -> Column:
    """Only to be looked at by a filter: numbers may be rounded here."""
    return f.concat(
        f.lit('{"attributes":'),
        f.coalesce(f.get_json_object(text, "$.attributes"), f.lit("{}")),
        f.lit(',"body":{"old":{},"new":'),
        f.coalesce(f.get_json_object(text, "$.body.new"), f.lit("{}")),
        f.lit("}}"),
    ).cast("binary")
