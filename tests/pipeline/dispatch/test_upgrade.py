"""A dispatcher that is older than the program that wrote a record: the subscription stops, and loses nothing."""

import asyncio
import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model import registration
from purveyor.model.control_events import CONTROL_SUBJECT, CatchUpJob, decode_job
from purveyor.model.errors import UnreadableRecord
from purveyor.model.registration import Record
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.pipeline.dispatch import batch_plan, suspensions
from purveyor.pipeline.dispatch.dispatch_query import Dispatcher
from purveyor.queues.registry import Unreadable
from purveyor.queues.sync_client import read_subscriptions, settle_begin
from tests.support.dispatch_harness import DispatchHarness
from tests.support.waiting import wait_until

Change = Callable[[dict[str, Any]], dict[str, Any]]


def newer(record: dict[str, Any]) -> dict[str, Any]:
    """A record of a later version."""
    return {**record, "version": 2}


def with_field(record: dict[str, Any]) -> dict[str, Any]:
    """A field that only a later program knows."""
    return {**record, "zone": "eu"}


def with_option(record: dict[str, Any]) -> dict[str, Any]:
    """An option of a subscription that only a later program knows."""
    return {**record, "definition": {**record["definition"], "sample": 0.5}}


def unreadable(harness: DispatchHarness, name: str) -> Unreadable:
    return read_subscriptions(harness.address).unreadable[name]


@pytest.mark.parametrize("change", [newer, with_option])
def test_a_subscription_that_is_not_understood_is_suspended_and_gets_everything_later(
    harness: DispatchHarness, change: Change
) -> None:
    for name in ("ox", "zoo"):
        harness.add(name)
    harness.events(1, 3)
    harness.start()
    harness.wait()
    understood = harness.raw("ox", "definition")
    harness.put_raw("ox", "definition", change(understood))
    harness.events(4, 6)
    harness.wait()
    harness.events(7, 8)
    harness.wait()
    assert harness.numbers("ox") == [1, 2, 3]
    assert harness.numbers("zoo") == list(range(1, 9))
    suspended = unreadable(harness, "ox").suspended
    assert suspended is not None
    assert suspended.position == 6  # behind two control events and three events
    assert "upgrade" in suspended.reason

    harness.put_raw("ox", "definition", understood)
    harness.events(9, 10)
    harness.wait()
    assert harness.numbers("ox") == harness.numbers("zoo") == list(range(1, 11))
    assert harness.found("ox").suspended is None


def test_a_dispatcher_that_knows_no_changes_stops_before_one_and_an_upgraded_one_goes_by_position(
    harness: DispatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ox", "zoo"):
        harness.add(name)
    harness.events(1, 2)

    async def change() -> None:
        async with harness.connected() as queues:
            topics = (RealmTopic("udm", "groups/group"),)
            await Subscriptions(queues).redefine("ox", lambda now: replace(now, realms_topics=topics))

    asyncio.run(change())
    harness.events(3, 4)
    harness.events(5, 6, "groups/group")
    known = tuple(name for name in registration.RECORD.fields if name not in ("pending", "past"))
    with monkeypatch.context() as older:
        older.setattr(registration, "RECORD", replace(registration.RECORD, fields=known))
        harness.dispatch()
        assert (harness.numbers("ox"), harness.numbers("zoo")) == ([], [1, 2, 3, 4])
        suspended = unreadable(harness, "ox").suspended
        assert suspended is not None
        assert "'past', which this program does not know" in suspended.reason
    harness.events(7, 7, "groups/group")
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2, 5, 6, 7]
    assert harness.found("ox").suspended is None


def test_it_stays_suspended_through_crashes_and_restarts_and_continues_where_it_stopped(
    harness: DispatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.add("ox")
    harness.events(1, 3)
    harness.dispatch()
    understood = harness.raw("ox", "definition")
    harness.put_raw("ox", "definition", newer(understood))
    harness.events(4, 5)
    with monkeypatch.context() as dying:  # between the suspension and the commit of the batch

        def die(*_: object) -> None:
            raise RuntimeError("died here")

        dying.setattr(Dispatcher, "_record_progress", die)
        wait_until(harness.start().exception)
    noted = harness.raw("ox", "dispatch")
    harness.dispatch()
    harness.events(6, 7)
    harness.dispatch()
    assert harness.raw("ox", "dispatch") == noted
    harness.put_raw("ox", "definition", understood)
    harness.events(8, 9)
    harness.dispatch()
    assert harness.numbers("ox") == list(range(1, 10))
    assert harness.found("ox").suspended is None


def test_one_that_begins_while_it_is_not_understood_gets_all_behind_its_beginning(harness: DispatchHarness) -> None:
    """Its record is not understood before its control event is stored, and its position is noted later still."""
    harness.events(1, 2)
    record = harness.add("ox", noted=False)
    begin = harness.last()
    fresh = harness.raw("ox", "definition")
    harness.put_raw("ox", "definition", newer(fresh))
    harness.events(3, 5)
    harness.dispatch()
    assert unreadable(harness, "ox").suspended is not None
    harness.put_raw("ox", "definition", {**newer(fresh), "begin": begin, "state": "active"})
    harness.events(6, 7)
    harness.dispatch()
    harness.put_raw("ox", "definition", {**fresh, "begin": begin, "state": "active"})
    harness.events(8, 8)
    harness.dispatch()
    assert record.incarnation == harness.found("ox").incarnation
    assert harness.numbers("ox") == [3, 4, 5, 6, 7, 8]


def test_a_record_that_a_newer_program_writes_while_its_beginning_is_settled_is_suspended_there(
    harness: DispatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.add("ox", noted=False)
    begin = harness.last()
    harness.events(1, 3)

    def too_late(*args: Any) -> Record:
        active = {**harness.raw("ox", "definition"), "begin": begin, "state": "active"}
        harness.put_raw("ox", "definition", newer(active))
        return settle_begin(*args)

    monkeypatch.setattr(batch_plan, "settle_begin", too_late)
    harness.dispatch()
    suspended = unreadable(harness, "ox").suspended
    assert suspended is not None
    assert suspended.position == begin + 1


@pytest.mark.parametrize("change", [newer, with_field])
def test_a_dispatch_state_that_is_not_understood_is_left_as_it_is_and_continued_by_one_that_does(
    harness: DispatchHarness, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ox", "zoo"):
        record = harness.add(name)
    harness.events(1, 2)
    harness.dispatch()
    record = harness.found("ox").record
    understood = {"incarnation": record.incarnation, "next": harness.last() + 1, "suspended": None}
    harness.put_raw("ox", "dispatch", change(understood))
    harness.events(3, 5)
    harness.dispatch()
    assert harness.raw("ox", "dispatch") == change(understood)
    assert harness.numbers("ox") == [1, 2]
    assert "subscription ox is left out" in caplog.text
    harness.put_raw("ox", "dispatch", understood)
    harness.events(6, 7)
    harness.dispatch()
    assert harness.numbers("ox") == harness.numbers("zoo") == list(range(1, 8))


def test_a_prefill_state_that_is_not_understood_is_no_concern_of_the_dispatcher(harness: DispatchHarness) -> None:
    record = harness.add("ox")
    harness.put_raw("ox", "prefill", newer({"incarnation": record.incarnation, "status": "done", "position": 1}))
    harness.events(1, 3)
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2, 3]
    assert unreadable(harness, "ox").suspended is None


@pytest.mark.parametrize("data", [b"no record", b'{"version": 2, "who": 7}'])
def test_a_record_without_a_readable_incarnation_is_suspended_by_the_owner_of_its_queue(
    harness: DispatchHarness, data: bytes
) -> None:
    record = harness.add("ox")
    harness.add("zoo")
    understood = harness.raw("ox", "definition")
    harness.put_raw("ox", "definition", data)
    harness.events(1, 3)
    harness.dispatch()
    found = unreadable(harness, "ox")
    assert found.incarnation is None
    assert found.dispatch is not None
    assert found.dispatch.incarnation == record.incarnation
    harness.put_raw("ox", "definition", understood)
    harness.events(4, 5)
    harness.dispatch()
    assert harness.numbers("ox") == harness.numbers("zoo") == list(range(1, 6))


def test_a_record_without_a_readable_incarnation_and_without_a_queue_is_suspended_too(
    harness: DispatchHarness,
) -> None:
    """Nothing says which subscription it is. Its name is enough to say so, and to note what it misses."""
    for name in ("ox", "zoo"):
        harness.add(name)
    understood = harness.raw("ox", "definition")
    harness.put_raw("ox", "definition", b"no record")
    harness.broker.drop("stream:ox")
    harness.events(1, 3)
    harness.dispatch()
    suspended = unreadable(harness, "ox").suspended
    assert suspended is not None
    assert suspended.position == 1  # its beginning is not known either: the batch begins there
    assert "upgrade the dispatcher" in suspended.reason
    harness.events(4, 4)
    harness.dispatch()
    assert unreadable(harness, "ox").suspended == suspended
    harness.put_raw("ox", "definition", understood)
    assert harness.found("ox").suspended == suspended
    harness.events(5, 6)
    harness.dispatch()
    assert harness.numbers("ox") == harness.numbers("zoo") == list(range(1, 7))
    assert harness.found("ox").suspended is None


@pytest.mark.parametrize("named", [True, False])
def test_where_a_control_event_is_not_understood_the_subscription_stops_there(
    harness: DispatchHarness, *, named: bool
) -> None:
    """Whoever adds it is slow: its position is noted after the batch that it lies in."""
    harness.add("zoo")
    wanted = Subscription(name="ox", realms_topics=(RealmTopic("udm", "users/user"),))
    harness.register(Record(incarnation=str(uuid.uuid4()), definition=wanted, created=datetime.now(UTC)))
    harness.events(1, 2)
    about = {"name": "ox"} if named else {"names": ["ox"]}
    harness.publish([json.dumps({"version": 2, "control": "subscription.added", **about}).encode()], CONTROL_SUBJECT)
    begin = harness.last()
    harness.events(3, 4)
    harness.dispatch()
    suspended = harness.found("ox").suspended
    assert suspended is not None
    assert suspended.position == begin + 1
    harness.put_raw("ox", "definition", {**harness.raw("ox", "definition"), "begin": begin, "state": "active"})
    harness.events(5, 6)
    harness.dispatch()
    assert harness.numbers("ox") == [3, 4, 5, 6]
    assert harness.numbers("zoo") == list(range(1, 7))
    assert harness.found("ox").suspended is None


def test_another_group_that_understands_the_record_continues(harness: DispatchHarness) -> None:
    """The suspension of the older group stays noted, and what this one wrote is noted beside it."""
    record = harness.add("ox")
    harness.events(1, 3)
    other = {"position": 2, "reason": "upgrade this program", "at": "2026-01-01T00:00:00+00:00", "group": "older"}
    state = {"incarnation": record.incarnation, "next": 2, "suspended": other}
    harness.put_raw("ox", "dispatch", state)
    harness.dispatch()
    harness.events(4, 5)
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2, 3, 4, 5]
    assert harness.raw("ox", "dispatch")["suspended"] == other


def test_two_groups_that_do_not_understand_it_both_continue_when_they_do(harness: DispatchHarness) -> None:
    harness.make_group("second")
    harness.add("ox")
    harness.events(1, 2)
    harness.dispatch()
    harness.dispatch("second")
    understood = harness.raw("ox", "definition")
    harness.put_raw("ox", "definition", newer(understood))
    harness.events(3, 4)
    harness.dispatch()
    harness.events(5, 6)
    harness.dispatch("second")
    harness.dispatch()
    noted = harness.raw("ox", "dispatch")
    assert noted["suspended"]["group"] == "dispatcher"
    harness.put_raw("ox", "definition", understood)
    harness.events(7, 8)
    harness.dispatch("second")
    assert harness.numbers("ox") == list(range(1, 9))
    harness.dispatch()
    harness.events(9, 9)
    harness.dispatch()
    harness.dispatch("second")
    assert harness.numbers("ox") == list(range(1, 10))
    assert harness.found("ox").suspended is None


def test_a_catch_up_is_asked_for_when_no_event_comes(harness: DispatchHarness) -> None:
    record = harness.add("ox")
    harness.events(1, 2)
    harness.start()
    harness.wait()
    understood = harness.raw("ox", "definition")
    harness.put_raw("ox", "definition", newer(understood))
    harness.events(3, 4)
    harness.wait()
    harness.put_raw("ox", "definition", understood)
    [row] = wait_until(lambda: harness.broker.rows("stream:prefill"))
    job = decode_job(row["data"])
    assert isinstance(job, CatchUpJob)
    assert (job.name, job.incarnation) == ("ox", record.incarnation)


def test_a_gap_too_large_for_a_batch_is_left_to_a_catch_up_job(
    harness: DispatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_plan, "SMALL_GAP_POSITIONS", 2)
    monkeypatch.setattr(suspensions, "REGISTRY_POLL_SECONDS", 3600.0)  # by the batch, and not by looking
    harness.add("ox")
    harness.add("zoo")
    harness.events(1, 2)
    harness.dispatch()
    understood = harness.raw("ox", "definition")
    harness.put_raw("ox", "definition", newer(understood))
    harness.events(3, 9)
    harness.dispatch()
    harness.put_raw("ox", "definition", understood)
    harness.start()
    for number in (10, 11):
        harness.events(number, number)
        harness.wait()
    assert harness.numbers("ox") == [1, 2]
    assert harness.numbers("zoo") == list(range(1, 12))
    [row] = harness.broker.rows("stream:prefill")
    assert isinstance(decode_job(row["data"]), CatchUpJob)


@pytest.mark.parametrize("unknown", [{"version": 2}, {"zone": "eu"}], ids=["version", "field"])
def test_a_checkpoint_of_a_newer_program_is_left_to_a_program_that_understands_it(
    harness: DispatchHarness, unknown: dict[str, Any]
) -> None:
    harness.add("ox")
    harness.events(1, 3)
    harness.dispatch()
    newest = max((harness.settings().checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    understood = newest.read_text()
    *head, offset = understood.splitlines()
    newest.write_text("\n".join([*head, json.dumps({**json.loads(offset), **unknown})]))
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    harness.events(4, 5)
    with pytest.raises(UnreadableRecord, match="upgrade this program"):
        harness.start()
    assert harness.numbers("ox") == [1, 2, 3]
    newest.write_text(understood)
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2, 3, 4, 5]
