"""A second pipeline stands by: it has no effect, and takes over when the first one is killed, under load.

The checks at the end are those of the crash runs: nothing is lost, doubled or out of order.
"""

import json
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from purveyor.model.file_lock import record_lock_holder
from purveyor.pipeline.archive.layout import archived_until
from purveyor.pipeline.checkpoints import CheckpointLocks
from purveyor.pipeline.part_starts import ensure_queues
from purveyor.pipeline.pipeline_settings import PipelineSettings
from purveyor.queues.status_board import STATUS
from tests.pipeline.installation import EXACT, PATIENCE_SECONDS, SAFE, WIDE, Installation
from tests.support.broker import Broker
from tests.support.killing import alive
from tests.support.nats_servers import OwnServer
from tests.support.pipeline_program import Pipeline
from tests.support.scale import chance, pick
from tests.support.waiting import wait_until

KILLS = pick(2, 20)
CHANGES, DIRECT = pick(120, 20_000), pick(60, 10_000)
BOARD = f"KV_{STATUS}"


def seen_from_outside(broker: Broker, data: Path) -> dict[str, Any]:
    """Everything that users and operators see of the queues and the data, but not the status board."""
    streams = {
        info["config"]["name"]: info for info in broker.ask("STREAM.LIST")["streams"] if info["config"]["name"] != BOARD
    }
    positions = {
        name: [
            (each["name"], each["ack_floor"], each["delivered"]["stream_seq"])
            for each in broker.ask(f"CONSUMER.LIST.{name}")["consumers"]
        ]
        for name in streams
    }
    kept = ("checkpoints", "archive")
    files = sorted(path for name in kept for path in (data / name).rglob("*") if path.suffix != ".lock")
    return {
        "streams": {name: (info["config"], info["state"]["last_seq"]) for name, info in streams.items()},
        "positions": positions,
        "files": [(path, path.stat().st_mtime_ns) for path in files],
        "status": sorted(data.glob("pipeline-status*")),
    }


def notices(broker: Broker, subject: str) -> list[dict[str, Any]]:
    return [json.loads(row["data"]) for row in broker.rows(BOARD) if row["subject"] == f"$KV.{STATUS}.{subject}"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PURVEYOR_NATS_URL", raising=False)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_a_standby_has_no_effect_that_anyone_can_see(own_server: OwnServer, data: Path) -> None:
    """The owner of the locks does nothing, so every difference would be made by the standby."""
    server = own_server(SAFE, directory=data / "nats")
    broker = Broker(server.address)
    settings = PipelineSettings(data_dir=data, find_address=lambda: server.address)
    ensure_queues(settings)
    broker.add("incoming", [("incoming", b"not an event", None, None)])
    with CheckpointLocks(data / "checkpoints", settings.locked_checkpoints) as locks:
        assert locks.take() is None
        before = seen_from_outside(broker, data)
        standby = Pipeline(data)
        try:
            standby.wait_for("standby")
            assert [line.partition(":")[0] for line in standby.lines] == ["warming", "standby"]
            wait_until(lambda: [each["state"] for each in notices(broker, "standby.all")] == ["standby"])
            assert seen_from_outside(broker, data) == before
            assert not list((data / "spark").glob("*/warm-up-*"))
            assert not notices(broker, "pipeline.all")
            assert not [path for path in (data / "logs").glob("*-driver.log") if "warmed up" in path.read_text()]
            standby.process.send_signal(signal.SIGTERM)
            assert (standby.ends(), standby.err) == (0, "")
            assert seen_from_outside(broker, data) == before
            assert notices(broker, "standby.all")[-1]["stopped"]
        finally:
            standby.close()


class Pair(Installation):
    """An installation with two pipelines: one runs the parts, and the other one stands by."""

    @property
    def pipeline(self) -> Pipeline:
        """The one that runs the parts: of those that live, the oldest; in the end the one that was stopped."""
        return next((each for each in self.pipelines if each.process.poll() is None), self.pipelines[-1])

    def drained(self) -> bool:
        """Whether all parts have reached the ends, by their positions: `ldif` holds what is done for minutes."""
        reached = {name: part.get("position", 0) for name, part in self.pipeline.status().items()}
        if self.last("ldif") < len(self.directory.expected) or reached["transform"] < self.last("ldif"):
            return False
        last = self.last("incoming")
        return reached["dispatch"] >= last and archived_until(self.data / "archive") >= last

    def start_standby(self) -> None:
        self.start()
        self.pipelines[-1].wait_for("standby")

    def kill_active(self, *, with_engine: bool) -> None:
        """Kill the active program, with its JVM or alone: then the standby has to end the JVM."""
        active = self.pipeline
        engine = active.engine()
        if with_engine:
            active.kill()
        else:
            active.kill_program()
        self.pipeline.wait_for("ready")
        wait_until(lambda: not alive(engine))
        assert record_lock_holder(self.data / "checkpoints" / "archive.engine.lock") == self.pipeline.engine()


@pytest.fixture
def pair(own_server: OwnServer, data: Path) -> Iterator[Pair]:
    made = Pair(own_server(SAFE, directory=data / "nats"), data, chance("kill -9 of the active pipeline"))
    yield made
    made.close()


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.first
def test_a_take_over_under_load_loses_doubles_and_disorders_nothing(pair: Pair, request: pytest.FixtureRequest) -> None:
    for each in (WIDE, EXACT):
        pair.add(each)
    pair.pipeline.wait_for("ready")
    random: Random = pair.random
    for number in range(KILLS):
        pair.start_standby()
        before = pair.last("wide")
        changes, direct = CHANGES // (KILLS + 1), DIRECT // (KILLS + 1)
        pair.feed(changes // 2, direct)
        wait_until(partial(lambda seen: pair.last("wide") > seen, before), seconds=PATIENCE_SECONDS)
        pair.feed(changes - changes // 2, 0)
        time.sleep(random.uniform(0, 1))  # wherever it is then
        pair.kill_active(with_engine=number % 2 == 0)
    pair.feed(CHANGES - len(pair.directory.expected), DIRECT - len(pair.direct))
    pair.drain()
    pair.check(request.getfixturevalue("spark"), (WIDE, EXACT))
