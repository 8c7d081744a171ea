"""Dispatch continues with a lost, old or damaged checkpoint: nothing is lost, duplicated or out of order."""

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.dispatch_harness import INCOMING, DispatchHarness
from tests.support.nats_servers import OwnServer


def free(harness: DispatchHarness) -> None:
    """Let the stream drop what dispatch has done, as if all other readers had done it too."""
    for durable in ("archive", "transform-receipts"):
        harness.broker.move(INCOMING, durable, past=harness.last())


def test_a_lost_checkpoint(harness: DispatchHarness) -> None:
    harness.add("ox")
    harness.events(1, 3)
    harness.dispatch()
    shutil.rmtree(harness.settings().checkpoint)
    harness.events(4, 5)
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2, 3, 4, 5]


def test_an_older_checkpoint(harness: DispatchHarness, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = harness.settings().checkpoint
    harness.add("ox")
    harness.events(1, 3)
    harness.dispatch()
    shutil.copytree(checkpoint, harness.directory / "older")
    harness.events(4, 6)
    harness.dispatch()
    free(harness)
    assert harness.broker.state(INCOMING)["first_seq"] > 5
    shutil.rmtree(checkpoint)
    shutil.move(harness.directory / "older", checkpoint)
    harness.events(7, 8)
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "a later one has dispatched up to" in caplog.text


@pytest.mark.parametrize("log", ["offsets", "commits"])
def test_a_checkpoint_that_a_power_cut_damaged(harness: DispatchHarness, log: str) -> None:
    harness.add("ox")
    harness.events(1, 3)
    harness.dispatch()
    newest = max((harness.settings().checkpoint / log).glob("[0-9]*"), key=lambda path: int(path.name))
    newest.write_bytes(b"")
    newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
    harness.events(4, 5)
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2, 3, 4, 5]


def test_an_older_store_of_the_server(own_server: OwnServer, spark: SparkSession, tmp_path: Path) -> None:
    """The checkpoint is ahead: positions that it counts as done are given to new events."""
    store = tmp_path / "store"
    server = own_server(directory=store)
    harness = DispatchHarness(server.address, spark, tmp_path)
    harness.add("ox")
    harness.events(1, 3)
    harness.dispatch()
    server.stop()
    shutil.copytree(store, tmp_path / "backup")
    server = own_server(directory=store)
    harness = DispatchHarness(server.address, spark, tmp_path)
    harness.events(4, 9)
    harness.dispatch()
    server.stop()
    shutil.rmtree(store)
    shutil.move(tmp_path / "backup", store)
    harness = DispatchHarness(own_server(directory=store).address, spark, tmp_path)
    harness.events(20, 22)
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2, 3, 20, 21, 22]
