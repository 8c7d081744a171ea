"""The API includes the metrics of the other processes on its data directory, and says which of them do not answer."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from purveyor.app.running_parts import announce
from purveyor.app.telemetry import metric_catalogue, part_metrics
from purveyor.app.telemetry.part_metrics import PartMetrics
from purveyor.app.telemetry.prometheus import MetricValues, render, serve_metrics
from purveyor.model.metrics import DELIVERED
from tests.support.metrics_page import MetricsPage

PART = (
    "import sys, time; from pathlib import Path; from purveyor.app.running_parts import announce\n"
    "from purveyor.app.telemetry.prometheus import serve_metrics; from purveyor.model.metrics import DELIVERED\n"
    "DELIVERED.add('ox', by=int(sys.argv[3]))\n"
    "with serve_metrics(0) as url, announce(Path(sys.argv[1]), sys.argv[2], metrics_url=url):\n"
    "    print('ready', flush=True); time.sleep(600)"
)


@contextmanager
def running(data: Path, part: str, delivered: int) -> "Iterator[subprocess.Popen[str]]":
    program = [sys.executable, "-c", PART, str(data), part, str(delivered)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


async def page(data: Path | None) -> MetricsPage:
    found = await PartMetrics(data).read()
    up = MetricValues(metric_catalogue.SERVER_UP, {(): 1.0})
    return MetricsPage(render([up, found.up], found.pages).decode())


async def test_one_page_has_the_metrics_of_all_processes(tmp_path: Path) -> None:
    with running(tmp_path, "push", 3), running(tmp_path, "pipeline", 5), announce(tmp_path, "api", url="http://x"):
        both = await page(tmp_path)
        assert both.get("messages_delivered_total", subscription="ox", process="push") == 3
        assert both.get("messages_delivered_total", subscription="ox", process="pipeline") == 5
        assert [both.get("process_up", process=name) for name in ("push", "pipeline", "api")] == [1, 1, None]
        assert both.get("nats_up") == 1
        with running(tmp_path, "push", 7):
            third = await page(tmp_path)
            assert third.get("messages_delivered_total", subscription="ox", process="push") == 3
            assert third.get("messages_delivered_total", subscription="ox", process="push-2") == 7
    assert (await page(None)).get("process_up", process="push") is None


async def test_a_process_that_hangs_or_was_killed_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, "pipeline", 1) as process:
        with monkeypatch.context() as impatient:
            impatient.setattr(part_metrics, "_TIMEOUT_SECONDS", 0.2)
            process.send_signal(signal.SIGSTOP)
            frozen = await page(tmp_path)
            assert frozen.get("process_up", process="pipeline") == 0
            assert frozen.get("messages_delivered_total", subscription="ox", process="pipeline") is None
        process.send_signal(signal.SIGCONT)
        assert (await page(tmp_path)).get("process_up", process="pipeline") == 1
        process.kill()
        process.wait()
        assert (await page(tmp_path)).get("process_up", process="pipeline") == 0


async def test_a_page_that_is_damaged_hides_no_other(tmp_path: Path) -> None:
    assert b"purveyor_build_info" in render([], {"push": b"half a {page", "pipeline": b"\xff"})


async def test_processes_on_one_port_keep_their_names_and_leave_other_apis_out(tmp_path: Path) -> None:
    ours, other = "http://127.0.0.1:1", "http://127.0.0.1:2"
    with (
        serve_metrics(0) as page_url,
        announce(tmp_path, "api", url=ours, metrics_url=page_url, worker=2),
        announce(tmp_path, "api", url=other, metrics_url=page_url, worker=3),
        announce(tmp_path, "api", url=ours, metrics_url=page_url, worker=1),
    ):
        found = await PartMetrics(tmp_path, ours).read()
        assert {*found.pages} == {"api-1", "api-2"}
        assert found.up.values == {("api-1",): True, ("api-2",): True}
        assert (await PartMetrics(tmp_path).read()).pages == {}


def test_a_page_of_one_of_several_processes_names_the_process_of_each_series() -> None:
    DELIVERED.add("own", by=2)
    up = MetricValues(metric_catalogue.SERVER_UP, {(): 1.0})
    for others in ({}, {"api-1": b"", "api-2": render()}):
        shown = MetricsPage(render([up], others, "api-1").decode())
        assert shown.get("messages_delivered_total", subscription="own") is None
        assert (shown.get("messages_delivered_total", subscription="own", process="api-1") or 0) >= 2
        assert shown.get("nats_up") == 1
