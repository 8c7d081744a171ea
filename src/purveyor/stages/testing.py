"""A pytest fixture that runs stages in a test with a real broker and a real database.

In `conftest.py`:

    from purveyor.stages.testing import stage_kit

and in a test, where `declare` is the function that declares the endpoints of the application:

    async def test_an_order_is_placed(stage_kit: StageKit) -> None:
        async with stage_kit.running(declare) as stages:
            await stages.send(orders, PlaceOrder("book"))
            await stage_kit.settled()
        assert await stage_kit.rows("SELECT item FROM orders") == [("book",)]
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import MetaData

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import ReadOptions
from purveyor.jetstream.server import EmbeddedServer, ServerOptions
from purveyor.model.errors import NoAnswer, UnknownStream
from purveyor.model.event import OUTBOX_SUBJECT, SUBJECT, Event
from purveyor.queues.catalogue import STAGE_STREAMS, incoming
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters.letter import DeadLetter
from purveyor.queues.dead_letters.store import DeadLetterStore
from purveyor.stages.application import Stages
from purveyor.stages.endpoint import Timing
from purveyor.stages.sql_store import SqlStore

_FAST_TIMING: Final = Timing(ack_wait=timedelta(seconds=2), grace=timedelta(0))
_POLL_INTERVAL_SECONDS: Final = 0.02


class StageKit:
    """An empty broker and an empty SQLite database for one test."""

    def __init__(self, address: Address, url: str) -> None:
        self.address = address
        self.url = url
        self._queues: Queues | None = None

    @contextlib.asynccontextmanager
    async def running(
        self, declare: Callable[[Stages], object], *, metadata: MetaData | None = None
    ) -> AsyncIterator[Stages]:
        """Run the application for the length of the block; create the tables of `metadata` first."""
        async with connect(self.address, name="stage-kit") as queues:
            self._queues = queues
            store = SqlStore(self.url, metadata=metadata)
            async with store.engine.begin() as connection:
                await connection.run_sync(store.metadata.create_all)
            stages = Stages(queues, store=store, app="test", timing=_FAST_TIMING)
            declare(stages)
            async with stages:
                yield stages

    async def settled(self, seconds: float = 30) -> None:
        """Wait until no message waits or is in work, and the outbox is sent. Raises NoAnswer when time is up."""
        deadline = time.monotonic() + seconds
        while not (await self._is_sent() and await self._is_empty() and await self._is_sent()):
            if time.monotonic() > deadline:
                raise NoAnswer(f"the stages are still at work after {seconds:g} s", fix="is a message tried again?")
            await asyncio.sleep(_POLL_INTERVAL_SECONDS)

    async def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a query on the database and return its rows."""
        store = SqlStore(self.url)
        try:
            async with store.engine.connect() as connection:
                return [tuple(row) for row in (await connection.exec_driver_sql(statement)).all()]
        finally:
            await store.close()

    async def published(self) -> list[Event]:
        """Return the events that the stages published and the relay sent, in order. Nothing processes them here."""
        stream = incoming().stream
        async with connect(self.address, name="stage-kit") as queues:
            try:
                last = (await queues.streams.info(stream)).state.last_seq
            except UnknownStream:  # the relay creates the queue for the first event
                return []
            options = ReadOptions(subjects=(SUBJECT, f"{OUTBOX_SUBJECT}.>"), columns=("data",))
            batches = queues.read_range(stream, 1, last, options)
            return [Event.decode(row["data"]) async for batch in batches for row in batch.to_pylist()]

    async def dead_letters(self) -> list[DeadLetter]:
        """Return the dead letters, oldest first."""
        async with connect(self.address, name="stage-kit") as queues:
            return [each.letter async for each in DeadLetterStore(queues).scan() if each.letter is not None]

    async def _is_sent(self) -> bool:
        return not await self.rows("SELECT 1 FROM purveyor_outbox WHERE sent_ms IS NULL LIMIT 1")

    async def _is_empty(self) -> bool:
        assert self._queues is not None, "call settled() inside of running()"
        streams = [info for info in await self._queues.streams.list() if info.config.name.startswith(STAGE_STREAMS)]
        return not any(info.state.messages for info in streams if info.config.name != "stream:stage-replies")


@pytest.fixture
def stage_kit(tmp_path: Path) -> Iterator[StageKit]:
    """Start a broker with an empty store, and make a database for one test."""
    with EmbeddedServer(tmp_path / "nats", ServerOptions(sync="2m")) as server:
        yield StageKit(server.address, f"sqlite:///{tmp_path / 'stages.db'}")
