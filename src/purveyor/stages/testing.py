"""A test kit: run stages in a test against a real broker and a real database, with one fixture.

In `conftest.py`:

    from purveyor.stages.testing import stage_kit

and in a test, with `declare` the function by which the application declares its endpoints:

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
from purveyor.jetstream.server import EmbeddedServer, ServerOptions
from purveyor.model.errors import NoAnswer
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters.letter import DeadLetter
from purveyor.queues.dead_letters.store import LetterBox
from purveyor.queues.stage_queues import STAGE_STREAMS
from purveyor.stages.application import Stages
from purveyor.stages.sql_store import SqlStore
from purveyor.stages.timeouts import Timing

_QUICK: Final = Timing(ack_wait=timedelta(seconds=2), grace=timedelta(0))
_PAUSE_SECONDS: Final = 0.02


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
        """The application at work, for the length of the block; the tables of `metadata` are made."""
        async with connect(self.address, name="stage-kit") as queues:
            self._queues = queues
            store = SqlStore(self.url, metadata=metadata)
            async with store.engine.begin() as connection:
                await connection.run_sync(store.metadata.create_all)
            stages = Stages(queues, store=store, app="test", timing=_QUICK)
            declare(stages)
            async with stages:
                yield stages

    async def settled(self, seconds: float = 30) -> None:
        """Return when no message waits or is in work, and nothing is left to be sent. NoAnswer when time is up."""
        give_up = time.monotonic() + seconds
        while not (await self._sent() and await self._empty() and await self._sent()):
            if time.monotonic() > give_up:
                raise NoAnswer(f"the stages are still at work after {seconds:g} s", fix="is a message tried again?")
            await asyncio.sleep(_PAUSE_SECONDS)

    async def rows(self, statement: str) -> list[tuple[Any, ...]]:
        """What the database answers."""
        store = SqlStore(self.url)
        try:
            async with store.engine.connect() as connection:
                return [tuple(row) for row in (await connection.exec_driver_sql(statement)).all()]
        finally:
            await store.close()

    async def dead_letters(self) -> list[DeadLetter]:
        """What was given up, oldest first."""
        async with connect(self.address, name="stage-kit") as queues:
            return [each.letter async for each in LetterBox(queues).scan() if each.letter is not None]

    async def _sent(self) -> bool:
        return not await self.rows("SELECT 1 FROM purveyor_outbox WHERE sent_ms IS NULL LIMIT 1")

    async def _empty(self) -> bool:
        assert self._queues is not None, "settled() is for inside of running()"
        streams = [info for info in await self._queues.streams.list() if info.config.name.startswith(STAGE_STREAMS)]
        return not any(info.state.messages for info in streams if info.config.name != "stream:stage-replies")


@pytest.fixture
def stage_kit(tmp_path: Path) -> Iterator[StageKit]:
    """See the module."""
    with EmbeddedServer(tmp_path / "nats", ServerOptions(sync="2m")) as server:
        yield StageKit(server.address, f"sqlite:///{tmp_path / 'stages.db'}")
