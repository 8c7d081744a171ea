"""`purveyor serve pipeline`: its output, its files and its exit codes."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from purveyor.jetstream.server import EmbeddedServer
from purveyor.jetstream.server.server_checks import free_port
from tests.support.broker import Broker
from tests.support.command_line import invoke, url_of
from tests.support.metrics_page import MetricsPage
from tests.support.nats_servers import OwnServer
from tests.support.pipeline_program import Pipeline
from tests.support.processes import kill
from tests.support.waiting import wait_until

EVENT = '{"publisher_name": "t", "ts": "2026-01-01T00:00:00Z", "realm": "r", "topic": "t", "body": {"new": {"id": 1}}}'


Start = Callable[..., Pipeline]


@pytest.fixture
def server(own_server: OwnServer) -> EmbeddedServer:
    return own_server()


@pytest.fixture
def start(server: EmbeddedServer, tmp_path: Path) -> Iterator[Start]:
    started: list[Pipeline] = []

    def begin(*arguments: str) -> Pipeline:
        started.append(Pipeline(tmp_path / "data", *arguments, url=url_of(server.address)))
        return started[-1]

    yield begin
    for pipeline in started:
        pipeline.close()


def test_without_a_server_the_error_says_how_to_start_one() -> None:
    invoke("--data-dir", "data", "serve", "pipeline").refused("no NATS server", "purveyor serve nats")


def test_invalid_settings_are_refused_before_the_start(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(server.address))
    invoke("serve", "pipeline", "--parts", "dispatch,dispense").refused("'dispense'", "transform,dispatch,archive")
    invoke("serve", "pipeline", "--group", "a b").refused("dispatcher_group", "'a b'", "--group")
    invoke("serve", "pipeline", "--group", "archive").refused("--group", "the archive uses this durable")
    Path("mapping.toml").write_text("realm = 7\n")
    invoke("serve", "pipeline", "--mapping", "mapping.toml").refused("mapping.toml", "realm")
    invoke("serve", "pipeline", "--mapping", "nowhere.toml").refused("nowhere.toml")
    assert not Path("xdg").exists()


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.chaos
def test_the_pipeline_runs_and_restarts_when_its_engine_dies(start: Start, server: EmbeddedServer) -> None:
    """Test several steps in one run, because every start of Spark takes seconds."""
    broker = Broker(server.address)
    port = free_port("127.0.0.1")
    first = start("--parts", "archive,prefill", "--metrics-port", str(port))
    assert first.wait_for("ready: ") == "ready: archive, prefill"
    assert first.count("starting: Spark on local[2]") == 1
    broker.add("incoming", [EVENT] * 3)
    wait_until(lambda: first.status()["archive"].get("position") == 3)
    page = MetricsPage(httpx.get(f"http://127.0.0.1:{port}/metrics").text)
    assert page.get("pipeline_position", part="archive") == 3
    assert page.get("pipeline_part_up", part="prefill") == 1
    assert (page.get("pipeline_last_batch_seconds", part="archive") or 0) > 0

    refused = start("--parts", "archive", "--no-wait")
    assert refused.ends() == 1
    assert refused.err.startswith("error: part archive of the pipeline on ")
    assert f"process {first.process.pid}" in refused.err

    standby = start("--parts", "archive,prefill", "--json")
    assert f"process {first.process.pid}" in standby.wait_for('{"event": "standby"')
    kill(first.engine())
    first.wait_for("restarting: the Spark engine has ended")
    standby.wait_for('{"event": "ready"')
    assert f"process {standby.process.pid}" in first.wait_for("standby: ")  # the same process, begun anew
    first.process.send_signal(signal.SIGTERM)
    assert (first.ends(), first.err) == (0, "")

    broker.add("incoming", [EVENT] * 2)
    wait_until(lambda: standby.status()["archive"].get("position") == 5)
    standby.process.send_signal(signal.SIGINT)
    assert (standby.ends(), standby.err) == (0, "")
    reported = [json.loads(line) for line in standby.lines]
    assert [line["event"] for line in reported][-2:] == ["stopping", "stopped"]
    assert any(line["event"] == "progress" and line.get("position") == 5 for line in reported)
    assert not list(standby.data.glob("pipeline-status*"))
    assert (standby.data / "logs" / "pipeline.log").exists()
