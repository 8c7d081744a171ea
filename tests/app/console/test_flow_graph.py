"""What the overview makes of facts: what is stuck is red, with the reason and the next step; nothing else is."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from purveyor.app.console import flow_svg
from purveyor.app.console.alerts import Level, Trouble
from purveyor.app.console.collector import numbers
from purveyor.app.console.flow_graph import MOST_SUBSCRIPTIONS, Flow, draw, oldest_age
from purveyor.app.console.html import troubles as as_html
from purveyor.app.console.snapshot import (
    Facts,
    PartFacts,
    PipelineFacts,
    QueueFacts,
    QueueKind,
    ReaderFacts,
)
from purveyor.app.console.time_series import History
from purveyor.model.registration import DispatchState, PrefillState, PrefillStatus, Record, RecordState, Suspension
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.registry import Registered, Unreadable

NOW = datetime(2026, 1, 1, 3, 0, tzinfo=UTC)
PARTS = tuple(
    PartFacts(name=name, state="running", batch_ms=50) for name in ("transform", "dispatch", "archive", "prefill")
)
PIPELINE = PipelineFacts(label="all", at=NOW, host="here", pid=7, group="dispatcher", parts=PARTS)


def registered(name: str, **more: Any) -> Registered:
    definition = Subscription(name=name, realms_topics=(RealmTopic("udm", "users/user"),))
    record = Record(incarnation="i", definition=definition, begin=1, state=RecordState.ACTIVE, created=NOW)
    for key in ("paused", "state"):
        if key in more:
            record = replace(record, **{key: more.pop(key)})
    return Registered(record=record, revision=1, **more)


def world(**more: Any) -> Facts:
    """All is well: two subscriptions, everything done."""
    queues = {name: QueueFacts(name=name, kind=QueueKind.INTERNAL) for name in ("ldif", "incoming", "prefill")}
    queues |= {name: QueueFacts(name=name, kind=QueueKind.SUBSCRIPTION) for name in ("ox", "ux")}
    readers = {
        "ldif": (ReaderFacts(durable="transformer"),),
        "incoming": (ReaderFacts(durable="dispatcher"), ReaderFacts(durable="archive")),
        "prefill": (ReaderFacts(durable="prefill"),),
    }
    subscriptions = {name: registered(name) for name in ("ox", "ux")}
    facts = Facts(at=NOW, queues=queues, readers=readers, subscriptions=subscriptions, pipelines=(PIPELINE,))
    return replace(facts, **more)


def flow_of(facts: Facts, *, seen_for: float = 1000.0) -> Flow:
    """As it looks when the facts have been like this for a while."""
    history = History()
    for seconds in (seen_for, seen_for / 2, 0.0):
        history.add(facts.at.timestamp() - seconds, numbers(facts))
    return draw(facts, history)


def only(flow: Flow) -> Trouble:
    (trouble,) = flow.troubles
    assert trouble.reason
    assert trouble.next
    return trouble


def waiting(name: str, count: int, seconds: float, **more: Any) -> QueueFacts:
    kind = QueueKind.SUBSCRIPTION if name in ("ox", "ux") else QueueKind.INTERNAL
    return QueueFacts(name=name, kind=kind, messages=count, oldest=NOW - timedelta(seconds=seconds), **more)


def unreadable(name: str) -> Unreadable:
    """A subscription that is not understood, for a reason that has its name in it."""
    return Unreadable(name=name, reason=f"{name} has version 2", revision=1)


def test_all_is_well() -> None:
    flow = flow_of(world())
    assert flow.troubles == ()
    assert flow.level is Level.FINE
    assert {box.title for box in flow.boxes} >= {
        "Directory",
        "Publishers",
        "incoming",
        "dispatch",
        "ox",
        "Dead letters",
    }
    assert "All is well" in as_html(flow.troubles)


def test_of_a_server_that_is_away_only_that_is_said() -> None:
    trouble = only(flow_of(world(problem="no NATS server answers", fix="is it running?", dead_letters={"x": 1})))
    assert (trouble.level, trouble.next) == (Level.STUCK, "is it running?")


def test_a_pipeline_that_is_dead_is_known_by_its_silence() -> None:
    dead = replace(PIPELINE, at=NOW - timedelta(seconds=40))
    trouble = only(flow_of(world(pipelines=(dead,))))
    assert trouble.level is Level.WARNING  # nothing waits for it
    assert "40 s ago" in trouble.reason
    readers = {
        **world().readers,
        "incoming": (ReaderFacts(durable="dispatcher", pending=5), ReaderFacts(durable="archive")),
    }
    flow = flow_of(world(pipelines=(dead,), readers=readers))
    trouble = only(flow)
    assert trouble.level is Level.STUCK
    assert "5 messages" in trouble.reason
    assert "purveyor serve pipeline" in trouble.next
    assert next(box for box in flow.boxes if box.id == "part:dispatch").level is Level.STUCK


def test_a_pipeline_that_never_was_is_missed_only_when_somebody_waits_for_it() -> None:
    assert flow_of(Facts(at=NOW)).troubles == ()
    assert only(flow_of(world(pipelines=()))).title == "No pipeline runs"


def test_of_two_pipelines_the_living_one_counts() -> None:
    gone = replace(PIPELINE, label="old", at=NOW - timedelta(hours=1))
    assert flow_of(world(pipelines=(gone, PIPELINE))).troubles == ()


@pytest.mark.parametrize(("state", "word"), [("waiting", "again and again"), ("failed", "cannot work")])
def test_a_part_that_fails_is_red_with_its_own_words(state: str, word: str) -> None:
    broken = tuple(
        replace(part, state=state, error="no space left (free some)") if part.name == "archive" else part
        for part in PARTS
    )
    flow = flow_of(world(pipelines=(replace(PIPELINE, parts=broken),)))
    trouble = only(flow)
    assert (trouble.about, trouble.level) == ("part:archive", Level.STUCK)
    assert word in trouble.title
    assert trouble.reason == "no space left (free some)"
    assert next(arrow for arrow in flow.arrows if arrow.target == "part:archive").level is Level.STUCK


def test_a_part_that_nobody_runs_is_missed_when_there_is_work_for_it() -> None:
    some = replace(PIPELINE, parts=PARTS[:2])
    assert flow_of(world(pipelines=(some,))).troubles == ()
    readers = {**world().readers, "prefill": (ReaderFacts(durable="prefill", pending=1),)}
    assert "--parts prefill" in only(flow_of(world(pipelines=(some,), readers=readers))).next


def test_a_part_that_runs_and_does_not_move_is_noticed() -> None:
    readers = {**world().readers, "ldif": (ReaderFacts(durable="transformer", ack_floor=3, pending=9),)}
    facts = world(readers=readers)
    assert flow_of(facts, seen_for=30).troubles == ()
    assert only(flow_of(facts, seen_for=90)).level is Level.WARNING
    assert only(flow_of(facts, seen_for=900)).level is Level.STUCK


def test_a_suspended_subscription_says_why_and_how_to_go_on() -> None:
    suspended = DispatchState(
        incarnation="i", next=9, suspended=Suspension(position=9, reason="the queue is full", at=NOW)
    )
    flow = flow_of(world(subscriptions={"ox": registered("ox", dispatch=suspended), "ux": registered("ux")}))
    trouble = only(flow)
    assert "the queue is full" in trouble.reason
    assert "resume" in trouble.next
    assert next(box for box in flow.boxes if box.id == "sub:ox").level is Level.STUCK


@pytest.mark.parametrize(
    ("status", "level"),
    [(PrefillStatus.FAILED, Level.STUCK), (PrefillStatus.RUNNING, Level.NOTE), (PrefillStatus.PENDING, Level.NOTE)],
)
def test_a_prefill_that_is_not_done_explains_why_nothing_comes(status: PrefillStatus, level: Level) -> None:
    state = PrefillState(incarnation="i", status=status, position=1, total=10, written=3, reason="no archive")
    assert only(flow_of(world(subscriptions={"ox": registered("ox", prefill=state)}))).level is level


def test_messages_that_nobody_takes_are_noticed_after_a_while() -> None:
    def facts(seconds: float) -> Facts:
        return world(queues={**world().queues, "ox": waiting("ox", 4, seconds)})

    assert flow_of(facts(20)).troubles == ()
    assert only(flow_of(facts(90))).level is Level.WARNING
    assert only(flow_of(facts(900))).level is Level.STUCK
    # A queue that is old and moves is behind, not stuck.
    assert flow_of(facts(900), seen_for=10).troubles == ()


def test_a_paused_subscription_is_not_stuck() -> None:
    facts = world(
        queues={**world().queues, "ox": waiting("ox", 4, 9000)}, subscriptions={"ox": registered("ox", paused=True)}
    )
    trouble = only(flow_of(facts))
    assert trouble.level is Level.WARNING
    assert "Resume" in trouble.next


@pytest.mark.parametrize("state", [RecordState.REGISTERING, RecordState.DELETING])
def test_what_was_interrupted_says_how_to_end_it(state: RecordState) -> None:
    assert "again" in only(flow_of(world(subscriptions={"ox": registered("ox", state=state)}))).next


def test_sealed_queues_dead_letters_and_failed_prefills_are_told() -> None:
    queues = {**world().queues, "incoming": waiting("incoming", 1, 5, sealed=True)}
    queues["prefill-failures"] = waiting("prefill-failures", 2, 5)
    flow = flow_of(world(queues=queues, dead_letters={"intake": 2}, unreadable={"bad": unreadable("bad")}))
    assert [trouble.level for trouble in flow.troubles] == [Level.STUCK, Level.WARNING, Level.WARNING, Level.NOTE]


def test_the_age_on_an_arrow_is_that_of_what_its_own_reader_has_not_done() -> None:
    history = History()
    for second, last in ((0, 0), (100, 10), (200, 20), (300, 30)):
        history.add(NOW.timestamp() - 300 + second, {("last", "incoming"): last})
    queues = {**world().queues, "incoming": waiting("incoming", 30, 290, last_sequence=30)}
    quick, slow = (
        ReaderFacts(durable="dispatcher", ack_floor=20, pending=10),
        ReaderFacts(durable="archive", pending=30),
    )
    facts = world(queues=queues, readers={**world().readers, "incoming": (quick, slow)})
    age = oldest_age(facts, history, "incoming", "dispatcher")
    assert age is not None
    assert age <= 100
    assert oldest_age(facts, history, "incoming", "archive") == pytest.approx(290)


def test_of_a_thousand_subscriptions_those_in_need_are_drawn() -> None:
    queues = {f"s{n}": QueueFacts(name=f"s{n}", kind=QueueKind.SUBSCRIPTION, messages=n % 50) for n in range(1000)}
    suspended = DispatchState(incarnation="i", next=9, suspended=Suspension(position=9, reason="full", at=NOW))
    subscriptions = {name: registered(name) for name in queues} | {"s7": registered("s7", dispatch=suspended)}
    flow = flow_of(world(queues={**world().queues, **queues}, subscriptions=subscriptions))
    assert "sub:s7" in {box.id for box in flow.boxes}
    assert sum(box.id.startswith("sub:") for box in flow.boxes) == MOST_SUBSCRIPTIONS
    assert flow.hidden == 1002 - MOST_SUBSCRIPTIONS
    assert f"and {flow.hidden} more" in flow_svg.render(flow)


def test_nothing_that_comes_from_outside_becomes_markup() -> None:
    evil = '<img src=x onerror="alert(1)">'
    silent = replace(PIPELINE, host=evil, at=NOW - timedelta(days=1))
    flow = flow_of(world(unreadable={evil: unreadable(evil)}, pipelines=(silent,)))
    assert "<img" not in as_html(flow.troubles) + flow_svg.render(flow)
