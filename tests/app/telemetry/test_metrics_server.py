"""The small port for Prometheus of parts that have no HTTP of their own."""

import socket
import urllib.error
import urllib.request
from datetime import UTC, datetime

import pytest

from purveyor.app.telemetry.metrics_server import exporting
from purveyor.app.telemetry.pipeline_metrics import PipelineFigures
from purveyor.jetstream.server.readiness import free_port
from purveyor.model.metric_types import Waits
from purveyor.model.metrics import MIGRATION_WAITS
from purveyor.pipeline.part_status import PartStatus, Reading, State
from tests.app.http.test_metrics import Page
from tests.waiting import wait_until

HOST = "127.0.0.1"


def fetch(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def answers(port: int) -> bool:
    try:
        fetch(port)
    except OSError:
        return False
    return True


class Silent:
    def say(self, event: str, text: str) -> None: ...

    def show(self, parts: object) -> None: ...


def part(batch: int, lag: int, milliseconds: int = 80) -> PartStatus:
    reading = Reading(position=100 + batch, lag=lag, rows=5, rows_per_second=50.0, batch=batch, batch_ms=milliseconds)
    return PartStatus(name="dispatch", state=State.RUNNING, since=datetime.now(UTC), reading=reading, restarts=2)


def test_the_parts_of_the_pipeline_are_told() -> None:
    figures = PipelineFigures(Silent())
    port = free_port(HOST)
    with exporting(port, figures.read):
        wait_until(lambda: answers(port))
        figures.show([part(4, 9)])
        before = Page(fetch(port))
        figures.show([part(7, 3)])
        figures.show([part(7, 3)])
        after = Page(fetch(port))
    assert after.get("pipeline_lag_messages", part="dispatch") == 3
    assert after.get("pipeline_position", part="dispatch") == 107
    assert after.get("pipeline_part_up", part="dispatch") == 1
    assert after.get("pipeline_restarts_total", part="dispatch") == 2
    assert after.get("pipeline_last_batch_seconds", part="dispatch") == 0.08
    assert after.since(before, "pipeline_batches_total", part="dispatch") == 3
    assert after.since(before, "pipeline_batch_seconds_count", part="dispatch") == 1
    assert after.since(before, "pipeline_batch_seconds_bucket", part="dispatch", le="0.1") == 1
    assert after.since(before, "pipeline_batch_seconds_bucket", part="dispatch", le="0.05") == 0


def test_there_is_one_page_and_no_other() -> None:
    port = free_port(HOST)
    with exporting(port):
        wait_until(lambda: answers(port))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(port, "/passwords.toml")
        with socket.create_connection((HOST, port)) as rude:
            rude.sendall(b"\x00\xff rubbish\r\n\r\n")
            rude.recv(100)
        assert "purveyor_build_info" in fetch(port)
    assert not answers(port)


def test_a_standby_gets_the_port_when_it_is_free() -> None:
    port = free_port(HOST)
    with exporting(port):
        wait_until(lambda: answers(port))
        standby = exporting(port)
        standby.__enter__()
    try:
        wait_until(lambda: answers(port))
    finally:
        standby.__exit__(None, None, None)


def test_waits_end_however_the_waiting_ends() -> None:
    number = MIGRATION_WAITS.begin("test-queue", 5)
    during = MIGRATION_WAITS.values()["test-queue"]
    assert (during.now, during.ever, during.held) == (1, 1, 5)
    MIGRATION_WAITS.end(number)
    over = MIGRATION_WAITS.values()["test-queue"]
    assert (over.now, over.ever, over.held) == (0, 1, 0)
    assert over.seconds >= during.seconds


def test_waits_of_a_task_are_told_to_its_driver() -> None:
    task, driver = Waits(), Waits()
    assert task.take() is None
    task.end(task.begin("incoming", 3))
    driver.put(task.take())
    driver.put(task.take())
    assert task.values() == {}
    assert driver.values()["incoming"].ever == 1
