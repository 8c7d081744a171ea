"""The Spark job of one batch, and the search for an event on which it fails each time.

**The job** writes topic batches to the queues of the subscriptions and makes a small report. Spark sends a topic batch
to the writing task once, with the list of its targets, and not once per target: the bodies travel once, however many
subscriptions ask for the topic. With several writers each has its share of the targets, and a topic batch goes to every
writer that has one of its targets.

**Isolation** separates a failing event, so that all other events are dispatched:

1. The batch fails for a reason that lies in its data (see `job_failures`), after Spark has tried its tasks several
   times.
2. It is divided in two, and its parts run in their order, each divided in the same way if it fails.
3. A single position fails twice. A trial shows the cause: one subscription without a filter selects the event, and
   nothing is written. If the trial fails, the event is parked as a dead letter of `incoming`, for all subscriptions. If
   it succeeds, the subscriptions are divided in the same way, until the failing ones are found. Each of them is
   suspended at the position: nothing behind it is written for that subscription.

A batch that succeeds costs nothing more than without this. Parts are written in the order of their positions, so each
queue gets its events in order, and the next attempt finds what an attempt wrote before it failed. After a crash at any
point the batch runs again from its beginning and has the same result: what is written is skipped, a letter is found by
its position, and a suspended subscription takes no part.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import AppendOptions, Refusal, RefusalKind, read_range
from purveyor.model import metrics, tracing
from purveyor.model.errors import InvalidInput
from purveyor.model.event import Event
from purveyor.model.subscription import Filter, RealmTopic, Subscription
from purveyor.pipeline.archive.layout import PositionRange
from purveyor.pipeline.archive.reader import ArchiveSource, events
from purveyor.pipeline.dispatch.batch_plan import STREAM, PlannedTarget
from purveyor.pipeline.dispatch.subscriber_messages import INVALID_TARGET, INVALID_WRITER
from purveyor.pipeline.dispatch.write_task import RESULT, TargetSpec, WriteTask
from purveyor.pipeline.event_rows import TOPIC_BATCH_COLUMNS
from purveyor.pipeline.expressions import Pair, TargetTopics
from purveyor.pipeline.job_failures import (
    MIN_TIME_LIMIT_SECONDS,
    data_fault,
    is_data_at_fault,
    is_message_at_fault,
    park_once,
    time_limit,
)
from purveyor.pipeline.matching import Matcher
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
            self._columns = [F.col(name) for name in TOPIC_BATCH_COLUMNS]
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


DELIVERIES_PER_SECOND: Final = 1000
"""For each this many deliveries that a batch may have to make, its jobs may take a second longer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """The report about some positions; and by incarnation the first missing position of queues that were stopped."""

    report: BatchReport = field(default_factory=BatchReport)
    stopped: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "WriteOutcome") -> "WriteOutcome":
        return WriteOutcome(self.report + other.report, {**other.stopped, **self.stopped})


Attempt = Callable[[PositionRange, Sequence[PlannedTarget]], WriteOutcome]
"""Writes some positions to the targets."""
OnRejected = Callable[[PlannedTarget, Refusal], None]
"""Notes that a subscription stops at a position."""
Message = dict[str, Any]
"""A message of `incoming`: position, subject, headers and data."""


def time_limit_seconds(positions: PositionRange, targets: Sequence[PlannedTarget]) -> float:
    """Return how long an attempt may take."""
    return MIN_TIME_LIMIT_SECONDS + len(positions) * len(targets) / DELIVERIES_PER_SECOND


class Isolation:
    """Writes batches, divided where one event makes the whole fail."""

    def __init__(self, spark: SparkSession, archive: ArchiveSource, attempt: Attempt, on_rejected: OnRejected) -> None:
        assert archive.address is not None, "what is dispatched comes from a stream"
        self._spark = spark
        self._address = archive.address
        self._archive = archive
        self._attempt = attempt
        self._on_rejected = on_rejected

    def write(self, positions: PositionRange, targets: Sequence[PlannedTarget]) -> WriteOutcome:
        """Write a batch. Raise errors that are not the fault of its data."""
        found = self._try(positions, targets)
        if isinstance(found, WriteOutcome):
            return found
        _log.warning("positions %d to %d fail and are divided: %s", positions.first, positions.last, found.reason)
        return self._write_divided(positions, targets, found)

    def _try(self, positions: PositionRange, targets: Sequence[PlannedTarget]) -> "WriteOutcome | _Fault":
        try:
            with time_limit(self._spark, time_limit_seconds(positions, targets)):
                return self._attempt(positions, targets)
        except Exception as error:
            reason = data_fault(error)
            if reason is None:
                raise
            return _Fault(reason, error)

    def _write_divided(
        self, positions: PositionRange, targets: Sequence[PlannedTarget], fault: "_Fault"
    ) -> WriteOutcome:
        if len(positions) == 1:
            return self._write_single(positions, targets, fault)
        middle = (positions.first + positions.last) // 2
        outcome = WriteOutcome()
        for part in (PositionRange(positions.first, middle), PositionRange(middle + 1, positions.last)):
            going_on = [target for target in targets if may_get(target, part, outcome)]
            found = self._try(part, going_on)
            outcome += found if isinstance(found, WriteOutcome) else self._write_divided(part, going_on, found)
        return outcome

    def _write_single(
        self, positions: PositionRange, targets: Sequence[PlannedTarget], fault: "_Fault"
    ) -> WriteOutcome:
        """Write one position that failed. First try again: an outage can look like a fault of the event."""
        if not is_data_at_fault(self._spark, fault.error):
            raise fault.error
        again = self._try(positions, targets)
        if isinstance(again, WriteOutcome):
            return again
        message = self._message(positions.first)
        if message is None:  # it was removed in the meantime
            return WriteOutcome()
        trial = self._try(positions, _trial_targets(message, targets))
        if isinstance(trial, _Fault):
            if not is_message_at_fault(self._spark, trial.error):
                raise trial.error
            park_once(self._address, message, f"dispatch fails on this event: {trial.reason}")
            return WriteOutcome()
        return self._write_by_subscription(positions, targets, again)

    def _write_by_subscription(
        self, positions: PositionRange, targets: Sequence[PlannedTarget], fault: "_Fault"
    ) -> WriteOutcome:
        """Write an event to each target that can take it, and suspend the targets that fail on it."""
        if len(targets) <= 1:
            if not is_data_at_fault(self._spark, fault.error):
                raise fault.error
            for target in targets:
                why = f"dispatch fails on the event at position {positions.first} for this subscription: {fault.reason}"
                self._on_rejected(target, Refusal(positions.first, why, 0, RefusalKind.OTHER))
            return WriteOutcome(stopped={target.incarnation: positions.first for target in targets})
        middle = len(targets) // 2
        outcome = WriteOutcome()
        for half in (targets[:middle], targets[middle:]):
            found = self._try(positions, half)
            outcome += found if isinstance(found, WriteOutcome) else self._write_by_subscription(positions, half, found)
        return outcome

    def _message(self, position: int) -> Message | None:
        for batch in read_range(self._address, STREAM, position, position):
            for row in batch.to_pylist():
                return {**row, "position": position}
        for row in events(self._spark, self._archive, position, position).collect():
            return {**row.asDict(), "headers": list((row.headers or {}).items()), "data": bytes(row.data)}
        return None


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why an attempt failed on its data."""

    reason: str
    error: Exception


def may_get(target: PlannedTarget, part: PositionRange, before: WriteOutcome) -> bool:
    """Return whether something of a part may be for a target, after what was written before it."""
    return target.floor < part.last and target.incarnation not in before.stopped


def _trial_targets(message: Message, targets: Sequence[PlannedTarget]) -> list[PlannedTarget]:
    """Return one target that asks for all topics of the event's realm, and already has the event."""
    try:
        realm = Event.decode(message["data"]).realm
    except InvalidInput:
        return []
    return [_unfiltered_target(target, RealmTopic(realm, ".*"), message["position"]) for target in targets[:1]]


def _unfiltered_target(target: PlannedTarget, wanted: RealmTopic, floor: int) -> PlannedTarget:
    record = target.found.record
    definition = replace(record.definition, realms_topics=(wanted,), filter=Filter(), hidden_fields=())
    return PlannedTarget(replace(target.found, record=replace(record, definition=definition)), floor)
