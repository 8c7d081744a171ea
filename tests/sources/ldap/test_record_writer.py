import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from purveyor.jetstream.server import EmbeddedServer
from purveyor.model.errors import LeaseLost, ServerUnavailable
from purveyor.queues.catalogue import DEAD_LETTERS, LDIF
from purveyor.queues.client import Queues, connect
from purveyor.sources.ldap.record_writer import RecordWriter
from purveyor.sources.ldap.source_store import SourceStore
from tests.support.nats_servers import OwnServer
from tests.support.waiting import until


@dataclass
class Harness:
    writer: RecordWriter[int]
    queues: Queues
    subject: str
    store: SourceStore
    running: asyncio.Task[None]
    places: list[int] = field(default_factory=list)

    async def bodies(self) -> list[bytes]:
        info = await self.queues.streams.info(LDIF.stream)
        batches = self.queues.read_range(LDIF.stream, info.state.first_seq or 1, info.state.last_seq)
        rows = [row async for batch in batches for row in batch.to_pylist()]
        return [row["data"] for row in rows if row["subject"] == self.subject]


@pytest.fixture
async def harness(queues: Queues, unique: str) -> AsyncIterator[Harness]:
    async with write_to(queues, unique, lease_seconds=0.0) as made:
        yield made


@contextlib.asynccontextmanager
async def write_to(queues: Queues, source: str, *, lease_seconds: float) -> AsyncIterator[Harness]:
    await queues.ensure(LDIF)
    await queues.ensure(DEAD_LETTERS)
    store = await SourceStore.open(queues, lease_seconds=lease_seconds)
    taken = await store.take(source)
    assert taken is not None
    places: list[int] = []
    subject = f"ldif.{source}"
    writer = RecordWriter[int](queues, subject, taken, lease_seconds=lease_seconds, on_stored=places.append)
    running = asyncio.create_task(writer.run())
    yield Harness(writer, queues, subject, store, running, places)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_records_are_stored_in_order_and_a_place_is_reported_after_them(harness: Harness) -> None:
    for number in range(10_000):
        await harness.writer.add(str(number).encode())
        if number % 1000 == 999:
            harness.writer.mark(number)
    await harness.writer.flush()
    assert await harness.bodies() == [str(number).encode() for number in range(10_000)]
    assert harness.places[-1] == 9999
    assert harness.places == sorted(set(harness.places))
    assert harness.writer.stored == 10_000


async def test_a_record_that_is_too_large_is_a_dead_letter_and_its_substitute_is_stored(harness: Harness) -> None:
    large = b"x" * (harness.queues.connection.max_payload + 1)
    await harness.writer.add(b"before")
    await harness.writer.add(large, lambda: b"substitute")
    await harness.writer.add(b"after")
    await harness.writer.flush()
    assert await harness.bodies() == [b"before", b"substitute", b"after"]
    assert harness.writer.parked == 1
    letter = await harness.queues.streams.get_last(DEAD_LETTERS.stream, "dead-letters.intake")
    assert letter.headers["Purveyor-Subject"] == (harness.subject,)
    assert "the server takes" in letter.headers["Purveyor-Reason"][0]


async def test_a_writer_whose_source_was_taken_over_writes_nothing_more(harness: Harness) -> None:
    await harness.writer.add(b"before")
    await harness.writer.flush()
    source = harness.subject.removeprefix("ldif.")
    await harness.store.take(source)  # sees the lease for the first time
    assert await harness.store.take(source) is not None
    await harness.writer.add(b"late")
    await until(harness.running.done)
    with pytest.raises(LeaseLost):
        harness.running.result()
    assert await harness.bodies() == [b"before"]


async def test_a_writer_ends_before_the_server_would_store_its_records_a_second_time(own_server: OwnServer) -> None:
    server: EmbeddedServer = own_server()
    async with connect(server.address, name="tests", patience_seconds=60) as queues:
        await queues.ensure(LDIF)
        await queues.streams.update(LDIF.stream, {"duplicate_window": timedelta(seconds=1)})
        async with write_to(queues, "people", lease_seconds=1000.0) as harness:
            await harness.writer.add(b"before")
            await harness.writer.flush()
            await asyncio.to_thread(server.stop)
            await harness.writer.add(b"its outcome is unknown")
            await until(harness.running.done)
            with pytest.raises(ServerUnavailable, match="begins again at its cookie"):
                harness.running.result()
            assert harness.writer.stored == 1
