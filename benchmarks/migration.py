"""Migrations of queues: how long publishers have to wait, and what a backlog costs, by drain and by snapshot.

Publishers publish one after the other all the time; what they wait is the longest time between two answers.
"""

import asyncio
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from benchmarks.report import Row, Section
from purveyor.jetstream import publish_many
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import outgoing
from purveyor.jetstream.config import ConsumerConfig, Retention, StreamConfig
from purveyor.jetstream.puller import PullOptions
from purveyor.queues.catalogue import Queue, Reader
from purveyor.queues.client import Queues, connect
from purveyor.queues.migration.events import MigrationOptions
from purveyor.queues.migration.plan import Strategy
from purveyor.queues.migration.record import QueueStatus

BACKLOG = 100_000
ROUNDS = 3
_BODY = bytes(200)
_AT_ONCE = 1000


def run(address: Address, *, backlog: int = BACKLOG) -> list[Section]:
    """All of it."""
    empty = {way: min(_downtime(address, way, 0) for _ in range(ROUNDS)) for way in Strategy}
    bare = min(asyncio.run(_delete_and_create(address)) for _ in range(ROUNDS))
    full = {way: _downtime(address, way, backlog) for way in Strategy}
    rows = [
        Row("empty queue, by drain", 1000 * empty[Strategy.DRAIN], 1000 * bare, "ms", note="250 ms of it on purpose"),
        Row("empty queue, by snapshot", 1000 * empty[Strategy.SNAPSHOT], 1000 * bare, "ms"),
        Row(
            f"{backlog:,} messages, snapshot beside drain",
            full[Strategy.SNAPSHOT],
            full[Strategy.DRAIN],
            "s",
            note=f"drained by one reader that takes {_AT_ONCE} at a time and does nothing with them",
        ),
    ]
    words = (
        "How long publishers wait while a work queue becomes an interest queue: the longest time between two answers. "
        "Beside it, for the empty queue, the stream deleted and made again without any care for messages; for the "
        "backlog, the other way. The quarter of a second is there so that all that was under way when the queue was "
        "sealed is refused, and order is kept."
    )
    return [Section("Migration of queues", words, rows)]


def _downtime(address: Address, way: Strategy, backlog: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_migrate(address, way, backlog, Path(directory)))


async def _migrate(address: Address, way: Strategy, backlog: int, archives: Path) -> float:
    name = f"bench-{uuid4().hex[:8]}"
    reader = Reader(durable="reader", used_by="benchmark", max_ack_pending=2 * _AT_ONCE)
    queue = Queue(
        name=name,
        purpose="benchmark",
        subjects=(name,),
        retention=Retention.INTEREST,
        writer="benchmark",
        readers=(reader,),
    )
    async with connect(address, patience_seconds=300) as queues, connect(address, patience_seconds=300) as writing:
        await queues.streams.add(StreamConfig(name=queue.stream, subjects=(name,), retention=Retention.WORK_QUEUE))
        await queues.consumers.add(
            queue.stream,
            ConsumerConfig(durable_name="reader", ack_wait=timedelta(seconds=30), max_ack_pending=2 * _AT_ONCE),
        )
        await asyncio.to_thread(
            publish_many, address, outgoing((name, _BODY, None, f"{name}-{number}") for number in range(backlog))
        )
        stop = asyncio.Event()
        reading = asyncio.create_task(_read(queues, queue.stream)) if way is Strategy.DRAIN else None
        publishing = asyncio.create_task(_publish(writing, name, stop))
        migrations = queues.migrations.with_options(MigrationOptions(archives=archives))
        if await migrations.begin(queue, strategy=way) is not QueueStatus.READY:
            await migrations.wait_until_done(name)
        await asyncio.sleep(0.5)
        stop.set()
        longest = await publishing
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await queues.streams.remove(queue.stream)
    return longest


async def _read(queues: Queues, stream: str) -> None:
    async for message in queues.pull(stream, "reader", PullOptions(batch=_AT_ONCE)):
        await message.ack()


async def _publish(queues: Queues, subject: str, stop: asyncio.Event) -> float:
    longest, number = 0.0, 0
    while not stop.is_set():
        begun = time.perf_counter()
        await queues.publish(subject, _BODY, msg_id=f"{subject}-live-{number}")
        longest, number = max(longest, time.perf_counter() - begun), number + 1
        await asyncio.sleep(0.005)
    return longest


async def _delete_and_create(address: Address) -> float:
    name = f"bench-{uuid4().hex[:8]}"
    async with connect(address) as queues:
        await queues.streams.add(StreamConfig(name=name, subjects=(name,), retention=Retention.WORK_QUEUE))
        begun = time.perf_counter()
        await queues.streams.remove(name)
        await queues.streams.add(StreamConfig(name=name, subjects=(name,), retention=Retention.INTEREST))
        await queues.consumers.add(name, ConsumerConfig(durable_name="reader"))
        took = time.perf_counter() - begun
        await queues.streams.remove(name)
    return took
