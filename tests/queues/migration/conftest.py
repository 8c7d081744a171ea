"""Queues as they were before, workers that read them, publishers that do not stop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.config import ConsumerConfig, Retention, StreamConfig
from purveyor.model.errors import NoAnswer
from purveyor.queues.catalogue import Queue, Reader
from purveyor.queues.client import Queues, connect
from purveyor.queues.migration.migrator import Migrations
from purveyor.queues.migration.record import QueueStatus
from purveyor.queues.migration.steps import Options
from tests.waiting import until

PATIENCE = 60.0


def declared(name: str, retention: Retention = Retention.INTEREST, *readers: str) -> Queue:
    """A queue as it is to be, with its readers."""
    return Queue(
        name=name,
        purpose="a test",
        subjects=(name, f"{name}.>"),
        retention=retention,
        writer="test",
        readers=tuple(
            Reader(durable=reader, who="test", ack_wait=timedelta(seconds=5)) for reader in readers or ("reader",)
        ),
    )


async def make_old(
    queues: Queues,
    name: str,
    retention: Retention = Retention.WORK_QUEUE,
    durable: str | None = "reader",
    **config: object,
) -> str:
    """A stream of an earlier system, with its durable."""
    stream = f"stream:{name}"
    await queues.streams.add(
        StreamConfig(name=stream, subjects=(name,), retention=retention, allow_direct=False, **config)  # type: ignore[arg-type]
    )
    if durable is not None:
        await queues.consumers.add(
            stream, ConsumerConfig(durable_name=durable, ack_wait=timedelta(seconds=5), max_ack_pending=1)
        )
    return stream


async def publish(queues: Queues, subject: str, first: int, last: int) -> None:
    """Messages that say their number."""
    for number in range(first, last + 1):
        await queues.publish(subject, b"%d" % number, msg_id=f"{subject}-{number}")


class Worker:
    """Reads a queue and keeps what it processed, in order."""

    def __init__(
        self, queues: Queues, stream: str, durable: str = "reader", poison: frozenset[int] = frozenset()
    ) -> None:
        self._queues = queues
        self._stream = stream
        self._durable = durable
        self._poison = poison
        self._unsure: set[int] = set()
        self.done: list[int] = []

    async def run(self) -> None:
        """For ever."""
        async for message in self._queues.pull(self._stream, self._durable):
            number = int(message.data)
            if number in self._poison:
                await message.nak()
                continue
            if number not in self._unsure:
                self.done.append(number)
            try:
                await message.ack(confirm=True)
            except NoAnswer:
                self._unsure.add(number)  # a node was killed: the message comes again, or was acknowledged unheard


@contextlib.asynccontextmanager
async def running(*workers: Worker) -> AsyncIterator[None]:
    """Workers at work for the length of a block."""
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def see_through(migrations: Migrations, queue: Queue) -> None:
    """Bring a migration to its end."""

    async def ready() -> bool:
        return await migrations.advance(queue.name) is QueueStatus.READY

    await until(ready)


@pytest.fixture
async def queues(address: Address) -> AsyncIterator[Queues]:
    async with connect(address, name="tests", patience_seconds=PATIENCE) as connected:
        yield connected


@pytest.fixture
def quick(queues: Queues, tmp_path: Path) -> Migrations:
    """Migrations that do not wait long for others."""
    return queues.migrations.with_options(
        Options(archives=tmp_path / "archives", lease_seconds=0.5, grace_seconds=0.05, stuck_seconds=0.2)
    )
