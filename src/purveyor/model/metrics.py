"""The metrics of the parts: counters, gauges and histograms of this process, each declared once.

A part imports an instrument and adds to it. `app/telemetry` reads the values; without a reader an addition costs a
lock. Names follow Prometheus: `purveyor_`, base units, `_total` for counters. Labels contain names of subscriptions,
queues, parts and stages, never keys, bodies or logins.
"""

import json
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

Labels: TypeAlias = tuple[str, ...]
"""The values of the labels of an instrument, in their order."""


class MetricKind(Enum):
    """The kind of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """The description of a metric. The name of a counter ends in `_total`, that of a duration in `_seconds`."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()


class Counter:
    """A number that only grows while the process lives."""

    def __init__(self, name: str, help_: str, *labels: str) -> None:
        self.info: Final = MetricInfo(name, MetricKind.COUNTER, help_, labels)
        self._values: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, *labels: str, by: float = 1) -> None:
        """Add `by` to the value of these labels."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + by

    def values(self) -> Mapping[Labels, float]:
        """Return the current values."""
        with self._lock:
            return dict(self._values)

    def keep_only(self, label: str, known: frozenset[str]) -> None:
        """Remove the values of deleted things: those whose label is not in `known`."""
        index = self.info.labels.index(label)
        with self._lock:
            for labels in [each for each in self._values if each[index] not in known]:
                del self._values[labels]


class Gauge:
    """A number that can change in both directions."""

    def __init__(self, name: str, help_: str, *labels: str) -> None:
        self.info: Final = MetricInfo(name, MetricKind.GAUGE, help_, labels)
        self._values: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def set(self, value: float, *labels: str) -> None:
        """Set the value of these labels."""
        with self._lock:
            self._values[labels] = value

    def remove(self, *labels: str) -> None:
        """Remove the value of these labels."""
        with self._lock:
            self._values.pop(labels, None)

    def values(self) -> Mapping[Labels, float]:
        """Return the current values."""
        with self._lock:
            return dict(self._values)


@dataclass(frozen=True, slots=True)
class HistogramValues:
    """The values of a histogram: the number up to each bound (and above all of them), and their sum."""

    counts: tuple[int, ...]
    total: float


class Histogram:
    """The distribution of values over buckets."""

    def __init__(self, name: str, help_: str, *labels: str, bounds: Sequence[float]) -> None:
        self.info: Final = MetricInfo(name, MetricKind.HISTOGRAM, help_, labels)
        self.bounds: Final = tuple(bounds)
        self._counts: dict[Labels, list[int]] = {}
        self._totals: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, value: float, *labels: str) -> None:
        """Add a value."""
        bucket = bisect_left(self.bounds, value)
        with self._lock:
            counts = self._counts.get(labels)
            if counts is None:
                counts = self._counts[labels] = [0] * (len(self.bounds) + 1)
            counts[bucket] += 1
            self._totals[labels] = self._totals.get(labels, 0.0) + value

    def values(self) -> Mapping[Labels, HistogramValues]:
        """Return the current values."""
        with self._lock:
            return {
                labels: HistogramValues(tuple(counts), self._totals[labels]) for labels, counts in self._counts.items()
            }

    def remove(self, *labels: str) -> None:
        """Remove the value of these labels."""
        with self._lock:
            self._counts.pop(labels, None)
            self._totals.pop(labels, None)


@dataclass(frozen=True, slots=True)
class WaitTotals:
    """Waits for one thing: how many now, how many so far, their total duration, and the messages that are held back."""

    now: int
    ever: int
    seconds: float
    held: int


class WaitTracker:
    """Counts waits and their duration: call `begin` when a wait begins, `end` when it is over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._finished: dict[str, tuple[int, float]] = {}
        self._running: dict[int, tuple[str, float, int]] = {}
        self._number = 0

    def begin(self, what: str, held: int = 1) -> int:
        """Begin a wait that holds back `held` messages; return its number for `end`."""
        with self._lock:
            self._number += 1
            self._running[self._number] = (what, time.monotonic(), held)
            return self._number

    def end(self, number: int) -> None:
        """End a wait."""
        with self._lock:
            what, began, _ = self._running.pop(number)
            ever, seconds = self._finished.get(what, (0, 0.0))
            self._finished[what] = (ever + 1, seconds + time.monotonic() - began)

    def take_finished(self) -> str | None:
        """Remove the finished waits and return them as text for another process; None if there are none."""
        with self._lock:
            over, self._finished = self._finished, {}
        return json.dumps(over) if over else None

    def add_finished(self, taken: str | None) -> None:
        """Add the finished waits of another process: a Spark task sends them to its driver."""
        for what, (count, waited) in json.loads(taken).items() if taken else ():
            with self._lock:
                ever, seconds = self._finished.get(what, (0, 0.0))
                self._finished[what] = (ever + count, seconds + waited)

    def values(self) -> Mapping[str, WaitTotals]:
        """Return the totals by what is waited for; a wait that continues counts with its time until now."""
        with self._lock:
            now = time.monotonic()
            found = {what: WaitTotals(0, ever, seconds, 0) for what, (ever, seconds) in self._finished.items()}
            for what, began, held in self._running.values():
                before = found.get(what, WaitTotals(0, 0, 0.0, 0))
                found[what] = WaitTotals(
                    before.now + 1, before.ever + 1, before.seconds + now - began, before.held + held
                )
            return found


Instrument: TypeAlias = Counter | Gauge | Histogram


_DURATION_BOUNDS_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

PUBLISHED: Final = Counter(
    "purveyor_events_published_total",
    "Events that this process stored in incoming; duplicate: they were stored before",
    "result",
)
DISPATCHED: Final = Counter(
    "purveyor_messages_dispatched_total",
    "Messages that dispatch stored in the queue of a subscription",
    "subscription",
)
DELIVERED: Final = Counter(
    "purveyor_messages_delivered_total",
    "Messages delivered to consumers of a subscription; each delivery counts",
    "subscription",
)
REDELIVERED: Final = Counter(
    "purveyor_messages_redelivered_total",
    "Of the messages delivered, those that had been delivered before",
    "subscription",
)
ACKNOWLEDGED: Final = Counter(
    "purveyor_messages_acknowledged_total",
    "Messages that consumers of a subscription acknowledged",
    "subscription",
)
RETURNED: Final = Counter(
    "purveyor_messages_returned_total",
    "Messages that consumers of a subscription returned, to receive them again",
    "subscription",
)
EXPIRED: Final = Counter(
    "purveyor_messages_expired_total",
    "Messages that were not acknowledged within the retention of a subscription",
    "subscription",
)
DEAD_LETTERS: Final = Counter(
    "purveyor_dead_letters_parked_total",
    "Messages that this process parked as dead letters, by the part or subscription that gave them up",
    "origin",
)
PUSH_ATTEMPTS: Final = Counter(
    "purveyor_push_attempts_total",
    "Requests that push sent to the endpoint of a subscription, by outcome",
    "subscription",
    "outcome",
)
PUSH_SECONDS: Final = Histogram(
    "purveyor_push_attempt_seconds",
    "How long the endpoint of a subscription took to answer",
    "subscription",
    bounds=_DURATION_BOUNDS_SECONDS,
)
PUSH_WINDOW: Final = Gauge(
    "purveyor_push_window_messages",
    "How many messages push may send to the endpoint of a subscription at the same time",
    "subscription",
)
PUSH_OUTSTANDING: Final = Gauge(
    "purveyor_push_outstanding_messages",
    "How many messages push is sending to the endpoint of a subscription",
    "subscription",
)
STAGE_MESSAGES: Final = Counter(
    "purveyor_stage_messages_total",
    "Messages of a stage: finished (acknowledged), again (failed, to be tried again), dead_letter (given up)",
    "stage",
    "outcome",
)
STAGE_SECONDS: Final = Histogram(
    "purveyor_stage_group_seconds",
    "How long a group of messages took through a stage, from its transaction's begin to its end",
    "stage",
    bounds=_DURATION_BOUNDS_SECONDS,
)
HTTP_REQUESTS: Final = Counter(
    "purveyor_http_requests_total",
    "Requests of the HTTP API, by route, method and status of the answer",
    "route",
    "method",
    "status",
)
BATCHES: Final = Counter("purveyor_pipeline_batches_total", "Batches that a part of the pipeline has completed", "part")
BATCH_SECONDS: Final = Histogram(
    "purveyor_pipeline_batch_seconds",
    "How long a batch of a part took; sampled ten times a second, so short batches may be missing",
    "part",
    bounds=_DURATION_BOUNDS_SECONDS,
)

MIGRATION_WAITS: Final = WaitTracker()
"""Waits of publishers of this process for queues that are sealed for migration, by queue."""

INSTRUMENTS: Final[tuple[Instrument, ...]] = (
    PUBLISHED,
    DISPATCHED,
    DELIVERED,
    REDELIVERED,
    ACKNOWLEDGED,
    RETURNED,
    EXPIRED,
    DEAD_LETTERS,
    PUSH_ATTEMPTS,
    PUSH_SECONDS,
    PUSH_WINDOW,
    PUSH_OUTSTANDING,
    STAGE_MESSAGES,
    STAGE_SECONDS,
    HTTP_REQUESTS,
    BATCHES,
    BATCH_SECONDS,
)
