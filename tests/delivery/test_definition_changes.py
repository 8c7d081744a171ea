"""A change of what a subscription selects is in force from an exact position on, despite crashes and other changes."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from purveyor.delivery import definition_changes
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.jetstream.headers import POSITION
from purveyor.model.control_events import CONTROL_EVENT, CONTROL_SUBJECT, ControlEvent
from purveyor.model.delivery_policy import Delivery
from purveyor.model.errors import InvalidInput, Refused
from purveyor.model.registration import RECORD, DispatchState, PrefillState, PrefillStatus, Record, Suspension
from purveyor.model.selection import Selection, may_overlap
from purveyor.model.subscription import Filter, RealmTopic, Subscription
from purveyor.pipeline.audit.scope import ControlEventAt, SelectionRange, selection_ranges
from purveyor.pipeline.dispatch.batch_plan import SubscriptionTracker
from purveyor.queues.client import Queues, connect
from tests.support.delivery import definition, stored

INCOMING = "stream:incoming"


def topics(*names: str) -> Callable[[Subscription], Subscription]:
    """Return a change to other topics."""
    return lambda now: replace(now, realms_topics=tuple(RealmTopic("udm", name) for name in names))


def names(selected: Subscription) -> list[str]:
    return [each.topic for each in selected.realms_topics]


async def in_log(queues: Queues) -> list[ControlEventAt]:
    return [
        ControlEventAt(message.sequence, CONTROL_EVENT.read(message.data, ControlEvent.from_json))
        for message in await stored(queues, INCOMING)
        if message.subject == CONTROL_SUBJECT
    ]


async def pass_all(queues: Queues) -> None:
    """Do what the dispatcher does when it has dispatched everything."""
    last = (await queues.streams.info(INCOMING)).state.last_seq
    await asyncio.to_thread(request_api, queues.address, f"CONSUMER.RESET.{INCOMING}.dispatcher", {"seq": last + 1})


async def test_a_change_of_topics_is_a_control_event_and_its_position_is_the_boundary(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    record, _ = await subscriptions.add(definition())
    await queues.publish("incoming", b"event")
    changed = await subscriptions.redefine("ox", topics("users/user", "groups/.*"))
    assert changed.position == 3
    *_, control = await in_log(queues)
    assert (control.position, control.event.incarnation) == (3, record.incarnation)
    assert control.event.change is not None
    assert control.event.change.selection == Selection.of(changed.record.definition)
    assert [names(changed.record.definition_at(position)) for position in (2, 3, 4)] == [
        ["users/user"], ["users/user"], ["users/user", "groups/.*"]
    ]  # fmt: skip
    assert (await subscriptions.get("ox")).record == changed.record
    assert Record.from_json(stored_form(changed.record)) == changed.record


def stored_form(record: Record) -> Any:
    return json.loads(RECORD.dump(record.to_json()))


async def test_only_what_is_selected_is_a_control_event(queues: Queues, subscriptions: Subscriptions) -> None:
    await subscriptions.add(definition())
    options = await subscriptions.redefine(
        "ox", lambda now: replace(now, lease_seconds=7, delivery=Delivery.PARALLEL, order_by=None)
    )
    same = await subscriptions.redefine("ox", topics("users/user"))
    assert (options.position, same.position, same.record.past) == (None, None, ())
    assert len(await in_log(queues)) == 1
    filtered = await subscriptions.redefine(
        "ox", lambda now: replace(now, filter=Filter(fields={"department": ("it",)}))
    )
    hidden = await subscriptions.redefine("ox", lambda now: replace(now, hidden_fields=("salary",), lease_seconds=9))
    assert (filtered.position, hidden.position, hidden.record.definition.lease_seconds) == (2, 3, 9)
    assert [each.until for each in hidden.record.past] == [2, 3]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (topics(), "has no topic"),
        (topics("([a-z]+/)*user"), "repeats a group"),
        (lambda now: replace(now, realms_topics=(RealmTopic(".*", ".*"),)), "a realm is exact"),
        (lambda now: replace(now, name="other"), "cannot change"),
        (lambda now: replace(now, request_prefill=True), "cannot change"),
    ],
)
async def test_a_wrong_change_changes_nothing(
    queues: Queues, subscriptions: Subscriptions, change: Callable[[Subscription], Subscription], fault: str
) -> None:
    record, _ = await subscriptions.add(definition())
    with pytest.raises(InvalidInput, match=fault):
        await subscriptions.redefine("ox", change)
    assert (await subscriptions.get("ox")).record == record
    assert len(await in_log(queues)) == 1


class Crash(BaseException):
    """The process dies here."""


def crash_at(queues: Queues, number: int, *, after: bool) -> None:
    """Die at the n-th write, before it is sent or after the server has stored it."""
    send, count = queues._publisher.send, 0

    async def send_or_crash(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number and not after:
            raise Crash
        found = await send(*args, **kwargs)
        if count == number:
            raise Crash
        return found

    queues._publisher.send = send_or_crash  # type: ignore[method-assign]


def ranges(record: Record, log: list[ControlEventAt], dispatched: int = 10_000) -> list[tuple[int, list[str]]]:
    return [(each.after, names(each.definition)) for each in selection_ranges(record, log, dispatched)]


@pytest.mark.parametrize("dispatches", [False, True], ids=["no dispatcher", "dispatcher"])
async def test_a_crash_in_each_step_leaves_the_old_or_the_new_selection_and_the_log_knows_which(
    address: Address, queues: Queues, subscriptions: Subscriptions, dispatches: bool
) -> None:
    writes = 3  # pending, control event, position
    for after in (False, True):
        for number in range(1, writes + 1):
            await subscriptions.add(definition())
            async with connect(address) as doomed:
                crash_at(doomed, number, after=after)
                with pytest.raises(Crash):
                    await Subscriptions(doomed).redefine("ox", topics("a"))
            is_stored = (number, after) > (2, False)
            tracker = SubscriptionTracker(address)
            if dispatches:
                await asyncio.to_thread(tracker.update)
            record = (await subscriptions.get("ox")).record
            is_settled = (number, after) == (3, True) or (dispatches and is_stored)
            assert names(record.definition) == (["a"] if is_settled else ["users/user"])
            again = await subscriptions.redefine("ox", topics("a"))
            other = await subscriptions.redefine("ox", topics("b"))
            assert (names(other.record.definition), other.record.pending) == (["b"], None)
            await asyncio.to_thread(tracker.update)  # reads the events of all changes, also of void ones
            record = (await subscriptions.get("ox")).record
            assert record == other.record
            log = await in_log(queues)
            boundary = record.past[0].until
            assert boundary == (again.position or boundary)
            wanted = [(record.begin, ["users/user"]), (boundary, ["a"]), (other.position, ["b"])]
            assert ranges(record, log) == wanted
            assert ranges(replace(record, past=()), log) == wanted, "the log alone knows what was in force"
            await subscriptions.delete("ox")


async def test_a_change_that_was_cut_off_is_void_when_the_next_one_begins(
    address: Address, queues: Queues, subscriptions: Subscriptions
) -> None:
    await subscriptions.add(definition())
    async with connect(address) as doomed:
        crash_at(doomed, 3, after=False)
        with pytest.raises(Crash):
            await Subscriptions(doomed).redefine("ox", topics("cut/off"))
    back = await subscriptions.redefine("ox", topics("users/user"))
    await asyncio.to_thread(SubscriptionTracker(address).update)
    record = (await subscriptions.get("ox")).record
    assert (record, names(record.definition)) == (back.record, ["users/user"])
    assert {tuple(each) for _, each in ranges(replace(record, past=()), await in_log(queues))} == {("users/user",)}


async def test_concurrent_changes_of_one_subscription_all_take_effect_one_after_the_other(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    record, _ = await subscriptions.add(definition())

    def add(topic: str) -> Callable[[Subscription], Subscription]:
        return lambda now: replace(now, realms_topics=(*now.realms_topics, RealmTopic("udm", topic)))

    async def hold(change: Awaitable[Any]) -> Any:
        return await change

    done = await asyncio.gather(*(hold(Subscriptions(queues).redefine("ox", add(str(number)))) for number in range(5)))
    now = (await subscriptions.get("ox")).record
    assert sorted(names(now.definition)) == ["0", "1", "2", "3", "4", "users/user"]
    assert sorted(each.position for each in done) == [each.until for each in now.past]
    assert ranges(replace(now, past=()), await in_log(queues)) == [
        (record.begin, ["users/user"]),
        *((each.until, names(now.definition_at(each.until + 1))) for each in now.past),
    ]


async def test_a_past_selection_is_kept_until_every_reader_has_passed_it(
    queues: Queues, subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _ = await subscriptions.add(definition())
    positions = [(await subscriptions.redefine("ox", topics(f"t{number}"))).position for number in range(3)]
    with monkeypatch.context() as limited:
        limited.setattr(definition_changes, "MAX_PAST_SELECTIONS", 3)
        with pytest.raises(Refused, match=f"the first is at position {positions[0]}") as refused:
            await subscriptions.redefine("ox", topics("t3"))
        assert refused.value.code == 409

    # The dispatcher has passed them all, but the queue lacks events from behind the first one.
    await pass_all(queues)
    registry = await subscriptions.registry()
    assert positions[0] is not None
    assert positions[1] is not None
    why = Suspension(position=positions[0] + 1, reason="full", at=record.created)
    state = DispatchState(incarnation=record.incarnation, next=positions[0] + 1, suspended=why)
    revision = await registry.put_dispatch("ox", state, 0)
    changed = await subscriptions.redefine("ox", topics("t3"))
    assert [each.until for each in changed.record.past] == [*positions[1:], changed.position]

    # The queue is complete, but a message from before the second one is not acknowledged.
    await registry.put_dispatch("ox", replace(state, next=100, suspended=None), revision)
    receipt = await queues.publish("ox.main", b"{}", headers={POSITION: str(positions[1])})
    changed = await subscriptions.redefine("ox", topics("t4"))
    assert changed.record.past[0].until == positions[1]
    await queues.streams.delete_message("stream:ox", receipt.sequence)
    await pass_all(queues)
    changed = await subscriptions.redefine("ox", topics("t5"))
    assert [each.until for each in changed.record.past] == [changed.position]


async def test_a_prefill_needs_new_topics_whose_older_messages_are_delivered(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    await subscriptions.add(definition(topic="users/.*"))
    with pytest.raises(InvalidInput, match="adds no topic"):
        await subscriptions.redefine(
            "ox", lambda now: replace(now, filter=Filter(fields={"a": (1,)})), prefill_new_topics=True
        )
    await subscriptions.redefine("ox", topics("users/.*", "groups/.*"))
    removed = await subscriptions.redefine("ox", topics("groups/.*"))
    with pytest.raises(Refused, match=rf"udm:users/\.\* was removed at position {removed.position}") as refused:
        await subscriptions.redefine("ox", topics("groups/.*", "users/user"), prefill_new_topics=True)
    assert refused.value.code == 409
    await pass_all(queues)
    added = await subscriptions.redefine("ox", topics("groups/.*", "users/user"), prefill_new_topics=True)
    assert [(each.until, each.prefill) for each in added.record.past] == [(added.position, True)]
    # The first prefill is done long ago, and that of this change is not requested yet: it is needed.
    state = PrefillState(incarnation=added.record.incarnation, status=PrefillStatus.DONE, position=1)
    await (await subscriptions.registry()).put_prefill("ox", state, 0)
    await pass_all(queues)
    kept = await subscriptions.redefine("ox", topics("groups/.*"))
    assert [each.until for each in kept.record.past] == [added.position, kept.position]


async def test_the_expressions_of_a_change_do_not_run_in_the_event_loop(
    subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_event_loop: list[bool] = []

    def watched(*given: Any) -> bool:
        in_event_loop.append(threading.current_thread() is threading.main_thread())
        return may_overlap(*given)

    monkeypatch.setattr(definition_changes, "may_overlap", watched)
    await subscriptions.add(definition(topic="users/.*"))
    await subscriptions.redefine("ox", topics("groups/.*"))
    with pytest.raises(Refused, match="was removed"):
        await subscriptions.redefine("ox", topics("groups/.*", "users/user"), prefill_new_topics=True)
    assert in_event_loop
    assert not any(in_event_loop)


async def test_a_change_that_no_program_settled_has_no_effect_where_a_dispatcher_has_passed_it(
    address: Address, queues: Queues, subscriptions: Subscriptions
) -> None:
    """The process crashed, and only a dispatcher that did not understand the record has passed the control event."""
    begun, _ = await subscriptions.add(definition())
    async with connect(address) as doomed:
        crash_at(doomed, 3, after=False)
        with pytest.raises(Crash):
            await Subscriptions(doomed).redefine("ox", topics("a"))
    record, log = (await subscriptions.get("ox")).record, await in_log(queues)
    assert record.pending is not None
    assert ranges(record, log) == [(begun.begin, ["users/user"])]
    boundary = log[-1].position
    assert ranges(record, log, boundary - 1) == [(begun.begin, ["users/user"]), (boundary, ["a"])], "it may be settled"
    assert ranges(begun, log, boundary - 1)[-1] == (boundary, ["a"]), "changed since the record was read"


def test_ranges_go_by_the_registry_where_an_older_version_wrote_no_control_event() -> None:
    record = Record.from_json(
        {
            "incarnation": "i",
            "definition": definition(topic="b").to_json(),
            "begin": 4,
            "state": "active",
            "paused": False,
            "created": "2026-01-01T00:00:00+00:00",
        }
    )
    assert selection_ranges(record, [], 9) == [SelectionRange(4, 2**62, record.definition)]
