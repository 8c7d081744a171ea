"""The cost of a large outbox and inbox: each poll, round trip and cleanup compared with the same on a small table.

A part of the benchmark of stages. The database generates the rows, as sent long ago.
"""

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from sqlalchemy.ext.asyncio import AsyncConnection

from benchmarks.report import Row, Section
from purveyor.stages import SqlStore
from purveyor.stages.flow import Flow, flow_message
from purveyor.stages.sql_statements import Claim, CleanupBatch, Statements

SMALL, LARGE = 10_000, 10_000_000
_LONG_AGO, _NOW = 1000, 1 << 40
_STAGE, _SUBJECT = "orders.0", "stage.orders.0"
_BATCH_ROWS = 2000
_ROUNDS = 200
_CLEANUPS = 4
"""Fewer than a small table has batches."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Median milliseconds of each step."""

    poll: float
    round_trip: float
    claim: float
    clean_outbox: float
    clean_inbox: float


async def section(url: str, sizes: Sequence[int] = (SMALL, 1_000_000, LARGE)) -> Section:
    """Compare each size with the smallest, on the PostgreSQL at that URL."""
    costs = {}
    for size in sizes:
        costs[size] = await _costs(url, size)
        print(f"{size:,} rows: {costs[size]}", flush=True)
    small, *larger = sizes
    rows = [
        Row(
            f"{name}, {size:,} rows / {small:,}",
            getattr(costs[size], field),
            getattr(costs[small], field),
            "ms",
            at_most=2,
        )
        for size in larger
        for name, field in (
            ("poll of an idle relay", "poll"),
            ("one message put, read and marked sent", "round_trip"),
            ("one message claimed in the inbox", "claim"),
            (f"cleaning {_BATCH_ROWS:,} rows of the outbox", "clean_outbox"),
            (f"cleaning {_BATCH_ROWS:,} rows of the inbox", "clean_inbox"),
        )
    ]
    text = (
        "The outbox and the inbox hold rows that were sent and processed long ago. Median of "
        f"{_ROUNDS} rounds, of {_CLEANUPS} cleanups."
    )
    return Section("Transactional stages: large tables", text, rows)


async def _costs(url: str, size: int) -> Costs:
    name = f"rows_{size}"
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}".encode())
    database_url = url.replace("/postgres?", f"/{name}?")
    store = SqlStore(database_url, create_tables=True)
    await store.open()
    _fill(database_url, size)
    try:
        async with store.engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            return await _measure(store.statements, connection)
    finally:
        await store.close()
        with psycopg.connect(url, autocommit=True) as db:
            db.execute(f"DROP DATABASE {name}".encode())


def _fill(url: str, size: int) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            "INSERT INTO purveyor_outbox (message_id, subject, headers, data, created_ms, sent_ms) "
            "SELECT 'm-' || n, %s, '{}', decode(repeat('78', 100), 'hex'), %s, %s FROM generate_series(1, %s) n",
            (_SUBJECT, _LONG_AGO, _LONG_AGO, size),
        )
        db.execute(
            "INSERT INTO purveyor_inbox SELECT %s, 'm-' || n, n, %s + n FROM generate_series(1, %s) n",
            (_STAGE, _LONG_AGO, size),
        )
        db.execute("VACUUM ANALYZE")


async def _measure(statements: Statements, connection: AsyncConnection) -> Costs:
    async def round_trip(number: int) -> None:
        message = flow_message(f"new-{number}", _SUBJECT, b"x" * 100, Flow(trace="t"), None)
        await statements.put(connection, [message], _NOW)
        rows = await statements.unsent(connection, 0, await statements.newest(connection), 500)
        await statements.mark_sent(connection, [row.id for row in rows], _NOW)

    async def claim(number: int) -> object:
        return await statements.claim(connection, _STAGE, [Claim(f"new-{number}", 1 << 40)], _NOW)

    sent = done = CleanupBatch(_NOW, _BATCH_ROWS)

    async def clean_outbox(_: int) -> None:
        nonlocal sent
        removed = await statements.clean_outbox(connection, sent)
        assert removed.rows == _BATCH_ROWS
        sent = replace(sent, begin=removed.up_to)

    async def clean_inbox(_: int) -> None:
        nonlocal done
        removed = await statements.clean_inbox(connection, _STAGE, 1 << 40, done)
        assert removed.rows == _BATCH_ROWS
        done = replace(done, begin=removed.up_to)

    return Costs(
        poll=await _median_ms(lambda _: statements.waiting(connection), _ROUNDS),
        round_trip=await _median_ms(round_trip, _ROUNDS),
        claim=await _median_ms(claim, _ROUNDS),
        clean_outbox=await _median_ms(clean_outbox, _CLEANUPS),
        clean_inbox=await _median_ms(clean_inbox, _CLEANUPS),
    )


async def _median_ms(work: Callable[[int], Awaitable[Any]], times: int) -> float:
    durations = []
    for number in range(times):
        began = time.perf_counter()
        await work(number)
        durations.append(time.perf_counter() - began)
    return statistics.median(durations) * 1000
