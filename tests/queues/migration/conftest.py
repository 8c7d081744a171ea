"""Queues as they were before, workers that read them, publishers that do not stop."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from purveyor.jetstream.address import Address
from purveyor.queues.client import Queues, connect
from purveyor.queues.migration.events import MigrationOptions
from purveyor.queues.migration.migrator import Migrator

PATIENCE = 60.0


@pytest.fixture
async def queues(address: Address) -> AsyncIterator[Queues]:
    async with connect(address, name="tests", patience_seconds=PATIENCE) as connected:
        yield connected


@pytest.fixture
def quick(queues: Queues, tmp_path: Path) -> Migrator:
    """Migrator that do not wait long for others."""
    return queues.migrations.with_options(
        MigrationOptions(archives=tmp_path / "archives", lease_seconds=0.5, grace_seconds=0.05, stuck_seconds=0.2)
    )
