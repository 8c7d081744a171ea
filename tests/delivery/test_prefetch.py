"""A quick consumer costs one write per message; a slow one, or one that changes the process, loses nothing."""

from collections.abc import AsyncIterator

import pytest

from purveyor.delivery import after_ack
from purveyor.delivery.lease_rules import expire_leases, lease_next, lease_pending
from purveyor.delivery.lease_types import LeasePolicy, LeaseRequest, Pending
from purveyor.delivery.pull import DeliveredMessage, PullService, open_pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.jetstream.headers import POSITION
from purveyor.model.delivery_state import DeliveryState, SubjectKind
from purveyor.queues.client import Queues, connect
from tests.support.delivery import definition


@pytest.fixture
async def pull(
    queues: Queues, subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PullService]:
    """A service whose subscription has the messages a to j, and whose consumer has just proved to be quick."""
    monkeypatch.setattr(after_ack, "_CLAIM_SECONDS", 30.0)
    await subscriptions.add(definition("ox"))
    for position, body in enumerate("abcdefghij", 2):
        await queues.publish("ox.main", body.encode(), headers={POSITION: str(position)})
    async with open_pull(queues) as opened:
        for _ in range(2):
            await handled(opened)
        yield opened


async def handled(pull: PullService, instance: str = "one") -> DeliveredMessage:
    message = await pull.next("ox", instance)
    assert message is not None
    await pull.acknowledge("ox", message.sequence, instance=instance)
    return message


async def writes(queues: Queues) -> int:
    entry = await (await queues.bucket("acknowledged")).newest("ox")
    assert entry is not None
    return entry.revision


async def test_a_quick_consumer_costs_one_write_a_message(pull: PullService, queues: Queues) -> None:
    before = await writes(queues)
    got = [await handled(pull) for _ in range(5)]
    assert [(message.data, message.num_delivered) for message in got] == [(bytes([at]), 1) for at in b"cdefg"]
    assert await writes(queues) - before == 5


async def test_a_prefetched_message_that_is_not_claimed_goes_to_others(
    pull: PullService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_ack, "_CLAIM_SECONDS", 0.05)
    await handled(pull)
    other = await pull.next("ox", "two", timeout=60)
    assert other is not None
    assert (other.data, other.num_delivered) == (b"d", 1)


async def test_prefetch_continues_after_an_empty_queue(pull: PullService, queues: Queues) -> None:
    for _ in range(8):
        await handled(pull)
    assert await pull.next("ox", "one") is None
    await queues.publish("ox.main", b"k", headers={POSITION: "12"})
    assert (await handled(pull)).data == b"k"


async def test_asking_again_counts_the_delivery_of_a_prefetched_message(pull: PullService) -> None:
    counts = [message.num_delivered for _ in range(3) if (message := await pull.next("ox", "one")) is not None]
    assert counts == [1, 2, 3]


async def test_the_same_instance_gets_a_prefetched_message_from_another_process_at_once(
    pull: PullService, address: Address
) -> None:
    async with connect(address) as queues, open_pull(queues) as elsewhere:
        message = await elsewhere.next("ox", "one")
        assert message is not None
        assert (message.data, message.num_delivered) == (b"c", 1)


async def test_a_lease_of_many_includes_the_prefetched_message(pull: PullService) -> None:
    found = await pull.lease("ox", "one", max=3)
    assert [(message.data, message.num_delivered) for message in found] == [(b"c", 1), (b"d", 1), (b"e", 1)]
    assert await pull.acknowledge_up_to("ox", found[-1].sequence, instance="one") == 3


async def test_a_process_that_ends_cancels_its_prefetched_lease(pull: PullService, address: Address) -> None:
    await pull._shared.close()
    async with connect(address) as queues, open_pull(queues) as later:
        message = await later.next("ox", "two")
        assert message is not None
        assert (message.data, message.num_delivered) == (b"c", 1)


def test_after_a_crash_a_prefetched_lease_counts_when_it_expires() -> None:
    pending, policy = [Pending(7, SubjectKind.MAIN)], LeasePolicy()
    prefetched = lease_next(
        DeliveryState(incarnation="i"), pending, LeaseRequest(instance="one", now=0, duration=1000), policy
    )
    assert prefetched is not None
    state, lease = prefetched
    assert lease.prefetched
    assert lease_pending(state, pending, LeaseRequest(instance="two", now=999, duration=1000), policy).lease is None
    assert lease_pending(state, pending, LeaseRequest(instance="one", now=999, duration=1000), policy).deliveries == (
        1,
    )
    assert expire_leases(state, 1000).delivery_counts == {7: 1}
