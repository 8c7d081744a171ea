"""Alerts: rules over a snapshot that find problems, each with its reason and the next step for the operator. Pure.

This module has the rules for the server, the pipeline and the queues; `subscription_alerts` those for subscriptions.
The level says how urgent an alert is, the kind what is affected: `alert_groups` ranks by both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from purveyor.app.console.formatting import format_count, format_duration
from purveyor.app.console.snapshot import (
    SILENT_SECONDS,
    PartSnapshot,
    PipelineSnapshot,
    QueueKind,
    QueueSnapshot,
    SystemSnapshot,
)
from purveyor.app.console.time_series import History

SLOW_SECONDS: Final = 60.0
"""A problem that lasts longer than this is more urgent."""
STUCK_SECONDS: Final = 300.0
"""A part or a queue that does not move for this time needs an operator."""


class Level(IntEnum):
    """The urgency of an alert."""

    FINE = 0
    NOTE = 1
    """Explains what the console shows; needs no action."""
    WARNING = 2
    """An operator should look at it within the day."""
    STUCK = 3
    """Messages are not delivered, and an operator has to act."""


class Kind(IntEnum):
    """What is wrong, in the order of impact: first what stops everything, then parts, then single subscriptions."""

    SERVER = 0
    PIPELINE = 1
    PART_MISSING = 2
    PART_FAILS = 3
    PART_STILL = 4
    SOURCE_STOPPED = 5
    SUSPENDED = 6
    UNREADABLE = 7
    NOT_PUSHED = 8
    PREFILL_FAILED = 9
    EXPIRING = 10
    DEAD_LETTERS = 11
    NO_CONSUMER = 12
    INTERRUPTED = 13
    MIGRATION = 14
    PREFILL_REQUESTS = 15
    PAUSED = 16
    FILLING = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A problem: the box it concerns (`about`), what is wrong, why, and what to do next."""

    about: str
    kind: Kind
    level: Level
    title: str
    reason: str
    next: str
    link: str = ""
    waiting: int = 0
    """The number of messages that wait because of it: of two alerts of a kind, the larger one comes first."""


def server_alerts(snapshot: SystemSnapshot) -> Iterator[Alert]:
    """Yield an alert if the NATS server does not answer."""
    if snapshot.problem is not None:
        yield Alert(
            about="server",
            kind=Kind.SERVER,
            level=Level.STUCK,
            title="The queues cannot be reached",
            reason=snapshot.problem,
            next=snapshot.fix or "Check that the NATS server runs: purveyor doctor",
        )


def pipeline_alerts(snapshot: SystemSnapshot, history: History) -> Iterator[Alert]:
    """Yield alerts about the pipeline and its parts."""
    running = [pipeline for pipeline in snapshot.pipelines if not pipeline.stopped]
    reporting = [pipeline for pipeline in running if not is_silent(snapshot, pipeline)]
    waiting = sum(_part_backlog(snapshot, part) for part in snapshot.part_readers)
    if not reporting and (waiting or snapshot.pipelines or snapshot.subscriptions):
        yield _no_pipeline(snapshot, history, waiting)
    known = snapshot.parts
    for name in snapshot.part_readers:
        if name in known and known[name][0] in reporting:
            yield from _part_alerts(snapshot, history, known[name][1])
        elif reporting and _part_backlog(snapshot, name):
            yield Alert(
                about=f"part:{name}",
                kind=Kind.PART_MISSING,
                level=Level.STUCK,
                title=f"No {name} runs",
                reason=f"{format_count(_part_backlog(snapshot, name), 'message')} waiting; no pipeline runs this part",
                next=f"Start it: purveyor serve pipeline --parts {name}",
                link="/console/pipeline",
            )


def source_alerts(snapshot: SystemSnapshot) -> Iterator[Alert]:
    """Yield alerts about sources that do not follow their directory. What is known already is still delivered."""
    for source in snapshot.sources:
        is_failed = source.state == "failed"
        if not is_failed and not source.is_silent:
            continue
        reason = str(source.values.get("error") or "the directory cannot be followed")
        fix = str(source.values.get("fix") or "does the directory run, and can the source reach it?")
        seconds = 0.0 if source.at is None else (snapshot.at - source.at).total_seconds()
        yield Alert(
            about=f"source:{source.source}",
            kind=Kind.SOURCE_STOPPED,
            level=Level.WARNING,
            title=f"Source {source.source} does not follow its directory",
            reason=reason if is_failed else f"Its process has not reported for {format_duration(seconds)}",
            next=fix if is_failed else "Start it: purveyor serve ldap (or purveyor up)",
        )


def _no_pipeline(snapshot: SystemSnapshot, history: History, waiting: int) -> Alert:
    """Return the alert of a pipeline that does not report. A restart takes half a minute and is none."""
    backlog = f"; {format_count(waiting, 'message')} waiting" if waiting else ""
    last = max(snapshot.pipelines, key=lambda pipeline: (not pipeline.stopped, pipeline.at), default=None)
    if last is None:
        seconds = history.of("pipeline").still_seconds(snapshot.at.timestamp())
        reason = f"No pipeline has reported since the NATS server started{backlog}"
    else:
        seconds = (snapshot.at - last.at).total_seconds()
        where = f"from process {last.pid} on {last.host}"
        ago = f"{format_duration(seconds)} old"
        reason = f"It was stopped{backlog}" if last.stopped else f"Its last report is {ago}, {where}{backlog}"
    level = Level.WARNING if seconds >= SLOW_SECONDS else Level.NOTE
    if waiting:
        level = Level.STUCK if seconds >= SLOW_SECONDS else Level.WARNING
    return Alert(
        about="pipeline",
        kind=Kind.PIPELINE,
        level=level,
        title="No pipeline runs",
        reason=reason,
        next="Start it: purveyor serve pipeline (or purveyor up). If it should run, read logs/pipeline.log there",
        link="/console/pipeline",
        waiting=waiting,
    )


def _part_alerts(snapshot: SystemSnapshot, history: History, part: PartSnapshot) -> Iterator[Alert]:
    about, link, now = f"part:{part.name}", "/console/pipeline", snapshot.at.timestamp()
    if part.state == "failed":
        yield Alert(
            about=about,
            kind=Kind.PART_FAILS,
            level=Level.STUCK,
            title=f"{part.name} cannot run",
            reason=part.error or "It gave no reason",
            next="Fix the cause and restart the pipeline",
            link=link,
        )
        return
    backlog = _part_backlog(snapshot, part.name)
    if part.state == "unresponsive":
        yield Alert(
            about=about,
            kind=Kind.PART_FAILS,
            level=Level.STUCK,
            title=f"{part.name} does not answer",
            reason="The JVM of Spark hangs or is suspended",
            next="`purveyor doctor` on its machine names a suspended process; else restart the pipeline",
            link=link,
            waiting=backlog,
        )
        return
    if part.error is not None or part.state == "waiting":  # the error stays until the part has run for a minute
        repeated = history.of("fails", part.name).still_seconds(now) >= SLOW_SECONDS
        yield Alert(
            about=about,
            kind=Kind.PART_FAILS,
            level=Level.STUCK if repeated else Level.WARNING,
            title=f"{part.name} {'fails repeatedly' if repeated else 'failed a moment ago'}",
            reason=part.error or "It gave no reason",
            next="Fix the cause; the pipeline retries automatically"
            if repeated
            else "Nothing yet: the pipeline starts it again. Check the cause if this repeats",
            link=link,
            waiting=backlog,
        )
    still = _still_seconds(snapshot, history, part.name)
    if backlog and still >= SLOW_SECONDS and part.state == "running":
        yield Alert(
            about=about,
            kind=Kind.PART_STILL,
            level=Level.STUCK if still >= STUCK_SECONDS else Level.WARNING,
            title=f"{part.name} does not move",
            reason=f"{format_count(backlog, 'message')} waiting, and none was processed for {format_duration(still)}",
            next="Check the batch time on the pipeline page, then logs/pipeline.log",
            link=link,
            waiting=backlog,
        )


def _still_seconds(snapshot: SystemSnapshot, history: History, part: str) -> float:
    """Return how long a part has not moved. A prefill or replay moves while the number of its messages grows."""
    now = snapshot.at.timestamp()
    moves = [history.of("floor", *snapshot.part_readers[part])]
    if part == "prefill":
        running = (name for name, found in snapshot.subscriptions.items() if found.prefill is not None)
        moves += [series for name in running if (series := history.of("written", name)).points()]
    return min(each.still_seconds(now) for each in moves)


def queue_alerts(snapshot: SystemSnapshot, history: History) -> Iterator[Alert]:
    """Yield alerts about queues."""
    for queue in snapshot.queues.values():
        if queue.sealed:
            yield _migration(snapshot, history, queue)
    if snapshot.dead_letter_total:
        yield Alert(
            about="queue:dead-letters",
            kind=Kind.DEAD_LETTERS,
            level=Level.WARNING,
            title=format_count(snapshot.dead_letter_total, "dead letter"),
            reason="Messages that could not be processed, each with its reason",
            next="Read them, fix the cause, and retry or discard them",
            link="/console/dead-letters",
        )
    failures = snapshot.queues.get("prefill-failures")
    if failures is not None and failures.messages:
        yield Alert(
            about="queue:prefill",
            kind=Kind.PREFILL_REQUESTS,
            level=Level.NOTE,
            title=f"{format_count(failures.messages, 'prefill request')} failed for good",
            reason="The queue prefill-failures holds each request with its reason",
            next="Read them in that queue",
            link="/console/queues?queue=prefill-failures",
        )


def _migration(snapshot: SystemSnapshot, history: History, queue: QueueSnapshot) -> Alert:
    """Return the alert of a sealed queue: a note while its readers empty it."""
    still = history.of("done", queue.name).still_seconds(snapshot.at.timestamp())
    halted, left = still >= STUCK_SECONDS, format_count(queue.messages, "message")
    return Alert(
        about=f"sub:{queue.name}" if queue.kind is QueueKind.SUBSCRIPTION else f"queue:{queue.name}",
        kind=Kind.MIGRATION,
        level=Level.WARNING if halted else Level.NOTE,
        title=f"{queue.name} is being migrated",
        reason=f"It is sealed: its writers wait until its readers have emptied it; {left} left",
        next="Check that its readers run, then the plan on the queues page"
        if halted
        else "Nothing, if its readers run",
        link=f"/console/queues?queue={queue.name}",
        waiting=queue.messages,
    )


def is_silent(snapshot: SystemSnapshot, pipeline: PipelineSnapshot) -> bool:
    """Return whether a pipeline has not reported for too long."""
    return (snapshot.at - pipeline.at).total_seconds() > SILENT_SECONDS


def _part_backlog(snapshot: SystemSnapshot, part: str) -> int:
    return snapshot.backlog(*snapshot.part_readers[part])
