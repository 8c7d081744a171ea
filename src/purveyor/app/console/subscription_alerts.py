"""Alerts about subscriptions: rules over a snapshot that find those that get nothing, and the reason. Pure.

A dead endpoint or a suspended subscription is red: a subscriber waits for messages that cannot be delivered. A queue
that a consumer has not read is no incident, because the queue is there for consumers that are away: it is a note after
minutes, and a warning when it is old or long.
"""

from collections.abc import Iterator
from typing import Final
from urllib.parse import quote

from purveyor.app.console.alerts import SLOW_SECONDS, STUCK_SECONDS, Alert, Kind, Level
from purveyor.app.console.formatting import format_count, format_duration
from purveyor.app.console.snapshot import QueueSnapshot, SystemSnapshot
from purveyor.app.console.time_series import History
from purveyor.delivery.push.push_reports import PushProblem
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues.registry import Registered

OLD_SECONDS: Final = 3600.0
"""Unread messages of this age are a warning, as in `purveyor doctor` and the shipped alert rules."""
MANY_MESSAGES: Final = 10_000
"""More unread messages of one subscription than this are a warning as soon as its consumer is away."""
_EXPIRING_SHARE: Final = 0.8
"""When the oldest message has used this share of the retention time, messages are about to be lost."""


def subscription_alerts(snapshot: SystemSnapshot, history: History) -> Iterator[Alert]:
    """Yield alerts about subscriptions, at most one for each."""
    for name, found in snapshot.subscriptions.items():
        alert = (
            _suspension(name, found)
            or _interrupted(snapshot, history, found)
            or _filling(name, found)
            or _delivery(snapshot, history, found)
        )
        if alert is not None:
            yield alert
    for name, unread in snapshot.unreadable.items():
        yield Alert(
            about=f"sub:{name}",
            kind=Kind.UNREADABLE,
            level=Level.STUCK,
            title=f"{name} has an unreadable record",
            reason=f"This version does not serve it and does not change it: {unread.reason}",
            next="Upgrade Purveyor: a newer version wrote the record, or the record is damaged",
            link=_page(name),
        )


def _suspension(name: str, found: Registered) -> Alert | None:
    if found.suspended is None:
        return None
    where, group = f"position {found.suspended.position} and later ones", found.suspended.group
    refused, left_out = "Its queue refused", "A dispatcher that cannot read its record skipped"
    return Alert(
        about=f"sub:{name}",
        kind=Kind.SUSPENDED,
        level=Level.STUCK,
        title=f"{name} is suspended",
        reason=f"{refused if group is None else left_out} {where}: {found.suspended.reason}",
        next="Fix the cause, then resume it: the pipeline writes the missed events then"
        if group is None
        else "Upgrade the pipeline: it resumes automatically and writes the missed events",
        link=_page(name),
    )


def _interrupted(snapshot: SystemSnapshot, history: History, found: Registered) -> Alert | None:
    """Return the alert of a request to add or delete that takes too long to be under way still."""
    if found.record.state is RecordState.ACTIVE:
        return None
    if history.of("unsettled", found.name).still_seconds(snapshot.at.timestamp()) < SLOW_SECONDS:
        return None
    deleting = found.record.state is RecordState.DELETING
    return Alert(
        about=f"sub:{found.name}",
        kind=Kind.INTERRUPTED,
        level=Level.WARNING,
        title=f"{found.name} is only partly {'deleted' if deleting else 'registered'}",
        reason="The request was interrupted",
        next=f"{'Delete' if deleting else 'Add'} it again; this completes the request",
        link=_page(found.name),
    )


def _filling(name: str, found: Registered) -> Alert | None:
    state = found.prefill
    if state is None or state.status is PrefillStatus.DONE:
        return None
    what = "replay" if state.is_replay else "prefill"
    if state.status is PrefillStatus.FAILED:
        return Alert(
            about=f"sub:{name}",
            kind=Kind.PREFILL_FAILED,
            level=Level.STUCK,
            title=f"The {what} of {name} failed",
            reason=state.reason or "It gave no reason",
            next=f"Fix the cause and request the {what} again: the API delivers nothing before it is done",
            link=_page(name),
        )
    progress = f"{state.written} of {state.total} written" if state.total else "It has not begun"
    if state.written and not state.total:
        progress = f"{state.written} written"
    title, meanwhile = f"{name} is being prefilled", "the API delivers nothing before it is done"
    if state.is_replay:
        title, meanwhile = f"A replay to {name} runs", "its messages are delivered when all are written"
    return Alert(
        about=f"sub:{name}",
        kind=Kind.FILLING,
        level=Level.NOTE,
        title=title,
        reason=f"{progress}; {meanwhile}",
        next="Wait; the pipeline part prefill must run",
        link=_page(name),
    )


def _delivery(snapshot: SystemSnapshot, history: History, found: Registered) -> Alert | None:
    queue = snapshot.queues.get(found.name)
    if queue is None or not queue.messages or queue.oldest is None:
        return None
    age = (snapshot.at - queue.oldest).total_seconds()
    waiting = format_count(queue.messages, "message")
    expiring = _expiring(found, queue, age)
    problem = None if found.record.paused else snapshot.push_problems.get(found.name)
    if problem is not None:  # the cause, also if messages expire because of it
        return _failing_push(snapshot, queue, problem, expiring)
    if expiring is not None:
        return expiring
    if found.record.paused:
        return Alert(
            about=f"sub:{found.name}",
            kind=Kind.PAUSED,
            level=Level.NOTE,
            title=f"{found.name} is paused",
            reason=f"{waiting} waiting, the oldest for {format_duration(age)}",
            next="Resume it when its consumer may continue",
            link=_page(found.name),
            waiting=queue.messages,
        )
    still = history.of("done", found.name).still_seconds(snapshot.at.timestamp())
    reason = f"{waiting}, the oldest for {format_duration(age)}; no acknowledgement for {format_duration(still)}"
    if found.record.definition.push is not None:
        return _no_push(queue, reason, min(still, age))
    return _no_consumer(queue, reason, min(still, age))


def _expiring(found: Registered, queue: QueueSnapshot, age: float) -> Alert | None:
    """Return the alert of messages that expire soon. A retention time below an hour means to lose old messages."""
    retention = found.record.definition.retention_seconds
    if retention is None or retention < OLD_SECONDS or age < _EXPIRING_SHARE * retention:
        return None
    kept = f"{format_count(queue.messages, 'message')} waiting; its retention time is {format_duration(retention)}"
    left = f"the first in {format_duration(retention - age)}" if retention > age else "the first of them now"
    return Alert(
        about=f"sub:{found.name}",
        kind=Kind.EXPIRING,
        level=Level.WARNING,
        title=f"Messages of {found.name} expire unread",
        reason=f"{kept}, {left}",
        next="Resume it, or give it a longer retention time"
        if found.record.paused
        else "Check that its consumer runs, or give it a longer retention time",
        link=_page(found.name),
        waiting=queue.messages,
    )


def _no_consumer(queue: QueueSnapshot, reason: str, seconds: float) -> Alert | None:
    """Return the alert of a queue that no consumer reads. It is never red: the queue keeps the messages."""
    if seconds < STUCK_SECONDS:
        return None
    return Alert(
        about=f"sub:{queue.name}",
        kind=Kind.NO_CONSUMER,
        level=Level.WARNING if seconds >= OLD_SECONDS or queue.messages >= MANY_MESSAGES else Level.NOTE,
        title=f"Subscription {queue.name} has no active consumer",
        reason=reason,
        next="Check that its consumer runs, and read its log; the page of the subscription shows the attempts",
        link=_page(queue.name),
        waiting=queue.messages,
    )


def _no_push(queue: QueueSnapshot, reason: str, seconds: float) -> Alert | None:
    """Return the alert of a queue that no push worker reads, and that no push worker reports."""
    if seconds < SLOW_SECONDS:
        return None
    return Alert(
        about=f"sub:{queue.name}",
        kind=Kind.NOT_PUSHED,
        level=Level.STUCK if seconds >= STUCK_SECONDS else Level.WARNING,
        title=f"{queue.name} is not pushed: no push worker reports why",
        reason=reason,
        next="Check that purveyor serve push runs, then send a test event from the page of the subscription",
        link=_page(queue.name),
        waiting=queue.messages,
    )


def _failing_push(
    snapshot: SystemSnapshot, queue: QueueSnapshot, problem: PushProblem, expiring: Alert | None
) -> Alert:
    """Return the alert of a subscription whose push worker reports a problem. The advice fits the cause."""
    lost = "" if expiring is None else f"; {expiring.reason}"
    seconds = max((snapshot.at - problem.since).total_seconds(), 0.0)
    tried = "".join(f"; {each.progress}" for each in problem.endpoints)
    answered = next((each.status for each in problem.endpoints if each.status is not None), None)
    if answered is not None:
        advice = f"Find out in the log of the endpoint why it answers {answered}; push continues automatically"
    elif problem.endpoints:
        advice = "Check that the endpoint runs and can be reached from the push worker; push continues automatically"
    else:
        advice = "Correct what the reason names; push continues automatically"
    return Alert(
        about=f"sub:{queue.name}",
        kind=Kind.NOT_PUSHED,
        level=Level.STUCK if seconds >= STUCK_SECONDS else Level.WARNING,
        title=f"{queue.name} is not pushed: {problem.reason}",
        reason=f"{format_count(queue.messages, 'message')} waiting, for {format_duration(seconds)}{tried}{lost}",
        next=advice,
        link=_page(queue.name),
        waiting=queue.messages,
    )


def _page(name: str) -> str:
    return f"/console/subscriptions/{quote(name)}"
