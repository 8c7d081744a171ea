"""The flow of messages as an SVG image; the style sheet sets its colours and motion. Pure."""

from dataclasses import dataclass
from html import escape
from typing import Final

from purveyor.app.console.alerts import Level
from purveyor.app.console.flow_graph import Arrow, Box, Column, Flow
from purveyor.app.console.formatting import format_brief, format_duration, format_rate, format_short

_WIDTH: Final = 1180
_BOX_WIDTH: Final = 172
_TARGET_WIDTH: Final = 220
"""Targets have the longest names: those of subscriptions."""
_BOX_HEIGHT: Final = 46
_MARGIN: Final = 10
_NAME_PIXELS: Final = 14.5
_NOTE_PIXELS: Final = 12.0
_LEFT: Final = {Column.SOURCE: 4, Column.QUEUE: 272, Column.PIPELINE: 588, Column.TARGET: 956}
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
_ROW: Final = 56
_LEAST: Final = 300
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


def render_svg(flow: Flow) -> str:
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
        places[box.id] = _BoxPosition(_LEFT[Column.TARGET], middle - _BOX_HEIGHT / 2, _TARGET_WIDTH)
    return places, height


def _box(box: Box, place: _BoxPosition) -> str:
    kind = "queue" if box.column is Column.QUEUE else "box"
    room = place.width - 2 * _MARGIN
    title, note = fit(box.title, room / _NAME_PIXELS), fit(box.note, room / _NOTE_PIXELS)
    hint = f"{box.title}: {box.hint}" if box.hint else box.title
    radius = _BOX_HEIGHT / 2 if kind == "queue" else 10
    body = (
        f"<title>{escape(hint)}</title>"
        f'<rect width="{place.width}" height="{_BOX_HEIGHT}" rx="{radius:g}"/>'
        f'<text class="name" x="{place.width / 2:g}" y="20">{escape(title)}</text>'
        f'<text class="sub" x="{place.width / 2:g}" y="36">{escape(note)}</text>'
    )
    group = f'<g class="{kind} {_LEVELS[box.level]}" transform="translate({place.x:g} {place.y:g})">{body}</g>'
    return f'<a href="{escape(box.link)}" data-box="{escape(box.id)}">{group}</a>' if box.link else group


_NARROW: Final = frozenset("ijlI1.,:;'|!()[] ")
_WIDE: Final = frozenset("mwMW@%")
_NARROW_EM, _WIDE_EM, _CAPITAL_EM, _USUAL_EM = 0.42, 1.1, 0.82, 0.7


def text_width(text: str) -> float:
    """Return at most how wide a text is in a bold, wide font, as a multiple of the font size."""
    return sum(
        _NARROW_EM if ch in _NARROW else _WIDE_EM if ch in _WIDE else _CAPITAL_EM if ch.isupper() else _USUAL_EM
        for ch in text
    )


def fit(text: str, width: float) -> str:
    """Shorten a text to a width, a multiple of the font size. The end of a name stays: names often differ there.

    >>> fit("mail-server", 11), fit("orders-of-the-shop-in-europe-west", 11)
    ('mail-server', 'orders-of-…west')
    """
    if text_width(text) <= width:
        return text
    for length in range(len(text) - 1, 0, -1):
        tail = length // 3
        short = f"{text[: length - tail]}…{text[len(text) - tail :]}"
        if text_width(short) <= width:
            return short
    return "…"


_TIP: Final = 16
"""The room of an arrow's head between its label and its target."""


def _arrow(arrow: Arrow, places: dict[str, _BoxPosition]) -> str:
    source, target = places[arrow.source], places[arrow.target]
    lines = _lines(arrow)
    width = max((len(text) for _, text in lines), default=0) * 6.6 + 10
    if arrow.source == "part:dispatch":  # the arrows of a fan end flat, with their labels below each other
        x1, y1, x2, y2 = source.x + source.width, source.middle, target.x - 3, target.middle
        path = f"M{x1:g} {y1:g} C{x1 + 70:g} {y1:g} {x1 + 30:g} {y2:g} {x1 + 112:g} {y2:g} L{x2:g} {y2:g}"
        label_x, label_y = x2 - _TIP - width / 2, y2
    elif target.x > source.x:
        x1, y1, x2, y2 = source.x + source.width, source.middle, target.x - 3, target.middle
        bend = (x2 - x1) / 2
        path = f"M{x1:g} {y1:g} C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"
        # Behind the bend of an arrow to another row: in its middle, the label would touch that of the row above.
        along, down = (0.5, 0.0) if y1 == y2 else (0.62, 0.72)
        label_x, label_y = x1 + (x2 - x1) * along, y1 + (y2 - y1) * down
    else:  # back to a queue on the left
        x1, y1 = source.x + 30, source.y + _BOX_HEIGHT
        x2, y2 = target.x + target.width - 30, target.y - 3
        path = f"M{x1:g} {y1:g} C{x1:g} {y1 + 44:g} {x2:g} {y2 - 44:g} {x2:g} {y2:g}"
        label_x, label_y = (x1 + x2) / 2, (y1 + y2) / 2
    busy = " busy" if arrow.rate is not None and arrow.rate >= 0.05 else ""
    return (
        f'<g class="arrow {_LEVELS[arrow.level]}{busy}" data-arrow="{escape(arrow.id)}">'
        f'<path d="{path}" marker-end="url(#tip)"/>{_label(arrow, lines, width, (label_x, label_y))}</g>'
    )


def _lines(arrow: Arrow) -> list[tuple[str, str]]:
    """Return the texts of a label with their classes: the rate, and what waits for how long."""
    lines = [] if arrow.rate is None else [("rate", format_rate(arrow.rate))]
    if arrow.backlog:
        age = "" if arrow.age_seconds is None else f" · {format_brief(arrow.age_seconds)}"
        lines.append(("backlog", f"{format_short(arrow.backlog)}{age}"))
    elif arrow.backlog == 0:
        lines.append(("backlog", "0 waiting"))
    return lines


def _label(arrow: Arrow, lines: list[tuple[str, str]], width: float, place: tuple[float, float]) -> str:
    if not lines:
        return ""
    height = 15 * len(lines) + 3
    texts = "".join(
        f'<text class="{name}" x="0" y="{12 + 15 * number - height / 2 + 1:g}">{escape(text)}</text>'
        for number, (name, text) in enumerate(lines)
    )
    return (
        f'<g class="label" transform="translate({place[0]:g} {place[1]:g})"><title>{escape(_hint(arrow))}</title>'
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
