"""Fixtures: a connection, subscriptions on it, and a pull service."""

from collections.abc import AsyncIterator

import pytest

from purveyor.delivery.pull import PullService, open_pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.queues.client import Queues, connect
from tests.support.delivery import Clock
from tests.support.nats_servers import OwnServer


@pytest.fixture
def address(own_server: OwnServer) -> Address:
    """A server for this test only: `incoming` and `prefill` contain nothing else."""
    return own_server().address


@pytest.fixture
async def queues(address: Address) -> AsyncIterator[Queues]:
    async with connect(address, name="tests", patience_seconds=60) as connected:
        yield connected


@pytest.fixture
def subscriptions(queues: Queues) -> Subscriptions:
    return Subscriptions(queues)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def pull(queues: Queues, clock: Clock) -> AsyncIterator[PullService]:
    async with open_pull(queues, clock=clock) as opened:
        yield opened
