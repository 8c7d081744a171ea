"""Push workers, and a subscription that they deliver."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from purveyor.delivery.push.push_request import SecretCipher
from purveyor.delivery.push.push_worker import PushOptions, PushWorker
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer
from purveyor.queues.client import Queues
from tests.support.push import LOCAL, Events, PushSubscription, Site, site
from tests.support.waiting import PATIENCE_SECONDS

__all__ = ["site"]


@pytest.fixture
def address(nats_server: EmbeddedServer) -> Address:
    """Use the shared server: every test has its own subscription name."""
    return nats_server.address


@pytest.fixture
async def pushed(
    queues: Queues, subscriptions: Subscriptions, site: Site, unique: str
) -> AsyncIterator[PushSubscription]:
    found = PushSubscription(queues, subscriptions, site, unique[:64])
    yield found
    with contextlib.suppress(Exception):
        await subscriptions.delete(found.name)


@pytest.fixture
def events() -> Events:
    """Return the events that workers reported: subscription, event, description."""
    return []


@pytest.fixture
async def work(
    queues: Queues, tmp_path: Path, events: Events, unique: str
) -> AsyncIterator[Callable[..., Awaitable[PushWorker]]]:
    """Start workers in this process; stop them after the test."""
    running: list[tuple[asyncio.Event, asyncio.Task[None]]] = []

    async def start(**options: Any) -> PushWorker:
        def on_event(name: str, event: str, description: str) -> None:
            if name == unique[:64]:  # not of subscriptions of other tests
                events.append((name, event, description))

        cipher = options.pop("cipher", None) or SecretCipher.from_directory(tmp_path)
        options = {"allowed": LOCAL, "grace_seconds": 3, "on_event": on_event, **options}
        worker = PushWorker(queues, PushOptions(cipher=cipher, **options))
        stop = asyncio.Event()
        running.append((stop, asyncio.create_task(worker.run(stop))))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.ready.wait()
        return worker

    yield start
    for stop, task in running:
        stop.set()
        await task
