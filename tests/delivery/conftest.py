"""A connection, subscriptions on it, and eyes on what they leave in the queues."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.address import Address
from purveyor.queues.client import Queues, connect
from purveyor.queues.streams import StoredMessage
from tests.conftest import OwnServer


@pytest.fixture
def address(own_server: OwnServer) -> Address:
    """A server of the test's own: what is in `incoming` and `prefill` is all there is."""
    return own_server().address


@pytest.fixture
async def queues(address: Address) -> AsyncIterator[Queues]:
    async with connect(address, name="tests", patience_seconds=20) as connected:
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
