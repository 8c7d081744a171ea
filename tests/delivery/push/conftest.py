"""An endpoint in a process of its own, push subscriptions to it, and a worker that delivers them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from purveyor.delivery.push.push_worker import PushOptions, PushWorker
from purveyor.delivery.push.secret_encryption import SecretCipher
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer
from purveyor.queues.client import Queues
from tests.support.push import LOCAL, Desk, Site, Told, site

__all__ = ["site"]


@pytest.fixture
def address(nats_server: EmbeddedServer) -> Address:
    """The shared server: subscriptions have names of their own."""
    return nats_server.address


@pytest.fixture
async def desk(queues: Queues, subscriptions: Subscriptions, site: Site, unique: str) -> AsyncIterator[Desk]:
    found = Desk(queues, subscriptions, site, unique[:64])
    yield found
    with contextlib.suppress(Exception):
        await subscriptions.delete(found.name)


@pytest.fixture
def told() -> Told:
    """What workers said: the subscription, a word, and words."""
    return []


@pytest.fixture
async def work(
    queues: Queues, tmp_path: Path, told: Told, unique: str
) -> AsyncIterator[Callable[..., Awaitable[PushWorker]]]:
    """Starts workers in this process; they are stopped after the test."""
    running: list[tuple[asyncio.Event, asyncio.Task[None]]] = []

    async def start(**options: Any) -> PushWorker:
        def on_event(name: str, event: str, words: str) -> None:
            if name == unique[:64]:  # not what other tests left
                told.append((name, event, words))

        cipher = options.pop("cipher", None) or SecretCipher.from_directory(tmp_path)
        options = {"allowed": LOCAL, "grace_seconds": 3, "on_event": on_event, **options}
        worker = PushWorker(queues, PushOptions(cipher=cipher, **options))
        stop = asyncio.Event()
        running.append((stop, asyncio.create_task(worker.run(stop))))
        async with asyncio.timeout(120):
            await worker.ready.wait()
        return worker

    yield start
    for stop, task in running:
        stop.set()
        await task
