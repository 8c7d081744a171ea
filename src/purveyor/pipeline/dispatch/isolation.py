"""Finds the event that a batch fails on each time it is run, and sets it aside, so that everything else goes on.

1. The batch fails for a reason that lies in its data (see `faults`), after Spark has tried its tasks several times.
2. It is divided in two, and its parts are run in their order, each divided in the same way if it fails.
3. A single position fails, and once more when it is run again. A trial tells whose fault it is: one subscription
   without filter asks for the event, and nothing is written.
   - The trial fails: the event is parked as a dead letter of `incoming`, for all.
   - It succeeds: the subscriptions are divided in the same way, until those are found that fail by themselves. Each
     of them is suspended at the position: nothing behind it is written for that subscription.

A batch that succeeds costs nothing more than without this. Parts are written in the order of their positions, so each
queue gets its events in order, and what an attempt wrote before it failed is found there by the next. After a crash at
any point the batch is run again from its beginning, and comes to the same end: what is written is skipped, a letter is
known by its position, and a subscription that was suspended takes no part.
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
from purveyor.pipeline.archive.reader import ArchiveSource, events
from purveyor.pipeline.dispatch.batch_job import Report
from purveyor.pipeline.dispatch.batch_plan import Seat, Span
from purveyor.pipeline.dispatch.subscription_snapshot import STREAM
from purveyor.pipeline.faults import LEAST_SECONDS, blames_data, blames_message, data_fault, time_limit
from purveyor.pipeline.parking import park_once

DELIVERIES_PER_SECOND: Final = 1000
"""For this many deliveries that a batch may have to make, its jobs may take a second longer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Written:
    """What became of some positions; and by incarnation the first one that is missing in queues that were stopped."""

    report: Report = field(default_factory=Report)
    stopped: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "Written") -> "Written":
        return Written(self.report + other.report, {**other.stopped, **self.stopped})


Attempt = Callable[[Span, Sequence[Seat]], Written]
"""Writes some positions to those who take part."""
Refuse = Callable[[Seat, Refusal], None]
"""Notes that a subscription stops at a position."""
Message = dict[str, Any]
"""A message of `incoming`: position, subject, headers and data."""


def seconds_for(span: Span, seats: Sequence[Seat]) -> float:
    """How long an attempt may take."""
    return LEAST_SECONDS + len(span) * len(seats) / DELIVERIES_PER_SECOND


class Isolation:
    """Writes batches, in parts where one event makes the whole fail."""

    def __init__(self, spark: SparkSession, archive: ArchiveSource, attempt: Attempt, refuse: Refuse) -> None:
        assert archive.address is not None, "what is dispatched comes from a stream"
        self._spark = spark
        self._address = archive.address
        self._archive = archive
        self._attempt = attempt
        self._refuse = refuse

    def write(self, span: Span, seats: Sequence[Seat]) -> Written:
        """Write a batch. Raises what is not the fault of its data."""
        found = self._try(span, seats)
        if isinstance(found, Written):
            return found
        _log.warning("positions %d to %d fail and are divided: %s", span.first, span.last, found.reason)
        return self._divided(span, seats, found)

    def _try(self, span: Span, seats: Sequence[Seat]) -> "Written | _Fault":
        try:
            with time_limit(self._spark, seconds_for(span, seats)):
                return self._attempt(span, seats)
        except Exception as error:
            reason = data_fault(error)
            if reason is None:
                raise
            return _Fault(reason, error)

    def _divided(self, span: Span, seats: Sequence[Seat], fault: "_Fault") -> Written:
        if len(span) == 1:
            return self._single(span, seats, fault)
        middle = (span.first + span.last) // 2
        written = Written()
        for part in (Span(span.first, middle), Span(middle + 1, span.last)):
            going_on = [seat for seat in seats if _takes_part(seat, part, written)]
            found = self._try(part, going_on)
            written += found if isinstance(found, Written) else self._divided(part, going_on, found)
        return written

    def _single(self, span: Span, seats: Sequence[Seat], fault: "_Fault") -> Written:
        """One position that fails: once more, so that an outage which looked like a fault blames no event."""
        if not blames_data(self._spark, fault.error):
            raise fault.error
        again = self._try(span, seats)
        if isinstance(again, Written):
            return again
        message = self._message(span.first)
        if message is None:  # it was removed meanwhile
            return Written()
        trial = self._try(span, _without_filter(message, seats))
        if isinstance(trial, _Fault):
            if not blames_message(self._spark, trial.error):
                raise trial.error
            park_once(self._address, message, f"dispatch fails on this event: {trial.reason}")
            return Written()
        return self._by_subscription(span, seats, again)

    def _by_subscription(self, span: Span, seats: Sequence[Seat], fault: "_Fault") -> Written:
        """Write an event to those that do not fail on it by themselves, and suspend the others."""
        if len(seats) <= 1:
            if not blames_data(self._spark, fault.error):
                raise fault.error
            for seat in seats:
                why = f"dispatch fails on the event at position {span.first} for this subscription: {fault.reason}"
                self._refuse(seat, Refusal(span.first, why, 0, RefusalKind.OTHER))
            return Written(stopped={seat.incarnation: span.first for seat in seats})
        middle = len(seats) // 2
        written = Written()
        for half in (seats[:middle], seats[middle:]):
            found = self._try(span, half)
            written += found if isinstance(found, Written) else self._by_subscription(span, half, found)
        return written

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


def _takes_part(seat: Seat, part: Span, before: Written) -> bool:
    """Whether something of a part may be for a subscription, after what was written before it."""
    return seat.floor < part.last and seat.incarnation not in before.stopped


def _without_filter(message: Message, seats: Sequence[Seat]) -> list[Seat]:
    """One subscription that asks for all topics of the event's realm, and has got the event already."""
    try:
        realm = Event.decode(message["data"]).realm
    except InvalidInput:
        return []
    return [_asking(seat, RealmTopic(realm, ".*"), message["position"]) for seat in seats[:1]]


def _asking(seat: Seat, wanted: RealmTopic, floor: int) -> Seat:
    record = seat.found.record
    definition = replace(record.definition, realms_topics=(wanted,), filter=Filter(), hidden_fields=())
    return Seat(replace(seat.found, record=replace(record, definition=definition)), floor)
