"""The flow as an operator thinks of it: boxes, arrows between them, what is stuck, why, and what to do next. Pure.

An arrow is what lies between two boxes: how fast it moves, how much waits on it, and how old the oldest of that is.
What is stuck is found by the rules of `troubles`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from typing import Final

from purveyor.app.console.alerts import (
    Level,
    Trouble,
    pipeline_troubles,
    queue_troubles,
    server_troubles,
    subscription_troubles,
)
from purveyor.app.console.snapshot import Facts, PartFacts, PipelineFacts, QueueKind
from purveyor.app.console.time_series import History

MOST_SUBSCRIPTIONS: Final = 8
"""So many are drawn: those that need somebody first, then those with the most to do."""


class Column(IntEnum):
    """Where a box stands, from the source of the flow to its end."""

    SOURCE = 0
    QUEUE = 1
    PIPELINE = 2
    TARGET = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A place that messages come from, wait in, or go to."""

    id: str
    title: str
    column: Column
    note: str = ""
    level: Level = Level.FINE
    link: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A way from one box to another. What is None is not known, or not a matter of this way."""

    source: str
    target: str
    rate: float | None = None
    backlog: int | None = None
    age_seconds: float | None = None
    level: Level = Level.FINE

    @property
    def id(self) -> str:
        """Its name in the page."""
        return f"{self.source}--{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What the overview shows."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    troubles: tuple[Trouble, ...]
    hidden: int = 0
    """How many subscriptions are not drawn."""

    @property
    def level(self) -> Level:
        """The worst there is."""
        return max((trouble.level for trouble in self.troubles), default=Level.FINE)

    def title(self, box: str) -> str:
        """The title of a box."""
        return next((each.title for each in self.boxes if each.id == box), box)


def draw(facts: Facts, history: History) -> Flow:
    """The flow at a moment."""
    troubles = tuple(sorted(all_troubles(facts, history), key=lambda trouble: -trouble.level))
    levels: dict[str, Level] = {}
    for trouble in troubles:
        levels[trouble.about] = max(levels.get(trouble.about, Level.FINE), trouble.level)
    shown = _shown(facts, levels)
    boxes = (*_sources(facts), *_queues(facts, levels), *_parts(facts, levels), *_targets(facts, levels, shown))
    there = {box.id for box in boxes}
    arrows = tuple(arrow for arrow in _arrows(facts, history, levels, shown) if {arrow.source, arrow.target} <= there)
    active = sum(queue.kind is QueueKind.SUBSCRIPTION for queue in facts.queues.values())
    return Flow(boxes=boxes, arrows=arrows, troubles=troubles, hidden=max(active - len(shown), 0))


def all_troubles(facts: Facts, history: History) -> Iterator[Trouble]:
    """Everything that somebody should know. While the server is away, that, and nothing about what cannot be seen."""
    if facts.problem is not None:
        yield from server_troubles(facts)
        return
    yield from pipeline_troubles(facts, history)
    yield from queue_troubles(facts)
    yield from subscription_troubles(facts, history)


def _sources(facts: Facts) -> Iterator[Box]:
    if "ldif" in facts.queues:
        yield Box(id="directory", title="Directory", column=Column.SOURCE, note="LDIF import", hint="purveyor import")
    yield Box(id="publishers", title="Publishers", column=Column.SOURCE, note="HTTP, stages", hint="POST /v1/messages")


def _queues(facts: Facts, levels: dict[str, Level]) -> Iterator[Box]:
    for name, hint in (
        ("ldif", "Raw records of a directory, as they were read"),
        ("incoming", "Every event of every source, in the one order that counts"),
        ("prefill", "Requests to fill a new subscription with the current state"),
    ):
        queue = facts.queues.get(name)
        if queue is not None:
            yield Box(
                id=f"queue:{name}",
                title=name,
                column=Column.QUEUE,
                note=_held(queue.messages),
                level=levels.get(f"queue:{name}", Level.FINE),
                link=f"/console/queues?queue={name}",
                hint=hint,
            )


def _parts(facts: Facts, levels: dict[str, Level]) -> Iterator[Box]:
    known = facts.parts
    for name, hint in (
        ("transform", "Makes events of directory records, with the object before and after"),
        ("dispatch", "Writes each event to the queue of every subscription that asked for it"),
        ("archive", "Keeps every event as Parquet, for prefill, replay and audit"),
        ("prefill", "Fills new subscriptions with the current state; replays history"),
    ):
        found = known.get(name)
        yield Box(
            id=f"part:{name}",
            title=name,
            column=Column.PIPELINE,
            note=_part_note(found, facts.at),
            level=max(levels.get(f"part:{name}", Level.FINE), levels.get("pipeline", Level.FINE)),
            link="/console/pipeline",
            hint=hint,
        )


def _part_note(found: tuple[PipelineFacts, PartFacts] | None, now: datetime) -> str:
    if found is None:
        return "not running"
    pipeline, part = found
    if pipeline.stopped:
        return "stopped"
    if (now - pipeline.at).total_seconds() > 10:
        return "silent"
    return f"{part.batch_ms} ms a batch" if part.state == "running" and part.batch_ms is not None else part.state


def _shown(facts: Facts, levels: dict[str, Level]) -> list[str]:
    names = [queue.name for queue in facts.queues.values() if queue.kind is QueueKind.SUBSCRIPTION]
    names.sort(key=lambda name: (-levels.get(f"sub:{name}", Level.FINE), -facts.queues[name].messages, name))
    return sorted(names[:MOST_SUBSCRIPTIONS])


def _targets(facts: Facts, levels: dict[str, Level], shown: list[str]) -> Iterator[Box]:
    for name in shown:
        found = facts.subscriptions.get(name)
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
    stages = [queue for queue in facts.queues.values() if queue.kind is QueueKind.STAGE]
    for queue in stages[:3]:
        yield Box(
            id=f"stage:{queue.name}",
            title=queue.name.removeprefix("stage-"),
            column=Column.TARGET,
            note=f"stage · {_held(queue.messages)}",
            level=levels.get(f"queue:{queue.name}", Level.FINE),
            link=f"/console/queues?queue={queue.name}",
            hint="A transactional stage: message in, database work, messages out, as one",
        )
    yield Box(
        id="queue:dead-letters",
        title="Dead letters",
        column=Column.TARGET,
        note=_held(facts.dead) if facts.dead else "none",
        level=levels.get("queue:dead-letters", Level.FINE),
        link="/console/dead-letters",
        hint="Messages that could not be processed, with the reason and the way back",
    )


def _arrows(facts: Facts, history: History, levels: dict[str, Level], shown: list[str]) -> Iterator[Arrow]:
    now = facts.at.timestamp()

    def into(queue: str) -> float | None:
        return history.of("last", queue).rate(now)

    def through(queue: str, durable: str, part: str) -> Arrow:
        reader = facts.reader(queue, durable)
        return Arrow(
            source=f"queue:{queue}",
            target=f"part:{part}",
            rate=history.of("floor", queue, durable).rate(now),
            backlog=None if reader is None else reader.pending + reader.unanswered,
            age_seconds=oldest_age(facts, history, queue, durable),
            level=levels.get(f"part:{part}", Level.FINE),
        )

    yield Arrow(source="directory", target="queue:ldif", rate=into("ldif"))
    transformed = history.of("floor", "ldif", "transformer").rate(now)
    all_in = into("incoming")
    others = None if all_in is None else max(all_in - (transformed or 0.0), 0.0)
    yield Arrow(source="publishers", target="queue:incoming", rate=others)
    yield through("ldif", "transformer", "transform")
    yield Arrow(source="part:transform", target="queue:incoming", rate=transformed)
    yield through("incoming", facts.dispatcher, "dispatch")
    yield through("incoming", "archive", "archive")
    yield through("prefill", "prefill", "prefill")
    for name in shown:
        queue = facts.queues[name]
        yield Arrow(
            source="part:dispatch",
            target=f"sub:{name}",
            rate=history.of("done", name).rate(now),
            backlog=queue.messages,
            age_seconds=None if queue.oldest is None else _seconds(facts.at, queue.oldest),
            level=levels.get(f"sub:{name}", Level.FINE),
        )


def oldest_age(facts: Facts, history: History, queue: str, durable: str) -> float | None:
    """How old the oldest message is that a reader has not done; None if it has done all.

    A queue of interest keeps what its slowest reader has not done, so its oldest message may be no matter of this one.
    Then the age is that of the moment when the queue first had a message behind the reader's place, as was seen.
    """
    reader, found = facts.reader(queue, durable), facts.queues.get(queue)
    if reader is None or found is None or not reader.pending + reader.unanswered or found.oldest is None:
        return None
    whole = _seconds(facts.at, found.oldest)
    if reader.pending + reader.unanswered >= found.messages:
        return whole
    came = history.of("last", queue).reached(reader.ack_floor + 1)
    return whole if came is None else min(whole, max(facts.at.timestamp() - came, 0.0))


def _held(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages:,} messages".replace(",", "\N{THIN SPACE}")


def _seconds(now: datetime, then: datetime) -> float:
    return max((now.astimezone(UTC) - then.astimezone(UTC)).total_seconds(), 0.0)
