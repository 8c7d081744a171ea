"""The flow of messages as a graph: boxes, arrows between them, and the alerts. Pure.

An arrow has the rate between two boxes, the number of messages that wait, and the age of the oldest one. `flow_svg`
draws the flow.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import Final

from purveyor.app.console.alert_groups import all_alerts, ranked
from purveyor.app.console.alerts import Alert, Level, is_silent
from purveyor.app.console.formatting import format_count, format_milliseconds
from purveyor.app.console.snapshot import QueueKind, SystemSnapshot, is_working
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
    alerts = tuple(ranked(all_alerts(snapshot, history)))
    levels: dict[str, Level] = {}
    for alert in alerts:
        levels[alert.about] = max(levels.get(alert.about, Level.FINE), alert.level)
    shown = _select_subscriptions(snapshot, levels)
    boxes = (
        *_sources(snapshot),
        *_queues(snapshot, levels),
        *_parts(snapshot, history, levels),
        *_targets(snapshot, levels, shown),
    )
    there = {box.id for box in boxes}
    arrows = tuple(
        arrow for arrow in _arrows(snapshot, history, levels, shown) if {arrow.source, arrow.target} <= there
    )
    active = sum(queue.kind is QueueKind.SUBSCRIPTION for queue in snapshot.queues.values())
    return Flow(boxes=boxes, arrows=arrows, alerts=alerts, hidden=max(active - len(shown), 0))


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
                note=format_count(queue.messages, "message"),
                level=levels.get(f"queue:{name}", Level.FINE),
                link=f"/console/queues?queue={name}",
                hint=hint,
            )


def _parts(snapshot: SystemSnapshot, history: History, levels: dict[str, Level]) -> Iterator[Box]:
    for name, hint in (
        ("transform", "Turns directory records into events, with the object before and after"),
        ("dispatch", "Writes each event to the queue of every matching subscription"),
        ("archive", "Stores every event as Parquet, for prefill, replay and audit"),
        ("prefill", "Fills new subscriptions with the current state; replays history"),
    ):
        yield Box(
            id=f"part:{name}",
            title=name,
            column=Column.PIPELINE,
            note=_part_note(snapshot, history, name),
            level=max(levels.get(f"part:{name}", Level.FINE), levels.get("pipeline", Level.FINE)),
            link="/console/pipeline",
            hint=hint,
        )


def _part_note(snapshot: SystemSnapshot, history: History, name: str) -> str:
    if name not in snapshot.parts:
        return "not running"
    pipeline, part = snapshot.parts[name]
    if pipeline.stopped:
        return "stopped"
    if is_silent(snapshot, pipeline):
        return "silent"
    if part.state != "running":
        return part.state
    if not is_working(snapshot, history, name):
        return "idle"
    return "working" if part.batch_ms is None else f"{format_milliseconds(part.batch_ms)} a batch"


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
            note=f"stage · {format_count(queue.messages, 'message')}",
            level=levels.get(f"queue:{queue.name}", Level.FINE),
            link=f"/console/queues?queue={queue.name}",
            hint="A transactional stage: message in, database work, messages out, as one",
        )
    yield Box(
        id="queue:dead-letters",
        title="Dead letters",
        column=Column.TARGET,
        note=format_count(snapshot.dead_letter_total, "message") if snapshot.dead_letter_total else "none",
        level=levels.get("queue:dead-letters", Level.FINE),
        link="/console/dead-letters",
        hint="Messages that could not be processed, with the reason; retry puts them back",
    )


def _arrows(snapshot: SystemSnapshot, history: History, levels: dict[str, Level], shown: list[str]) -> Iterator[Arrow]:
    now = snapshot.at.timestamp()

    def into(queue: str) -> float | None:
        return history.of("last", queue).rate(now)

    def through(queue: str, durable: str, part: str) -> Arrow:
        return Arrow(
            source=f"queue:{queue}",
            target=f"part:{part}",
            rate=history.of("floor", queue, durable).rate(now),
            backlog=None if snapshot.reader(queue, durable) is None else snapshot.backlog(queue, durable),
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

    A queue keeps messages that its other readers need, or that this one may read again, so the oldest one may be done.
    Then the age counts from the moment when the console first saw a message after the position of this reader.
    """
    done, found, backlog = (
        snapshot.processed(queue, durable),
        snapshot.queues.get(queue),
        snapshot.backlog(queue, durable),
    )
    if done is None or found is None or not backlog or found.oldest is None:
        return None
    whole = _seconds(snapshot.at, found.oldest)
    if backlog >= found.messages:
        return whole
    came = history.of("last", queue).first_reached(done + 1)
    return whole if came is None else min(whole, max(snapshot.at.timestamp() - came, 0.0))


def _seconds(now: datetime, then: datetime) -> float:
    return max((now.astimezone(UTC) - then.astimezone(UTC)).total_seconds(), 0.0)
