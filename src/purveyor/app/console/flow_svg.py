"""The flow as an SVG image. The style sheet sets its colours and motion. Pure: the same flow gives the same text."""

from dataclasses import dataclass
from html import escape
from typing import Final

from purveyor.app.console.alerts import Level
from purveyor.app.console.flow_graph import Arrow, Box, Column, Flow
from purveyor.app.console.formatting import format_brief, format_duration, format_rate, format_short

_WIDTH: Final = 1180
_BOX_WIDTH: Final = 172
_BOX_HEIGHT: Final = 52
_LEFT: Final = {Column.SOURCE: 8, Column.QUEUE: 318, Column.PIPELINE: 644, Column.TARGET: 1000}
_SLOT: Final = {
    "directory": 0,
    "queue:ldif": 0,
    "part:transform": 0,
    "publishers": 1,
    "queue:incoming": 1,
    "part:dispatch": 1,
    "part:archive": 2,
    "queue:prefill": 3,
    "part:prefill": 3,
}
"""The rows of the boxes on the left. The targets on the right share the height evenly."""
_SLOTS: Final = 4
_ROW: Final = 70
_LEAST: Final = 400
_LEVELS: Final = {Level.FINE: "fine", Level.NOTE: "note", Level.WARNING: "warning", Level.STUCK: "stuck"}


@dataclass(frozen=True, slots=True)
class _BoxPosition:
    """The upper left corner and the width of a box."""

    x: float
    y: float
    width: float = _BOX_WIDTH

    @property
    def middle(self) -> float:
        """The vertical centre of the box."""
        return self.y + _BOX_HEIGHT / 2


def render(flow: Flow) -> str:
    """Return the SVG of a flow."""
    places, height = _layout(flow)
    drawn = [_arrow(arrow, places) for arrow in flow.arrows]
    drawn += [_box(box, places[box.id]) for box in flow.boxes]
    more = f'<text class="more" x="{_WIDTH - 8}" y="{height - 4}">and {flow.hidden} more</text>' if flow.hidden else ""
    return (
        f'<svg class="flow" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(_summary(flow))}">'
        f"<defs>{_marker()}</defs>{''.join(drawn)}{more}</svg>"
    )


def _summary(flow: Flow) -> str:
    stuck = sum(alert.level is Level.STUCK for alert in flow.alerts)
    return f"The flow of messages: {len(flow.boxes)} boxes, {len(flow.arrows)} arrows, {stuck} stuck"


def _marker() -> str:
    return (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="context-stroke"/></marker>'
    )


def _layout(flow: Flow) -> tuple[dict[str, _BoxPosition], float]:
    targets = [box for box in flow.boxes if box.column is Column.TARGET]
    height = max(_LEAST, len(targets) * _ROW + (18 if flow.hidden else 0))
    room = height - (18 if flow.hidden else 0)
    places: dict[str, _BoxPosition] = {}
    for box in flow.boxes:
        if box.column is Column.TARGET:
            continue
        slot = _SLOT.get(box.id, _SLOTS - 1)
        places[box.id] = _BoxPosition(_LEFT[box.column], room * (slot + 0.5) / _SLOTS - _BOX_HEIGHT / 2)
    for number, box in enumerate(targets):
        middle = room * (number + 0.5) / len(targets)
        places[box.id] = _BoxPosition(_LEFT[Column.TARGET], middle - _BOX_HEIGHT / 2)
    return places, height


def _box(box: Box, place: _BoxPosition) -> str:
    kind = "queue" if box.column is Column.QUEUE else "box"
    title = box.title if len(box.title) <= 18 else f"{box.title[:17]}…"
    hint = f"{box.title}: {box.hint}" if box.hint else box.title
    radius = _BOX_HEIGHT / 2 if kind == "queue" else 10
    body = (
        f"<title>{escape(hint)}</title>"
        f'<rect width="{place.width}" height="{_BOX_HEIGHT}" rx="{radius:g}"/>'
        f'<text class="name" x="{place.width / 2:g}" y="22">{escape(title)}</text>'
        f'<text class="sub" x="{place.width / 2:g}" y="40">{escape(box.note)}</text>'
    )
    group = f'<g class="{kind} {_LEVELS[box.level]}" transform="translate({place.x:g} {place.y:g})">{body}</g>'
    return f'<a href="{escape(box.link)}" data-box="{escape(box.id)}">{group}</a>' if box.link else group


def _arrow(arrow: Arrow, places: dict[str, _BoxPosition]) -> str:
    source, target = places[arrow.source], places[arrow.target]
    if target.x > source.x:
        x1, y1, x2, y2 = source.x + source.width, source.middle, target.x - 3, target.middle
        bend = (x2 - x1) / 2
        path = f"M{x1:g} {y1:g} C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"
    else:  # back to a queue on the left
        x1, y1 = source.x + 30, source.y + _BOX_HEIGHT
        x2, y2 = target.x + target.width - 30, target.y - 3
        path = f"M{x1:g} {y1:g} C{x1:g} {y1 + 44:g} {x2:g} {y2 - 44:g} {x2:g} {y2:g}"
    busy = " busy" if arrow.rate is not None and arrow.rate >= 0.05 else ""
    share = 0.72 if arrow.source == "part:dispatch" else 0.5
    label_x, label_y = x1 + (x2 - x1) * share, y1 + (y2 - y1) * _ease(share)
    return (
        f'<g class="arrow {_LEVELS[arrow.level]}{busy}" data-arrow="{escape(arrow.id)}">'
        f'<path d="{path}" marker-end="url(#tip)"/>{_label(arrow, label_x, label_y)}</g>'
    )


def _ease(share: float) -> float:
    """Return the vertical share of the curve at a horizontal share."""
    return 3 * share**2 - 2 * share**3


def _label(arrow: Arrow, x: float, y: float) -> str:
    first = format_rate(arrow.rate) if arrow.rate is not None else ""
    second = ""
    if arrow.backlog:
        second = format_short(arrow.backlog)
        if arrow.age_seconds is not None:
            second += f" · {format_brief(arrow.age_seconds)}"
    elif arrow.backlog == 0:
        second = "0 waiting"
    lines = [line for line in (first, second) if line]
    if not lines:
        return ""
    width = max(map(len, lines)) * 6.4 + 12
    height = 15 * len(lines) + 3
    texts = "".join(
        f'<text class="{"rate" if line == first else "backlog"}" x="0" y="{12 + 15 * number - height / 2 + 1:g}">'
        f"{escape(line)}</text>"
        for number, line in enumerate(lines)
    )
    hint = _hint(arrow)
    return (
        f'<g class="label" transform="translate({x:g} {y:g})"><title>{escape(hint)}</title>'
        f'<rect x="{-width / 2:g}" y="{-height / 2:g}" width="{width:g}" height="{height:g}" rx="5"/>{texts}</g>'
    )


def _hint(arrow: Arrow) -> str:
    parts = []
    if arrow.rate is not None:
        parts.append(f"{format_rate(arrow.rate)} in the last seconds")
    if arrow.backlog is not None:
        parts.append(f"{arrow.backlog} waiting")
    if arrow.age_seconds is not None:
        parts.append(f"the oldest for {format_duration(arrow.age_seconds)}")
    return ", ".join(parts)
