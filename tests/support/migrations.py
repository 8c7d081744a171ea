"""Queues of an earlier system, workers that read them, and a migration that runs to its end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta

from purveyor.jetstream.address import Address
from purveyor.jetstream.config import ConsumerConfig, Retention, StreamConfig
from purveyor.model.errors import NoAnswer
from purveyor.queues.catalogue import Queue, Reader, incoming
from purveyor.queues.client import Queues, connect
from purveyor.queues.migration.migrator import Migrator
from purveyor.queues.migration.record import QueueStatus
from tests.support.waiting import PATIENCE_SECONDS, until

QUEUE = incoming()


async def seal_incoming(address: Address) -> QueueStatus:
    async with connect(address) as queues:
        await queues.streams.add(
            StreamConfig(name=QUEUE.stream, subjects=("incoming",), retention=Retention.WORK_QUEUE)
        )
        await queues.consumers.add(QUEUE.stream, ConsumerConfig(durable_name="durable_name:incoming"))
        await queues.publish("incoming", b"{}", msg_id="old")
        return (await queues.ensure(QUEUE, migrate=True)).status


async def drain_incoming(address: Address) -> None:
    async with connect(address) as queues, asyncio.timeout(PATIENCE_SECONDS):
        for message in await queues.fetch(QUEUE.stream, "dispatcher"):
            await message.ack(confirm=True)
        await queues.migrations.wait_until_done(QUEUE.name)


ACK_WAIT = timedelta(seconds=5)
"""Longer than a busy machine takes from the delivery to the ack: no message is processed twice."""


def declare_queue(name: str, retention: Retention = Retention.INTEREST, *readers: str) -> Queue:
    """Declare a queue with its readers."""
    return Queue(
        name=name,
        purpose="a test",
        subjects=(name, f"{name}.>"),
        retention=retention,
        writer="test",
        readers=tuple(Reader(durable=reader, used_by="test", ack_wait=ACK_WAIT) for reader in readers or ("reader",)),
    )


async def make_old_stream(
    queues: Queues,
    name: str,
    retention: Retention = Retention.WORK_QUEUE,
    durable: str | None = "reader",
    **config: object,
) -> str:
    """Make a stream of an earlier system, with its durable."""
    stream = f"stream:{name}"
    await queues.streams.add(
        StreamConfig(name=stream, subjects=(name,), retention=retention, allow_direct=False, **config)  # type: ignore[arg-type]
    )
    if durable is not None:
        await queues.consumers.add(stream, ConsumerConfig(durable_name=durable, ack_wait=ACK_WAIT, max_ack_pending=1))
    return stream


async def publish(queues: Queues, subject: str, first: int, last: int) -> None:
    """Publish messages whose data is their number."""
    for number in range(first, last + 1):
        await queues.publish(subject, b"%d" % number, msg_id=f"{subject}-{number}")


class Worker:
    """Reads a queue and records the numbers it processed, in order."""

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
        """Read until the task is cancelled."""
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
    """Run workers during a block."""
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


async def finish_migration(migrations: Migrator, queue: Queue) -> None:
    """Run a migration to its end."""

    async def ready() -> bool:
        return await migrations.advance(queue.name) is QueueStatus.READY

    await until(ready)
