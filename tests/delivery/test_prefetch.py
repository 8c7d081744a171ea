"""A quick consumer costs one write a message; whoever is slow, or comes elsewhere, loses and miscounts nothing."""

from collections.abc import AsyncIterator

import pytest

from purveyor.delivery import prefetch
from purveyor.delivery.lease_rules import expire, keep_next, take
from purveyor.delivery.pull import Delivered, Pull
from purveyor.delivery.state import Ask, Book, Kind, Pending, Rules
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.jetstream.headers import POSITION
from purveyor.queues.client import Queues, connect
from tests.delivery.conftest import definition


@pytest.fixture
async def pull(queues: Queues, subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pull]:
    """Of a subscription with messages a to j, whose consumer has just shown that it is quick, however busy we are."""
    monkeypatch.setattr(prefetch, "_MOMENT_SECONDS", 30.0)
    await subscriptions.add(definition("ox"))
    for position, body in enumerate("abcdefghij", 2):
        await queues.publish("ox.main", body.encode(), headers={POSITION: str(position)})
    async with Pull(queues) as opened:
        for _ in range(2):
            await handled(opened)
        yield opened


async def handled(pull: Pull, instance: str = "one") -> Delivered:
    message = await pull.next("ox", instance)
    assert message is not None
    await pull.acknowledge("ox", message.sequence, instance=instance)
    return message


async def writes(queues: Queues) -> int:
    entry = await (await queues.bucket("acknowledged")).newest("ox")
    assert entry is not None
    return entry.revision


async def test_a_quick_consumer_costs_one_write_a_message(pull: Pull, queues: Queues) -> None:
    before = await writes(queues)
    got = [await handled(pull) for _ in range(5)]
    assert [(message.data, message.num_delivered) for message in got] == [(bytes([at]), 1) for at in b"cdefg"]
    assert await writes(queues) - before == 5


async def test_what_is_kept_and_not_asked_for_goes_to_others(pull: Pull, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_MOMENT_SECONDS", 0.05)
    await handled(pull)
    other = await pull.next("ox", "two", timeout=60)
    assert other is not None
    assert (other.data, other.num_delivered) == (b"d", 1)


async def test_the_last_message_is_not_the_end(pull: Pull, queues: Queues) -> None:
    for _ in range(8):
        await handled(pull)
    assert await pull.next("ox", "one") is None
    await queues.publish("ox.main", b"k", headers={POSITION: "12"})
    assert (await handled(pull)).data == b"k"


async def test_asked_again_it_counts(pull: Pull) -> None:
    counts = [message.num_delivered for _ in range(3) if (message := await pull.next("ox", "one")) is not None]
    assert counts == [1, 2, 3]


async def test_the_same_instance_elsewhere_gets_it_at_once(pull: Pull, address: Address) -> None:
    async with connect(address) as queues, Pull(queues) as elsewhere:
        message = await elsewhere.next("ox", "one")
        assert message is not None
        assert (message.data, message.num_delivered) == (b"c", 1)


async def test_who_asks_for_many_gets_what_was_kept_among_them(pull: Pull) -> None:
    found = await pull.lease("ox", "one", max=3)
    assert [(message.data, message.num_delivered) for message in found] == [(b"c", 1), (b"d", 1), (b"e", 1)]
    assert await pull.acknowledge_up_to("ox", found[-1].sequence, instance="one") == 3


async def test_a_process_that_ends_gives_back_what_it_kept(pull: Pull, address: Address) -> None:
    await pull.close()
    async with connect(address) as queues, Pull(queues) as later:
        message = await later.next("ox", "two")
        assert message is not None
        assert (message.data, message.num_delivered) == (b"c", 1)


def test_after_a_crash_it_counts_when_its_lease_runs_out() -> None:
    pending, rules = [Pending(7, Kind.MAIN)], Rules()
    kept = keep_next(Book(incarnation="i"), pending, Ask(instance="one", now=0, length=1000), rules)
    assert kept is not None
    book, lease = kept
    assert lease.ahead
    assert take(book, pending, Ask(instance="two", now=999, length=1000), rules).lease is None
    assert take(book, pending, Ask(instance="one", now=999, length=1000), rules).deliveries == (1,)
    assert expire(book, 1000).tries == {7: 1}
