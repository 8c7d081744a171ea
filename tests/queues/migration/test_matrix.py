"""Every retention to every other, full or empty, by one or several instances, by both ways: all messages, in order."""

import asyncio
import contextlib
import itertools
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path

import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.config import ConsumerConfig, Retention, StreamConfig
from purveyor.queues.catalogue import DEAD_LETTERS, Queue, Reader
from purveyor.queues.client import Queues, connect
from purveyor.queues.migration.events import MigrationOptions
from purveyor.queues.migration.plan import Strategy
from purveyor.queues.migration.record import QueueStatus
from tests.support.migrations import publish
from tests.support.scale import LONG, chance
from tests.support.waiting import until

BACKLOG, ALL = 12, 20
POISON = 3
ACK_WAIT = timedelta(seconds=5)
"""Longer than a busy machine takes from the delivery to the ack: no message is processed twice."""
AT_ONCE = 6


class Holds(Enum):
    """What is in the queue when its migration begins."""

    NOTHING = "nothing"
    BACKLOG = "a backlog"
    IN_FLIGHT = "a backlog, one of it in the hands of a worker that died"
    POISON = "a backlog, one of it past its deliveries"


@dataclass(frozen=True)
class Cell:
    """One case."""

    before: Retention
    after: Retention
    holds: Holds
    instances: int
    strategy: Strategy

    def __str__(self) -> str:
        return (
            f"{self.before.value} -> {self.after.value}, {self.holds.value}, {self.instances} instances, "
            f"{self.strategy.value}"
        )


CELLS = [Cell(*each) for each in itertools.product(Retention, Retention, Holds, (1, 3), Strategy)]


def sampled() -> list[Cell]:
    """All in `make chaos`; else so many that each pair of retentions is met, and each other choice often."""
    if LONG:
        return CELLS
    random = chance("migration matrix")
    by_pair = [
        [cell for cell in CELLS if (cell.before, cell.after) == pair]
        for pair in itertools.product(Retention, Retention)
    ]
    hard = [
        cells
        for cells in by_pair
        if (Retention.WORK_QUEUE in (cells[0].before, cells[0].after)) and cells[0].before is not cells[0].after
    ]
    return [random.choice(cells) for cells in by_pair] + [cell for cells in hard for cell in random.sample(cells, 3)]


class Case:
    """One cell, played."""

    def __init__(self, cell: Cell, name: str, archives: Path) -> None:
        self.cell = cell
        self.options = MigrationOptions(
            archives=archives / name, lease_seconds=2, grace_seconds=0.05, stuck_seconds=0.3
        )
        self.processed: list[int] = []
        deliveries = 2 if cell.holds is Holds.POISON else -1
        reader = Reader(durable="reader", used_by="test", ack_wait=ACK_WAIT)
        self.queue = Queue(
            name=name, purpose="test", subjects=(name,), retention=cell.after, writer="test", readers=(reader,)
        )
        self.old = StreamConfig(
            name=self.queue.stream, subjects=(name,), retention=cell.before, allow_direct=True, allow_atomic=True
        )
        self.durable = ConsumerConfig(
            durable_name="reader", ack_wait=ACK_WAIT, max_ack_pending=1, max_deliver=deliveries
        )

    async def play(self, address: Address) -> None:
        async with contextlib.AsyncExitStack() as stack:
            instances = [
                await stack.enter_async_context(connect(address, patience_seconds=30))
                for _ in range(self.cell.instances)
            ]
            first = instances[0]
            await first.streams.add(self.old)
            await first.consumers.add(self.queue.stream, self.durable)
            await self._fill(first)
            working = [asyncio.create_task(self._instance(each)) for each in instances]
            try:
                publishing = asyncio.create_task(publish(first, self.queue.name, BACKLOG + 1, ALL))
                await publishing
                await until(lambda: self._is_processed(working), what=f"all messages of {self.cell}")
                await until(lambda: self._is_ready(first), what=f"a queue that is ready, {self.cell}")
            finally:
                for each in working:
                    each.cancel()
                await asyncio.gather(*working, return_exceptions=True)
            await self._check(first)

    def _is_processed(self, working: list[asyncio.Task[None]]) -> bool:
        for each in working:
            if each.done():
                each.result()
        return len(self.processed) >= self._expected

    async def _is_ready(self, queues: Queues) -> bool:
        return (await queues.ensure(self.queue)).status is QueueStatus.READY

    async def _fill(self, queues: Queues) -> None:
        if self.cell.holds is Holds.NOTHING:
            return
        await publish(queues, self.queue.name, 1, BACKLOG)
        if self.cell.holds is Holds.IN_FLIGHT:
            assert len(await queues.fetch(self.queue.stream, "reader", 1)) == 1

    async def _instance(self, queues: Queues) -> None:
        migrations = queues.migrations.with_options(self.options)
        working = asyncio.create_task(self._work(queues))
        try:
            plan = await migrations.plan(self.queue)
            if plan.needs_migration:
                way = self.cell.strategy if plan.obstacle(self.cell.strategy) is None else plan.choose_strategy(None)
                await migrations.begin(self.queue, strategy=way)
            while True:
                await migrations.advance(self.queue.name)
                await queues.ensure(self.queue)
                await asyncio.sleep(0.1)
                if working.done():
                    working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _work(self, queues: Queues) -> None:
        async for message in queues.pull(self.queue.stream, "reader"):
            number = int(message.data)
            if number == POISON and self.cell.holds is Holds.POISON:
                await message.nak(confirm=True)
                continue
            self.processed.append(number)
            await message.ack(confirm=True)

    @property
    def _first(self) -> int:
        return BACKLOG + 1 if self.cell.holds is Holds.NOTHING else 1

    @property
    def _expected(self) -> int:
        return ALL - self._first + 1 - (self.cell.holds is Holds.POISON)

    async def _check(self, queues: Queues) -> None:
        wanted = [
            number for number in range(self._first, ALL + 1) if number != POISON or self.cell.holds is not Holds.POISON
        ]
        assert self.processed == wanted, str(self.cell)
        raw = await queues.streams.raw_info(self.queue.stream)
        assert raw["config"]["retention"] == self.cell.after.value, str(self.cell)
        assert not raw["config"].get("sealed"), str(self.cell)
        assert raw["state"]["last_seq"] == ALL - self._first + 1, str(self.cell)
        if self.cell.holds is Holds.POISON:
            await self._find_poison(queues)
        record = await queues.migrations.record(self.queue.name)
        assert record is None or record.done, str(self.cell)

    async def _find_poison(self, queues: Queues) -> None:
        """It is in the queue still, or a dead letter."""
        letters = await queues.streams.subjects("stream:dead-letters", f"dead-letters.stream-{self.queue.name}")
        messages = (await queues.streams.info(self.queue.stream)).state.messages
        assert letters or messages, str(self.cell)
        assert sum(letters.values()) <= 1, str(self.cell)


@pytest.mark.chaos
def test_all_messages_arrive_once_and_in_order_whatever_becomes_of_the_queue(
    address: Address, unique: str, tmp_path: Path
) -> None:
    async def play() -> None:
        async with connect(address) as queues:
            await queues.ensure(DEAD_LETTERS)
        room = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, cell: Cell) -> None:
            async with room:
                await Case(cell, f"{unique}-{number}", tmp_path).play(address)

        done = await asyncio.gather(*(one(*each) for each in enumerate(sampled())), return_exceptions=True)
        failures = [each for each in done if isinstance(each, BaseException)]
        for failure in failures:
            print("FAILED", repr(failure)[:2000])
        if failures:
            raise failures[0]

    asyncio.run(play())
