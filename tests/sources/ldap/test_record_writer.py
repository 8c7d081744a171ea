import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from purveyor.model.errors import LeaseLost
from purveyor.queues.catalogue import DEAD_LETTERS, LDIF
from purveyor.queues.client import Queues
from purveyor.sources.ldap.record_writer import RecordWriter
from purveyor.sources.ldap.source_store import SourceStore
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
    await queues.ensure(LDIF)
    await queues.ensure(DEAD_LETTERS)
    store = await SourceStore.open(queues, lease_seconds=0.0)
    taken = await store.take(unique)
    assert taken is not None
    places: list[int] = []
    writer = RecordWriter[int](queues, f"ldif.{unique}", taken, lease_seconds=0.0, on_stored=places.append)
    running = asyncio.create_task(writer.run())
    yield Harness(writer, queues, f"ldif.{unique}", store, running, places)
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
