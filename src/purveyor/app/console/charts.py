"""Plots as options of ECharts: lines over the last hour. Colours that can be read on light and on dark. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from purveyor.app.console.time_series import Series, rates

COLOURS: Final = ("#4f7df0", "#2f9e6b", "#e08a1e", "#d64545", "#8b6fd6")
STEP_SECONDS: Final = 15.0
SPAN_SECONDS: Final = 1800.0
LEAST_SECONDS: Final = 300.0
_AXIS: Final = "#8590a0"
_GRID: Final = "rgba(133, 144, 160, 0.18)"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: str = COLOURS[0]


def as_rate(name: str, series: Series, now: float, colour: str = COLOURS[0]) -> Line:
    """A number that goes up, as what it grows by in a second."""
    end = now - now % STEP_SECONDS
    return Line(name, rates(series.points(), STEP_SECONDS, end - SPAN_SECONDS, end), colour)


def as_is(name: str, series: Series, now: float, colour: str = COLOURS[0]) -> Line:
    """A number as it was."""
    begin, found = now - SPAN_SECONDS, series.points()
    inside = [point for point in found if point[0] >= begin]
    before = [(begin, value) for time, value in found if time < begin][-1:]
    return Line(name, [*before, *inside], colour)


def plot(lines: Sequence[Line], *, now: float, unit: str = "") -> dict[str, Any]:
    """The options of a plot."""
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
    """Where the plot begins: half an hour ago, or later if nothing older is known."""
    known = [time for line in lines for time, value in line.points if value is not None]
    return min(max(min(known, default=now), now - SPAN_SECONDS), now - LEAST_SECONDS)
