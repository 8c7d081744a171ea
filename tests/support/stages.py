"""Databases, orders and targets for tests of stages."""

import asyncio
import uuid
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pytest

from purveyor.model.event import OUTBOX_SUBJECT, Event
from purveyor.queues.catalogue import DEAD_LETTERS, endpoint_queue, incoming
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import DeadLetter, subject_token
from purveyor.stages import Retry, SqlStore, Stages, Target
from purveyor.stages.endpoint import Timing
from purveyor.stages.testing import stage_kit  # noqa: F401 - a fixture

QUICK = Timing(ack_wait=timedelta(seconds=4), grace=timedelta(milliseconds=100))
"""Short times for tests that crash and wait for redelivery."""


def make_database(kind: str, request: pytest.FixtureRequest, directory: Path) -> str:
    """Create a database of one kind."""
    if kind == "postgresql":
        return fresh_database(request.getfixturevalue("postgres"), "prepared")
    url = f"sqlite:///{directory / f'{uuid.uuid4().hex[:8]}.db'}"
    run_in_thread(make_effects(url))
    return url


def run_in_thread(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in a new thread, where no event loop runs."""
    with ThreadPoolExecutor() as pool:
        pool.submit(asyncio.run, work).result()


def fresh_database(postgres: str, template: str) -> str:
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    return postgres.replace("/postgres?", f"/{name}?")


async def make_effects(url: str) -> None:
    """Create the tables of stages, and the table `effects` of the application."""
    store = SqlStore(url, create_tables=True)
    await store.open()
    async with store.engine.begin() as connection:
        kind = "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY" if store.postgres else "INTEGER PRIMARY KEY"
        await connection.exec_driver_sql(f"CREATE TABLE effects (id {kind}, number INTEGER NOT NULL, note TEXT)")
    await store.close()


async def rows(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Run a query on a database."""
    store = SqlStore(url)
    async with store.engine.connect() as connection:
        found = [tuple(row) for row in (await connection.exec_driver_sql(statement)).all()]
    await store.close()
    return found


class MakeStages(Protocol):
    """Makes applications on one database."""

    def __call__(self, timing: Timing = ...) -> Stages: ...


QUICK_RETRY = Retry.parallel(attempts=3, first_delay=timedelta(milliseconds=10))


@dataclass(frozen=True)
class Order:
    number: int
    note: str = ""


async def effects(database: str) -> list[int]:
    return sorted(number for (number,) in await rows(database, "SELECT number FROM effects"))


async def waiting(queues: Queues, endpoint: str) -> int:
    return (await queues.streams.info(endpoint_queue(endpoint, 1).stream)).state.messages


async def is_empty(queues: Queues, endpoint: str) -> bool:
    return await waiting(queues, endpoint) == 0


async def letters(queues: Queues, endpoint: str) -> list[DeadLetter]:
    subject = f"dead-letters.{subject_token(f'stage:{endpoint}.0')}"
    found: list[DeadLetter] = []
    sequence = 1
    for _ in range((await queues.streams.subjects(DEAD_LETTERS.stream, subject)).get(subject, 0)):
        stored = await queues.streams.get_next(DEAD_LETTERS.stream, sequence, subject)
        found.append(DeadLetter.from_message(stored.headers, stored.data))
        sequence = stored.sequence + 1
    return found


async def sink(queues: Queues, stages: Stages, name: str) -> Target[Order, None]:
    """Return a target whose messages stay in its queue."""
    await queues.ensure(endpoint_queue(f"{name}-sink", 1))
    return stages.remote(f"{name}-sink", request=Order, reply=type(None))


async def stored(queues: Queues, stream: str, subject: str) -> list[dict[str, Any]]:
    """Return all messages of a subject, in order."""
    found: list[dict[str, Any]] = []
    async for batch in queues.read_range(stream, 1, (await queues.streams.info(stream)).state.last_seq):
        found.extend(row for row in batch.to_pylist() if row["subject"] == subject)
    return found


async def published(queues: Queues) -> list[Event]:
    """Return the events that stages published with inbox and outbox, in the order of their positions."""
    found: list[Event] = []
    stream = incoming().stream
    async for batch in queues.read_range(stream, 1, (await queues.streams.info(stream)).state.last_seq):
        found += [Event.decode(row["data"]) for row in batch.to_pylist() if row["subject"].startswith(OUTBOX_SUBJECT)]
    return found


def event(number: int, key: str) -> bytes:
    made = Event(
        publisher_name="test",
        ts=datetime(2026, 11, 16, tzinfo=UTC),
        realm="udm",
        topic="users/user",
        new={"number": number, "id": key},
    )
    return made.encode()
