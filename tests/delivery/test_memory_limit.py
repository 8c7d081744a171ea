"""What a process holds of the messages of subscriptions is bounded, for each and for all; and all are delivered."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from purveyor.delivery import transitions
from purveyor.delivery.memory_limit import ALL_SUBSCRIPTIONS, PER_SUBSCRIPTION, Memory
from purveyor.delivery.message_buffer import Window
from purveyor.delivery.pull import Delivered, Pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream import bulk
from purveyor.model.delivery_policy import Delivery, OrderBy
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import Queues
from tests.delivery.conftest import OX, Clock, definition, empty, parallel
from tests.waiting import until

KNOWN = 1000
"""More than what is known of a message takes."""


def put(queues: Queues, count: int, size: int, *, name: str = "ox", key: str | None = None) -> None:
    messages: list[bulk.Outgoing] = []
    for number in range(count):
        event = {"key": key or f"k{number}", "n": number, "body": {"new": {"filling": "x" * size}}}
        headers = {"Purveyor-Position": str(number + 2)}
        messages.append((f"{name}.main", json.dumps(event).encode(), headers, f"{name}-{number}"))
    bulk.publish_many(queues.address, bulk.outgoing(messages))


def numbers(messages: list[Delivered]) -> list[int]:
    return [json.loads(message.data)["n"] for message in messages]


@pytest.fixture
def memory() -> Memory:
    return Memory(each=200_000, total=500_000)


@pytest.fixture
async def small(queues: Queues, clock: Clock, memory: Memory) -> AsyncIterator[Pull]:
    async with Pull(queues, clock=clock, memory=memory) as opened:
        yield opened


async def test_a_look_that_finds_nothing_to_hand_out_holds_no_more_than_may_be(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    """By key, behind a message that is out, all others have to be looked at: 26 MB here."""
    memory, count = Memory(), 400
    async with Pull(queues, memory=memory) as pull:
        await subscriptions.add(parallel(OrderBy.KEY))
        put(queues, count, 64 << 10, key="busy")
        (out,) = await pull.lease("ox", "a")
        assert await pull.lease("ox", "b") == []
        assert PER_SUBSCRIPTION // 2 < memory.used < PER_SUBSCRIPTION + count * KNOWN
        assert memory.used < ALL_SUBSCRIPTIONS
        got = numbers([out])
        await pull.acknowledge("ox", out.sequence)
        while found := await pull.lease("ox", "b"):
            got += numbers(found)
            assert len(found[0].data) > 64 << 10
            await pull.acknowledge("ox", found[0].sequence)
        assert got == [*range(count)]
        assert memory.used < PER_SUBSCRIPTION + count * KNOWN
    assert memory.used == 0


@pytest.mark.parametrize("how", ["next", "lease"])
@pytest.mark.parametrize("order_by", [OrderBy.POSITION, OrderBy.KEY, None])
async def test_messages_that_were_given_up_are_read_again_and_delivered_in_order(
    queues: Queues, subscriptions: Subscriptions, small: Pull, memory: Memory, *, order_by: OrderBy | None, how: str
) -> None:
    ordered = order_by is OrderBy.POSITION
    await subscriptions.add(definition() if ordered else parallel(order_by))
    put(queues, 300, 4000)
    if not ordered:  # all 300 are looked at, and 50 of them are held
        put(queues, 1, 10, key="last")
    got: list[int] = []
    while True:
        found = await small.lease("ox", max=150) if how == "lease" else [await small.next("ox")]
        messages = [message for message in found if message is not None]
        if not messages:
            break
        got += numbers(messages)
        assert memory.used < 200_000 + 301 * KNOWN
        if how == "lease":
            await small.acknowledge_up_to("ox", messages[-1].sequence)
        else:
            await small.acknowledge("ox", messages[0].sequence, instance="default")
    assert got[:300] == [*range(300)]
    await until(lambda: empty(queues))


async def test_subscriptions_that_are_not_used_give_up_their_messages_first(
    queues: Queues, subscriptions: Subscriptions, small: Pull, memory: Memory
) -> None:
    names = [f"s{number}" for number in range(8)]
    topics = (RealmTopic("udm", "users/user"),)
    for name in names:
        await subscriptions.add(Subscription(name=name, realms_topics=topics, delivery=Delivery.ORDERED))
        put(queues, 40, 4000, name=name)
    held = []
    for name in [*names, names[5]]:
        assert await small.next(name) is not None
        held.append(memory.used)
    assert max(held) <= 500_000
    windows = {name: small._desks._desks[name].window for name in names}
    assert [name for name in names if windows[name]._bodies.held] == ["s5", "s7"]
    for name in names:
        got = []
        while message := await small.next(name):
            got += numbers([message])
            await small.acknowledge(name, message.sequence)
            assert memory.used <= 500_000 + 320 * KNOWN
        assert got == [*range(40)]


@pytest.mark.parametrize("order_by", [OrderBy.POSITION, None])
async def test_large_messages_are_delivered_and_a_lease_of_them_is_bounded(
    queues: Queues, subscriptions: Subscriptions, pull: Pull, monkeypatch: pytest.MonkeyPatch, order_by: OrderBy | None
) -> None:
    monkeypatch.setattr(transitions, "MOST_BYTES", 5 << 20)
    await subscriptions.add(definition() if order_by else parallel())
    put(queues, 20, 1 << 20)
    got: list[int] = []
    while found := await pull.lease("ox", max=1000):
        assert len(found) == min(4, 20 - len(got))  # each is a little larger than 1 MB
        got += numbers(found)
        await pull.acknowledge_up_to("ox", found[-1].sequence)
    assert got == [*range(20)]
    await until(lambda: empty(queues))


async def test_one_message_that_is_larger_than_all_limits_is_delivered(
    queues: Queues, subscriptions: Subscriptions, small: Pull, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions, "MOST_BYTES", 1000)
    await subscriptions.add(definition())
    put(queues, 3, 1 << 20)
    for number in range(3):
        for _ in range(2):
            message = await small.next("ox")
            assert message is not None
            assert numbers([message]) == [number]
        assert memory.used < 4 * KNOWN
        await small.acknowledge("ox", number + 1)


async def test_messages_that_somebody_removed_meanwhile_are_done_and_the_others_are_delivered(
    queues: Queues, subscriptions: Subscriptions, small: Pull
) -> None:
    await subscriptions.add(parallel())
    put(queues, 200, 4000)
    first = await small.lease("ox", "a", max=200)
    assert len(first) == 200
    await asyncio.gather(*(small.retry("ox", message.sequence, delay=0, instance="a") for message in first))
    for sequence in (3, 4, 100, 180):
        await queues.streams.delete_message(OX, sequence)
    again = await small.lease("ox", "b", max=200)
    assert [message.sequence for message in again] == [n for n in range(1, 201) if n not in (3, 4, 100, 180)]
    await small.acknowledge_up_to("ox", again[-1].sequence, instance="b")
    assert await small.lease("ox", "b") == []


async def test_in_the_usual_case_no_message_is_read_twice(
    queues: Queues, subscriptions: Subscriptions, pull: Pull, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(*_: object) -> None:
        raise AssertionError("read twice")

    monkeypatch.setattr(Window, "fetch", fetch)
    await subscriptions.add(definition())
    put(queues, 300, 800)
    for number in range(150):
        message = await pull.next("ox")
        assert message is not None
        assert numbers([message]) == [number]
        await pull.acknowledge("ox", message.sequence, instance="default")
    assert numbers(await pull.lease("ox", max=1000)) == [*range(150, 300)]
