"""A connection to the worker's server, with the queue `ldif`."""

from collections.abc import AsyncIterator

import pytest

from purveyor.jetstream.address import Address
from purveyor.queues.client import Queues, connect


@pytest.fixture
async def queues(address: Address) -> AsyncIterator[Queues]:
    async with connect(address, name="tests", patience_seconds=60) as connected:
        yield connected
