"""What somebody should know, and what to do about it: rules over facts, each with a reason and a next step. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from purveyor.app.console.formatting import duration, plural
from purveyor.app.console.snapshot import Facts, PartFacts, PipelineFacts, QueueKind
from purveyor.app.console.time_series import History
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues.registry import Registered

SILENT_SECONDS: Final = 10.0
"""A pipeline that posted nothing for so long is not there."""
SLOW_SECONDS: Final = 60.0
STUCK_SECONDS: Final = 300.0
_READS: Final = {
    "transform": ("ldif", "transformer"),
    "dispatch": ("incoming", ""),
    "archive": ("incoming", "archive"),
    "prefill": ("prefill", "prefill"),
}


class Level(IntEnum):
    """How bad it is."""

    FINE = 0
    NOTE = 1
    """Something is under way that explains what is seen."""
    WARNING = 2
    """Somebody should look at it some time."""
    STUCK = 3
    """Messages do not go on until somebody acts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What is wrong with what (the id of a box), why, and what to do next."""

    about: str
    level: Level
    title: str
    reason: str
    next: str
    link: str = ""


def server_troubles(facts: Facts) -> Iterator[Trouble]:
    """Without the server nothing else can be told."""
    if facts.problem is not None:
        yield Trouble(
            about="server",
            level=Level.STUCK,
            title="The queues cannot be reached",
            reason=facts.problem,
            next=facts.fix or "See that the NATS server runs: purveyor doctor",
        )


def pipeline_troubles(facts: Facts, history: History) -> Iterator[Trouble]:
    """Of the pipeline as a whole, and of its parts."""
    running = [pipeline for pipeline in facts.pipelines if not pipeline.stopped]
    heard = [pipeline for pipeline in running if not _silent(facts, pipeline)]
    waiting = sum(_backlog(facts, part) for part in _READS)
    if not heard and (waiting or facts.pipelines or facts.subscriptions):
        yield _no_pipeline(facts, running, waiting)
    known = facts.parts
    for name in _READS:
        if name in known and known[name][0] in heard:
            yield from _part_troubles(facts, history, known[name][1])
        elif heard and _backlog(facts, name):
            yield Trouble(
                about=f"part:{name}",
                level=Level.STUCK,
                title=f"No {name} runs",
                reason=f"{plural(_backlog(facts, name), 'message')} for it, and no pipeline that runs has this part",
                next=f"Start it: purveyor serve pipeline --parts {name}",
                link="/console/pipeline",
            )


def _no_pipeline(facts: Facts, running: list[PipelineFacts], waiting: int) -> Trouble:
    level = Level.STUCK if waiting else Level.WARNING
    held = f"; {plural(waiting, 'message')} for it" if waiting else ""
    if running:
        last = max(running, key=lambda pipeline: pipeline.at)
        ago = duration((facts.at - last.at).total_seconds())
        reason = f"It was last heard of {ago} ago, as process {last.pid} on {last.host}{held}"
    elif facts.pipelines:
        reason = f"It was stopped{held}"
    else:
        reason = f"None has said anything since the queue server started{held}"
    return Trouble(
        about="pipeline",
        level=level,
        title="No pipeline runs",
        reason=reason,
        next="Start it: purveyor serve pipeline (or purveyor up). If it should run, see logs/pipeline.log there",
        link="/console/pipeline",
    )


def _part_troubles(facts: Facts, history: History, part: PartFacts) -> Iterator[Trouble]:
    about, link = f"part:{part.name}", "/console/pipeline"
    if part.state in ("waiting", "failed"):
        yield Trouble(
            about=about,
            level=Level.STUCK,
            title=f"{part.name} {'fails again and again' if part.state == 'waiting' else 'cannot work'}",
            reason=part.error or "It gave no reason",
            next="Mend the cause; it is tried again by itself"
            if part.state == "waiting"
            else "Mend the cause and start the pipeline again",
            link=link,
        )
        return
    if part.error is not None:
        yield Trouble(
            about=about,
            level=Level.WARNING,
            title=f"{part.name} failed a moment ago",
            reason=part.error,
            next="It runs again; look at the cause if that repeats",
            link=link,
        )
    queue, durable = _source(facts, part.name)
    still = history.of("floor", queue, durable).still_seconds(facts.at.timestamp())
    held = _backlog(facts, part.name)
    if held and still >= SLOW_SECONDS and part.state == "running":
        yield Trouble(
            about=about,
            level=Level.STUCK if still >= STUCK_SECONDS else Level.WARNING,
            title=f"{part.name} does not move",
            reason=f"{plural(held, 'message')} for it, and none was done for {duration(still)}",
            next="A long batch? See its time on the page of the pipeline, then logs/pipeline.log",
            link=link,
        )


def queue_troubles(facts: Facts) -> Iterator[Trouble]:
    """Of queues as such."""
    for queue in facts.queues.values():
        if queue.sealed:
            yield Trouble(
                about=f"sub:{queue.name}" if queue.kind is QueueKind.SUBSCRIPTION else f"queue:{queue.name}",
                level=Level.WARNING,
                title=f"{queue.name} is being migrated",
                reason="It is sealed: who writes to it waits until its readers have emptied it",
                next="Nothing, if its readers run. Else see the plan on the page of queues",
                link=f"/console/queues?queue={queue.name}",
            )
    if facts.dead:
        yield Trouble(
            about="queue:dead-letters",
            level=Level.WARNING,
            title=plural(facts.dead, "dead letter"),
            reason="Messages that could not be processed were set aside, with the reason",
            next="Read them, mend the cause, and retry or discard them",
            link="/console/dead-letters",
        )
    failures = facts.queues.get("prefill-failures")
    if failures is not None and failures.messages:
        yield Trouble(
            about="queue:prefill",
            level=Level.NOTE,
            title=f"{plural(failures.messages, 'prefill request')} failed for good",
            reason="Each says why in the queue prefill-failures",
            next="Read them there",
            link="/console/queues?queue=prefill-failures",
        )


def subscription_troubles(facts: Facts, history: History) -> Iterator[Trouble]:
    """Of subscriptions."""
    for name, found in facts.subscriptions.items():
        trouble = _registration(name, found) or _prefill(name, found) or _delivery(facts, history, found)
        if trouble is not None:
            yield trouble
    for name, unread in facts.unreadable.items():
        yield Trouble(
            about=f"sub:{name}",
            level=Level.STUCK,
            title=f"{name} is not understood",
            reason=f"This program does not serve it, and leaves it as it is: {unread.reason}",
            next="Upgrade this program: a newer one wrote the record, or it is damaged",
            link=f"/console/subscriptions/{name}",
        )


def _registration(name: str, found: Registered) -> Trouble | None:
    about, link = f"sub:{name}", f"/console/subscriptions/{name}"
    if found.suspended is not None:
        where, group = f"position {found.suspended.position} and what follows", found.suspended.group
        refused, left_out = "Its queue refused", "A dispatcher that does not understand its record left out"
        return Trouble(
            about=about,
            level=Level.STUCK,
            title=f"{name} is suspended",
            reason=f"{refused if group is None else left_out} {where}: {found.suspended.reason}",
            next="Mend the cause, then resume it: what it missed is written then"
            if group is None
            else "Upgrade the pipeline: it goes on by itself, and what was missed is written then",
            link=link,
        )
    if found.record.state is RecordState.ACTIVE:
        return None
    deleting = found.record.state is RecordState.DELETING
    return Trouble(
        about=about,
        level=Level.WARNING,
        title=f"{name} is not {'deleted' if deleting else 'registered'} to the end",
        reason="Whoever did it was interrupted",
        next=f"{'Delete' if deleting else 'Add'} it again; that goes on where it ended",
        link=link,
    )


def _prefill(name: str, found: Registered) -> Trouble | None:
    about, link, state = f"sub:{name}", f"/console/subscriptions/{name}", found.prefill
    if state is None or state.status is PrefillStatus.DONE:
        return None
    if state.status is PrefillStatus.FAILED:
        return Trouble(
            about=about,
            level=Level.STUCK,
            title=f"The prefill of {name} failed",
            reason=state.reason or "No reason was given",
            next="Mend that and ask for the prefill again: nothing is delivered before it is done",
            link=link,
        )
    how_far = f"{state.written} of {state.total} written" if state.total else "It has not begun"
    return Trouble(
        about=about,
        level=Level.NOTE,
        title=f"{name} is being prefilled",
        reason=f"{how_far}; nothing is delivered before it is done",
        next="Wait. It needs the part prefill of the pipeline",
        link=link,
    )


def _delivery(facts: Facts, history: History, found: Registered) -> Trouble | None:
    queue = facts.queues.get(found.name)
    if queue is None or not queue.messages or queue.oldest is None:
        return None
    about, link = f"sub:{found.name}", f"/console/subscriptions/{found.name}"
    age = (facts.at - queue.oldest).total_seconds()
    waiting = plural(queue.messages, "message")
    if found.record.paused:
        return Trouble(
            about=about,
            level=Level.WARNING,
            title=f"{found.name} is paused",
            reason=f"{waiting} meanwhile, the oldest for {duration(age)}",
            next="Resume it when its consumer may go on",
            link=link,
        )
    still = history.of("done", found.name).still_seconds(facts.at.timestamp())
    if min(still, age) < SLOW_SECONDS:
        return None
    pushed = found.record.definition.push is not None
    return Trouble(
        about=about,
        level=Level.STUCK if min(still, age) >= STUCK_SECONDS else Level.WARNING,
        title=f"{'The endpoint' if pushed else 'Nobody'} takes {'no' if pushed else 'the'} messages of {found.name}",
        reason=f"{waiting}, the oldest for {duration(age)}; none was acknowledged for {duration(still)} or longer",
        next="See that purveyor serve push runs, then send the endpoint a test event from its page"
        if pushed
        else "See that its consumer runs, and what its log says; its attempts are on its page",
        link=link,
    )


def _silent(facts: Facts, pipeline: PipelineFacts) -> bool:
    return (facts.at - pipeline.at).total_seconds() > SILENT_SECONDS


def _source(facts: Facts, part: str) -> tuple[str, str]:
    queue, durable = _READS[part]
    return queue, durable or facts.dispatcher


def _backlog(facts: Facts, part: str) -> int:
    queue, durable = _source(facts, part)
    reader = facts.reader(queue, durable)
    return 0 if reader is None else reader.pending + reader.unanswered
