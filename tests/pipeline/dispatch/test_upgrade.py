"""A dispatcher that is older than the program that wrote a record: the subscription stops, and loses nothing."""

import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from purveyor.model.control_events import CONTROL_SUBJECT, CatchUpJob, decode_job
from purveyor.model.errors import UnreadableRecord
from purveyor.model.registration import Record
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.pipeline.dispatch import batch_plan, subscription_snapshot, suspensions
from purveyor.pipeline.dispatch.dispatch_query import Dispatcher
from purveyor.queues.registry import Unreadable
from purveyor.queues.sync_client import read_subscriptions, settle_begin
from tests.support.dispatch_world import World
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


def unreadable(world: World, name: str) -> Unreadable:
    return read_subscriptions(world.address).unreadable[name]


@pytest.mark.parametrize("change", [newer, with_option])
def test_a_subscription_that_is_not_understood_is_suspended_and_gets_everything_later(
    world: World, change: Change
) -> None:
    for name in ("ox", "zoo"):
        world.add(name)
    world.events(1, 3)
    world.start()
    world.wait()
    understood = world.raw("ox", "definition")
    world.put_raw("ox", "definition", change(understood))
    world.events(4, 6)
    world.wait()
    world.events(7, 8)
    world.wait()
    assert world.numbers("ox") == [1, 2, 3]
    assert world.numbers("zoo") == list(range(1, 9))
    suspended = unreadable(world, "ox").suspended
    assert suspended is not None
    assert suspended.position == 6  # behind two control events and three events
    assert "upgrade" in suspended.reason

    world.put_raw("ox", "definition", understood)
    world.events(9, 10)
    world.wait()
    assert world.numbers("ox") == world.numbers("zoo") == list(range(1, 11))
    assert world.found("ox").suspended is None


def test_it_stays_suspended_through_crashes_and_restarts_and_continues_where_it_stopped(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add("ox")
    world.events(1, 3)
    world.dispatch()
    understood = world.raw("ox", "definition")
    world.put_raw("ox", "definition", newer(understood))
    world.events(4, 5)
    with monkeypatch.context() as dying:  # between the suspension and the commit of the batch

        def die(*_: object) -> None:
            raise RuntimeError("died here")

        dying.setattr(Dispatcher, "_record_progress", die)
        wait_until(world.start().exception)
    noted = world.raw("ox", "dispatch")
    world.dispatch()
    world.events(6, 7)
    world.dispatch()
    assert world.raw("ox", "dispatch") == noted
    world.put_raw("ox", "definition", understood)
    world.events(8, 9)
    world.dispatch()
    assert world.numbers("ox") == list(range(1, 10))
    assert world.found("ox").suspended is None


def test_one_that_begins_while_it_is_not_understood_gets_all_behind_its_beginning(world: World) -> None:
    """Its record is not understood before its control event is stored, and its position is noted later still."""
    world.events(1, 2)
    record = world.add("ox", noted=False)
    begin = world.last()
    fresh = world.raw("ox", "definition")
    world.put_raw("ox", "definition", newer(fresh))
    world.events(3, 5)
    world.dispatch()
    assert unreadable(world, "ox").suspended is not None
    world.put_raw("ox", "definition", {**newer(fresh), "begin": begin, "state": "active"})
    world.events(6, 7)
    world.dispatch()
    world.put_raw("ox", "definition", {**fresh, "begin": begin, "state": "active"})
    world.events(8, 8)
    world.dispatch()
    assert record.incarnation == world.found("ox").incarnation
    assert world.numbers("ox") == [3, 4, 5, 6, 7, 8]


def test_a_record_that_a_newer_program_writes_while_its_beginning_is_settled_is_suspended_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.add("ox", noted=False)
    begin = world.last()
    world.events(1, 3)

    def too_late(*args: Any) -> Record:
        active = {**world.raw("ox", "definition"), "begin": begin, "state": "active"}
        world.put_raw("ox", "definition", newer(active))
        return settle_begin(*args)

    monkeypatch.setattr(subscription_snapshot, "settle_begin", too_late)
    world.dispatch()
    suspended = unreadable(world, "ox").suspended
    assert suspended is not None
    assert suspended.position == begin + 1


@pytest.mark.parametrize("change", [newer, with_field])
def test_a_dispatch_state_that_is_not_understood_is_left_as_it_is_and_continued_by_one_that_does(
    world: World, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("ox", "zoo"):
        record = world.add(name)
    world.events(1, 2)
    world.dispatch()
    record = world.found("ox").record
    understood = {"incarnation": record.incarnation, "next": world.last() + 1, "suspended": None}
    world.put_raw("ox", "dispatch", change(understood))
    world.events(3, 5)
    world.dispatch()
    assert world.raw("ox", "dispatch") == change(understood)
    assert world.numbers("ox") == [1, 2]
    assert "subscription ox is left out" in caplog.text
    world.put_raw("ox", "dispatch", understood)
    world.events(6, 7)
    world.dispatch()
    assert world.numbers("ox") == world.numbers("zoo") == list(range(1, 8))


def test_a_prefill_state_that_is_not_understood_is_no_concern_of_the_dispatcher(world: World) -> None:
    record = world.add("ox")
    world.put_raw("ox", "prefill", newer({"incarnation": record.incarnation, "status": "done", "position": 1}))
    world.events(1, 3)
    world.dispatch()
    assert world.numbers("ox") == [1, 2, 3]
    assert unreadable(world, "ox").suspended is None


@pytest.mark.parametrize("data", [b"no record", b'{"version": 2, "who": 7}'])
def test_a_record_without_a_readable_incarnation_is_suspended_by_the_owner_of_its_queue(
    world: World, data: bytes
) -> None:
    record = world.add("ox")
    world.add("zoo")
    understood = world.raw("ox", "definition")
    world.put_raw("ox", "definition", data)
    world.events(1, 3)
    world.dispatch()
    found = unreadable(world, "ox")
    assert found.incarnation is None
    assert found.dispatch is not None
    assert found.dispatch.incarnation == record.incarnation
    world.put_raw("ox", "definition", understood)
    world.events(4, 5)
    world.dispatch()
    assert world.numbers("ox") == world.numbers("zoo") == list(range(1, 6))


@pytest.mark.parametrize("named", [True, False])
def test_where_a_control_event_is_not_understood_the_subscription_stops_there(world: World, *, named: bool) -> None:
    """Whoever adds it is slow: its position is noted after the batch that it lies in."""
    world.add("zoo")
    wanted = Subscription(name="ox", realms_topics=(RealmTopic("udm", "users/user"),))
    world.register(Record(incarnation=str(uuid.uuid4()), definition=wanted, created=datetime.now(UTC)))
    world.events(1, 2)
    about = {"name": "ox"} if named else {"names": ["ox"]}
    world.publish([json.dumps({"version": 2, "control": "subscription.added", **about}).encode()], CONTROL_SUBJECT)
    begin = world.last()
    world.events(3, 4)
    world.dispatch()
    suspended = world.found("ox").suspended
    assert suspended is not None
    assert suspended.position == begin + 1
    world.put_raw("ox", "definition", {**world.raw("ox", "definition"), "begin": begin, "state": "active"})
    world.events(5, 6)
    world.dispatch()
    assert world.numbers("ox") == [3, 4, 5, 6]
    assert world.numbers("zoo") == list(range(1, 7))
    assert world.found("ox").suspended is None


def test_another_group_that_understands_the_record_continues(world: World) -> None:
    """The suspension of the older group stays noted, and what this one wrote is noted beside it."""
    record = world.add("ox")
    world.events(1, 3)
    other = {"position": 2, "reason": "upgrade this program", "at": "2026-01-01T00:00:00+00:00", "group": "older"}
    state = {"incarnation": record.incarnation, "next": 2, "suspended": other}
    world.put_raw("ox", "dispatch", state)
    world.dispatch()
    world.events(4, 5)
    world.dispatch()
    assert world.numbers("ox") == [1, 2, 3, 4, 5]
    assert world.raw("ox", "dispatch")["suspended"] == other


def test_two_groups_that_do_not_understand_it_both_continue_when_they_do(world: World) -> None:
    world.make_group("second")
    world.add("ox")
    world.events(1, 2)
    world.dispatch()
    world.dispatch("second")
    understood = world.raw("ox", "definition")
    world.put_raw("ox", "definition", newer(understood))
    world.events(3, 4)
    world.dispatch()
    world.events(5, 6)
    world.dispatch("second")
    world.dispatch()
    noted = world.raw("ox", "dispatch")
    assert noted["suspended"]["group"] == "dispatcher"
    world.put_raw("ox", "definition", understood)
    world.events(7, 8)
    world.dispatch("second")
    assert world.numbers("ox") == list(range(1, 9))
    world.dispatch()
    world.events(9, 9)
    world.dispatch()
    world.dispatch("second")
    assert world.numbers("ox") == list(range(1, 10))
    assert world.found("ox").suspended is None


def test_a_catch_up_is_asked_for_when_no_event_comes(world: World) -> None:
    record = world.add("ox")
    world.events(1, 2)
    world.start()
    world.wait()
    understood = world.raw("ox", "definition")
    world.put_raw("ox", "definition", newer(understood))
    world.events(3, 4)
    world.wait()
    world.put_raw("ox", "definition", understood)
    [row] = wait_until(lambda: world.broker.rows("stream:prefill"))
    job = decode_job(row["data"])
    assert isinstance(job, CatchUpJob)
    assert (job.name, job.incarnation) == ("ox", record.incarnation)


def test_a_gap_too_large_for_a_batch_is_left_to_a_catch_up_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_plan, "SMALL_GAP", 2)
    monkeypatch.setattr(suspensions, "REGISTRY_POLL_SECONDS", 3600.0)  # by the batch, and not by looking
    world.add("ox")
    world.add("zoo")
    world.events(1, 2)
    world.dispatch()
    understood = world.raw("ox", "definition")
    world.put_raw("ox", "definition", newer(understood))
    world.events(3, 9)
    world.dispatch()
    world.put_raw("ox", "definition", understood)
    world.start()
    for number in (10, 11):
        world.events(number, number)
        world.wait()
    assert world.numbers("ox") == [1, 2]
    assert world.numbers("zoo") == list(range(1, 12))
    [row] = world.broker.rows("stream:prefill")
    assert isinstance(decode_job(row["data"]), CatchUpJob)


@pytest.mark.parametrize("unknown", [{"version": 2}, {"zone": "eu"}], ids=["version", "field"])
def test_a_checkpoint_of_a_newer_program_is_left_to_a_program_that_understands_it(
    world: World, unknown: dict[str, Any]
) -> None:
    world.add("ox")
    world.events(1, 3)
    world.dispatch()
    newest = max((world.settings().checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    understood = newest.read_text()
    *head, offset = understood.splitlines()
    newest.write_text("\n".join([*head, json.dumps({**json.loads(offset), **unknown})]))
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    world.events(4, 5)
    with pytest.raises(UnreadableRecord, match="upgrade this program"):
        world.start()
    assert world.numbers("ox") == [1, 2, 3]
    newest.write_text(understood)
    world.dispatch()
    assert world.numbers("ox") == [1, 2, 3, 4, 5]
