"""The metrics port of processes without an HTTP API."""

import socket
import urllib.error
import urllib.request
from datetime import UTC, datetime

import pytest

from purveyor.app.telemetry import prometheus
from purveyor.app.telemetry.pipeline_metrics import PipelineMetrics
from purveyor.app.telemetry.prometheus import serve_metrics
from purveyor.jetstream.server.server_checks import free_port
from purveyor.model.metrics import MIGRATION_WAITS, WaitTracker
from purveyor.pipeline.part_status import PartProgress, PartStatus, State
from tests.support.metrics_page import HOST, MetricsPage, answers, fetch
from tests.support.waiting import wait_until


class Silent:
    def report_step(self, event: str, text: str) -> None: ...

    def report_parts(self, parts: object) -> None: ...


def part(batch: int, lag: int, milliseconds: int = 80) -> PartStatus:
    progress = PartProgress(
        position=100 + batch, lag=lag, rows=5, rows_per_second=50.0, batch=batch, batch_ms=milliseconds
    )
    return PartStatus(name="dispatch", state=State.RUNNING, since=datetime.now(UTC), progress=progress, restarts=2)


def test_the_metrics_of_pipeline_parts_are_served() -> None:
    figures = PipelineMetrics(Silent())
    port = free_port(HOST)
    with serve_metrics(port, figures.read):
        wait_until(lambda: answers(port))
        figures.report_parts([part(4, 9)])
        before = MetricsPage(fetch(port))
        figures.report_parts([part(7, 3)])
        figures.report_parts([part(7, 3)])
        after = MetricsPage(fetch(port))
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
    with serve_metrics(port):
        wait_until(lambda: answers(port))
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(port, "/passwords.toml")
        with socket.create_connection((HOST, port)) as rude:
            rude.sendall(b"\x00\xff rubbish\r\n\r\n")
            rude.recv(100)
        assert "purveyor_build_info" in fetch(port)
    assert not answers(port)


def test_a_client_that_sends_byte_by_byte_does_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_REQUEST_TIMEOUT_SECONDS", 1.0)
    port = free_port(HOST)
    with serve_metrics(port):
        wait_until(lambda: answers(port))
        with socket.create_connection((HOST, port), timeout=120) as slow:

            def is_disconnected() -> bool:
                try:
                    slow.sendall(b"G")
                    slow.settimeout(0.05)
                    return slow.recv(1) == b""
                except TimeoutError:
                    return False
                except OSError:
                    return True

            wait_until(is_disconnected)
            assert "purveyor_build_info" in fetch(port)


def test_a_standby_gets_the_port_when_it_is_free() -> None:
    port = free_port(HOST)
    with serve_metrics(port):
        wait_until(lambda: answers(port))
        standby = serve_metrics(port)
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


def test_waits_of_a_task_reach_its_driver() -> None:
    task, driver = WaitTracker(), WaitTracker()
    assert task.take_finished() is None
    task.end(task.begin("incoming", 3))
    driver.add_finished(task.take_finished())
    driver.add_finished(task.take_finished())
    assert task.values() == {}
    assert driver.values()["incoming"].ever == 1
