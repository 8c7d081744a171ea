"""Snapshots of systems that do not exist: a healthy one, and what tests change in it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from purveyor.app.console.alerts import Alert
from purveyor.app.console.flow_graph import Flow, build_flow
from purveyor.app.console.snapshot import (
    PartSnapshot,
    PipelineSnapshot,
    QueueKind,
    QueueSnapshot,
    ReaderSnapshot,
    SystemSnapshot,
    recorded_numbers,
)
from purveyor.app.console.time_series import History
from purveyor.model.delivery_policy import Delivery
from purveyor.model.registration import Record, RecordState
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.registry import Registered, Unreadable

NOW = datetime(2026, 1, 1, 3, 0, tzinfo=UTC)
PARTS = tuple(
    PartSnapshot(name=name, state="running", batch_ms=50) for name in ("transform", "dispatch", "archive", "prefill")
)
PIPELINE = PipelineSnapshot(label="all", at=NOW, host="here", pid=7, group="dispatcher", parts=PARTS)


def registered(name: str, **more: Any) -> Registered:
    """Return a subscription with changes of its record, its definition or its states."""
    push, retention = more.pop("push", None), more.pop("retention_seconds", None)
    definition = Subscription(
        name=name,
        realms_topics=(RealmTopic("udm", "users/user"),),
        delivery=Delivery.ORDERED if push is None else Delivery.PUSH,
        push=push,
        retention_seconds=retention,
    )
    record = Record(incarnation="i", definition=definition, begin=1, state=RecordState.ACTIVE, created=NOW)
    for key in ("paused", "state"):
        if key in more:
            record = replace(record, **{key: more.pop(key)})
    return Registered(record=record, revision=1, **more)


def sample_system(**more: Any) -> SystemSnapshot:
    """Return a healthy system: two subscriptions, no backlog."""
    queues = {name: QueueSnapshot(name=name, kind=QueueKind.INTERNAL) for name in ("ldif", "incoming", "prefill")}
    queues |= {name: QueueSnapshot(name=name, kind=QueueKind.SUBSCRIPTION) for name in ("ox", "ux")}
    readers = {
        "ldif": (ReaderSnapshot(durable="transformer"),),
        "incoming": (ReaderSnapshot(durable="dispatcher"), ReaderSnapshot(durable="archive")),
        "prefill": (ReaderSnapshot(durable="prefill"),),
    }
    subscriptions = {name: registered(name) for name in ("ox", "ux")}
    snapshot = SystemSnapshot(
        at=NOW, queues=queues, readers=readers, subscriptions=subscriptions, pipelines=(PIPELINE,)
    )
    return replace(snapshot, **more)


def flow_of(snapshot: SystemSnapshot, *, seen_for: float = 1000.0) -> Flow:
    """Return the flow after the snapshot has not changed for a while."""
    history = History()
    for seconds in (seen_for, seen_for / 2, 0.0):
        history.add(snapshot.at.timestamp() - seconds, recorded_numbers(snapshot))
    return build_flow(snapshot, history)


def only(flow: Flow) -> Alert:
    (alert,) = flow.alerts
    assert alert.reason
    assert alert.next
    return alert


def waiting(name: str, count: int, seconds: float, **more: Any) -> QueueSnapshot:
    kind = QueueKind.SUBSCRIPTION if name in ("ox", "ux") else QueueKind.INTERNAL
    return QueueSnapshot(name=name, kind=kind, messages=count, oldest=NOW - timedelta(seconds=seconds), **more)


def unreadable(name: str) -> Unreadable:
    """Return a subscription with an unreadable record."""
    return Unreadable(name=name, reason=f"{name} has version 2", revision=1)
