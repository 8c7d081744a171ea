"""A server with the queues of the pipeline, and what a test of the dispatcher does there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.conftest import OwnServer
from tests.pipeline.dispatch.world import World


@pytest.fixture
def world(own_server: OwnServer, spark: SparkSession, tmp_path: Path) -> Iterator[World]:
    """A server of its own: `stream:incoming` has one name everywhere."""
    made = World(own_server().address, spark, tmp_path)
    yield made
    made.stop()
