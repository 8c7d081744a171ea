"""Finds the event on which a batch fails each time, and sets it aside, so that everything else goes on.

1. The batch fails for a reason that lies in its data (see `job_failures`), after Spark has tried its tasks several
   times.
2. It is divided in two, and its parts run in their order, each divided in the same way if it fails.
3. A single position fails, and once more when it runs again. A trial shows the cause: one subscription without a filter
   asks for the event, and nothing is written. If the trial fails, the event is parked as a dead letter of `incoming`,
   for all subscriptions. If it succeeds, the subscriptions are divided in the same way, until those are found that fail
   by themselves. Each of them is suspended at the position: nothing behind it is written for that subscription.

A batch that succeeds costs nothing more than without this. Parts are written in the order of their positions, so each
queue gets its events in order, and the next attempt finds what an attempt wrote before it failed. After a crash at any
point the batch runs again from its beginning and has the same result: what is written is skipped, a letter is found by
its position, and a suspended subscription takes no part.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pyspark.sql import SparkSession

from purveyor.jetstream.bulk import Refusal, RefusalKind, read_range
from purveyor.model.errors import InvalidInput
from purveyor.model.event import Event
from purveyor.model.subscription import Filter, RealmTopic
from purveyor.pipeline.archive.layout import PositionRange
from purveyor.pipeline.archive.reader import ArchiveSource, events
from purveyor.pipeline.dispatch.batch_job import BatchReport
from purveyor.pipeline.dispatch.batch_plan import PlannedTarget
from purveyor.pipeline.dispatch.subscription_snapshot import STREAM
from purveyor.pipeline.job_failures import (
    MIN_TIME_LIMIT_SECONDS,
    data_fault,
    is_data_at_fault,
    is_message_at_fault,
    park_once,
    time_limit,
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
            going_on = [target for target in targets if _may_get(target, part, outcome)]
            found = self._try(part, going_on)
            outcome += found if isinstance(found, WriteOutcome) else self._write_divided(part, going_on, found)
        return outcome

    def _write_single(
        self, positions: PositionRange, targets: Sequence[PlannedTarget], fault: "_Fault"
    ) -> WriteOutcome:
        """Write one position that fails: once more, so that an outage that looked like a fault blames no event."""
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
        """Write an event to the targets that do not fail on it by themselves, and suspend the others."""
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


def _may_get(target: PlannedTarget, part: PositionRange, before: WriteOutcome) -> bool:
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
