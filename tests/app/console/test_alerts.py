"""Alerts: what is red, what is a warning, what is only a note, and what is no alert at all."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from html import escape

import pytest

from purveyor.app.console.alert_groups import all_alerts, group_alerts
from purveyor.app.console.alerts import Kind, Level
from purveyor.app.console.flow_graph import Flow, build_flow
from purveyor.app.console.html import MAX_MEMBERS
from purveyor.app.console.html import alerts as alerts_html
from purveyor.app.console.pages.overview import processes_table, sources_table
from purveyor.app.console.snapshot import (
    PipelineSnapshot,
    QueueKind,
    QueueSnapshot,
    ReaderSnapshot,
    SystemSnapshot,
    recorded_numbers,
)
from purveyor.app.console.time_series import History
from purveyor.delivery.push.push_reports import EndpointFailure, PushProblem
from purveyor.model.control_events import JobKind, job_id
from purveyor.model.delivery_policy import Push
from purveyor.model.registration import DispatchState, PrefillState, PrefillStatus, RecordState, Suspension
from purveyor.sources.ldap.source_status import SourceReport
from tests.app.console.sample_systems import (
    NOW,
    PARTS,
    PIPELINE,
    flow_of,
    only,
    registered,
    sample_system,
    unreadable,
    waiting,
)


@pytest.mark.parametrize(
    ("status", "error", "advice"),
    [(500, None, "why it answers 500"), (None, "connection refused", "runs and can be reached")],
)
def test_a_failing_endpoint_is_red_with_its_cause_and_fitting_advice(
    status: int | None, error: str | None, advice: str
) -> None:
    failure = EndpointFailure(
        endpoint="http://ox/in",
        since=NOW - timedelta(minutes=6),
        attempts=20,
        status=status,
        error=error,
        breaker="open",
        window=1,
    )
    problem = PushProblem(failure.reason, failure.since, (failure,))
    queues = {**sample_system().queues, "ox": waiting("ox", 20_000, 360)}
    pushed = {"ox": registered("ox", push=Push(endpoints=("http://ox/in",))), "ux": registered("ux")}
    failing = sample_system(queues=queues, subscriptions=pushed, push_problems={"ox": problem})
    alert = only(flow_of(failing, seen_for=1.0))
    assert recorded_numbers(failing)["failed", "ox"] == 20
    assert recorded_numbers(sample_system(subscriptions=pushed))["failed", "ox"] == 0
    assert (alert.about, alert.level) == ("sub:ox", Level.STUCK)
    assert failure.reason in alert.title
    assert "6 min" in alert.reason
    assert "20 attempts failed, circuit breaker open, window 1" in alert.reason
    assert advice in alert.next
    keeps = registered("ox", retention_seconds=7200.0, push=Push(endpoints=("http://ox/in",)))
    expiring = sample_system(
        subscriptions={"ox": keeps, "ux": registered("ux")},
        queues={**queues, "ox": waiting("ox", 20_000, 7000)},
        push_problems={"ox": problem},
    )
    alert = only(flow_of(expiring, seen_for=1.0))
    assert (alert.level, failure.reason in alert.title, advice in alert.next) == (Level.STUCK, True, True)
    assert "the first in 3 min" in alert.reason, "and the messages that expire because of it"


@pytest.mark.parametrize(
    ("values", "is_silent", "words"),
    [
        ({"state": "failed", "error": "the password is wrong", "fix": "set it"}, False, "the password is wrong"),
        ({"state": "following"}, True, "has not reported for"),
    ],
)
def test_a_source_that_does_not_follow_its_directory_is_a_warning(
    values: dict[str, str], is_silent: bool, words: str
) -> None:
    report = SourceReport(source="people", values=values, at=NOW - timedelta(seconds=60), is_silent=is_silent)
    alert = only(flow_of(sample_system(sources=(report,))))
    assert (alert.about, alert.level, alert.kind) == ("source:people", Level.WARNING, Kind.SOURCE_STOPPED)
    assert words in alert.reason


def test_the_overview_shows_the_directories() -> None:
    values = {"state": "following", "base": "dc=<b>", "uri": "ldap://a", "entries": 1234, "lag_seconds": 0.004}
    values |= {"mode": "syncrepl", "last_change": (NOW - timedelta(seconds=30)).isoformat()}
    report = SourceReport(source="people", values=values, at=NOW)
    shown = sources_table(sample_system(sources=(report,)))
    assert not flow_of(sample_system(sources=(report,))).alerts
    for words in ("people", "dc=&lt;b&gt;", "following", "30 s ago", "4 ms"):
        assert words in shown
    assert sources_table(sample_system(sources=(SourceReport(source="x", values={}, at=None),)))


def test_while_the_server_is_unreachable_there_is_only_that_alert() -> None:
    alert = only(flow_of(sample_system(problem="no NATS server answers", fix="is it running?", dead_letters={"x": 1})))
    assert (alert.level, alert.next) == (Level.STUCK, "is it running?")


def pending(count: int) -> dict[str, tuple[ReaderSnapshot, ...]]:
    """Return readers of which the dispatcher has work."""
    readers = (ReaderSnapshot(durable="dispatcher", pending=count), ReaderSnapshot(durable="archive"))
    return {**sample_system().readers, "incoming": readers}


def test_a_pipeline_that_is_dead_is_red_when_messages_wait_for_it_and_a_restart_is_not() -> None:
    def flow(silent_seconds: int, count: int) -> Flow:
        dead = replace(PIPELINE, at=NOW - timedelta(seconds=silent_seconds))
        return flow_of(sample_system(pipelines=(dead,), readers=pending(count)))

    assert flow(8, 0).alerts == ()
    levels = {(seconds, count): only(flow(seconds, count)).level for seconds in (40, 90) for count in (0, 5)}
    assert levels == {
        (40, 0): Level.NOTE,
        (40, 5): Level.WARNING,
        (90, 0): Level.WARNING,  # nothing waits for it
        (90, 5): Level.STUCK,
    }
    alert = only(flow(90, 5))
    assert "1 min 30 s old" in alert.reason
    assert "5 messages" in alert.reason
    assert "purveyor serve pipeline" in alert.next
    assert next(box for box in flow(90, 5).boxes if box.id == "part:dispatch").level is Level.STUCK


def test_a_pipeline_that_starts_with_the_system_is_given_time_to_report() -> None:
    assert only(flow_of(sample_system(pipelines=()), seen_for=20)).level is Level.NOTE
    assert only(flow_of(sample_system(pipelines=(), readers=pending(5)), seen_for=900)).level is Level.STUCK


def test_a_missing_pipeline_is_an_alert_only_when_there_is_work() -> None:
    assert flow_of(SystemSnapshot(at=NOW)).alerts == ()
    assert only(flow_of(sample_system(pipelines=()))).title == "No pipeline runs"


def test_of_two_pipelines_the_living_one_counts() -> None:
    gone = replace(PIPELINE, label="old", at=NOW - timedelta(hours=1))
    assert flow_of(sample_system(pipelines=(gone, PIPELINE))).alerts == ()


def failing(state: str) -> PipelineSnapshot:
    """Return a pipeline whose archive has an error."""
    error = "no space left (free some)"
    parts = (replace(part, state=state, error=error) if part.name == "archive" else part for part in PARTS)
    return replace(PIPELINE, parts=tuple(parts))


@pytest.mark.parametrize(
    ("state", "seconds", "level", "title"),
    [
        ("failed", 1, Level.STUCK, "archive cannot run"),
        ("waiting", 10, Level.WARNING, "archive failed a moment ago"),
        ("running", 30, Level.WARNING, "archive failed a moment ago"),
        ("waiting", 90, Level.STUCK, "archive fails repeatedly"),
        ("running", 90, Level.STUCK, "archive fails repeatedly"),  # the error stays until it has run for a minute
    ],
)
def test_a_part_that_fails_is_red_when_the_restart_does_not_help(
    state: str, seconds: float, level: Level, title: str
) -> None:
    flow = flow_of(sample_system(pipelines=(failing(state),)), seen_for=seconds)
    alert = only(flow)
    assert (alert.about, alert.level, alert.title) == ("part:archive", level, title)
    assert alert.reason == "no space left (free some)"
    assert next(arrow for arrow in flow.arrows if arrow.target == "part:archive").level is level


def test_a_part_that_does_not_answer_is_red_at_once() -> None:
    alert = only(flow_of(sample_system(pipelines=(failing("unresponsive"),)), seen_for=1))
    assert (alert.about, alert.level, alert.title) == ("part:archive", Level.STUCK, "archive does not answer")


def test_a_part_that_does_not_run_is_an_alert_when_it_has_work() -> None:
    some = replace(PIPELINE, parts=PARTS[:2])
    assert flow_of(sample_system(pipelines=(some,))).alerts == ()
    readers = {**sample_system().readers, "prefill": (ReaderSnapshot(durable="prefill", pending=1),)}
    assert "--parts prefill" in only(flow_of(sample_system(pipelines=(some,), readers=readers))).next


def test_a_part_that_runs_and_does_not_move_is_noticed() -> None:
    readers = {**sample_system().readers, "ldif": (ReaderSnapshot(durable="transformer", ack_floor=3, pending=9),)}
    snapshot = sample_system(readers=readers)
    assert flow_of(snapshot, seen_for=30).alerts == ()
    assert only(flow_of(snapshot, seen_for=90)).level is Level.WARNING
    assert only(flow_of(snapshot, seen_for=900)).level is Level.STUCK


def test_a_part_that_has_processed_what_its_durable_has_not_passed_is_well() -> None:
    """The archive moves its durable minutes later, so that the messages can be read again."""
    readers = (ReaderSnapshot(durable="dispatcher", ack_floor=50), ReaderSnapshot(durable="archive", pending=50))
    queues = {**sample_system().queues, "incoming": waiting("incoming", 50, 119, last_sequence=50)}
    snapshot = sample_system(queues=queues, readers={**sample_system().readers, "incoming": readers})

    def with_position(position: int | None, seen_for: float = 900) -> Flow:
        parts = tuple(replace(part, position=position) if part.name == "archive" else part for part in PARTS)
        return flow_of(replace(snapshot, pipelines=(replace(PIPELINE, parts=parts),)), seen_for=seen_for)

    def backlog(flow: Flow) -> int | None:
        return next(arrow.backlog for arrow in flow.arrows if arrow.target == "part:archive")

    assert (with_position(50).alerts, backlog(with_position(50))) == ((), 0)
    assert (only(with_position(47)).level, backlog(with_position(47))) == (Level.STUCK, 3)
    assert backlog(with_position(None)) == 50
    assert backlog(with_position(51)) == 50  # of a stream that was made again: the position says nothing


def test_a_prefill_that_writes_is_no_part_that_does_not_move() -> None:
    def snapshot(written: int) -> SystemSnapshot:
        state = PrefillState(incarnation="i", status=PrefillStatus.RUNNING, position=1, written=written)
        readers = {**sample_system().readers, "prefill": (ReaderSnapshot(durable="prefill", unanswered=1),)}
        return sample_system(
            readers=readers, subscriptions={"ox": registered("ox", prefill=state), "ux": registered("ux")}
        )

    history = History()
    for seconds, written in ((900, 10), (10, 20), (0, 20)):
        history.add(NOW.timestamp() - seconds, recorded_numbers(snapshot(written)))
    assert [alert.level for alert in build_flow(snapshot(20), history).alerts] == [Level.NOTE]
    halted = flow_of(snapshot(20), seen_for=900)
    assert [alert.about for alert in halted.alerts if alert.level is Level.STUCK] == ["part:prefill"]


def test_a_suspended_subscription_says_why_and_how_to_go_on() -> None:
    suspended = DispatchState(
        incarnation="i", next=9, suspended=Suspension(position=9, reason="the queue is full", at=NOW)
    )
    flow = flow_of(sample_system(subscriptions={"ox": registered("ox", dispatch=suspended), "ux": registered("ux")}))
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
    assert only(flow_of(sample_system(subscriptions={"ox": registered("ox", prefill=state)}))).level is level


def test_a_replay_is_not_called_a_prefill() -> None:
    replay = PrefillState(
        incarnation="i", status=PrefillStatus.RUNNING, position=1, job="1f0e2c1a-5b7f-4c38-9b1e-0d5b2f1f4a11"
    )
    alert = only(flow_of(sample_system(subscriptions={"ox": registered("ox", prefill=replay)})))
    assert alert.title == "A replay to ox runs"
    prefill = replace(replay, job=job_id("00000000-0000-0000-0000-000000000001", JobKind.PREFILL, 1))
    assert (
        only(flow_of(sample_system(subscriptions={"ox": registered("ox", prefill=prefill)}))).title
        == "ox is being prefilled"
    )


@pytest.mark.parametrize(
    ("messages", "seconds", "level"),
    [
        (2, 20, None),
        (2, 250, None),
        (2, 900, Level.NOTE),  # two unread messages are no incident: the queue keeps them
        (9_999, 900, Level.NOTE),
        (10_000, 900, Level.WARNING),
        (2, 4000, Level.WARNING),
        (90_000, 90_000, Level.WARNING),
    ],
)
def test_a_subscription_without_an_active_consumer_is_a_note_then_a_warning_and_never_red(
    messages: int, seconds: float, level: Level | None
) -> None:
    flow = flow_of(
        sample_system(queues={**sample_system().queues, "ox": waiting("ox", messages, seconds)}), seen_for=100_000
    )
    assert [alert.level for alert in flow.alerts] == ([] if level is None else [level])


def test_a_queue_that_is_old_and_moves_is_behind_and_no_alert() -> None:
    assert (
        flow_of(sample_system(queues={**sample_system().queues, "ox": waiting("ox", 4, 9000)}), seen_for=10).alerts
        == ()
    )


@pytest.mark.parametrize(("seconds", "level"), [(30, None), (90, Level.WARNING), (900, Level.STUCK)])
def test_a_push_subscription_that_no_worker_serves_is_red_within_minutes(seconds: float, level: Level | None) -> None:
    pushed = registered("ox", push=Push(endpoints=("http://ox/in",)))
    snapshot = sample_system(
        queues={**sample_system().queues, "ox": waiting("ox", 2, seconds)},
        subscriptions={"ox": pushed, "ux": registered("ux")},
    )
    flow = flow_of(snapshot, seen_for=100_000)
    assert [alert.level for alert in flow.alerts] == ([] if level is None else [level])
    assert all("serve push" in alert.next for alert in flow.alerts)


@pytest.mark.parametrize(
    ("age", "retention", "warned"), [(86_000, 86_400, True), (9000, 86_400, False), (50, 60, False)]
)
def test_messages_that_expire_unread_are_a_warning(age: float, retention: float, warned: bool) -> None:
    """A retention time below an hour is chosen by subscribers that want no old messages."""
    snapshot = sample_system(
        queues={**sample_system().queues, "ox": waiting("ox", 2, age)},
        subscriptions={"ox": registered("ox", retention_seconds=retention)},
    )
    expiring = [alert for alert in flow_of(snapshot, seen_for=5).alerts if alert.kind is Kind.EXPIRING]
    assert len(expiring) == warned
    assert all("retention time" in alert.next for alert in expiring)


def test_a_paused_subscription_is_not_stuck() -> None:
    snapshot = sample_system(
        queues={**sample_system().queues, "ox": waiting("ox", 4, 9000)},
        subscriptions={"ox": registered("ox", paused=True)},
    )
    alert = only(flow_of(snapshot))
    assert alert.level is Level.NOTE  # an operator wanted it so
    assert "Resume" in alert.next


@pytest.mark.parametrize("state", [RecordState.REGISTERING, RecordState.DELETING])
def test_what_was_interrupted_says_how_to_end_it(state: RecordState) -> None:
    snapshot = sample_system(subscriptions={"ox": registered("ox", state=state)})
    assert "again" in only(flow_of(snapshot)).next
    assert flow_of(snapshot, seen_for=5).alerts == ()  # the request is under way


def test_sealed_queues_dead_letters_and_failed_prefills_are_alerts() -> None:
    queues = {**sample_system().queues, "ldif": waiting("ldif", 1, 5, sealed=True)}
    queues["prefill-failures"] = waiting("prefill-failures", 2, 5)
    flow = flow_of(sample_system(queues=queues, dead_letters={"intake": 2}, unreadable={"bad": unreadable("bad")}))
    assert [alert.level for alert in flow.alerts] == [Level.STUCK, Level.WARNING, Level.WARNING, Level.NOTE]


def many(names: Iterable[str], messages: int = 3) -> SystemSnapshot:
    """Return a system with subscriptions that no consumer has read for hours."""
    found = {
        name: QueueSnapshot(
            name=name, kind=QueueKind.SUBSCRIPTION, messages=messages + number, oldest=NOW - timedelta(hours=5)
        )
        for number, name in enumerate(names)
    }
    subscriptions = {name: registered(name) for name in ("ox", "ux", *found)}
    return sample_system(queues={**sample_system().queues, **found}, subscriptions=subscriptions)


def test_many_subscriptions_with_the_same_problem_are_one_line_with_each_of_them_and_the_next_step() -> None:
    flow = flow_of(many(["a", "b", "c"]), seen_for=20_000)
    (group,) = group_alerts(flow.alerts)
    assert group.title == "3 subscriptions have no active consumer"
    assert [alert.about for alert in group.alerts] == ["sub:c", "sub:b", "sub:a"]  # the longest queue first
    text = alerts_html(flow.alerts)
    assert text.count("<details") == 1
    assert text.count("Next:") == 1  # the same step for all
    assert all(f'href="/console/subscriptions/{name}"' in text for name in "abc")
    assert " open>" not in text


def test_a_hundred_subscriptions_with_the_same_problem_do_not_fill_the_page() -> None:
    text = alerts_html(flow_of(many([f"s{number}" for number in range(100)]), seen_for=20_000).alerts)
    assert "100 subscriptions have no active consumer" in text
    assert f"and {100 - MAX_MEMBERS} more" in text
    assert text.count("<a ") == MAX_MEMBERS


def test_alerts_are_ranked_by_urgency_and_then_by_what_they_stop() -> None:
    suspended = DispatchState(incarnation="i", next=9, suspended=Suspension(position=9, reason="full", at=NOW))
    snapshot = many(["a", "b"])
    subscriptions = {**snapshot.subscriptions, "z": registered("z", dispatch=suspended)}
    flow = flow_of(
        replace(snapshot, subscriptions=subscriptions, dead_letters={"x": 2}, pipelines=(failing("failed"),)),
        seen_for=20_000,
    )
    assert [group.kind for group in group_alerts(flow.alerts)] == [
        Kind.PART_FAILS,
        Kind.SUSPENDED,
        Kind.DEAD_LETTERS,
        Kind.NO_CONSUMER,
    ]


def test_only_the_most_urgent_line_is_open_and_notes_share_the_last_one() -> None:
    paused = {name: registered(name, paused=True) for name in ("ox", "ux")}
    queues = {name: waiting(name, 3, 90) for name in paused}
    queues["prefill-failures"] = waiting("prefill-failures", 2, 5)
    snapshot = sample_system(queues={**sample_system().queues, **queues}, subscriptions=paused, dead_letters={"x": 2})
    text = alerts_html(flow_of(replace(snapshot, pipelines=(failing("failed"),)), seen_for=20_000).alerts)
    assert text.count(" open>") == 1
    assert (
        text.index(" open>") < text.index("archive cannot run") < text.index("2 dead letters") < text.index("2 notes")
    )
    assert text.index("2 notes") < text.index("2 subscriptions are paused")
    assert "Resume it" in text


def test_each_alert_keeps_its_next_step_in_the_page() -> None:
    flow = flow_of(replace(many(["a"]), dead_letters={"x": 2}, pipelines=(failing("failed"),)), seen_for=20_000)
    text = alerts_html(flow.alerts)
    assert all(f"Next: {escape(alert.next)}." in text for alert in flow.alerts)


def test_a_standby_is_among_the_processes_and_raises_no_alert() -> None:
    def shown(**changes: object) -> str:
        return processes_table(sample_system(standbys=(replace(standby, **changes),)))  # type: ignore[arg-type]  # of the test

    standby = replace(PIPELINE, pid=12, state="standby", parts=())
    assert "12 on here" in shown()
    assert "standby</" in shown()
    assert "starting, to stand by" in shown(state="warming")
    assert "12 on here" not in shown(stopped=True)
    assert "12 on here" not in shown(at=NOW - timedelta(minutes=1))
    assert "12 on here" not in processes_table(sample_system())
    assert list(all_alerts(sample_system(standbys=(standby,)), History())) == list(
        all_alerts(sample_system(), History())
    )
