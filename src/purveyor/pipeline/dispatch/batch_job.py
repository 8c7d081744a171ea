"""Events to queues: the one Spark job of a batch, from packs of events to a small report.

A pack goes to the writing task once, with the list of its targets, and not once per target: twenty subscriptions on one
topic do not carry the bodies twenty times through Spark. With several writers each has its share of the targets, and a
pack goes to every writer that has one of its targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import AppendOptions, Refusal, RefusalKind
from purveyor.model import metrics, tracing
from purveyor.model.subscription import Subscription
from purveyor.pipeline.dispatch.batch_plan import Seat
from purveyor.pipeline.dispatch.subscriber_messages import INVALID, INVALID_WRITER
from purveyor.pipeline.dispatch.write_task import RESULT, Place, Task
from purveyor.pipeline.expressions import Choice, Pair
from purveyor.pipeline.matching import Matcher
from purveyor.pipeline.topic_batches import COLUMNS
from purveyor.spark.map_in_arrow import ArrowTask

_MATTERS: Final = "size(matched.targets) > 0 or matched.unseen or realm is null"
_PASSES: Final = " or exists(matched.passing, each -> size(each) > 0)"
_NOBODY: Final = "cast(array() as array<int>)"
_PLAIN: Final = "matched.targets"
_ANY: Final = f"concat({_PLAIN}, coalesce(flatten(matched.passing), {_NOBODY}))"
_SHARES: Final = (
    "explode(array_union(transform({targets}, target -> target % {writers}), "
    f"if(matched.unseen or realm is null, array({INVALID_WRITER}), {_NOBODY}))) as writer"
)


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a batch: counts, who refused, and which topics were met for the first time."""

    stored: int = 0
    skipped: int = 0
    invalid: int = 0
    refusals: tuple[tuple[Seat, Refusal], ...] = ()
    topics: Mapping[Pair, frozenset[str]] = field(default_factory=dict)
    """Topics on which the expressions were tried for the first time, with those that match."""
    traces: tuple[str, ...] = ()
    """Traces that events of the batch belong to, if somebody wants to know."""

    def __add__(self, other: "Report") -> "Report":
        return Report(
            stored=self.stored + other.stored,
            skipped=self.skipped + other.skipped,
            invalid=self.invalid + other.invalid,
            refusals=self.refusals + other.refusals,
            topics={**self.topics, **other.topics},
            traces=self.traces + other.traces,
        )


class Deliverer:
    """Matching and writing for the subscriptions that take part. What it prepares is kept while those are the same."""

    def __init__(self, address: Address, options: AppendOptions) -> None:
        self._address = address
        self._options = options
        self._matcher = Matcher((), packed=True)
        self._choices: tuple[Choice, ...] = ()
        self._columns: list[Column] = []
        self._matters: dict[bool, Column] = {}
        self._writing: tuple[Task, ArrowTask] | None = None

    def learn(self, topics: Mapping[Pair, frozenset[str]]) -> None:
        """Topics that were met, and the expressions that match them."""
        self._matcher.learn(topics)

    def prepare(self, seats: Sequence[Seat]) -> None:
        """Be ready for these subscriptions."""
        wanted = tuple(seat.found.record.definition for seat in seats)
        if not _same(wanted, self._matcher.subscriptions):
            self._matcher = Matcher(wanted, self._matcher.learned, packed=True)
            self._choices = self._matcher.choices

    def deliver(self, events: DataFrame, seats: Sequence[Seat], *, writers: int, in_order: bool) -> Report:
        """Write the events (see `packs`) to the queues of those who get them.

        `in_order` says that the packs lie in one partition, by portion; else they are brought there.
        """
        self.prepare(seats)
        filters = self._matcher.filters
        if filters not in self._matters:  # a plan without them is quicker made, and nearly every one is
            self._columns = [F.col(name) for name in COLUMNS]
            self._matters[filters] = F.expr(_MATTERS + _PASSES if filters else _MATTERS)
        rows = self._matcher.match(events, self._columns).where(self._matters[filters])
        if writers > 1:
            shares = _SHARES.format(targets=_ANY if filters else _PLAIN, writers=writers)
            rows = rows.selectExpr("*", shares).repartitionById(writers, F.col("writer"))
        elif not in_order:
            rows = rows.repartition(1)
        if writers > 1 or not in_order:
            rows = rows.sortWithinPartitions("portion")
        told = tuple(Place(seat.name, seat.incarnation, seat.floor, seat.hidden) for seat in seats)
        wanted = tracing.enabled()
        task = Task(
            address=self._address,
            seats=told,
            patterns=self._matcher.patterns,
            choices=self._choices,
            writers=writers,
            options=self._options,
            traces=wanted,
        )
        if self._writing is None or self._writing[0] != task:
            self._writing = task, ArrowTask(task, RESULT)
        return _report(self._writing[1].on(rows).collect(), seats, self._matcher.patterns)


def _same(wanted: Sequence[Subscription], known: Sequence[Subscription]) -> bool:
    return len(wanted) == len(known) and all(a is b or a.same_as(b) for a, b in zip(wanted, known, strict=True))


def _report(results: Sequence[Any], seats: Sequence[Seat], patterns: Sequence[Pair]) -> Report:
    written = [row for row in results if row.target is not None and row.target != INVALID]
    for row in results:
        metrics.MIGRATION_WAITS.put(row.waits)
    for row in written:
        metrics.DISPATCHED.add(seats[row.target].name, by=row.stored)
    return Report(
        stored=sum(row.stored for row in written),
        skipped=sum(row.skipped for row in written),
        invalid=sum(row.stored for row in results if row.target == INVALID),
        refusals=tuple(
            (seats[row.target], Refusal(row.refused_at, row.reason, row.code, RefusalKind(row.kind)))
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
