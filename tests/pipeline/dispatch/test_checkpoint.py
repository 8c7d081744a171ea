"""Dispatch continues with a lost, old or damaged checkpoint: nothing is lost, duplicated or out of order."""

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.dispatch_world import INCOMING, World
from tests.support.nats_servers import OwnServer


def free(world: World) -> None:
    """Let the stream drop what dispatch has done, as if all other readers had done it too."""
    for durable in ("archive", "transform-receipts"):
        world.broker.move(INCOMING, durable, past=world.last())


def test_a_lost_checkpoint(world: World) -> None:
    world.add("ox")
    world.events(1, 3)
    world.dispatch()
    shutil.rmtree(world.settings().checkpoint)
    world.events(4, 5)
    world.dispatch()
    assert world.numbers("ox") == [1, 2, 3, 4, 5]


def test_an_older_checkpoint(world: World, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = world.settings().checkpoint
    world.add("ox")
    world.events(1, 3)
    world.dispatch()
    shutil.copytree(checkpoint, world.directory / "older")
    world.events(4, 6)
    world.dispatch()
    free(world)
    assert world.broker.state(INCOMING)["first_seq"] > 5
    shutil.rmtree(checkpoint)
    shutil.move(world.directory / "older", checkpoint)
    world.events(7, 8)
    world.dispatch()
    assert world.numbers("ox") == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "a later one has dispatched up to" in caplog.text


@pytest.mark.parametrize("log", ["offsets", "commits"])
def test_a_checkpoint_that_a_power_cut_damaged(world: World, log: str) -> None:
    world.add("ox")
    world.events(1, 3)
    world.dispatch()
    newest = max((world.settings().checkpoint / log).glob("[0-9]*"), key=lambda path: int(path.name))
    newest.write_bytes(b"")
    newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
    world.events(4, 5)
    world.dispatch()
    assert world.numbers("ox") == [1, 2, 3, 4, 5]


def test_an_older_store_of_the_server(own_server: OwnServer, spark: SparkSession, tmp_path: Path) -> None:
    """The checkpoint is ahead: positions that it counts as done are given to new events."""
    store = tmp_path / "store"
    server = own_server(directory=store)
    world = World(server.address, spark, tmp_path)
    world.add("ox")
    world.events(1, 3)
    world.dispatch()
    server.stop()
    shutil.copytree(store, tmp_path / "backup")
    server = own_server(directory=store)
    world = World(server.address, spark, tmp_path)
    world.events(4, 9)
    world.dispatch()
    server.stop()
    shutil.rmtree(store)
    shutil.move(tmp_path / "backup", store)
    world = World(own_server(directory=store).address, spark, tmp_path)
    world.events(20, 22)
    world.dispatch()
    assert world.numbers("ox") == [1, 2, 3, 20, 21, 22]
