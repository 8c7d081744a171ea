"""Queries on the archive for prefill and replay: which events a subscription gets, and in which order.

All of it is Spark SQL; the task that writes the rows (`queue_writer`) makes headers and bodies.
"""

from dataclasses import replace
from datetime import datetime

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from purveyor.model.control_events import ReplayJob
from purveyor.model.subscription import Subscription
from purveyor.pipeline.archive.layout import EVENT
from purveyor.pipeline.archive.reader import ArchiveSource, events, objects_at
from purveyor.pipeline.matching import Matcher, match_subscriptions

_ONE_TASK_POSITIONS = 500_000
"""Up to this many positions, one task reads faster than several that exchange their results."""

Range = tuple[int, int]
"""Positions, both included."""


def objects(spark: SparkSession, archive: ArchiveSource, definition: Subscription, position: int) -> DataFrame:
    """Return the objects as of a position that a subscription gets, ranked by the first of its topics that matches."""
    return _select_objects(spark, archive, definition, position)


def new_objects(
    spark: SparkSession, archive: ArchiveSource, definition: Subscription, before: Subscription, position: int
) -> DataFrame:
    """Return the objects as of a position that a subscription gets, of topics that its definition before did not have.

    An object of a topic that it had may have older messages in the queue, which must not come behind the object.
    """
    return _select_objects(spark, archive, definition, position, before)


def _select_objects(
    spark: SparkSession,
    archive: ArchiveSource,
    definition: Subscription,
    position: int,
    before: Subscription | None = None,
) -> DataFrame:
    found = objects_at(spark, archive, position)
    emptied = f.col("operation") != "create"
    # One target for each topic: the first that matches is the rank. The last target has the topics to leave out.
    left_out = () if before is None else (Subscription(name=before.name, realms_topics=before.realms_topics),)
    topics = Matcher([*(replace(definition, realms_topics=(topic,)) for topic in definition.realms_topics), *left_out])
    if definition.filter.fields:
        # A filter sees the message that will be sent, whose old is empty; the writing task gets the original.
        positions = f.when(emptied, _without_old(f.col("data").cast("string"))).otherwise(f.col("data"))
        asked = found.withColumn("original", f.col("data")).withColumn("data", positions)
        found = topics.add_targets(asked).withColumn("data", f.col("original"))
    else:
        found = topics.add_targets(found)
    if left_out:
        found = found.where(~f.array_contains("targets", f.lit(len(definition.realms_topics))))
    wanted = found.where(f.size("targets") > 0).select(
        f.get("targets", f.lit(0)).alias("rank"),
        "position",
        emptied.alias("emptied"),
        "headers",
        "data",
    )
    return _to_one_task(wanted, position)


def history(
    spark: SparkSession, archive: ArchiveSource, definition: Subscription, job: ReplayJob, range_: Range
) -> DataFrame:
    """Return the events of a range that a subscription gets, or only those of some topics."""
    found = match_subscriptions(_events(spark, archive, range_), [definition]).drop("subscription")
    if job.topics:
        narrow = Subscription(name=definition.name, realms_topics=job.topics)
        found = match_subscriptions(found, [narrow])
    wanted = found.select(f.lit(0).alias("rank"), "position", f.lit(False).alias("emptied"), "headers", "data")
    return _to_one_task(wanted, range_[1] - range_[0] + 1)


def _to_one_task(rows: DataFrame, positions: int) -> DataFrame:
    """Bring rows into one task: it reads a few positions itself; all cores read many."""
    return rows if positions <= _ONE_TASK_POSITIONS else rows.repartition(1)


def first_stored_at(spark: SparkSession, archive: ArchiveSource, moment: datetime, newest: int) -> int | None:
    """Return the first position that was stored at or after a time."""
    found = events(spark, archive, 1, newest).where(f.col("stored") >= f.lit(moment))
    return found.agg(f.min("position").alias("position")).collect()[0].position  # type: ignore[no-any-return]


def _events(spark: SparkSession, archive: ArchiveSource, range_: Range) -> DataFrame:
    return events(spark, archive, *range_).where(f.col("kind") == EVENT)


def _without_old(text: Column) -> Column:
    """Return the body without `old`, for filters only: numbers may be rounded here."""
    return f.concat(
        f.lit('{"attributes":'),
        f.coalesce(f.get_json_object(text, "$.attributes"), f.lit("{}")),
        f.lit(',"body":{"old":{},"new":'),
        f.coalesce(f.get_json_object(text, "$.body.new"), f.lit("{}")),
        f.lit("}}"),
    ).cast("binary")
