"""The flow of messages as a graph: boxes, arrows between them, and the alerts of `alerts`. Pure.

An arrow shows the rate between two boxes, the number of messages that wait, and the age of the oldest one. `render_svg`
draws the flow as an SVG image; the style sheet sets its colours and motion.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from html import escape
from typing import Final

from purveyor.app.console.alerts import (
    Alert,
    Level,
    pipeline_alerts,
    queue_alerts,
    server_alerts,
    subscription_alerts,
)
from purveyor.app.console.formatting import format_brief, format_duration, format_rate, format_short
from purveyor.app.console.snapshot import PartSnapshot, PipelineSnapshot, QueueKind, SystemSnapshot
from purveyor.app.console.time_series import History

MAX_SUBSCRIPTIONS: Final = 8
"""The number of subscriptions to draw: first those with alerts, then those with the largest backlog."""


class Column(IntEnum):
    """The column of a box, from the source of the flow to its end."""

    SOURCE = 0
    QUEUE = 1
    PIPELINE = 2
    TARGET = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A source, queue, part or target of messages."""

    id: str
    title: str
    column: Column
    note: str = ""
    level: Level = Level.FINE
    link: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A connection from one box to another. None: unknown, or without meaning for this arrow."""

    source: str
    target: str
    rate: float | None = None
    backlog: int | None = None
    age_seconds: float | None = None
    level: Level = Level.FINE

    @property
    def id(self) -> str:
        """The id of the arrow in the page."""
        return f"{self.source}--{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The content of the overview."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    alerts: tuple[Alert, ...]
    hidden: int = 0
    """The number of subscriptions that are not drawn."""

    @property
    def level(self) -> Level:
        """The highest severity of all alerts."""
        return max((alert.level for alert in self.alerts), default=Level.FINE)

    def title(self, box: str) -> str:
        """Return the title of a box."""
        return next((each.title for each in self.boxes if each.id == box), box)


def build_flow(snapshot: SystemSnapshot, history: History) -> Flow:
    """Return the flow of a snapshot."""
    alerts = tuple(sorted(all_alerts(snapshot, history), key=lambda alert: -alert.level))
    levels: dict[str, Level] = {}
    for alert in alerts:
        levels[alert.about] = max(levels.get(alert.about, Level.FINE), alert.level)
    shown = _select_subscriptions(snapshot, levels)
    boxes = (
        *_sources(snapshot),
        *_queues(snapshot, levels),
        *_parts(snapshot, levels),
        *_targets(snapshot, levels, shown),
    )
    there = {box.id for box in boxes}
    arrows = tuple(
        arrow for arrow in _arrows(snapshot, history, levels, shown) if {arrow.source, arrow.target} <= there
    )
    active = sum(queue.kind is QueueKind.SUBSCRIPTION for queue in snapshot.queues.values())
    return Flow(boxes=boxes, arrows=arrows, alerts=alerts, hidden=max(active - len(shown), 0))


def all_alerts(snapshot: SystemSnapshot, history: History) -> Iterator[Alert]:
    """Yield all alerts. While the server does not answer, only that one: the rest is unknown."""
    if snapshot.problem is not None:
        yield from server_alerts(snapshot)
        return
    yield from pipeline_alerts(snapshot, history)
    yield from queue_alerts(snapshot)
    yield from subscription_alerts(snapshot, history)


def _sources(snapshot: SystemSnapshot) -> Iterator[Box]:
    if "ldif" in snapshot.queues:
        yield Box(id="directory", title="Directory", column=Column.SOURCE, note="LDIF import", hint="purveyor import")
    yield Box(id="publishers", title="Publishers", column=Column.SOURCE, note="HTTP, stages", hint="POST /v1/messages")


def _queues(snapshot: SystemSnapshot, levels: dict[str, Level]) -> Iterator[Box]:
    for name, hint in (
        ("ldif", "Raw records of a directory"),
        ("incoming", "Every event of every source, in order"),
        ("prefill", "Requests to fill a new subscription with the current state"),
    ):
        queue = snapshot.queues.get(name)
        if queue is not None:
            yield Box(
                id=f"queue:{name}",
                title=name,
                column=Column.QUEUE,
                note=_message_count(queue.messages),
                level=levels.get(f"queue:{name}", Level.FINE),
                link=f"/console/queues?queue={name}",
                hint=hint,
            )


def _parts(snapshot: SystemSnapshot, levels: dict[str, Level]) -> Iterator[Box]:
    known = snapshot.parts
    for name, hint in (
        ("transform", "Turns directory records into events, with the object before and after"),
        ("dispatch", "Writes each event to the queue of every matching subscription"),
        ("archive", "Stores every event as Parquet, for prefill, replay and audit"),
        ("prefill", "Fills new subscriptions with the current state; replays history"),
    ):
        found = known.get(name)
        yield Box(
            id=f"part:{name}",
            title=name,
            column=Column.PIPELINE,
            note=_part_note(found, snapshot.at),
            level=max(levels.get(f"part:{name}", Level.FINE), levels.get("pipeline", Level.FINE)),
            link="/console/pipeline",
            hint=hint,
        )


def _part_note(found: tuple[PipelineSnapshot, PartSnapshot] | None, now: datetime) -> str:
    if found is None:
        return "not running"
    pipeline, part = found
    if pipeline.stopped:
        return "stopped"
    if (now - pipeline.at).total_seconds() > 10:
        return "silent"
    return f"{part.batch_ms} ms a batch" if part.state == "running" and part.batch_ms is not None else part.state


def _select_subscriptions(snapshot: SystemSnapshot, levels: dict[str, Level]) -> list[str]:
    names = [queue.name for queue in snapshot.queues.values() if queue.kind is QueueKind.SUBSCRIPTION]
    names.sort(key=lambda name: (-levels.get(f"sub:{name}", Level.FINE), -snapshot.queues[name].messages, name))
    return sorted(names[:MAX_SUBSCRIPTIONS])


def _targets(snapshot: SystemSnapshot, levels: dict[str, Level], shown: list[str]) -> Iterator[Box]:
    for name in shown:
        found = snapshot.subscriptions.get(name)
        delivery = found.record.definition.delivery.value if found is not None else "?"
        paused = " · paused" if found is not None and found.record.paused else ""
        yield Box(
            id=f"sub:{name}",
            title=name,
            column=Column.TARGET,
            note=f"{delivery}{paused}",
            level=levels.get(f"sub:{name}", Level.FINE),
            link=f"/console/subscriptions/{name}",
        )
    stages = [queue for queue in snapshot.queues.values() if queue.kind is QueueKind.STAGE]
    for queue in stages[:3]:
        yield Box(
            id=f"stage:{queue.name}",
            title=queue.name.removeprefix("stage-"),
            column=Column.TARGET,
            note=f"stage · {_message_count(queue.messages)}",
            level=levels.get(f"queue:{queue.name}", Level.FINE),
            link=f"/console/queues?queue={queue.name}",
            hint="A transactional stage: message in, database work, messages out, as one",
        )
    yield Box(
        id="queue:dead-letters",
        title="Dead letters",
        column=Column.TARGET,
        note=_message_count(snapshot.dead_letter_total) if snapshot.dead_letter_total else "none",
        level=levels.get("queue:dead-letters", Level.FINE),
        link="/console/dead-letters",
        hint="Messages that could not be processed, with the reason; retry puts them back",
    )


def _arrows(snapshot: SystemSnapshot, history: History, levels: dict[str, Level], shown: list[str]) -> Iterator[Arrow]:
    now = snapshot.at.timestamp()

    def into(queue: str) -> float | None:
        return history.of("last", queue).rate(now)

    def through(queue: str, durable: str, part: str) -> Arrow:
        reader = snapshot.reader(queue, durable)
        return Arrow(
            source=f"queue:{queue}",
            target=f"part:{part}",
            rate=history.of("floor", queue, durable).rate(now),
            backlog=None if reader is None else reader.pending + reader.unanswered,
            age_seconds=oldest_age(snapshot, history, queue, durable),
            level=levels.get(f"part:{part}", Level.FINE),
        )

    yield Arrow(source="directory", target="queue:ldif", rate=into("ldif"))
    transformed = history.of("floor", "ldif", "transformer").rate(now)
    all_in = into("incoming")
    others = None if all_in is None else max(all_in - (transformed or 0.0), 0.0)
    yield Arrow(source="publishers", target="queue:incoming", rate=others)
    yield through("ldif", "transformer", "transform")
    yield Arrow(source="part:transform", target="queue:incoming", rate=transformed)
    yield through("incoming", snapshot.dispatcher, "dispatch")
    yield through("incoming", "archive", "archive")
    yield through("prefill", "prefill", "prefill")
    for name in shown:
        queue = snapshot.queues[name]
        yield Arrow(
            source="part:dispatch",
            target=f"sub:{name}",
            rate=history.of("done", name).rate(now),
            backlog=queue.messages,
            age_seconds=None if queue.oldest is None else _seconds(snapshot.at, queue.oldest),
            level=levels.get(f"sub:{name}", Level.FINE),
        )


def oldest_age(snapshot: SystemSnapshot, history: History, queue: str, durable: str) -> float | None:
    """Return the age of the oldest message that a reader has not processed; None if it has processed all.

    An interest queue keeps messages until its slowest reader has processed them, so this reader may have processed the
    oldest one. Then the age counts from the moment when the console first saw a message after the reader's ack floor.
    """
    reader, found = snapshot.reader(queue, durable), snapshot.queues.get(queue)
    if reader is None or found is None or not reader.pending + reader.unanswered or found.oldest is None:
        return None
    whole = _seconds(snapshot.at, found.oldest)
    if reader.pending + reader.unanswered >= found.messages:
        return whole
    came = history.of("last", queue).first_reached(reader.ack_floor + 1)
    return whole if came is None else min(whole, max(snapshot.at.timestamp() - came, 0.0))


def _message_count(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages:,} messages".replace(",", "\N{THIN SPACE}")


def _seconds(now: datetime, then: datetime) -> float:
    return max((now.astimezone(UTC) - then.astimezone(UTC)).total_seconds(), 0.0)


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
