"""The buffered messages of a process are bounded, per subscription and in total; all are delivered."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from purveyor.delivery import transitions
from purveyor.delivery.message_buffer import MAX_BYTES, MAX_BYTES_PER_SUBSCRIPTION, MemoryBudget, MessageBuffer
from purveyor.delivery.pull import DeliveredMessage, PullService, open_pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream import bulk
from purveyor.model.delivery_policy import Delivery, OrderBy
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import Queues
from tests.support.delivery import OX, Clock, definition, is_empty, parallel
from tests.support.waiting import until

KNOWN = 1000
"""More than the information about a message takes."""


def put(queues: Queues, count: int, size: int, *, name: str = "ox", key: str | None = None) -> None:
    messages: list[bulk.Outgoing] = []
    for number in range(count):
        event = {"key": key or f"k{number}", "n": number, "body": {"new": {"filling": "x" * size}}}
        headers = {"Purveyor-Position": str(number + 2)}
        messages.append((f"{name}.main", json.dumps(event).encode(), headers, f"{name}-{number}"))
    bulk.publish_many(queues.address, bulk.outgoing(messages))


def numbers(messages: list[DeliveredMessage]) -> list[int]:
    return [json.loads(message.data)["n"] for message in messages]


@pytest.fixture
def memory() -> MemoryBudget:
    return MemoryBudget(each=200_000, total=500_000)


@pytest.fixture
async def small(queues: Queues, clock: Clock, memory: MemoryBudget) -> AsyncIterator[PullService]:
    async with open_pull(queues, clock=clock, memory=memory) as opened:
        yield opened


async def test_a_request_that_finds_nothing_stays_within_the_memory_budget(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    """By key, behind a leased message, all others have to be read: 26 MB here."""
    memory, count = MemoryBudget(), 400
    async with open_pull(queues, memory=memory) as pull:
        await subscriptions.add(parallel(OrderBy.KEY))
        put(queues, count, 64 << 10, key="busy")
        (out,) = await pull.lease("ox", "a")
        assert await pull.lease("ox", "b") == []
        assert MAX_BYTES_PER_SUBSCRIPTION // 2 < memory.used < MAX_BYTES_PER_SUBSCRIPTION + count * KNOWN
        assert memory.used < MAX_BYTES
        got = numbers([out])
        await pull.acknowledge("ox", out.sequence)
        while found := await pull.lease("ox", "b"):
            got += numbers(found)
            assert len(found[0].data) > 64 << 10
            await pull.acknowledge("ox", found[0].sequence)
        assert got == [*range(count)]
        assert memory.used < MAX_BYTES_PER_SUBSCRIPTION + count * KNOWN
    assert memory.used == 0


@pytest.mark.parametrize("how", ["next", "lease"])
@pytest.mark.parametrize("order_by", [OrderBy.POSITION, OrderBy.KEY, None])
async def test_released_messages_are_read_again_and_delivered_in_order(
    queues: Queues,
    subscriptions: Subscriptions,
    small: PullService,
    memory: MemoryBudget,
    *,
    order_by: OrderBy | None,
    how: str,
) -> None:
    ordered = order_by is OrderBy.POSITION
    await subscriptions.add(definition() if ordered else parallel(order_by))
    put(queues, 300, 4000)
    if not ordered:  # all 300 are read, and 50 of them are held
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
    await until(lambda: is_empty(queues))


async def test_the_least_recently_used_subscriptions_release_their_messages_first(
    queues: Queues, subscriptions: Subscriptions, small: PullService, memory: MemoryBudget
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
    writers = small._shared.state_writers._writers
    assert [name for name in names if writers[name].buffer._held.held_bytes] == ["s5", "s7"]
    for name in names:
        got = []
        while message := await small.next(name):
            got += numbers([message])
            await small.acknowledge(name, message.sequence)
            assert memory.used <= 500_000 + 320 * KNOWN
        assert got == [*range(40)]


async def test_the_keys_of_subscriptions_that_are_not_in_use_are_forgotten(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    """What a process knows about messages counts too, and only one subscription needs it at a time."""
    memory, count = MemoryBudget(each=5_000, total=20_000), 300
    names = [f"s{number}" for number in range(8)]
    async with open_pull(queues, memory=memory) as pull:
        for name in names:
            await subscriptions.add(replace(parallel(OrderBy.KEY), name=name))
            put(queues, count, 10, name=name, key="busy" * 50)
        held: dict[str, DeliveredMessage] = {}
        for name in names:
            (held[name],) = await pull.lease(name, "a")
            assert await pull.lease(name, "b") == []  # behind a message in hand it reads all others
            assert memory.used < count * KNOWN
        for name in names:
            got = numbers([held[name]])
            await pull.acknowledge(name, held[name].sequence)
            while found := await pull.lease(name, "b"):
                got += numbers(found)
                await pull.acknowledge(name, found[0].sequence)
            assert got == [*range(count)]
    assert memory.used == 0


@pytest.mark.parametrize("order_by", [OrderBy.POSITION, None])
async def test_large_messages_are_delivered_and_a_lease_of_them_is_bounded(
    queues: Queues,
    subscriptions: Subscriptions,
    pull: PullService,
    monkeypatch: pytest.MonkeyPatch,
    order_by: OrderBy | None,
) -> None:
    monkeypatch.setattr(transitions, "MAX_LEASE_BYTES", 5 << 20)
    await subscriptions.add(definition() if order_by else parallel())
    put(queues, 20, 1 << 20)
    got: list[int] = []
    while found := await pull.lease("ox", max=1000):
        assert len(found) == min(4, 20 - len(got))  # each is a little larger than 1 MB
        got += numbers(found)
        await pull.acknowledge_up_to("ox", found[-1].sequence)
    assert got == [*range(20)]
    await until(lambda: is_empty(queues))


async def test_one_message_that_is_larger_than_all_limits_is_delivered(
    queues: Queues,
    subscriptions: Subscriptions,
    small: PullService,
    memory: MemoryBudget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transitions, "MAX_LEASE_BYTES", 1000)
    await subscriptions.add(definition())
    put(queues, 3, 1 << 20)
    for number in range(3):
        for _ in range(2):
            message = await small.next("ox")
            assert message is not None
            assert numbers([message]) == [number]
        assert memory.used < 4 * KNOWN
        await small.acknowledge("ox", number + 1)


async def test_deleted_messages_are_acknowledged_and_the_others_are_delivered(
    queues: Queues, subscriptions: Subscriptions, small: PullService
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
    queues: Queues, subscriptions: Subscriptions, pull: PullService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(*_: object) -> None:
        raise AssertionError("read twice")

    monkeypatch.setattr(MessageBuffer, "fetch", fetch)
    await subscriptions.add(definition())
    put(queues, 300, 800)
    for number in range(150):
        message = await pull.next("ox")
        assert message is not None
        assert numbers([message]) == [number]
        await pull.acknowledge("ox", message.sequence, instance="default")
    assert numbers(await pull.lease("ox", max=1000)) == [*range(150, 300)]
