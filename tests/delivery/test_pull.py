"""Consumers get each message in the requested order, one instance at a time, until it is acknowledged."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import pytest

from purveyor.delivery.dead_letters.park import attempts_of
from purveyor.delivery.pull import DeliveredMessage, PullService
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.delivery_policy import Delivery, OrderBy, RetryPolicy
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.errors import (
    InvalidInput,
    LeaseLost,
    UnknownMessage,
    UnknownStream,
    UnknownSubscription,
)
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import DeadLetter
from purveyor.queues.dead_letters.store import ParkedMessage
from tests.support.delivery import OX, Clock, definition, drain, is_empty, parallel, stored, texts, write
from tests.support.waiting import until


async def test_the_oldest_message_comes_again_until_it_is_acknowledged_and_is_gone_then(
    queues: Queues, subscriptions: Subscriptions, pull: PullService
) -> None:
    await subscriptions.add(definition())
    assert await pull.next("ox") is None
    await write(queues, "one", "two")
    for count in (1, 2, 3):
        message = await pull.next("ox")
        assert message is not None
        assert (message.data, message.num_delivered, message.position, message.kind) == (
            b"one",
            count,
            2,
            SubjectKind.MAIN,
        )
    await pull.acknowledge("ox", 1)
    with pytest.raises(UnknownMessage):
        await pull.acknowledge("ox", 1)
    assert await drain(pull) == ["two"]
    assert await pull.next("ox") is None
    await until(lambda: is_empty(queues))
    registry = await subscriptions.registry()
    assert await registry.last_acknowledged(await subscriptions.get("ox")) == 3


async def test_a_popped_message_is_acknowledged(
    queues: Queues, subscriptions: Subscriptions, pull: PullService
) -> None:
    await subscriptions.add(definition())
    (sequence, _) = await write(queues, "one", "two")
    popped = await pull.next("ox", pop=True)
    assert popped is not None
    assert (popped.data, popped.lease, popped.until) == (b"one", None, None)
    assert await drain(pull) == ["two"]
    with pytest.raises(UnknownMessage):
        await pull.acknowledge("ox", sequence)
    await until(lambda: is_empty(queues))


async def test_a_batch_in_order_can_be_acknowledged_up_to_a_message(
    queues: Queues, subscriptions: Subscriptions, pull: PullService
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
    await until(lambda: is_empty(queues))


async def test_parallel_consumers_get_different_messages_and_expired_leases_come_back(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, clock: Clock
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
    await until(lambda: is_empty(queues))


async def test_by_key_one_message_of_each_key_is_leased(
    queues: Queues, subscriptions: Subscriptions, pull: PullService
) -> None:
    await subscriptions.add(parallel(OrderBy.KEY))
    events = [("x", 1), ("x", 2), ("y", 1), ("x", 3), ("y", 2)]
    await write(queues, *(json.dumps({"body": {"old": {}, "new": {"id": key, "n": n}}}) for key, n in events))

    def texts_and_counts(messages: list[DeliveredMessage]) -> list[tuple[str, int]]:
        found = [json.loads(message.data)["body"]["new"] for message in messages]
        return [(new["id"], new["n"]) for new in found]

    first = await pull.lease("ox", "a")
    assert texts_and_counts(first) == [("x", 1), ("y", 1)]
    assert await pull.lease("ox", "b") == []
    await pull.acknowledge("ox", first[0].sequence)
    second = await pull.lease("ox", "b")
    assert texts_and_counts(second) == [("x", 2)]
    await pull.retry("ox", second[0].sequence, delay=60, instance="b")
    await pull.acknowledge("ox", first[1].sequence)
    assert texts_and_counts(await pull.lease("ox", "b")) == [("y", 2)]


async def test_a_retry_waits_for_its_delay_or_for_the_backoff_of_the_policy(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, clock: Clock
) -> None:
    policy = RetryPolicy(min_backoff_seconds=4)
    await subscriptions.add(Subscription(name="ox", realms_topics=(RealmTopic("udm", "a"),), retry=policy))
    (sequence, _) = await write(queues, "one", "two")
    with pytest.raises(LeaseLost, match="was not delivered"):
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
    queues: Queues, subscriptions: Subscriptions, pull: PullService
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
    details = {name: value for name, value in letter.details.items() if name != "attempts_log"}
    assert details == {"subscription": "ox", "incarnation": record.incarnation, "position": 2}
    with pytest.raises(UnknownMessage):
        await pull.reject("ox", sequence, "again", instance="a")


@pytest.mark.parametrize("delivery", [Delivery.ORDERED, Delivery.PARALLEL])
async def test_after_the_last_attempt_a_message_becomes_a_dead_letter_and_the_next_one_comes(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, clock: Clock, delivery: Delivery
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
    attempts = [(attempt.time, attempt.error) for attempt in attempts_of(ParkedMessage.from_message(parked))]
    assert attempts == [
        (datetime(2027, 1, 15, 8, 0, 0, 0, UTC), "instance 'default' asked for a retry"),
        (datetime(2027, 1, 15, 8, 1, 1, 0, UTC), "the lease of instance 'default' expired"),
    ]
    entry = await (await subscriptions.registry())._acknowledged.get("ox")
    assert b'"ends"' not in entry.value  # deleted with the message


async def test_a_paused_subscription_delivers_nothing_until_it_is_resumed(
    queues: Queues, subscriptions: Subscriptions, pull: PullService
) -> None:
    await subscriptions.add(definition())
    await write(queues, "one", "two")
    message = await pull.next("ox")
    assert message is not None
    await subscriptions.pause("ox")
    pull.invalidate("ox")
    await pull.acknowledge("ox", message.sequence)
    assert await pull.next("ox") is None
    waiting = asyncio.create_task(pull.next("ox", timeout=30))
    await asyncio.sleep(0)
    await subscriptions.resume("ox")
    resumed = await waiting
    assert resumed is not None
    assert resumed.data == b"two"


async def test_a_queue_that_is_missing_is_an_empty_one(
    queues: Queues, subscriptions: Subscriptions, pull: PullService
) -> None:
    await subscriptions.add(definition())
    await queues.streams.remove(OX)
    assert await pull.next("ox") is None
    with pytest.raises(UnknownMessage):
        await pull.acknowledge("ox", 1)
    with pytest.raises(UnknownStream):
        await queues.streams.info(OX)


async def test_a_message_that_a_limit_deleted_is_skipped(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, clock: Clock
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
async def test_invalid_arguments_are_refused(
    pull: PullService, ask: Callable[[PullService], Awaitable[object]]
) -> None:
    with pytest.raises(InvalidInput):
        await ask(pull)


async def test_an_unknown_subscription_is_refused(pull: PullService) -> None:
    for call in (pull.next("nobody"), pull.acknowledge("nobody", 1), pull.extend("nobody", 1)):
        with pytest.raises(UnknownSubscription):
            await call
