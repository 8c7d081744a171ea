"""The telemetry of a process starts and stops with it, according to its settings."""

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest

from purveyor.app.cli.up import EventPrinter
from purveyor.app.settings import LogFormat, Settings
from purveyor.app.telemetry.setup import telemetry
from purveyor.app.up.managed_process import LOG, ManagedProcess, Part, PartEvent, UpOptions, make_parts
from purveyor.jetstream.server.readiness import free_port
from tests.support.metrics_page import answers
from tests.support.waiting import until, wait_until

OURS = logging.getLogger("purveyor.somewhere")


def test_a_port_is_served_as_long_as_the_part_lives(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    with telemetry(Settings(data_dir=tmp_path, metrics_port=port), "push", lambda: ()):
        wait_until(lambda: answers(port))
    assert not answers(port)


def test_a_part_that_draws_is_quiet_until_it_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with telemetry(Settings(data_dir=tmp_path), "pipeline", draws=True):
        assert not any(isinstance(each, logging.StreamHandler) for each in logging.getLogger("purveyor").handlers)
    with telemetry(Settings(data_dir=tmp_path, log_format=LogFormat.JSON), "pipeline", draws=True):
        OURS.warning("slow", extra={"position": 7})
    line = json.loads(capsys.readouterr().err)
    assert (line["part"], line["message"], line["position"]) == ("pipeline", "slow", 7)


def test_up_gives_push_the_port_behind_that_of_the_pipeline() -> None:
    wanted = UpOptions(push=("--metrics-port", "9101"))
    commands = {part.name: part.command for part in make_parts(wanted)}
    assert commands["push"][-2:] == ("--metrics-port", "9101")


def test_up_passes_logs_on_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    code = """
import sys, time
sys.stderr.write('{"level": "warning", "message": "slow"}\\\\n')
sys.stderr.flush()
print('{"event": "ready"}', flush=True)
time.sleep(60)
"""
    heard: list[PartEvent] = []

    async def run() -> None:
        process = ManagedProcess(
            Part("API", (sys.executable, "-c", code.replace("\\\\n", "\\n")), grace_seconds=5), heard.append
        )
        running = asyncio.create_task(process.run())
        await until(process.ready.is_set)
        await until(lambda: any(event.event == LOG for event in heard))
        await process.stop()
        await running

    asyncio.run(run())
    for event in heard:
        EventPrinter(json=False).print(event)
    said = capsys.readouterr()
    assert said.err == '{"level": "warning", "message": "slow"}\n'
    assert "slow" not in said.out
