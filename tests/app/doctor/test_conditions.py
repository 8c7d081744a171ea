"""A deployment is judged by the progress of its parts, not by the processes that exist."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from purveyor.app.doctor.conditions import Condition, judge
from purveyor.app.doctor.machine_checks import Weight
from purveyor.app.doctor.observation import Observation, Report
from purveyor.delivery.push.push_reports import EndpointFailure, PushProblem
from purveyor.jetstream.streams import StreamUsage
from purveyor.model.delivery_policy import Delivery, OrderBy, Push
from purveyor.model.registration import DispatchState, PrefillState, PrefillStatus, Record, RecordState, Suspension
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.backlog import Backlog
from purveyor.queues.catalogue import incoming, subscription_queue
from purveyor.queues.registry import Registered, Snapshot
from purveyor.sources.ldap.source_status import SourceReport

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
HERE = socket.gethostname()


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def part(name: str, state: str = "running", *, moved: float = 1, **more: Any) -> dict[str, Any]:
    return {"part": name, "state": state, "since": ago(900).isoformat(), "moved_at": ago(moved).isoformat(), **more}


def report(*parts: dict[str, Any], silent: float = 1, pid: int = 4711, host: str = "elsewhere", **more: Any) -> Report:
    return Report(pid=pid, host=host, at=ago(silent), stopped=False, values={"parts": [*parts], **more})


ALL = tuple(part(name) for name in ("transform", "dispatch", "archive", "prefill"))


def waiting(durable: str, pending: int, oldest: float) -> Backlog:
    return Backlog(stream=incoming().stream, durable=durable, position=7, pending=pending, oldest=ago(oldest))


def subscription(name: str = "ox", *, pushed: bool = False, **more: Any) -> Registered:
    push = Push(endpoints=("https://example.com/in",)) if pushed else None
    definition = Subscription(
        name=name,
        realms_topics=(RealmTopic("shop", ".*"),),
        delivery=Delivery.PUSH if pushed else Delivery.ORDERED,
        push=push,
        order_by=OrderBy.POSITION,
    )
    record = Record(incarnation="a", definition=definition, begin=1, state=RecordState.ACTIVE, created=ago(9999))
    changes = {key: more.pop(key) for key in ("paused", "state") if key in more}
    return Registered(record=replace(record, **changes), revision=1, **more)


def queue(name: str, messages: int, oldest: float) -> StreamUsage:
    return StreamUsage(
        stream=subscription_queue(name).stream,
        messages=messages,
        bytes=1,
        first_sequence=1,
        last_sequence=messages,
        oldest=ago(oldest) if messages else None,
        sealed=False,
        consumers=0,
    )


STREAM = incoming().stream


def stream_at(last_sequence: int) -> StreamUsage:
    return replace(queue("x", 1, 1), stream=STREAM, last_sequence=last_sequence)


def observed(*found: Registered, queues: tuple[StreamUsage, ...] = (), **more: Any) -> Observation:
    values: dict[str, Any] = {"problems": {}, "backlogs": (), "pipelines": [report(*ALL)], "push_workers": [report()]}
    return Observation(
        at=NOW,
        snapshot=Snapshot(subscriptions={each.name: each for each in found}),
        usages={usage.stream: usage for usage in queues},
        **(values | more),
    )


def problems(seen: Observation, **more: Any) -> list[Condition]:
    return [each for each in judge(seen, **more) if each.weight is not Weight.OK]


def only(seen: Observation, **more: Any) -> Condition:
    (found,) = problems(seen, **more)
    assert found.fix
    return found


def test_an_idle_and_a_busy_system_have_no_conditions() -> None:
    assert not problems(observed(subscription(), subscription("hook", pushed=True)))
    busy = observed(
        subscription(),
        subscription("hook", pushed=True),
        queues=(queue("ox", 900, 30), queue("hook", 50, 4)),
        backlogs=(waiting("dispatcher", 20_000, 90), waiting("archive", 20_000, 90)),
    )
    assert not problems(busy)
    idle_for_a_day = observed(pipelines=[report(*(part(each["part"], moved=86_400) for each in ALL))])
    assert not problems(idle_for_a_day)
    just_written = replace(idle_for_a_day, backlogs=(waiting("dispatcher", 1, 0.2), waiting("archive", 1, 0.2)))
    assert not problems(just_written)


def test_a_standby_is_no_problem_and_no_pipeline() -> None:
    standby = report(pid=12, state="standby")
    facts = [each.fact for each in judge(observed(standbys=[standby]))]
    assert "process 12 on elsewhere stands by" in facts
    assert not problems(observed(standbys=[standby, report(state="warming")]))
    assert not problems(observed(standbys=[replace(standby, at=ago(3600))]))  # it died
    backlog = (waiting("dispatcher", 3, 100), waiting("archive", 3, 100))
    alone = problems(observed(pipelines=[], standbys=[standby], backlogs=backlog))
    assert [each.fact.partition(",")[0] for each in alone] == [
        "no pipeline runs dispatch",
        "no pipeline runs archive",
        "no pipeline has reported since the NATS server started",
    ]


def test_a_part_that_does_not_move_is_wrong_and_one_that_moves_is_only_behind() -> None:
    parts = (part("dispatch", moved=200), *(each for each in ALL if each["part"] != "dispatch"))
    still = only(observed(pipelines=[report(*parts)], backlogs=(waiting("dispatcher", 20_000, 240),)))
    assert still.weight is Weight.WRONG
    assert still.fact == (
        "dispatch has been at position 7 since 2026-01-01 11:56:40 UTC, "
        "and 20,000 messages wait for it, the oldest for 4 minutes"
    )
    behind = only(observed(backlogs=(waiting("dispatcher", 20_000, 1000),)))
    assert behind.weight is Weight.WARNING
    assert "17 minutes behind" in behind.fact
    slow_archive = (part("archive", moved=800), *(each for each in ALL if each["part"] != "archive"))
    collects = observed(pipelines=[report(*slow_archive)], backlogs=(waiting("archive", 5, 700),))
    assert not problems(collects, archive_seconds=600)
    assert "archive has been at position" in only(collects).fact
    done = (part("archive", moved=800, position=90), *(each for each in ALL if each["part"] != "archive"))
    held = observed(pipelines=[report(*done)], backlogs=(waiting("archive", 5, 700),), queues=(stream_at(90),))
    assert not problems(held)  # processed, and kept in the queue for a backup
    assert "has been at position 90 since" in only(replace(held, usages={STREAM: stream_at(95)})).fact


def test_an_unresponsive_part_and_a_failing_one_are_wrong() -> None:
    others = ALL[1:]
    frozen = only(observed(pipelines=[report(part("transform", "unresponsive", error="x"), *others)]))
    assert (frozen.weight, "the JVM of Spark hangs" in frozen.fact) == (Weight.WRONG, True)
    fails = only(observed(pipelines=[report(part("transform", "waiting", error="no space"), *others)]))
    assert (fails.weight, fails.reason) == (Weight.WRONG, "no space")
    assert "no space" not in fails.fact
    failed = only(observed(pipelines=[report(part("transform", error="no space"), *others)]))
    assert failed.weight is Weight.WARNING
    slow = only(observed(pipelines=[report(part("transform", "starting"), *others)]))
    assert slow.weight is Weight.WARNING


def test_a_pipeline_that_does_not_report_is_wrong_and_one_that_was_stopped_is_missed_by_its_backlog() -> None:
    backlog = (waiting("dispatcher", 3, 240),)
    silent = only(observed(pipelines=[report(*ALL, silent=40)], backlogs=backlog))
    assert silent.fact == "the pipeline (process 4711 on elsewhere) has not reported for 40 s"
    stopped = [replace(report(*ALL), stopped=True)]
    assert only(observed(pipelines=stopped, backlogs=backlog)).fact.startswith("no pipeline runs dispatch, and 3 mess")
    assert not problems(observed(pipelines=stopped))
    assert only(observed(pipelines=[])).weight is Weight.NOTE


@pytest.fixture
def process() -> "Iterator[subprocess.Popen[str]]":
    program = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        yield started
        started.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_the_advice_fits_what_happened_to_a_process_of_this_machine(process: "subprocess.Popen[str]") -> None:
    def silent() -> Condition:
        return only(observed(pipelines=[report(*ALL, silent=40, pid=process.pid, host=HERE)]))

    assert f"kill -9 {process.pid}" in (silent().fix or "")
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert f"kill -CONT {process.pid}" in (silent().fix or "")
    child = report(part("transform", "unresponsive"), *ALL[1:], pid=os.getpid(), host=HERE)
    assert f"kill -CONT {process.pid}" in (only(observed(pipelines=[child])).fix or "")  # a JVM is a child
    process.kill()
    process.wait()
    assert "ended unexpectedly" in silent().fact


def test_push_workers_are_missed_and_replaced_ones_are_not() -> None:
    hook = subscription("hook", pushed=True)
    assert not problems(observed(push_workers=[]))
    assert only(observed(hook, push_workers=[])).fact == "no push worker runs, and 1 subscription should be pushed"
    dead = report(silent=600, pid=2**22 + 1, host=HERE)
    assert "ended unexpectedly" in only(observed(hook, push_workers=[dead])).fact
    assert not problems(observed(hook, push_workers=[dead, report()]))
    hangs = report(silent=600, pid=os.getpid(), host=HERE)
    assert only(observed(hook, push_workers=[hangs, report()])).weight is Weight.WRONG


@pytest.mark.parametrize(
    ("failure", "advice"),
    [
        ({"status": 500, "error": None}, "why it answers 500"),
        ({"status": None, "error": "connection refused"}, "does the endpoint run"),
    ],
)
def test_the_advice_for_a_push_problem_fits_the_endpoint(failure: dict[str, Any], advice: str) -> None:
    endpoint = EndpointFailure(
        endpoint="https://example.com/in?key=secret", since=ago(90), attempts=9, breaker="open", window=1, **failure
    )
    seen = observed(
        subscription("hook", pushed=True),
        queues=(queue("hook", 20_000, 90),),
        problems={"hook": PushProblem(endpoint.reason, ago(90), (endpoint,))},
    )
    found = only(seen)
    assert found.weight is Weight.WRONG
    assert found.fact.startswith("hook has not been pushed since 2026-01-01 11:58:30 UTC, and 20,000 messages wait")
    assert "secret" not in f"{found.fact} {found.fix}"  # `/readyz` needs no login
    assert "secret" in found.finding().text
    assert found.finding().text.endswith("; 9 attempts failed, circuit breaker open, window 1")
    assert advice in (found.fix or "")
    secrets = replace(seen, problems={"hook": PushProblem("the secret cannot be decrypted", ago(90))})
    assert "correct what the reason names" in (only(secrets).fix or "")


def test_subscriptions_that_get_nothing_are_found() -> None:
    suspension = Suspension(position=7, reason="the queue is full", at=ago(60))
    suspended = subscription(dispatch=DispatchState(incarnation="a", next=7, suspended=suspension))
    found = only(observed(suspended))
    assert (found.weight, found.reason) == (Weight.WRONG, "the queue is full")
    assert "purveyor subscription resume ox" in (found.fix or "")
    newer = replace(suspension, group="dispatcher")
    by_group = subscription(dispatch=DispatchState(incarnation="a", next=7, suspended=newer))
    assert "upgrade the pipeline" in (only(observed(by_group)).fix or "")
    prefill = PrefillState(incarnation="a", status=PrefillStatus.FAILED, position=3, reason="no archive")
    failed = only(observed(subscription(prefill=prefill)))
    assert (failed.weight, failed.reason) == (Weight.WRONG, "no archive")
    old = (queue("ox", 5, 7300),)
    assert "its consumer does not fetch" in (only(observed(subscription(), queues=old)).fix or "")
    assert "resume ox" in (only(observed(subscription(paused=True), queues=old)).fix or "")
    assert not problems(observed(subscription(paused=True), queues=(queue("ox", 5, 60),)))
    unpushed = only(observed(subscription("hook", pushed=True), queues=(queue("hook", 5, 400),)))
    assert "no push worker reports a problem" in unpushed.fact
    assert only(observed(subscription(state=RecordState.DELETING))).weight is Weight.WARNING


@pytest.mark.parametrize(
    ("values", "is_silent", "weight", "words"),
    [
        ({"state": "following", "mode": "syncrepl", "entries": 1234}, False, Weight.OK, "by syncrepl, 1,234 entries"),
        ({"state": "standby"}, False, Weight.OK, "people is standby"),
        ({"state": "failed", "error": "wrong password", "fix": "set it"}, False, Weight.WARNING, "cannot follow"),
        ({"state": "following"}, True, Weight.WRONG, "has not reported for 60 s"),
    ],
)
def test_a_source_is_wrong_only_if_its_process_is_gone(
    values: dict[str, Any], is_silent: bool, weight: Weight, words: str
) -> None:
    source = SourceReport(source="people", values=values, at=ago(60), is_silent=is_silent)
    (found,) = [each for each in judge(observed(sources=[source])) if each.about == "sources"]
    assert found.weight is weight
    assert words in found.fact
    assert "wrong password" not in found.fact
