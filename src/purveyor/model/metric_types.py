"""What the parts count while they work, as plain numbers of this process; `app/telemetry` shows them to who asks.

A part imports the meter and adds to it. Nothing here knows who reads: without a reader it costs a lock and an addition.
All meters are declared in `figures`, once, with their name, labels and meaning.
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
"""The values of a meter's labels, in their order."""


class Kind(Enum):
    """What a number means: how much it was so far, how much it is, or how values are spread."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as it is told to the outside. The name of a counter ends in `_total`, that of a time in `_seconds`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


class Counter:
    """Goes up, as long as the process lives."""

    def __init__(self, name: str, help_: str, *labels: str) -> None:
        self.figure: Final = Figure(name, Kind.COUNTER, help_, labels)
        self._values: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, *labels: str, by: float = 1) -> None:
        """So many more."""
        with self._lock:
            self._values[labels] = self._values.get(labels, 0) + by

    def values(self) -> Mapping[Labels, float]:
        """As of now."""
        with self._lock:
            return dict(self._values)

    def keep(self, label: str, known: frozenset[str]) -> None:
        """Forget what has another value of a label than these: it is gone, and its numbers would stay for ever."""
        place = self.figure.labels.index(label)
        with self._lock:
            for labels in [each for each in self._values if each[place] not in known]:
                del self._values[labels]


class Gauge:
    """Is what it was last set to."""

    def __init__(self, name: str, help_: str, *labels: str) -> None:
        self.figure: Final = Figure(name, Kind.GAUGE, help_, labels)
        self._values: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def set(self, value: float, *labels: str) -> None:
        """It is this now."""
        with self._lock:
            self._values[labels] = value

    def remove(self, *labels: str) -> None:
        """There is no such thing any more."""
        with self._lock:
            self._values.pop(labels, None)

    def values(self) -> Mapping[Labels, float]:
        """As of now."""
        with self._lock:
            return dict(self._values)


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of a histogram: how many up to each bound (and above them all), and their sum."""

    counts: tuple[int, ...]
    total: float


class Histogram:
    """How values are spread."""

    def __init__(self, name: str, help_: str, *labels: str, bounds: Sequence[float]) -> None:
        self.figure: Final = Figure(name, Kind.HISTOGRAM, help_, labels)
        self.bounds: Final = tuple(bounds)
        self._counts: dict[Labels, list[int]] = {}
        self._totals: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, value: float, *labels: str) -> None:
        """One more value."""
        place = bisect_left(self.bounds, value)
        with self._lock:
            counts = self._counts.get(labels)
            if counts is None:
                counts = self._counts[labels] = [0] * (len(self.bounds) + 1)
            counts[place] += 1
            self._totals[labels] = self._totals.get(labels, 0.0) + value

    def values(self) -> Mapping[Labels, Spread]:
        """As of now."""
        with self._lock:
            return {labels: Spread(tuple(counts), self._totals[labels]) for labels, counts in self._counts.items()}

    def remove(self, *labels: str) -> None:
        """There is no such thing any more."""
        with self._lock:
            self._counts.pop(labels, None)
            self._totals.pop(labels, None)


@dataclass(frozen=True, slots=True)
class Waited:
    """Those who wait for something: how many now, since ever, for how long together, and with how much in hand."""

    now: int
    ever: int
    seconds: float
    held: int


class Waits:
    """Who waits for what, and for how long: `begin` when the waiting begins, `end` when it is over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._over: dict[str, tuple[int, float]] = {}
        self._going: dict[int, tuple[str, float, int]] = {}
        self._number = 0

    def begin(self, what: str, held: int = 1) -> int:
        """Somebody waits for it from now on, with so many messages in hand; what to give to `end`."""
        with self._lock:
            self._number += 1
            self._going[self._number] = (what, time.monotonic(), held)
            return self._number

    def end(self, number: int) -> None:
        """The waiting is over, however it ended."""
        with self._lock:
            what, began, _ = self._going.pop(number)
            ever, seconds = self._over.get(what, (0, 0.0))
            self._over[what] = (ever + 1, seconds + time.monotonic() - began)

    def take(self) -> str | None:
        """The waits that are over, as text for `put` in another process, and forgotten here; None if there are none."""
        with self._lock:
            over, self._over = self._over, {}
        return json.dumps(over) if over else None

    def put(self, taken: str | None) -> None:
        """Waits of a process that nobody asks: a task of Spark tells them to its driver."""
        for what, (count, waited) in json.loads(taken).items() if taken else ():
            with self._lock:
                ever, seconds = self._over.get(what, (0, 0.0))
                self._over[what] = (ever + count, seconds + waited)

    def values(self) -> Mapping[str, Waited]:
        """By what is waited for; who waits still counts with the time until now."""
        with self._lock:
            now = time.monotonic()
            found = {what: Waited(0, ever, seconds, 0) for what, (ever, seconds) in self._over.items()}
            for what, began, held in self._going.values():
                before = found.get(what, Waited(0, 0, 0.0, 0))
                found[what] = Waited(before.now + 1, before.ever + 1, before.seconds + now - began, before.held + held)
            return found


Meter: TypeAlias = Counter | Gauge | Histogram
