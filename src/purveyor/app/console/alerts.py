"""Alerts: rules over a snapshot that find problems, each with its reason and the next step for the operator. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from purveyor.app.console.formatting import format_count, format_duration
from purveyor.app.console.snapshot import PartSnapshot, PipelineSnapshot, QueueKind, SystemSnapshot
from purveyor.app.console.time_series import History
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues.registry import Registered

SILENT_SECONDS: Final = 10.0
"""The console treats a pipeline without a status for this time as not running."""
SLOW_SECONDS: Final = 60.0
STUCK_SECONDS: Final = 300.0
_PART_READERS: Final = {
    "transform": ("ldif", "transformer"),
    "dispatch": ("incoming", ""),
    "archive": ("incoming", "archive"),
    "prefill": ("prefill", "prefill"),
}


class Level(IntEnum):
    """The severity of an alert."""

    FINE = 0
    NOTE = 1
    """Work in progress that explains what the console shows."""
    WARNING = 2
    """An operator should look at it soon."""
    STUCK = 3
    """Messages do not move until an operator acts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A problem: the box it concerns (`about`), what is wrong, why, and what to do next."""

    about: str
    level: Level
    title: str
    reason: str
    next: str
    link: str = ""


def server_alerts(snapshot: SystemSnapshot) -> Iterator[Alert]:
    """Yield an alert if the NATS server does not answer."""
    if snapshot.problem is not None:
        yield Alert(
            about="server",
            level=Level.STUCK,
            title="The queues cannot be reached",
            reason=snapshot.problem,
            next=snapshot.fix or "Check that the NATS server runs: purveyor doctor",
        )


def pipeline_alerts(snapshot: SystemSnapshot, history: History) -> Iterator[Alert]:
    """Yield alerts about the pipeline and its parts."""
    running = [pipeline for pipeline in snapshot.pipelines if not pipeline.stopped]
    heard = [pipeline for pipeline in running if not _is_silent(snapshot, pipeline)]
    waiting = sum(_backlog(snapshot, part) for part in _PART_READERS)
    if not heard and (waiting or snapshot.pipelines or snapshot.subscriptions):
        yield _no_pipeline(snapshot, running, waiting)
    known = snapshot.parts
    for name in _PART_READERS:
        if name in known and known[name][0] in heard:
            yield from _part_alerts(snapshot, history, known[name][1])
        elif heard and _backlog(snapshot, name):
            yield Alert(
                about=f"part:{name}",
                level=Level.STUCK,
                title=f"No {name} runs",
                reason=f"{format_count(_backlog(snapshot, name), 'message')} waiting; no pipeline runs this part",
                next=f"Start it: purveyor serve pipeline --parts {name}",
                link="/console/pipeline",
            )


def _no_pipeline(snapshot: SystemSnapshot, running: list[PipelineSnapshot], waiting: int) -> Alert:
    level = Level.STUCK if waiting else Level.WARNING
    backlog = f"; {format_count(waiting, 'message')} waiting" if waiting else ""
    if running:
        last = max(running, key=lambda pipeline: pipeline.at)
        ago = format_duration((snapshot.at - last.at).total_seconds())
        reason = f"Its last report is {ago} old, from process {last.pid} on {last.host}{backlog}"
    elif snapshot.pipelines:
        reason = f"It was stopped{backlog}"
    else:
        reason = f"No pipeline has reported since the NATS server started{backlog}"
    return Alert(
        about="pipeline",
        level=level,
        title="No pipeline runs",
        reason=reason,
        next="Start it: purveyor serve pipeline (or purveyor up). If it should run, read logs/pipeline.log there",
        link="/console/pipeline",
    )


def _part_alerts(snapshot: SystemSnapshot, history: History, part: PartSnapshot) -> Iterator[Alert]:
    about, link = f"part:{part.name}", "/console/pipeline"
    if part.state in ("waiting", "failed"):
        yield Alert(
            about=about,
            level=Level.STUCK,
            title=f"{part.name} {'fails repeatedly' if part.state == 'waiting' else 'cannot run'}",
            reason=part.error or "It gave no reason",
            next="Fix the cause; the pipeline retries by itself"
            if part.state == "waiting"
            else "Fix the cause and restart the pipeline",
            link=link,
        )
        return
    if part.error is not None:
        yield Alert(
            about=about,
            level=Level.WARNING,
            title=f"{part.name} failed a moment ago",
            reason=part.error,
            next="It runs again; check the cause if this repeats",
            link=link,
        )
    queue, durable = _source(snapshot, part.name)
    still = history.of("floor", queue, durable).still_seconds(snapshot.at.timestamp())
    backlog = _backlog(snapshot, part.name)
    if backlog and still >= SLOW_SECONDS and part.state == "running":
        yield Alert(
            about=about,
            level=Level.STUCK if still >= STUCK_SECONDS else Level.WARNING,
            title=f"{part.name} does not move",
            reason=f"{format_count(backlog, 'message')} waiting, and none was processed for {format_duration(still)}",
            next="Check the batch time on the pipeline page, then logs/pipeline.log",
            link=link,
        )


def queue_alerts(snapshot: SystemSnapshot) -> Iterator[Alert]:
    """Yield alerts about queues."""
    for queue in snapshot.queues.values():
        if queue.sealed:
            yield Alert(
                about=f"sub:{queue.name}" if queue.kind is QueueKind.SUBSCRIPTION else f"queue:{queue.name}",
                level=Level.WARNING,
                title=f"{queue.name} is being migrated",
                reason="It is sealed: its writers wait until its readers have emptied it",
                next="Nothing, if its readers run. Otherwise check the plan on the queues page",
                link=f"/console/queues?queue={queue.name}",
            )
    if snapshot.dead_letter_total:
        yield Alert(
            about="queue:dead-letters",
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
            level=Level.NOTE,
            title=f"{format_count(failures.messages, 'prefill request')} failed for good",
            reason="The queue prefill-failures holds each request with its reason",
            next="Read them in that queue",
            link="/console/queues?queue=prefill-failures",
        )


def subscription_alerts(snapshot: SystemSnapshot, history: History) -> Iterator[Alert]:
    """Yield alerts about subscriptions, at most one for each."""
    for name, found in snapshot.subscriptions.items():
        alert = _registration(name, found) or _prefill(name, found) or _delivery(snapshot, history, found)
        if alert is not None:
            yield alert
    for name, unread in snapshot.unreadable.items():
        yield Alert(
            about=f"sub:{name}",
            level=Level.STUCK,
            title=f"{name} has an unreadable record",
            reason=f"This version does not serve it and does not change it: {unread.reason}",
            next="Upgrade Purveyor: a newer version wrote the record, or the record is damaged",
            link=f"/console/subscriptions/{name}",
        )


def _registration(name: str, found: Registered) -> Alert | None:
    about, link = f"sub:{name}", f"/console/subscriptions/{name}"
    if found.suspended is not None:
        where, group = f"position {found.suspended.position} and later ones", found.suspended.group
        refused, left_out = "Its queue refused", "A dispatcher that cannot read its record skipped"
        return Alert(
            about=about,
            level=Level.STUCK,
            title=f"{name} is suspended",
            reason=f"{refused if group is None else left_out} {where}: {found.suspended.reason}",
            next="Fix the cause, then resume it: the pipeline writes the missed events then"
            if group is None
            else "Upgrade the pipeline: it resumes by itself and writes the missed events",
            link=link,
        )
    if found.record.state is RecordState.ACTIVE:
        return None
    deleting = found.record.state is RecordState.DELETING
    return Alert(
        about=about,
        level=Level.WARNING,
        title=f"{name} is only partly {'deleted' if deleting else 'registered'}",
        reason="The request was interrupted",
        next=f"{'Delete' if deleting else 'Add'} it again; this completes the request",
        link=link,
    )


def _prefill(name: str, found: Registered) -> Alert | None:
    about, link, state = f"sub:{name}", f"/console/subscriptions/{name}", found.prefill
    if state is None or state.status is PrefillStatus.DONE:
        return None
    if state.status is PrefillStatus.FAILED:
        return Alert(
            about=about,
            level=Level.STUCK,
            title=f"The prefill of {name} failed",
            reason=state.reason or "It gave no reason",
            next="Fix the cause and request the prefill again: the API delivers nothing before it is done",
            link=link,
        )
    progress = f"{state.written} of {state.total} written" if state.total else "It has not begun"
    return Alert(
        about=about,
        level=Level.NOTE,
        title=f"{name} is being prefilled",
        reason=f"{progress}; the API delivers nothing before it is done",
        next="Wait; the pipeline part prefill must run",
        link=link,
    )


def _delivery(snapshot: SystemSnapshot, history: History, found: Registered) -> Alert | None:
    queue = snapshot.queues.get(found.name)
    if queue is None or not queue.messages or queue.oldest is None:
        return None
    about, link = f"sub:{found.name}", f"/console/subscriptions/{found.name}"
    age = (snapshot.at - queue.oldest).total_seconds()
    waiting = format_count(queue.messages, "message")
    if found.record.paused:
        return Alert(
            about=about,
            level=Level.WARNING,
            title=f"{found.name} is paused",
            reason=f"{waiting} waiting, the oldest for {format_duration(age)}",
            next="Resume it when its consumer may continue",
            link=link,
        )
    still = history.of("done", found.name).still_seconds(snapshot.at.timestamp())
    if min(still, age) < SLOW_SECONDS:
        return None
    pushed = found.record.definition.push is not None
    return Alert(
        about=about,
        level=Level.STUCK if min(still, age) >= STUCK_SECONDS else Level.WARNING,
        title=f"The endpoint of {found.name} accepts no messages"
        if pushed
        else f"Subscription {found.name} has no active consumer",
        reason=f"{waiting}, the oldest for {format_duration(age)}; no acknowledgement for {format_duration(still)}",
        next="Check that purveyor serve push runs, then send a test event from the page of the subscription"
        if pushed
        else "Check that its consumer runs, and read its log; the page of the subscription shows the attempts",
        link=link,
    )


def _is_silent(snapshot: SystemSnapshot, pipeline: PipelineSnapshot) -> bool:
    return (snapshot.at - pipeline.at).total_seconds() > SILENT_SECONDS


def _source(snapshot: SystemSnapshot, part: str) -> tuple[str, str]:
    queue, durable = _PART_READERS[part]
    return queue, durable or snapshot.dispatcher


def _backlog(snapshot: SystemSnapshot, part: str) -> int:
    queue, durable = _source(snapshot, part)
    reader = snapshot.reader(queue, durable)
    return 0 if reader is None else reader.pending + reader.unanswered
