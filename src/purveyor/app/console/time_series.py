"""What the console remembers of numbers over time: rates, how long nothing has moved, and the points of plots.

Numbers of a thousand queues for an hour, so a series keeps a point only when its value changes, and at most one in ten
seconds: an idle queue costs two points. Pure; the time is given in, in seconds.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

KEPT_SECONDS: Final = 3600.0
SPACING_SECONDS: Final = 10.0
RATE_SECONDS: Final = 12.0
"""A rate is that of so many seconds."""

Key: TypeAlias = tuple[str, ...]
Point: TypeAlias = tuple[float, float]


class Series:
    """One number over time."""

    __slots__ = ("_moved_at", "_times", "_values")

    def __init__(self) -> None:
        self._moved_at: float | None = None
        self._times = array("d")
        self._values = array("d")

    def add(self, at: float, value: float) -> None:
        """The value now. The last point moves along until it is far enough from the one before."""
        times, values = self._times, self._values
        if times and at <= times[-1]:
            return
        if values and value != values[-1]:
            self._moved_at = at
        flat = len(values) >= 2 and values[-1] == values[-2] == value
        close = len(times) >= 2 and at - times[-2] < SPACING_SECONDS
        if flat or close:
            times[-1], values[-1] = at, value
        else:
            times.append(at)
            values.append(value)
        while len(times) > 2 and times[1] < at - KEPT_SECONDS:
            del times[0], values[0]

    def at(self, moment: float) -> float | None:
        """The value at a time, between two points in proportion; before the first point the first value."""
        times, values = self._times, self._values
        if not times:
            return None
        place = bisect_right(times, moment)
        if place == 0:
            return values[0]
        if place == len(times):
            return values[-1]
        share = (moment - times[place - 1]) / (times[place] - times[place - 1])
        return values[place - 1] + share * (values[place] - values[place - 1])

    def rate(self, now: float, seconds: float = RATE_SECONDS) -> float | None:
        """How much it went up in a second; None before there are two points."""
        if len(self._times) < 2:
            return None
        begin = max(now - seconds, self._times[0])
        before, after = self.at(begin), self.at(now)
        if before is None or after is None or now <= begin:
            return None
        return max(after - before, 0.0) / (now - begin)

    def still_seconds(self, now: float) -> float:
        """For how long the value has been the same, as far as is known."""
        since = self._moved_at if self._moved_at is not None else self._times[0] if self._times else now
        return max(now - since, 0.0)

    def reached(self, value: float) -> float | None:
        """When it first was at least so much, for a value that goes up; None if that was before its first point."""
        if not self._values or self._values[0] >= value:
            return None
        for time, found in zip(self._times, self._values, strict=True):
            if found >= value:
                return time
        return None

    def points(self) -> list[Point]:
        """All points."""
        return list(zip(self._times, self._values, strict=True))


class History:
    """Series by key. What is not told any more (a queue that is gone) is forgotten with its next look."""

    def __init__(self) -> None:
        self._series: dict[Key, Series] = {}

    def add(self, at: float, values: Mapping[Key, float]) -> None:
        """All numbers at one moment."""
        for key in [key for key in self._series if key not in values]:
            del self._series[key]
        for key, value in values.items():
            series = self._series.get(key)
            if series is None:
                series = self._series[key] = Series()
            series.add(at, value)

    def of(self, *key: str) -> Series:
        """One series; an empty one if nothing is known."""
        return self._series.get(key) or Series()


def rates(points: Iterable[Point], step: float, begin: float, end: float) -> list[tuple[float, float | None]]:
    """A number that goes up as its rate in steps of time, for a plot; None where nothing is known.

    >>> rates([(0.0, 0.0), (10.0, 100.0)], 5.0, 0.0, 15.0)
    [(5.0, 10.0), (10.0, 10.0), (15.0, 0.0)]
    """
    series = Series()
    found = list(points)
    for time, value in found:
        series._times.append(time)  # noqa: SLF001 - as they are, without the spacing of `add`
        series._values.append(value)  # noqa: SLF001
    result: list[tuple[float, float | None]] = []
    moment = begin + step
    while moment <= end + 1e-6:
        before, after = series.at(moment - step), series.at(moment)
        known = bool(found) and moment - step >= found[0][0] - step
        rate = None if before is None or after is None or not known else max(after - before, 0.0) / step
        result.append((moment, rate))
        moment += step
    return result
