"""The Spark job of one batch: from topic batches to the queues of the subscriptions, and a small report.

Spark sends a topic batch to the writing task once, with the list of its targets, and not once per target: the bodies
travel once, however many subscriptions ask for the topic. With several writers each has its share of the targets, and a
topic batch goes to every writer that has one of its targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import AppendOptions, Refusal, RefusalKind
from purveyor.model import metrics, tracing
from purveyor.model.subscription import Subscription
from purveyor.pipeline.dispatch.batch_plan import PlannedTarget
from purveyor.pipeline.dispatch.subscriber_messages import INVALID_TARGET, INVALID_WRITER
from purveyor.pipeline.dispatch.write_task import RESULT, TargetSpec, WriteTask
from purveyor.pipeline.expressions import Pair, TargetTopics
from purveyor.pipeline.matching import Matcher
from purveyor.pipeline.topic_batches import COLUMNS
from purveyor.spark.pyspark_internals import ArrowTask

_RELEVANT: Final = "size(matched.targets) > 0 or matched.unseen or realm is null"
_OR_PASSES_FILTER: Final = " or exists(matched.passing, each -> size(each) > 0)"
_NO_TARGETS: Final = "cast(array() as array<int>)"
_MATCHED_TARGETS: Final = "matched.targets"
_ALL_TARGETS: Final = f"concat({_MATCHED_TARGETS}, coalesce(flatten(matched.passing), {_NO_TARGETS}))"
_WRITER_SHARES: Final = (
    "explode(array_union(transform({targets}, target -> target % {writers}), "
    f"if(matched.unseen or realm is null, array({INVALID_WRITER}), {_NO_TARGETS}))) as writer"
)
_HEADER_LINES: Final = (
    "flatten(transform(map_entries(headers), "
    "each -> transform(each.value, value -> concat(each.key, ': ', value, '\\r\\n'))))"
)
_HEADER_BLOCK: Final = (
    f"if(cardinality(headers) > 0, concat('NATS/1.0\\r\\n', array_join({_HEADER_LINES}, ''), '\\r\\n'), '')"
)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The result of a batch: counts, refusals, and topics that were seen for the first time."""

    stored: int = 0
    skipped: int = 0
    invalid: int = 0
    refusals: tuple[tuple[PlannedTarget, Refusal], ...] = ()
    topics: Mapping[Pair, frozenset[str]] = field(default_factory=dict)
    """Topics on which expressions were tried for the first time, with those that match."""
    traces: tuple[str, ...] = ()
    """Traces of the events of the batch, if tracing is on."""

    def __add__(self, other: "BatchReport") -> "BatchReport":
        return BatchReport(
            stored=self.stored + other.stored,
            skipped=self.skipped + other.skipped,
            invalid=self.invalid + other.invalid,
            refusals=self.refusals + other.refusals,
            topics={**self.topics, **other.topics},
            traces=self.traces + other.traces,
        )


class BatchJob:
    """Matches and writes events for the planned targets.

    It keeps what it prepares while the subscriptions are the same.
    """

    def __init__(self, address: Address, options: AppendOptions) -> None:
        self._address = address
        self._options = options
        self._matcher = Matcher((), in_topic_batches=True)
        self._target_topics: tuple[TargetTopics, ...] = ()
        self._columns: list[Column] = []
        self._relevant: dict[bool, Column] = {}
        self._write_task: tuple[WriteTask, ArrowTask] | None = None

    def add_known_topics(self, topics: Mapping[Pair, frozenset[str]]) -> None:
        """Remember topics, and the expressions that match them."""
        self._matcher.add_known_topics(topics)

    def prepare(self, targets: Sequence[PlannedTarget]) -> None:
        """Prepare the matcher for these subscriptions."""
        wanted = tuple(target.found.record.definition for target in targets)
        if not _is_same(wanted, self._matcher.subscriptions):
            self._matcher = Matcher(wanted, self._matcher.known_topics, in_topic_batches=True)
            self._target_topics = self._matcher.target_topics

    def run(self, events: DataFrame, targets: Sequence[PlannedTarget], *, writers: int, in_order: bool) -> BatchReport:
        """Write the events, as topic batches, to the queues of the subscriptions that get them.

        `in_order` says that the topic batches are in one partition, by portion; else they are brought there.
        """
        self.prepare(targets)
        filters = self._matcher.has_filters
        if filters not in self._relevant:  # a plan without filters is faster to build, and nearly every plan has none
            self._columns = [F.col(name) for name in COLUMNS]
            self._relevant[filters] = F.expr(_RELEVANT + _OR_PASSES_FILTER if filters else _RELEVANT)
        rows = self._matcher.match(events, self._columns).where(self._relevant[filters])
        if writers > 1:
            shares = _WRITER_SHARES.format(targets=_ALL_TARGETS if filters else _MATCHED_TARGETS, writers=writers)
            rows = rows.selectExpr("*", shares).repartitionById(writers, F.col("writer"))
        elif not in_order:
            rows = rows.repartition(1)
        if writers > 1 or not in_order:
            rows = rows.sortWithinPartitions("portion")
        specs = tuple(TargetSpec(target.name, target.incarnation, target.floor, target.hidden) for target in targets)
        wanted = tracing.is_enabled()
        task = WriteTask(
            address=self._address,
            targets=specs,
            patterns=self._matcher.patterns,
            target_topics=self._target_topics,
            writers=writers,
            options=self._options,
            traces=wanted,
        )
        if self._write_task is None or self._write_task[0] != task:
            self._write_task = task, ArrowTask(task, RESULT)
        return _make_report(self._write_task[1].apply(rows).collect(), targets, self._matcher.patterns)


def _is_same(wanted: Sequence[Subscription], known: Sequence[Subscription]) -> bool:
    return len(wanted) == len(known) and all(a is b or a.is_same_as(b) for a, b in zip(wanted, known, strict=True))


def _make_report(results: Sequence[Any], targets: Sequence[PlannedTarget], patterns: Sequence[Pair]) -> BatchReport:
    written = [row for row in results if row.target is not None and row.target != INVALID_TARGET]
    for row in results:
        metrics.MIGRATION_WAITS.add_finished(row.waits)
    for row in written:
        metrics.DISPATCHED.add(targets[row.target].name, by=row.stored)
    return BatchReport(
        stored=sum(row.stored for row in written),
        skipped=sum(row.skipped for row in written),
        invalid=sum(row.stored for row in results if row.target == INVALID_TARGET),
        refusals=tuple(
            (targets[row.target], Refusal(row.refused_at, row.reason, row.code, RefusalKind(row.kind)))
            for row in written
            if row.refused_at is not None
        ),
        topics={
            (row.realm, row.topic): frozenset(patterns[number][1] for number in row.matching)
            for row in results
            if row.topic is not None
        },
        traces=tuple(row.trace for row in results if row.trace is not None),
    )


def archived_topic_batches(events: DataFrame) -> DataFrame:
    """Turn each event of the archive into a topic batch."""
    return events.where("kind = 'event'").selectExpr(
        "position as portion",
        "subject",
        "realm",
        "topic",
        "array(position) as positions",
        "array(octet_length(data)) as ends",
        "data",
        f"array(octet_length({_HEADER_BLOCK})) as header_ends",
        f"cast({_HEADER_BLOCK} as binary) as headers",
    )
