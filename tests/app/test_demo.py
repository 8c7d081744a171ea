"""The checks of the demo, and one run of the whole demo."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from purveyor.app.demo.subscribers import DeliveryCheck, MeasuredPeriod
from purveyor.app.demo.system import Step, changes, initial_entries
from tests.support.command_line import invoke

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def event(uuid: str = "u", *, gone: bool = False, at: datetime = NOW) -> dict[str, object]:
    here = {"uuid": uuid, "dn": f"uid={uuid}", "properties": {"username": uuid}}
    return {"ts": at.isoformat(), "body": {"old": here, "new": {}} if gone else {"old": {}, "new": here}}


def test_the_directory_is_the_same_in_every_run() -> None:
    assert changes(initial_entries(50, 2), 1) == changes(initial_entries(50, 2), 1)


def test_each_change_is_one_record() -> None:
    step = changes(initial_entries(50, 2), 1)
    assert step.ldif.count("changetype:") == step.events
    assert len(step.people) == 50 - step.ldif.count("changetype: delete")


def test_duplicates_and_disorder_are_found() -> None:
    got = DeliveryCheck("x", "pull")
    for position, each in ((5, event()), (5, event()), (4, event()), (6, event("v")), (7, event("v", gone=True))):
        got.record(each, position, NOW)
    assert (got.got, got.duplicates, got.out_of_order) == (5, 1, 2)
    assert set(got.objects) == {"u"}


def test_order_by_key_is_checked_for_each_object() -> None:
    got = DeliveryCheck("x", "pull", by_key=True)
    for position, each in ((5, event("a")), (4, event("b")), (6, event("b")), (3, event("a"))):
        got.record(each, position, NOW)
    assert (got.duplicates, got.out_of_order) == (0, 1)


def test_missing_messages_are_found() -> None:
    got = DeliveryCheck("x", "pull", expected=2)
    got.record(event(), 1, NOW)
    assert list(got.find_problems(Step("", 0, 0, ()))) == [
        "x got 1 messages instead of 2",
        "x knows other people than the directory has",
    ]


def test_latency_is_measured_separately_for_calm_and_disturbed_periods() -> None:
    second = timedelta(seconds=1)
    got = DeliveryCheck("x", "pull")
    got.periods += [MeasuredPeriod(NOW, calm=True, until=NOW + second), MeasuredPeriod(NOW + second, calm=False)]
    got.record(event(at=NOW - 9 * second), 1, NOW)
    got.record(event(at=NOW), 2, NOW + 2 * second)
    got.record(event(at=NOW + second), 3, NOW + 9 * second)
    assert (got.latency(0.5), got.latency(0.5, calm=False)) == (2.0, 8.0)
    assert len(got.latencies) == 2
    assert got.newest == NOW + second


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.first
def test_the_demo_runs_and_finds_nothing_wrong() -> None:
    done = invoke("demo", "--people", "40", "--json")
    assert done.code == 0, (done.out, done.err)
    reported = json.loads(done.out)
    assert reported["wrong"] == []
    assert reported["audit"]["clean"]
    assert reported["dead_letters"] == 0
    received = {each["name"]: each for each in reported["received"]}
    assert set(received) == {"everything", "by-key", "webhook", "table", "late"}
    assert all(each["got"] == each["expected"] > 0 for each in received.values())
    assert received["webhook"]["retried"] > 0
    assert all(each["latency_p50_seconds"] and each["disturbed_p50_seconds"] for each in received.values())
    assert reported["recovery_seconds"] > 0
