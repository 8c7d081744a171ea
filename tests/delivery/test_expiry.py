"""A message that is not acknowledged within the retention time of its subscription expires and is counted."""

import asyncio
import contextlib
import dataclasses
import time
from typing import Any

import pytest

from purveyor.delivery.dead_letters.service import DeadLetterFilter, open_dead_letters
from purveyor.delivery.expiry import Expiry
from purveyor.delivery.pull import PullService
from purveyor.delivery.subscription_status import read_status
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.headers import POSITION
from purveyor.model.ack_ranges import Expired
from purveyor.model.delivery_policy import Delivery
from purveyor.model.errors import InvalidInput, UnknownMessage
from purveyor.model.registration import PrefillState, PrefillStatus
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import Queues
from tests.support.waiting import until

HOUR = 3600.0


class Clock:
    """The wall clock, which the test moves forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


def keeping(seconds: float | None = HOUR, **more: Any) -> Subscription:
    topics = (RealmTopic("udm", "users/user"),)
    return Subscription(name="ox", realms_topics=topics, retention_seconds=seconds, **more)


async def write(queues: Queues, count: int, *, first: int = 2, kind: str = "main") -> None:
    for position in range(first, first + count):
        await queues.publish(f"ox.{kind}", b"%d" % position, headers={POSITION: str(position)})


async def expired(queues: Queues, subscriptions: Subscriptions) -> Expired:
    registry = await subscriptions.registry()
    return (await read_status(queues, registry, await registry.get("ox"))).expired


async def test_expired_messages_are_counted_not_delivered_and_the_watermark_stays(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, clock: Clock
) -> None:
    begun = time.time()
    await subscriptions.add(keeping())
    await write(queues, 1200)  # more than one transition expires
    clock.ahead = HOUR - 600
    message = await pull.next("ox")
    assert message is not None
    assert message.position == 2
    assert await expired(queues, subscriptions) == Expired()
    clock.ahead = HOUR + 60
    assert await pull.next("ox") is None
    with pytest.raises(UnknownMessage):
        await pull.acknowledge("ox", message.sequence)
    found = await expired(queues, subscriptions)
    assert (found.count, found.position) == (1200, 1201)
    assert found.at > 1000 * (begun + HOUR)
    registry = await subscriptions.registry()
    assert await registry.last_acknowledged(await subscriptions.get("ox")) == 1201
    clock.ahead = 0
    await write(queues, 1, first=1202)
    message = await pull.next("ox", pop=True)
    assert message is not None
    assert message.data == b"1202"


async def test_a_leased_message_can_be_acknowledged_until_its_lease_is_over(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, clock: Clock
) -> None:
    await subscriptions.add(keeping(delivery=Delivery.PARALLEL, order_by=None, lease_seconds=600))
    await write(queues, 3)
    clock.ahead = HOUR - 60
    one, two = await pull.lease("ox", max=2)
    clock.ahead = HOUR + 60
    assert await pull.expire("ox") == 1
    await pull.acknowledge("ox", one.sequence)
    clock.ahead = HOUR + 1200
    assert await pull.lease("ox", max=10) == []
    with pytest.raises(UnknownMessage):
        await pull.acknowledge("ox", two.sequence)
    assert (await expired(queues, subscriptions)).count == 2


async def test_repeated_requests_for_the_oldest_message_do_not_prevent_its_expiry(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, clock: Clock
) -> None:
    await subscriptions.add(keeping())
    await write(queues, 1)
    assert await pull.next("ox") is not None
    clock.ahead = HOUR + 10
    assert await pull.next("ox") is None


async def test_messages_of_subscriptions_without_consumers_expire_too(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, clock: Clock
) -> None:
    await subscriptions.add(keeping(request_prefill=True))
    await subscriptions.add(dataclasses.replace(keeping(None), name="for-ever"))
    await subscriptions.pause("ox")
    await write(queues, 2, kind="prefill")
    await write(queues, 3)
    clock.ahead = HOUR + 60
    expiry = Expiry(subscriptions, pull, interval_seconds=0.05)
    assert await expiry.once() == {}  # the prefill is under way
    registry = await subscriptions.registry()
    found = await subscriptions.get("ox")
    assert found.prefill is not None
    done = PrefillState(incarnation=found.incarnation, status=PrefillStatus.DONE, position=found.prefill.position)
    await registry.put_prefill("ox", done, found.prefill_revision)
    pull.invalidate("ox")

    async def all_expired() -> bool:
        return (await expired(queues, subscriptions)).count >= 5

    going_round = asyncio.create_task(expiry.run())
    try:
        await until(all_expired)
    finally:
        going_round.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await going_round


async def test_the_retention_time_of_a_redriven_letter_starts_again(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, clock: Clock
) -> None:
    await subscriptions.add(keeping(2 * HOUR))
    await write(queues, 1)
    message = await pull.next("ox")
    assert message is not None
    await pull.reject("ox", message.sequence, "no")
    async with open_dead_letters(queues) as letters:
        await letters.retry(DeadLetterFilter(subscription="ox"))
    clock.ahead = HOUR
    assert await pull.next("ox") is not None
    clock.ahead = 3 * HOUR
    assert await pull.next("ox") is None
    assert (await expired(queues, subscriptions)).count == 1


def test_a_retention_is_a_second_or_more_and_part_of_the_definition() -> None:
    assert Subscription.from_json(keeping(90).to_json()) == keeping(90)
    assert "retention_seconds" not in keeping(None).to_json()
    for seconds in (0, 0.5, -1, 1e12):
        with pytest.raises(InvalidInput):
            keeping(seconds)
    with pytest.raises(InvalidInput):
        Subscription.from_json({**keeping(90).to_json(), "retention_seconds": "1h"})
