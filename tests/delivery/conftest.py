"""A connection, subscriptions on it, and eyes on what they leave in the queues."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from purveyor.delivery.pull import Delivered, Pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.jetstream.headers import POSITION
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.delivery_policy import Delivery, OrderBy
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import Queues, connect
from tests.conftest import OwnServer


@pytest.fixture
def address(own_server: OwnServer) -> Address:
    """A server of the test's own: what is in `incoming` and `prefill` is all there is."""
    return own_server().address


@pytest.fixture
async def queues(address: Address) -> AsyncIterator[Queues]:
    async with connect(address, name="tests", patience_seconds=60) as connected:
        yield connected


@pytest.fixture
def subscriptions(queues: Queues) -> Subscriptions:
    return Subscriptions(queues)


def definition(name: str = "ox", *, topic: str = "users/user", prefill: bool = False) -> Subscription:
    return Subscription(name=name, realms_topics=(RealmTopic("udm", topic),), request_prefill=prefill)


async def stored(queues: Queues, stream: str) -> list[StoredMessage]:
    """All messages of a stream."""
    state = (await queues.streams.info(stream)).state
    sequences = range(state.first_seq, state.last_seq + 1) if state.messages else ()
    return [await queues.streams.get(stream, sequence) for sequence in sequences]


async def bodies(queues: Queues, stream: str) -> list[Any]:
    return [json.loads(message.data) for message in await stored(queues, stream)]


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


async def empty(queues: Queues) -> bool:
    return (await queues.streams.info(OX)).state.messages == 0


async def drain(pull: Pull, instance: str = "default") -> list[str]:
    got = []
    while (message := await pull.next("ox", instance)) is not None:
        got.append(message.data.decode())
        await pull.acknowledge("ox", message.sequence)
    return got
