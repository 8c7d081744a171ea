"""What outbox and inbox cost when they are large: each look, turn and cleaning beside the same on a small table.

A part of the benchmark of stages. Rows are made by the database itself, as if they had been sent long ago.
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
_PORTION = 2000
_TURNS = 200
_CLEANINGS = 4
"""As many as a small table has portions of, and some rows left."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds, in the middle."""

    look: float
    turn: float
    claim: float
    clean_outbox: float
    clean_inbox: float


async def section(url: str, sizes: Sequence[int] = (SMALL, 1_000_000, LARGE)) -> Section:
    """Each size beside the smallest, on the PostgreSQL at that address."""
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
            ("look of an idle relay", "look"),
            ("one message put, read and marked sent", "turn"),
            ("one message claimed in the inbox", "claim"),
            (f"cleaning {_PORTION:,} rows of the outbox", "clean_outbox"),
            (f"cleaning {_PORTION:,} rows of the inbox", "clean_inbox"),
        )
    ]
    words = (
        "The outbox and the inbox hold so many rows that were sent and processed long ago. Middle of "
        f"{_TURNS} turns, of {_CLEANINGS} cleanings."
    )
    return Section("Transactional stages: large tables", words, rows)


async def _costs(url: str, size: int) -> Costs:
    name = f"rows_{size}"
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}".encode())
    its_url = url.replace("/postgres?", f"/{name}?")
    store = SqlStore(its_url, create_tables=True)
    await store.open()
    _fill(its_url, size)
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


async def _measure(ask: Statements, connection: AsyncConnection) -> Costs:
    async def turn(number: int) -> None:
        letter = flow_message(f"new-{number}", _SUBJECT, b"x" * 100, Flow(trace="t"), None)
        await ask.put(connection, [letter], _NOW)
        rows = await ask.unsent(connection, 0, await ask.newest(connection), 500)
        await ask.mark_sent(connection, [row.id for row in rows], _NOW)

    async def claim(number: int) -> object:
        return await ask.claim(connection, _STAGE, [Claim(f"new-{number}", 1 << 40)], _NOW)

    sent = done = CleanupBatch(_NOW, _PORTION)

    async def clean_outbox(_: int) -> None:
        nonlocal sent
        gone = await ask.clean_outbox(connection, sent)
        assert gone.rows == _PORTION
        sent = replace(sent, begin=gone.up_to)

    async def clean_inbox(_: int) -> None:
        nonlocal done
        gone = await ask.clean_inbox(connection, _STAGE, 1 << 40, done)
        assert gone.rows == _PORTION
        done = replace(done, begin=gone.up_to)

    return Costs(
        look=await _middle(lambda _: ask.waiting(connection), _TURNS),
        turn=await _middle(turn, _TURNS),
        claim=await _middle(claim, _TURNS),
        clean_outbox=await _middle(clean_outbox, _CLEANINGS),
        clean_inbox=await _middle(clean_inbox, _CLEANINGS),
    )


async def _middle(work: Callable[[int], Awaitable[Any]], times: int) -> float:
    taken = []
    for number in range(times):
        began = time.perf_counter()
        await work(number)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1000
