"""The problems of a running deployment, judged from one observation. Pure, apart from processes of this machine.

The rules look for progress, not for processes: a part that exists but does not move has a condition. A backlog that
moves has none. `doctor` prints every condition; `/readyz` lists those that are wrong.
"""

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from purveyor.app.doctor.machine_checks import Finding, Weight
from purveyor.app.doctor.observation import Observation, Report, suspended_process
from purveyor.model.delivery_policy import Delivery
from purveyor.model.file_lock import process_exists
from purveyor.model.json_fields import UPGRADE
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues.backlog import Backlog
from purveyor.queues.catalogue import DEFAULT_GROUP, LDIF, PREFILL, incoming, subscription_queue
from purveyor.queues.registry import Registered
from purveyor.queues.status_board import SILENT_SECONDS

STILL_SECONDS: Final = 60.0
"""A part that makes no step for this time, while messages wait, does not move."""
_BEHIND_SECONDS: Final = 600.0
_STARTING_SECONDS: Final = 120.0
_HOLDING: Final = frozenset({"transform", "archive"})
_HELD_SECONDS: Final = 120.0
"""How long these parts keep processed messages in the queue, for a backup that copies their checkpoints first."""
_UNPUSHED_SECONDS: Final = 300.0
_UNREAD_SECONDS: Final = 3600.0
_ABOUT_SUBSCRIPTIONS: Final = "subscriptions"
_ABOUT_PIPELINE: Final = "pipeline"
_ABOUT_PUSH: Final = "push"
_ABOUT_SOURCES: Final = "sources"
_PROCESSES: Final = {
    _ABOUT_PIPELINE: ("the pipeline", "purveyor serve pipeline"),
    _ABOUT_PUSH: ("the push worker", "purveyor serve push"),
}
_READS: Final = {
    "transform": (LDIF.stream, "transformer"),
    "dispatch": (incoming().stream, None),
    "archive": (incoming().stream, "archive"),
    "prefill": (PREFILL.stream, "prefill"),
}
"""The stream and the durable of each part of the pipeline; the durable of dispatch is its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A statement about one thing, its reason, and what to do."""

    about: str
    weight: Weight
    fact: str
    """It holds no addresses and no texts of errors: `/readyz` needs no login."""
    reason: str = ""
    fix: str | None = None

    def finding(self) -> Finding:
        """Return it for `doctor`."""
        return Finding(self.about, self.weight, f"{self.fact}: {self.reason}" if self.reason else self.fact, self.fix)


def judge(seen: Observation, *, group: str = DEFAULT_GROUP, archive_seconds: float = 0.0) -> Iterator[Condition]:
    """Yield the conditions of a deployment. `archive_seconds` is how long the archive may collect events."""
    yield from _judge_pipelines(seen, group, archive_seconds)
    yield from _judge_push_workers(seen)
    yield from _judge_sources(seen)
    yield from _judge_subscriptions(seen)


def _judge_pipelines(seen: Observation, group: str, archive_seconds: float) -> Iterator[Condition]:
    served: set[str] = set()
    for report in seen.pipelines:
        if report.stopped:
            continue
        silent_seconds = seen.age_seconds(report.at)
        if silent_seconds > SILENT_SECONDS:
            yield _silent(_ABOUT_PIPELINE, report, silent_seconds)
            served |= {str(part.get("part")) for part in report.parts}  # said once, and not again for each part
            continue
        for part in report.parts:
            served.add(str(part.get("part")))
            yield _judge_part(seen, report, part, archive_seconds)
    for name, (stream, durable) in _READS.items():
        waiting = _find_backlog(seen, stream, durable or group)
        if name not in served and waiting is not None and seen.age_seconds(waiting.oldest) > SILENT_SECONDS:
            yield Condition(
                about=_ABOUT_PIPELINE,
                weight=Weight.WRONG,
                fact=f"no pipeline runs {name}, and {_waiting(waiting.pending)} for it",
                fix=f"start it: `purveyor up`, or `purveyor serve pipeline --parts {name}`",
            )
    for report in seen.standbys:
        # One that is silent has died. `up` starts it again, and without `up` nothing says that there should be one.
        if not report.stopped and seen.age_seconds(report.at) <= SILENT_SECONDS:
            is_ready = report.values.get("state") == "standby"
            yield Condition(
                about=_ABOUT_PIPELINE,
                weight=Weight.OK,
                fact=f"{report.name} stands by" if is_ready else f"{report.name} starts, to stand by",
            )
    if not seen.pipelines:
        yield Condition(
            about=_ABOUT_PIPELINE,
            weight=Weight.NOTE,
            fact="no pipeline has reported since the NATS server started",
            fix="start it: `purveyor up`, or `purveyor serve pipeline`",
        )


def _judge_part(seen: Observation, report: Report, part: Mapping[str, Any], archive_seconds: float) -> Condition:
    name, state = str(part.get("part")), str(part.get("state"))
    error, since = str(part.get("error") or ""), _moment(part.get("since"))
    logs = f"see logs/pipeline.log and logs/pipeline-driver.log in the data directory of {report.name}"
    if state == "unresponsive":
        suspended = suspended_process(report.pid) if _is_here(report) else None
        return Condition(
            about=_ABOUT_PIPELINE,
            weight=Weight.WRONG,
            fact=f"{name} has not answered since {_clock(since)}: the JVM of Spark hangs or is suspended",
            fix=f"process {suspended} is suspended; continue it: `kill -CONT {suspended}`"
            if suspended is not None
            else f"is the machine of {report.name} short of memory? Else restart the pipeline",
        )
    if state in ("waiting", "failed"):
        fact = f"{name} fails, and starts again and again" if state == "waiting" else f"{name} cannot work"
        return Condition(about=_ABOUT_PIPELINE, weight=Weight.WRONG, fact=fact, reason=error, fix=logs)
    if state != "running":
        is_late = seen.age_seconds(since) > _STARTING_SECONDS
        return Condition(
            about=_ABOUT_PIPELINE,
            weight=Weight.WARNING if is_late else Weight.OK,
            fact=f"{name} has been {state} since {_clock(since)}" if is_late else f"{name} is {state}",
            fix=logs if is_late else None,
        )
    return (
        _judge_progress(seen, report, part, archive_seconds)
        or (
            Condition(
                about=_ABOUT_PIPELINE,
                weight=Weight.WARNING,
                fact=f"{name} runs, and failed a moment ago",
                reason=error,
                fix=f"none if it does not repeat; else {logs}",
            )
            if error
            else None
        )
        or _running(name, part)
    )


def _running(name: str, part: Mapping[str, Any]) -> Condition:
    position = part.get("position")
    where = "" if position is None else f" at position {position}"
    return Condition(about=_ABOUT_PIPELINE, weight=Weight.OK, fact=f"{name} runs{where}")


def _judge_progress(
    seen: Observation, report: Report, part: Mapping[str, Any], archive_seconds: float
) -> Condition | None:
    """Compare the position of a running part with what waits for it. None if it moves, or nothing waits for long."""
    name = str(part.get("part"))
    stream, durable = _READS.get(name, ("", None))
    waiting = _find_backlog(seen, stream, durable or str(report.values.get("group") or DEFAULT_GROUP))
    if waiting is None or not waiting.pending:
        return None
    position, usage = part.get("position"), seen.usages.get(stream)
    if not isinstance(position, int):
        position = waiting.position
    pending = max(usage.last_sequence - position, 0) if usage is not None else waiting.pending
    if not pending:  # it has processed them; the queue holds them for a backup
        return None
    held_seconds = _HELD_SECONDS if name in _HOLDING else 0.0
    patience = STILL_SECONDS + held_seconds + (archive_seconds if name == "archive" else 0.0)
    waits_seconds = seen.age_seconds(waiting.oldest)
    moved_at = _moment(part.get("moved_at")) or _moment(part.get("since"))
    if min(seen.age_seconds(moved_at), waits_seconds) > patience:
        return Condition(
            about=_ABOUT_PIPELINE,
            weight=Weight.WRONG,
            fact=f"{name} has been at position {position} since {_clock(moved_at)}, and "
            f"{_waiting(pending)} for it, the oldest for {_duration(waits_seconds)}",
            fix="a batch takes long or hangs: see logs/pipeline.log in the data directory of "
            f"{report.name}; a restart of the pipeline repeats the batch",
        )
    if waits_seconds > _BEHIND_SECONDS + patience:
        return Condition(
            about=_ABOUT_PIPELINE,
            weight=Weight.WARNING,
            fact=f"{name} moves, but is {_duration(waits_seconds)} behind: {_waiting(pending)}",
            fix="more comes in than goes through: give Spark more cores, or wait until an import is done",
        )
    return None


def _judge_push_workers(seen: Observation) -> Iterator[Condition]:
    pushed = {name: each for name, each in seen.snapshot.subscriptions.items() if _is_pushed(each)}
    live = [each for each in seen.push_workers if seen.age_seconds(each.at) <= SILENT_SECONDS]
    for report in seen.push_workers:
        # A worker that died while another one works is replaced. One that still exists hangs, with leased messages.
        hangs = _is_here(report) and report.pid is not None and process_exists(report.pid)
        if report not in live and (hangs or not live):
            silent_seconds = seen.age_seconds(report.at)
            weight = Weight.WRONG if pushed or hangs else Weight.NOTE
            yield _silent(_ABOUT_PUSH, report, silent_seconds, weight)
    if live:
        sent = sum(int(each.values.get("sent") or 0) for each in live)
        yield Condition(
            about=_ABOUT_PUSH,
            weight=Weight.OK,
            fact=f"{_count(len(live), 'worker')} {'push' if len(live) > 1 else 'pushes'} "
            f"{_count(len(pushed), 'subscription')}, {_count(sent, 'request')} sent",
        )
    elif not seen.push_workers and pushed:
        yield Condition(
            about=_ABOUT_PUSH,
            weight=Weight.WRONG,
            fact=f"no push worker runs, and {_count(len(pushed), 'subscription')} should be pushed",
            fix="start one: `purveyor up`, or `purveyor serve push`",
        )


def _judge_sources(seen: Observation) -> Iterator[Condition]:
    for source in seen.sources:
        name, values = source.source, source.values
        entries, mode = values.get("entries"), values.get("mode")
        if source.is_silent:
            yield Condition(
                about=_ABOUT_SOURCES,
                weight=Weight.WRONG,
                fact=f"{name} has not reported for {_duration(seen.age_seconds(source.at))}",
                fix="does its process run? Start it: `purveyor up`, or `purveyor serve ldap`",
            )
        elif source.state == "failed":
            # Not wrong: the source tries again, and everything else works.
            yield Condition(
                about=_ABOUT_SOURCES,
                weight=Weight.WARNING,
                fact=f"{name} cannot follow its directory since {_clock(_moment(values.get('since')))}",
                reason=str(values.get("error") or ""),
                fix=str(values.get("fix") or "does the directory run, and can the source reach it?"),
            )
        else:
            known = f", {entries:,} entries" if isinstance(entries, int) else ""
            by = f" by {mode}" if mode else ""
            yield Condition(about=_ABOUT_SOURCES, weight=Weight.OK, fact=f"{name} is {source.state}{by}{known}")


def _judge_subscriptions(seen: Observation) -> Iterator[Condition]:
    subscriptions, healthy = seen.snapshot.subscriptions, 0
    for unread in seen.snapshot.unreadable.values():
        yield Condition(
            about=_ABOUT_SUBSCRIPTIONS,
            weight=Weight.WRONG,
            fact=f"{unread.name} is not served, because its record cannot be read",
            reason=unread.reason,
            fix=UPGRADE,
        )
    for name, found in subscriptions.items():
        condition = _judge_subscription(seen, name, found)
        if condition is None:
            healthy += 1
        else:
            yield condition
    if healthy:
        fact = f"{healthy} of {len(subscriptions)} without a problem"
        yield Condition(about=_ABOUT_SUBSCRIPTIONS, weight=Weight.OK, fact=fact)


def _judge_subscription(seen: Observation, name: str, found: Registered) -> Condition | None:
    def condition(weight: Weight, fact: str, fix: str, reason: str = "") -> Condition:
        return Condition(about=_ABOUT_SUBSCRIPTIONS, weight=weight, fact=fact, reason=reason, fix=fix)

    usage = seen.usages.get(subscription_queue(name).stream)
    waiting = 0 if usage is None else usage.messages
    age_seconds = seen.age_seconds(usage.oldest) if usage is not None and waiting else 0.0
    held = f"{_waiting(waiting)}, the oldest for {_duration(age_seconds)}"
    show = f"`purveyor subscription show {name}`"
    if found.record.state is not RecordState.ACTIVE:
        word = "deleted" if found.record.state is RecordState.DELETING else "registered"
        return condition(Weight.WARNING, f"{name} is only partly {word}", "send the request again: it is completed")
    if found.suspended is not None:
        by_group = found.suspended.group is not None
        return condition(
            Weight.WRONG,
            f"{name} has been suspended at position {found.suspended.position} since {_clock(found.suspended.at)}",
            "upgrade the pipeline: it resumes the subscription automatically"
            if by_group
            else f"correct the cause, then `purveyor subscription resume {name}`",
            found.suspended.reason,
        )
    if found.prefill is not None and found.prefill.status is PrefillStatus.FAILED:
        fix = f"correct the cause, then `purveyor subscription prefill {name}`; until then it gets nothing"
        return condition(Weight.WRONG, f"the prefill of {name} failed", fix, found.prefill.reason or "")
    problem = seen.problems.get(name)
    if problem is not None:
        return condition(
            Weight.WRONG,
            f"{name} has not been pushed since {_clock(problem.since)}{f', and {held}' if waiting else ''}",
            _push_fix(name, seen),
            problem.details,
        )
    if found.record.paused:
        is_old = age_seconds > _UNREAD_SECONDS
        fix = f"`purveyor subscription resume {name}` when its consumer may continue"
        return condition(Weight.WARNING, f"{name} is paused, and {held}", fix) if is_old else None
    if _is_pushed(found) and age_seconds > _UNPUSHED_SECONDS:
        fact = f"{name} is behind: {held}, and no push worker reports a problem"
        return condition(Weight.WARNING, fact, f"does a push worker run? {show} lists the attempts of the oldest one")
    if age_seconds > _UNREAD_SECONDS:
        fix = f"its consumer does not fetch or does not acknowledge: is it running? {show} lists its leases"
        return condition(Weight.WARNING, f"{name} is not consumed: {held}", fix)
    return None


def _push_fix(name: str, seen: Observation) -> str:
    """Return what to do about a push problem: it depends on what the endpoint does."""
    endpoints = seen.problems[name].endpoints
    status = next((each.status for each in endpoints if each.status is not None), None)
    more = f"`purveyor subscription show {name}` lists the attempts; push continues automatically"
    if status is not None:
        return f"find out in the log of the endpoint why it answers {status}; {more}"
    if endpoints:
        return f"does the endpoint run, and can the push worker reach it? {more}"
    return f"correct what the reason names; {more}"


def _silent(about: str, report: Report, silent_seconds: float, weight: Weight = Weight.WRONG) -> Condition:
    """Return the condition of a process that should report and does not, with advice that fits its state."""
    what, start = _PROCESSES[about]
    fact = f"{what} ({report.name}) has not reported for {_duration(silent_seconds)}"
    if not _is_here(report) or report.pid is None:
        fix = f"on that host: does the process run, and does it reach the NATS server? Start it: `{start}`"
    elif not process_exists(report.pid):
        fact = f"{what} ({report.name}) ended unexpectedly {_duration(silent_seconds)} ago"
        fix = f"start it: `{start}`; under `purveyor up` it starts automatically"
    elif (suspended := suspended_process(report.pid)) is not None:
        fix = f"process {suspended} is suspended; continue it: `kill -CONT {suspended}`"
    else:
        fix = (
            f"it hangs, or does not reach the NATS server: see its log. To let `up` restart it: `kill -9 {report.pid}`"
        )
    return Condition(about=about, weight=weight, fact=fact, fix=fix)


def _is_here(report: Report) -> bool:
    return report.host == socket.gethostname()


def _is_pushed(found: Registered) -> bool:
    record = found.record
    return record.definition.delivery is Delivery.PUSH and record.state is RecordState.ACTIVE and not record.paused


def _find_backlog(seen: Observation, stream: str, durable: str) -> Backlog | None:
    return next((each for each in seen.backlogs if (each.stream, each.durable) == (stream, durable)), None)


def _moment(value: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(value)) if value else None
    except ValueError:
        return None


def _clock(at: datetime | None) -> str:
    return "an unknown time" if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _waiting(messages: int) -> str:
    return f"{_count(messages, 'message')} {'waits' if messages == 1 else 'wait'}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
