"""Consumers get every message in the order they asked for, in one hand at a time, until they have acknowledged it."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from purveyor.delivery.dead_letters import attempts_of
from purveyor.delivery.desk import Desk
from purveyor.delivery.leases import Kind
from purveyor.delivery.pull import Delivered, Pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.errors import (
    InvalidInput,
    LeaseLost,
    PrefillFailed,
    Unavailable,
    UnknownMessage,
    UnknownStream,
    UnknownSubscription,
)
from purveyor.model.policy import Delivery, OrderBy, RetryPolicy
from purveyor.model.registration import PrefillState, PrefillStatus
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.address import Address
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters import DeadLetter
from purveyor.queues.headers import POSITION
from purveyor.queues.letter_box import Parked
from tests.conftest import OwnServer
from tests.delivery.conftest import definition, stored

OX = "stream:ox"


class Clock:
    """A wall clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def pull(queues: Queues, clock: Clock) -> AsyncIterator[Pull]:
    async with Pull(queues, clock=clock) as opened:
        yield opened


def parallel(order_by: OrderBy | None = None, **more: Any) -> Subscription:
    topics = (RealmTopic("udm", "users/user"),)
    return Subscription(name="ox", realms_topics=topics, delivery=Delivery.PARALLEL, order_by=order_by, **more)


async def write(queues: Queues, *bodies: str, kind: str = "main", first: int = 2) -> list[int]:
    """Messages as the dispatcher writes them, positions from `first` on; their sequences."""
    return [
        (await queues.publish(f"ox.{kind}", body.encode(), headers={POSITION: str(position)})).sequence
        for position, body in enumerate(bodies, first)
    ]


def texts(messages: list[Delivered]) -> list[str]:
    return [message.data.decode() for message in messages]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.02)


async def empty(queues: Queues) -> bool:
    return (await queues.streams.info(OX)).state.messages == 0


async def drain(pull: Pull, instance: str = "default") -> list[str]:
    got = []
    while (message := await pull.next("ox", instance)) is not None:
        got.append(message.data.decode())
        await pull.acknowledge("ox", message.sequence)
    return got


async def test_the_oldest_message_comes_again_until_it_is_acknowledged_and_is_gone_then(
    queues: Queues, subscriptions: Subscriptions, pull: Pull
) -> None:
    await subscriptions.add(definition())
    assert await pull.next("ox") is None
    await write(queues, "one", "two")
    for count in (1, 2, 3):
        message = await pull.next("ox")
        assert message is not None
        assert (message.data, message.num_delivered, message.position, message.kind) == (b"one", count, 2, Kind.MAIN)
    await pull.acknowledge("ox", 1)
    with pytest.raises(UnknownMessage):
        await pull.acknowledge("ox", 1)
    assert await drain(pull) == ["two"]
    assert await pull.next("ox") is None
    await until(lambda: empty(queues))
    registry = await subscriptions.registry()
    assert await registry.acknowledged(await subscriptions.get("ox")) == 3


async def test_a_standby_takes_over_when_the_lease_has_run_out(
    queues: Queues, subscriptions: Subscriptions, pull: Pull, clock: Clock
) -> None:
    await subscriptions.add(definition())
    await write(queues, "one")
    first = await pull.next("ox", "a")
    assert first is not None
    assert await pull.next("ox", "b") is None
    clock.now += 29
    assert await pull.extend("ox", first.sequence, instance="a") > first.until  # type: ignore[operator]
    clock.now += 29
    assert await pull.next("ox", "b") is None
    clock.now += 2
    taken_over = await pull.next("ox", "b")
    assert taken_over is not None
    assert taken_over.num_delivered == 2
    for late in (pull.extend, pull.retry):
        with pytest.raises(LeaseLost, match="'b'"):
            await late("ox", first.sequence, instance="a")
    await pull.acknowledge("ox", first.sequence)  # but what is done is done
    assert await pull.next("ox", "b") is None


async def test_a_standby_that_waits_is_woken_by_the_end_of_a_lease(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    short = Subscription(name="ox", realms_topics=(RealmTopic("udm", "a"),), lease_seconds=1)
    await subscriptions.add(short)
    await write(queues, "one")
    async with Pull(queues) as pull:
        assert await pull.next("ox", "a") is not None
        assert await pull.next("ox", "b", timeout=30) is not None


async def test_nothing_is_served_before_the_prefill_is_done_and_then_it_comes_first(
    queues: Queues, subscriptions: Subscriptions, pull: Pull
) -> None:
    record, _ = await subscriptions.add(definition(prefill=True))
    await write(queues, "live 1")
    await write(queues, "object 1", "object 2", kind="prefill", first=1)
    await write(queues, "live 2", first=3)
    assert await pull.next("ox") is None
    registry = await subscriptions.registry()

    async def say(status: PrefillStatus, reason: str | None = None) -> None:
        found = await subscriptions.get("ox")
        state = PrefillState(incarnation=record.incarnation, status=status, position=1, reason=reason)
        await registry.put_prefill("ox", state, found.prefill_revision)
        pull.forget("ox")

    await say(PrefillStatus.RUNNING)
    assert await pull.lease("ox") == []
    await say(PrefillStatus.FAILED, "no archive")
    with pytest.raises(PrefillFailed, match="no archive"):
        await pull.next("ox", timeout=5)
    await say(PrefillStatus.PENDING)
    waiting = asyncio.create_task(pull.next("ox", timeout=30))
    await asyncio.sleep(0)
    found = await subscriptions.get("ox")
    done = PrefillState(incarnation=record.incarnation, status=PrefillStatus.DONE, position=1)
    await registry.put_prefill("ox", done, found.prefill_revision)  # nobody tells this process
    first = await waiting
    assert first is not None
    assert (first.data, first.kind) == (b"object 1", Kind.PREFILL)
    assert await drain(pull) == ["object 1", "object 2", "live 1", "live 2"]
    await until(lambda: empty(queues))


async def test_a_subscription_deleted_and_added_again_waits_for_its_own_prefill(
    queues: Queues, subscriptions: Subscriptions, pull: Pull
) -> None:
    await subscriptions.add(definition())
    await write(queues, "old 1", "old 2")
    old = await pull.next("ox")
    assert old is not None
    await subscriptions.delete("ox")
    await subscriptions.add(definition(prefill=True))
    await write(queues, "new")
    assert await pull.next("ox") is None
    await subscriptions.delete("ox")
    pull.forget("ox")
    with pytest.raises(UnknownSubscription):
        await pull.next("ox")
    await subscriptions.add(definition())
    await write(queues, "newest")
    message = await pull.next("ox")
    assert message is not None
    assert (message.data, message.num_delivered) == (b"newest", 1)


@pytest.mark.parametrize("served_before", [True, False])
async def test_a_late_process_serves_nothing_of_a_subscription_that_took_the_name(
    address: Address,
    queues: Queues,
    subscriptions: Subscriptions,
    monkeypatch: pytest.MonkeyPatch,
    served_before: bool,
) -> None:
    await subscriptions.add(definition())
    async with connect(address) as other, Pull(other) as late:
        if served_before:
            await write(queues, "old")
            assert await late.next("ox") is not None
        gate, look = late._gate, late._gate.look
        stale = [await look("ox")]

        async def look_late(name: str) -> Any:
            return stale.pop() if stale else await look(name)

        await subscriptions.delete("ox")
        await subscriptions.add(definition(prefill=True))
        await write(queues, "live")
        monkeypatch.setattr(gate, "look", look_late)
        late._desks._desks["ox"].window.clear() if served_before else None
        assert await late.next("ox") is None
        assert not stale


async def _value(value: Any) -> Any:
    return value


async def test_what_is_popped_is_gone(queues: Queues, subscriptions: Subscriptions, pull: Pull) -> None:
    await subscriptions.add(definition())
    (sequence, _) = await write(queues, "one", "two")
    popped = await pull.next("ox", pop=True)
    assert popped is not None
    assert (popped.data, popped.lease, popped.until) == (b"one", None, None)
    assert await drain(pull) == ["two"]
    with pytest.raises(UnknownMessage):
        await pull.acknowledge("ox", sequence)
    await until(lambda: empty(queues))


async def test_a_batch_in_order_is_acknowledged_up_to_where_the_consumer_came(
    queues: Queues, subscriptions: Subscriptions, pull: Pull
) -> None:
    await subscriptions.add(definition())
    await write(queues, *(str(number) for number in range(250)))
    batch = await pull.lease("ox", max=200)
    assert texts(batch) == [str(number) for number in range(200)]
    assert await pull.lease("ox", "b", max=10) == []
    assert await pull.acknowledge_up_to("ox", batch[149].sequence) == 150
    with pytest.raises(UnknownMessage):
        await pull.acknowledge_up_to("ox", batch[149].sequence)
    again = await pull.lease("ox", max=1000)
    assert texts(again) == [str(number) for number in range(150, 250)]
    assert [message.num_delivered for message in again] == [2] * 50 + [1] * 50
    assert await pull.acknowledge_up_to("ox", again[-1].sequence) == 100
    await until(lambda: empty(queues))


async def test_parallel_consumers_have_messages_of_their_own_and_expired_ones_come_back(
    queues: Queues, subscriptions: Subscriptions, pull: Pull, clock: Clock
) -> None:
    await subscriptions.add(parallel())
    await write(queues, *(str(number) for number in range(6)))
    a, b = await asyncio.gather(pull.lease("ox", "a", max=3), pull.lease("ox", "b", 3, 60))
    assert sorted(texts(a) + texts(b)) == [str(number) for number in range(6)]
    assert await pull.lease("ox", "c") == []
    with pytest.raises(LeaseLost):
        await pull.acknowledge_up_to("ox", b[-1].sequence, instance="a")
    await pull.acknowledge("ox", a[1].sequence)
    clock.now += 31
    back = await pull.lease("ox", "c")
    assert (texts(back), [message.num_delivered for message in back]) == (texts([a[0], a[2]]), [2, 2])
    assert await pull.acknowledge_up_to("ox", back[-1].sequence, instance="c") == 2
    assert await pull.acknowledge_up_to("ox", b[-1].sequence, instance="b") == 3
    await until(lambda: empty(queues))


async def test_by_key_one_message_of_each_object_is_out(
    queues: Queues, subscriptions: Subscriptions, pull: Pull
) -> None:
    await subscriptions.add(parallel(OrderBy.KEY))
    events = [("x", 1), ("x", 2), ("y", 1), ("x", 3), ("y", 2)]
    await write(queues, *(json.dumps({"body": {"old": {}, "new": {"id": key, "n": n}}}) for key, n in events))

    def told(messages: list[Delivered]) -> list[tuple[str, int]]:
        found = [json.loads(message.data)["body"]["new"] for message in messages]
        return [(new["id"], new["n"]) for new in found]

    first = await pull.lease("ox", "a")
    assert told(first) == [("x", 1), ("y", 1)]
    assert await pull.lease("ox", "b") == []
    await pull.acknowledge("ox", first[0].sequence)
    second = await pull.lease("ox", "b")
    assert told(second) == [("x", 2)]
    await pull.retry("ox", second[0].sequence, delay=60, instance="b")
    await pull.acknowledge("ox", first[1].sequence)
    assert told(await pull.lease("ox", "b")) == [("y", 2)]


async def test_a_retry_waits_for_its_delay_or_for_the_pause_of_the_policy(
    queues: Queues, subscriptions: Subscriptions, pull: Pull, clock: Clock
) -> None:
    policy = RetryPolicy(min_backoff_seconds=4)
    await subscriptions.add(Subscription(name="ox", realms_topics=(RealmTopic("udm", "a"),), retry=policy))
    (sequence, _) = await write(queues, "one", "two")
    with pytest.raises(LeaseLost, match="not handed out"):
        await pull.retry("ox", sequence)
    for delay, pause in ((10.0, 10), (None, 8)):
        assert await pull.next("ox") is not None
        await pull.retry("ox", sequence, delay=delay)
        clock.now += pause - 1
        assert await pull.next("ox") is None
        clock.now += 1
    message = await pull.next("ox")
    assert message is not None
    assert (message.data, message.num_delivered) == (b"one", 3)


async def test_a_rejected_message_is_a_dead_letter_with_its_reason(
    queues: Queues, subscriptions: Subscriptions, pull: Pull
) -> None:
    record, _ = await subscriptions.add(definition())
    (sequence, _) = await write(queues, "one", "two")
    assert await pull.next("ox", "a") is not None
    with pytest.raises(LeaseLost):
        await pull.reject("ox", sequence, "not mine", instance="b")
    await pull.reject("ox", sequence, "no such mailbox", instance="a")
    assert await drain(pull) == ["two"]
    (letter,) = [
        DeadLetter.from_message(message.headers, message.data)
        for message in await stored(queues, "stream:dead-letters")
    ]
    assert (letter.reason, letter.subject, letter.data, letter.attempts) == ("no such mailbox", "ox.main", b"one", 1)
    log = json.loads(str(letter.details["attempts_log"]))
    assert [(each["error"], each["excerpt"]) for each in log] == [("rejected by instance 'a'", "no such mailbox")]
    told = {name: value for name, value in letter.details.items() if name != "attempts_log"}
    assert told == {"subscription": "ox", "incarnation": record.incarnation, "position": 2}
    with pytest.raises(UnknownMessage):
        await pull.reject("ox", sequence, "again", instance="a")


@pytest.mark.parametrize("delivery", [Delivery.ORDERED, Delivery.PARALLEL])
async def test_after_the_last_attempt_a_message_becomes_a_dead_letter_and_the_next_one_comes(
    queues: Queues, subscriptions: Subscriptions, pull: Pull, clock: Clock, delivery: Delivery
) -> None:
    order = OrderBy.POSITION if delivery is Delivery.ORDERED else None
    topics, policy = (RealmTopic("udm", "a"),), RetryPolicy(max_attempts=2)
    await subscriptions.add(
        Subscription(name="ox", realms_topics=topics, delivery=delivery, order_by=order, retry=policy)
    )
    await write(queues, "poison", "two")
    for count in (1, 2):
        message = await pull.next("ox")
        assert message is not None
        assert (message.data, message.num_delivered) == (b"poison", count)
        if count == 1:
            await pull.retry("ox", message.sequence, delay=0)
        clock.now += 31
    message = await pull.next("ox", "b")
    assert message is not None
    assert (message.data, message.num_delivered) == (b"two", 1)
    (parked,) = await stored(queues, "stream:dead-letters")
    letter = DeadLetter.from_message(parked.headers, parked.data)
    assert (letter.data, letter.attempts) == (b"poison", 2)
    assert "after 2 deliveries" in letter.reason
    told = [(attempt.time, attempt.error) for attempt in attempts_of(Parked.of(parked))]
    assert told == [
        (datetime(2027, 1, 15, 8, 0, 0, 0, UTC), "instance 'default' gave it back, to be delivered again"),
        (datetime(2027, 1, 15, 8, 1, 1, 0, UTC), "the lease of instance 'default' ran out"),
    ]
    book = await (await subscriptions.registry())._acknowledged.get("ox")
    assert b'"ends"' not in book.value  # forgotten with the message


async def test_a_paused_subscription_hands_out_nothing_and_goes_on_when_resumed(
    queues: Queues, subscriptions: Subscriptions, pull: Pull
) -> None:
    await subscriptions.add(definition())
    await write(queues, "one", "two")
    message = await pull.next("ox")
    assert message is not None
    await subscriptions.pause("ox")
    pull.forget("ox")
    await pull.acknowledge("ox", message.sequence)
    assert await pull.next("ox") is None
    waiting = asyncio.create_task(pull.next("ox", timeout=30))
    await asyncio.sleep(0)
    await subscriptions.resume("ox")
    resumed = await waiting
    assert resumed is not None
    assert resumed.data == b"two"


async def test_five_hundred_who_wait_ask_nothing_and_are_woken_by_what_they_wait_for(
    queues: Queues, subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscriptions.add(parallel(lease_seconds=600))
    async with Pull(queues) as pull:
        waiting = [asyncio.create_task(pull.next("ox", f"i{number}", timeout=60)) for number in range(500)]
        bells = pull._bells._bells
        await until(lambda: _value(bool(bells) and bells["ox"].waiters == 500 and len(bells["ox"]._listening) == 3))
        asked = 0
        request = queues.connection.request

        async def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal asked
            asked += 1
            return await request(*args, **kwargs)

        async def is_quiet() -> bool:
            nonlocal asked
            asked = 0
            await asyncio.sleep(1)
            return asked < 10  # those who look by themselves from time to time do so together

        monkeypatch.setattr(queues.connection, "request", counted)
        await until(is_quiet)  # when each has looked for the last time
        monkeypatch.undo()
        await asyncio.gather(*(queues.publish("ox.main", str(number).encode()) for number in range(500)))
        async with asyncio.timeout(60):
            got = [message for message in await asyncio.gather(*waiting) if message is not None]
        assert sorted(texts(got), key=int) == [str(number) for number in range(500)]
        assert not bells


async def test_one_who_is_not_there_any_more_keeps_nothing(
    queues: Queues, subscriptions: Subscriptions, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscriptions.add(definition())
    await write(queues, "one")
    writing, go_on = asyncio.Event(), asyncio.Event()
    put = Desk._write

    async def slow(self: Desk, book: Any) -> bool:
        writing.set()
        await go_on.wait()
        return await put(self, book)

    monkeypatch.setattr(Desk, "_write", slow)
    left = asyncio.create_task(pull.next("ox", "a"))
    await writing.wait()
    left.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await left
    go_on.set()
    message = await pull.next("ox", "b", timeout=20)
    assert message is not None
    assert message.num_delivered == 1


@pytest.mark.parametrize("order_by", [OrderBy.POSITION, None])
async def test_many_consumers_of_several_processes_get_each_message_once(
    address: Address, queues: Queues, subscriptions: Subscriptions, order_by: OrderBy | None
) -> None:
    await subscriptions.add(definition() if order_by else parallel())
    count = 120
    got: list[int] = []
    await write(queues, *(str(number) for number in range(count)))

    async def consume(pull: Pull, instance: str) -> None:
        while len(got) < count:
            for message in await pull.lease("ox", instance, max=3, timeout=0.2):
                got.append(int(message.data))
                await pull.acknowledge("ox", message.sequence)

    async with connect(address) as other, Pull(queues) as one, Pull(other) as two, asyncio.timeout(60):
        await asyncio.gather(*(consume(pull, f"i{number}") for number, pull in enumerate([one, two] * 3)))
    assert sorted(got) == list(range(count))
    if order_by is OrderBy.POSITION:
        assert got == sorted(got)
    await until(lambda: empty(queues))


async def test_a_consumer_may_answer_to_another_process_than_it_asked(
    address: Address, queues: Queues, subscriptions: Subscriptions
) -> None:
    await subscriptions.add(parallel())
    await write(queues, *"abcdef")
    async with connect(address) as other, Pull(queues) as one, Pull(other) as two:
        (known,) = await two.lease("ox", "z", max=1)  # it has a book of its own, which the next line makes old
        leased = [message.sequence for message in await one.lease("ox", "i")]
        await two.extend("ox", leased[0], instance="i")
        await two.acknowledge("ox", leased[0])
        await two.retry("ox", leased[1], delay=60, instance="i")
        await one.extend("ox", leased[2], instance="i")
        await two.reject("ox", leased[2], "no", instance="i")
        assert await two.acknowledge_up_to("ox", leased[4], instance="i") == 2
        for process in (one, two):
            for sequence in (leased[0], leased[2], leased[3]):
                with pytest.raises(UnknownMessage):
                    await process.acknowledge("ox", sequence)
        await one.acknowledge("ox", known.sequence)
        await one.acknowledge("ox", leased[1])
    await until(lambda: empty(queues))


async def test_a_late_acknowledgement_does_not_meet_a_message_of_the_next_of_that_name(
    queues: Queues, subscriptions: Subscriptions, pull: Pull
) -> None:
    await subscriptions.add(definition())
    await write(queues, "old")
    old = await pull.next("ox")
    assert old is not None
    await subscriptions.delete("ox")
    await subscriptions.add(definition())
    pull.forget("ox")
    [new] = await write(queues, "new")
    assert new > old.sequence
    assert await pull.next("ox") is not None  # handed out, so that only its sequence tells it from the old one
    with pytest.raises(UnknownMessage):
        await pull.acknowledge("ox", old.sequence)
    assert await drain(pull) == ["new"]


async def test_an_acknowledgement_in_another_process_wakes_a_standby(
    address: Address, queues: Queues, subscriptions: Subscriptions
) -> None:
    await subscriptions.add(definition())
    await write(queues, "one", "two")
    async with connect(address) as other, Pull(queues) as one, Pull(other) as two:
        message = await one.next("ox", "a")
        assert message is not None
        waiting = asyncio.create_task(two.next("ox", "b", timeout=25))  # shorter than the lease
        bells = two._bells._bells
        await until(lambda: _value("ox" in bells and len(bells["ox"]._listening) == 3))
        await one.acknowledge("ox", message.sequence)
        second = await waiting
        assert second is not None
        assert second.data == b"two"


async def test_what_was_acknowledged_before_a_crash_is_not_given_again_and_is_removed_later(
    address: Address, queues: Queues, subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscriptions.add(parallel())
    await write(queues, *"abcd")
    async with connect(address) as doomed:
        monkeypatch.setattr(Desk, "_tidy_soon", lambda _: None)  # it ends before it removes anything
        pull = Pull(doomed)
        leased = await pull.lease("ox", "a")
        for number in (0, 2):
            await pull.acknowledge("ox", leased[number].sequence)
        await pull.close()
        monkeypatch.undo()
    assert (await queues.streams.info(OX)).state.messages == 4
    async with Pull(queues, clock=lambda: 2_000_000_000.0) as survivor:
        rest = await survivor.lease("ox", "b")
        assert (texts(rest), [message.num_delivered for message in rest]) == (["b", "d"], [2, 2])

        async def two_left() -> bool:
            return (await queues.streams.info(OX)).state.messages == 2

        await until(two_left)
        with pytest.raises(UnknownMessage):
            await survivor.acknowledge("ox", leased[0].sequence)


async def test_a_queue_that_is_missing_is_an_empty_one(
    queues: Queues, subscriptions: Subscriptions, pull: Pull
) -> None:
    await subscriptions.add(definition())
    await queues.streams.remove(OX)
    assert await pull.next("ox") is None
    with pytest.raises(UnknownMessage):
        await pull.acknowledge("ox", 1)
    with pytest.raises(UnknownStream):
        await queues.streams.info(OX)


async def test_a_message_that_limits_removed_is_passed_over(
    queues: Queues, subscriptions: Subscriptions, pull: Pull, clock: Clock
) -> None:
    await subscriptions.add(parallel())
    await write(queues, "one", "two")
    (one, _) = await pull.lease("ox")
    await queues.streams.delete_message(OX, one.sequence)
    clock.now += 31
    assert texts(await pull.lease("ox")) == ["two"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda pull: pull.next("ox", timeout=-1),
        lambda pull: pull.next("ox", ""),
        lambda pull: pull.next("ox", "a\nb"),
        lambda pull: pull.lease("ox", max=0),
        lambda pull: pull.lease("ox", max=1001),
        lambda pull: pull.lease("ox", lease_seconds=0),
        lambda pull: pull.retry("ox", 1, delay=-1),
    ],
)
async def test_what_makes_no_sense_is_refused(pull: Pull, ask: Callable[[Pull], Awaitable[object]]) -> None:
    with pytest.raises(InvalidInput):
        await ask(pull)


async def test_nobody_is_served_under_an_unknown_name(pull: Pull) -> None:
    for call in (pull.next("nobody"), pull.acknowledge("nobody", 1), pull.extend("nobody", 1)):
        with pytest.raises(UnknownSubscription):
            await call


@pytest.mark.chaos
async def test_a_server_that_restarts_in_the_midst_of_it_loses_nothing_and_doubles_no_lease(
    own_server: OwnServer,
) -> None:
    server = own_server()
    async with connect(server.address, patience_seconds=30) as queues:
        subscriptions = Subscriptions(queues)
        await subscriptions.add(definition())
        count = 60
        got: list[int] = []
        await write(queues, *(str(number) for number in range(count)))

        async def consume(pull: Pull) -> None:
            while len(set(got)) < count:
                try:
                    message = await pull.next("ox", timeout=1)
                    if message is None:
                        continue
                    got.append(int(message.data))
                    await pull.acknowledge("ox", message.sequence)
                except (Unavailable, UnknownMessage):  # asked again, as a client would
                    continue

        async with Pull(queues) as pull, asyncio.timeout(90):
            consuming = asyncio.create_task(consume(pull))
            for begun in (10, 30):
                await until(lambda begun=begun: _value(len(got) >= begun))  # type: ignore[misc]
                assert server.pid is not None
                os.kill(server.pid, signal.SIGKILL)  # and it is started again
            await consuming
            assert list(dict.fromkeys(got)) == list(range(count))
            assert await pull.next("ox") is None
