"""Numbers of the last hour: rates, how long a value has not changed, and charts as options of ECharts.

There may be thousands of queues, so a series keeps a point only when its value changes, and at most one in ten seconds:
an idle queue costs two points. Pure: the caller passes the time in seconds.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

RETENTION_SECONDS: Final = 3600.0
SPACING_SECONDS: Final = 10.0
RATE_SECONDS: Final = 12.0
"""The time over which a rate is computed."""

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
        """Add a value. The last point moves along until it is far enough from the previous one."""
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
        while len(times) > 2 and times[1] < at - RETENTION_SECONDS:
            del times[0], values[0]

    def at(self, moment: float) -> float | None:
        """Return the value at a time, interpolated between two points; before the first point, the first value."""
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
        """Return the increase per second; None before there are two points."""
        if len(self._times) < 2:
            return None
        begin = max(now - seconds, self._times[0])
        before, after = self.at(begin), self.at(now)
        if before is None or after is None or now <= begin:
            return None
        return max(after - before, 0.0) / (now - begin)

    def still_seconds(self, now: float) -> float:
        """Return how long the value has not changed, as far as the series goes back."""
        since = self._moved_at if self._moved_at is not None else self._times[0] if self._times else now
        return max(now - since, 0.0)

    def first_reached(self, value: float) -> float | None:
        """Return when a rising value first reached `value`; None if that was before the first point."""
        if not self._values or self._values[0] >= value:
            return None
        for time, found in zip(self._times, self._values, strict=True):
            if found >= value:
                return time
        return None

    def points(self) -> list[Point]:
        """Return all points."""
        return list(zip(self._times, self._values, strict=True))


class History:
    """Series by key. A series without a new value (of a deleted queue) is dropped."""

    def __init__(self) -> None:
        self._series: dict[Key, Series] = {}

    def add(self, at: float, values: Mapping[Key, float]) -> None:
        """Add the values of one moment."""
        for key in [key for key in self._series if key not in values]:
            del self._series[key]
        for key, value in values.items():
            series = self._series.get(key)
            if series is None:
                series = self._series[key] = Series()
            series.add(at, value)

    def of(self, *key: str) -> Series:
        """Return a series; an empty one if the key is unknown."""
        return self._series.get(key) or Series()


def rates(points: Iterable[Point], step: float, begin: float, end: float) -> list[tuple[float, float | None]]:
    """Return a rising number as rates per step, for a plot; None where it is unknown.

    >>> rates([(0.0, 0.0), (10.0, 100.0)], 5.0, 0.0, 15.0)
    [(5.0, 10.0), (10.0, 10.0), (15.0, 0.0)]
    """
    series = Series()
    found = list(points)
    for time, value in found:
        series._times.append(time)  # noqa: SLF001 - without the spacing of `add`
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


COLOURS: Final = ("#4f7df0", "#2f9e6b", "#e08a1e", "#d64545", "#8b6fd6")
STEP_SECONDS: Final = 15.0
PLOT_SECONDS: Final = 1800.0
MIN_PLOT_SECONDS: Final = 300.0
_AXIS: Final = "#8590a0"
_GRID: Final = "rgba(133, 144, 160, 0.18)"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: str = COLOURS[0]


def rate_line(name: str, series: Series, now: float, colour: str = COLOURS[0]) -> Line:
    """Return a line with the increase of a rising number per second."""
    end = now - now % STEP_SECONDS
    return Line(name, rates(series.points(), STEP_SECONDS, end - PLOT_SECONDS, end), colour)


def value_line(name: str, series: Series, now: float, colour: str = COLOURS[0]) -> Line:
    """Return a line with the values of a number."""
    begin, found = now - PLOT_SECONDS, series.points()
    inside = [point for point in found if point[0] >= begin]
    before = [(begin, value) for time, value in found if time < begin][-1:]
    return Line(name, [*before, *inside], colour)


def working_line(name: str, values: Series, batches: Series, now: float, colour: str = COLOURS[0]) -> Line:
    """Return a line with a value of each batch; no value for the times without a batch."""
    end = now - now % STEP_SECONDS
    steps = [end - PLOT_SECONDS + STEP_SECONDS * number for number in range(1, int(PLOT_SECONDS / STEP_SECONDS) + 1)]
    return Line(
        name, [(at, values.at(at) if _is_higher(batches, at - STEP_SECONDS, at) else None) for at in steps], colour
    )


def _is_higher(series: Series, before: float, after: float) -> bool:
    first, last = series.at(before), series.at(after)
    return first is not None and last is not None and last > first


def plot(lines: Sequence[Line], *, now: float, unit: str = "") -> dict[str, Any]:
    """Return the ECharts options of a plot."""
    return {
        "animation": False,
        "textStyle": {"fontFamily": "system-ui, sans-serif"},
        "grid": {"left": 8, "right": 16, "top": 32, "bottom": 4, "containLabel": True},
        "legend": {
            "top": 0,
            "left": 0,
            "icon": "roundRect",
            "itemWidth": 12,
            "itemHeight": 4,
            "textStyle": {"color": _AXIS},
        },
        "tooltip": {"trigger": "axis", "confine": True},
        "xAxis": {
            "type": "time",
            "min": round(_begin(lines, now) * 1000),
            "max": round(now * 1000),
            "axisLine": {"lineStyle": {"color": _GRID}},
            "axisLabel": {"color": _AXIS, "hideOverlap": True},
            "splitLine": {"show": False},
        },
        "yAxis": {
            "type": "value",
            "min": 0,
            "minInterval": 1 if not unit else 0,
            "axisLabel": {"color": _AXIS, "formatter": f"{{value}}{unit}"},
            "splitLine": {"lineStyle": {"color": _GRID}},
            "splitNumber": 4,
        },
        "series": [
            {
                "name": line.name,
                "type": "line",
                "showSymbol": False,
                "lineStyle": {"width": 2, "color": line.colour},
                "itemStyle": {"color": line.colour},
                "data": [
                    [round(time * 1000), None if value is None else round(value, 3)] for time, value in line.points
                ],
            }
            for line in lines
        ],
    }


def _begin(lines: Sequence[Line], now: float) -> float:
    """Return where the plot begins: half an hour ago, or later if there are no older points."""
    known = [time for line in lines for time, value in line.points if value is not None]
    return min(max(min(known, default=now), now - PLOT_SECONDS), now - MIN_PLOT_SECONDS)
