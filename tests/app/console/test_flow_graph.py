"""The overview shows what is stuck in red, with the reason and the next step, and nothing else."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from purveyor.app.console.alerts import Alert, Level
from purveyor.app.console.flow_graph import MAX_SUBSCRIPTIONS, Flow, build_flow, oldest_age, render_svg
from purveyor.app.console.html import alerts as as_html
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
from purveyor.model.registration import DispatchState, PrefillState, PrefillStatus, Record, RecordState, Suspension
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.registry import Registered, Unreadable

NOW = datetime(2026, 1, 1, 3, 0, tzinfo=UTC)
PARTS = tuple(
    PartSnapshot(name=name, state="running", batch_ms=50) for name in ("transform", "dispatch", "archive", "prefill")
)
PIPELINE = PipelineSnapshot(label="all", at=NOW, host="here", pid=7, group="dispatcher", parts=PARTS)


def registered(name: str, **more: Any) -> Registered:
    definition = Subscription(name=name, realms_topics=(RealmTopic("udm", "users/user"),))
    record = Record(incarnation="i", definition=definition, begin=1, state=RecordState.ACTIVE, created=NOW)
    for key in ("paused", "state"):
        if key in more:
            record = replace(record, **{key: more.pop(key)})
    return Registered(record=record, revision=1, **more)


def world(**more: Any) -> SystemSnapshot:
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


def test_all_is_well() -> None:
    flow = flow_of(world())
    assert flow.alerts == ()
    assert flow.level is Level.FINE
    assert {box.title for box in flow.boxes} >= {
        "Directory",
        "Publishers",
        "incoming",
        "dispatch",
        "ox",
        "Dead letters",
    }
    assert "All is well" in as_html(flow.alerts)


def test_while_the_server_is_unreachable_there_is_only_that_alert() -> None:
    alert = only(flow_of(world(problem="no NATS server answers", fix="is it running?", dead_letters={"x": 1})))
    assert (alert.level, alert.next) == (Level.STUCK, "is it running?")


def test_a_pipeline_that_is_dead_is_known_by_its_silence() -> None:
    dead = replace(PIPELINE, at=NOW - timedelta(seconds=40))
    alert = only(flow_of(world(pipelines=(dead,))))
    assert alert.level is Level.WARNING  # nothing waits for it
    assert "40 s old" in alert.reason
    readers = {
        **world().readers,
        "incoming": (ReaderSnapshot(durable="dispatcher", pending=5), ReaderSnapshot(durable="archive")),
    }
    flow = flow_of(world(pipelines=(dead,), readers=readers))
    alert = only(flow)
    assert alert.level is Level.STUCK
    assert "5 messages" in alert.reason
    assert "purveyor serve pipeline" in alert.next
    assert next(box for box in flow.boxes if box.id == "part:dispatch").level is Level.STUCK


def test_a_missing_pipeline_is_an_alert_only_when_there_is_work() -> None:
    assert flow_of(SystemSnapshot(at=NOW)).alerts == ()
    assert only(flow_of(world(pipelines=()))).title == "No pipeline runs"


def test_of_two_pipelines_the_living_one_counts() -> None:
    gone = replace(PIPELINE, label="old", at=NOW - timedelta(hours=1))
    assert flow_of(world(pipelines=(gone, PIPELINE))).alerts == ()


@pytest.mark.parametrize(("state", "word"), [("waiting", "repeatedly"), ("failed", "cannot run")])
def test_a_part_that_fails_is_red_with_its_own_words(state: str, word: str) -> None:
    broken = tuple(
        replace(part, state=state, error="no space left (free some)") if part.name == "archive" else part
        for part in PARTS
    )
    flow = flow_of(world(pipelines=(replace(PIPELINE, parts=broken),)))
    alert = only(flow)
    assert (alert.about, alert.level) == ("part:archive", Level.STUCK)
    assert word in alert.title
    assert alert.reason == "no space left (free some)"
    assert next(arrow for arrow in flow.arrows if arrow.target == "part:archive").level is Level.STUCK


def test_a_part_that_does_not_run_is_an_alert_when_it_has_work() -> None:
    some = replace(PIPELINE, parts=PARTS[:2])
    assert flow_of(world(pipelines=(some,))).alerts == ()
    readers = {**world().readers, "prefill": (ReaderSnapshot(durable="prefill", pending=1),)}
    assert "--parts prefill" in only(flow_of(world(pipelines=(some,), readers=readers))).next


def test_a_part_that_runs_and_does_not_move_is_noticed() -> None:
    readers = {**world().readers, "ldif": (ReaderSnapshot(durable="transformer", ack_floor=3, pending=9),)}
    snapshot = world(readers=readers)
    assert flow_of(snapshot, seen_for=30).alerts == ()
    assert only(flow_of(snapshot, seen_for=90)).level is Level.WARNING
    assert only(flow_of(snapshot, seen_for=900)).level is Level.STUCK


def test_a_suspended_subscription_says_why_and_how_to_go_on() -> None:
    suspended = DispatchState(
        incarnation="i", next=9, suspended=Suspension(position=9, reason="the queue is full", at=NOW)
    )
    flow = flow_of(world(subscriptions={"ox": registered("ox", dispatch=suspended), "ux": registered("ux")}))
    alert = only(flow)
    assert "the queue is full" in alert.reason
    assert "resume" in alert.next
    assert next(box for box in flow.boxes if box.id == "sub:ox").level is Level.STUCK


@pytest.mark.parametrize(
    ("status", "level"),
    [(PrefillStatus.FAILED, Level.STUCK), (PrefillStatus.RUNNING, Level.NOTE), (PrefillStatus.PENDING, Level.NOTE)],
)
def test_a_prefill_that_is_not_done_explains_why_nothing_comes(status: PrefillStatus, level: Level) -> None:
    state = PrefillState(incarnation="i", status=status, position=1, total=10, written=3, reason="no archive")
    assert only(flow_of(world(subscriptions={"ox": registered("ox", prefill=state)}))).level is level


def test_a_subscription_without_an_active_consumer_is_an_alert() -> None:
    def snapshot(seconds: float) -> SystemSnapshot:
        return world(queues={**world().queues, "ox": waiting("ox", 4, seconds)})

    assert flow_of(snapshot(20)).alerts == ()
    assert only(flow_of(snapshot(90))).level is Level.WARNING
    assert only(flow_of(snapshot(900))).level is Level.STUCK
    # A queue that is old and moves is behind, not stuck.
    assert flow_of(snapshot(900), seen_for=10).alerts == ()


def test_a_paused_subscription_is_not_stuck() -> None:
    snapshot = world(
        queues={**world().queues, "ox": waiting("ox", 4, 9000)}, subscriptions={"ox": registered("ox", paused=True)}
    )
    alert = only(flow_of(snapshot))
    assert alert.level is Level.WARNING
    assert "Resume" in alert.next


@pytest.mark.parametrize("state", [RecordState.REGISTERING, RecordState.DELETING])
def test_what_was_interrupted_says_how_to_end_it(state: RecordState) -> None:
    assert "again" in only(flow_of(world(subscriptions={"ox": registered("ox", state=state)}))).next


def test_sealed_queues_dead_letters_and_failed_prefills_are_alerts() -> None:
    queues = {**world().queues, "incoming": waiting("incoming", 1, 5, sealed=True)}
    queues["prefill-failures"] = waiting("prefill-failures", 2, 5)
    flow = flow_of(world(queues=queues, dead_letters={"intake": 2}, unreadable={"bad": unreadable("bad")}))
    assert [alert.level for alert in flow.alerts] == [Level.STUCK, Level.WARNING, Level.WARNING, Level.NOTE]


def test_the_age_on_an_arrow_is_that_of_what_its_own_reader_has_not_done() -> None:
    history = History()
    for second, last in ((0, 0), (100, 10), (200, 20), (300, 30)):
        history.add(NOW.timestamp() - 300 + second, {("last", "incoming"): last})
    queues = {**world().queues, "incoming": waiting("incoming", 30, 290, last_sequence=30)}
    quick, slow = (
        ReaderSnapshot(durable="dispatcher", ack_floor=20, pending=10),
        ReaderSnapshot(durable="archive", pending=30),
    )
    snapshot = world(queues=queues, readers={**world().readers, "incoming": (quick, slow)})
    age = oldest_age(snapshot, history, "incoming", "dispatcher")
    assert age is not None
    assert age <= 100
    assert oldest_age(snapshot, history, "incoming", "archive") == pytest.approx(290)


def test_of_a_thousand_subscriptions_those_in_need_are_drawn() -> None:
    queues = {f"s{n}": QueueSnapshot(name=f"s{n}", kind=QueueKind.SUBSCRIPTION, messages=n % 50) for n in range(1000)}
    suspended = DispatchState(incarnation="i", next=9, suspended=Suspension(position=9, reason="full", at=NOW))
    subscriptions = {name: registered(name) for name in queues} | {"s7": registered("s7", dispatch=suspended)}
    flow = flow_of(world(queues={**world().queues, **queues}, subscriptions=subscriptions))
    assert "sub:s7" in {box.id for box in flow.boxes}
    assert sum(box.id.startswith("sub:") for box in flow.boxes) == MAX_SUBSCRIPTIONS
    assert flow.hidden == 1002 - MAX_SUBSCRIPTIONS
    assert f"and {flow.hidden} more" in render_svg(flow)


def test_nothing_that_comes_from_outside_becomes_markup() -> None:
    evil = '<img src=x onerror="alert(1)">'
    silent = replace(PIPELINE, host=evil, at=NOW - timedelta(days=1))
    flow = flow_of(world(unreadable={evil: unreadable(evil)}, pipelines=(silent,)))
    assert "<img" not in as_html(flow.alerts) + render_svg(flow)
