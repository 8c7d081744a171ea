"""A server of its own for these tests: the queues of the pipeline have fixed names."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer
from purveyor.queues.client import connect
from tests.support.nats_servers import FAST
from tests.support.prefill_harness import PrefillHarness


@pytest.fixture(scope="module")
def prefill_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("prefill") / "store", FAST) as server:
        yield server


@pytest.fixture
def address(prefill_server: EmbeddedServer) -> Address:
    return prefill_server.address


@pytest.fixture
async def harness(address: Address, spark: SparkSession, tmp_path: Path, unique: str) -> AsyncIterator[PrefillHarness]:
    async with connect(address) as queues:
        yield await PrefillHarness.make(queues, spark, tmp_path / "archive", unique)
