"""The telemetry of a part begins and ends with it, as its settings say."""

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest

from purveyor.app.cli.up import Teller
from purveyor.app.settings import LogFormat, Settings
from purveyor.app.telemetry.setup import telemetry
from purveyor.app.up.managed_process import LOG, Keeper, News
from purveyor.app.up.processes import Part, Wanted, parts
from purveyor.jetstream.server.readiness import free_port
from tests.app.telemetry.test_metrics_server import answers
from tests.waiting import until, wait_until

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
    wanted = Wanted(push=("--metrics-port", "9101"))
    commands = {part.name: part.command for part in parts(wanted)}
    assert commands["push"][-2:] == ("--metrics-port", "9101")


def test_up_passes_logs_on_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    code = """
import sys, time
sys.stderr.write('{"level": "warning", "message": "slow"}\\\\n')
sys.stderr.flush()
print('{"event": "ready"}', flush=True)
time.sleep(60)
"""
    heard: list[News] = []

    async def run() -> None:
        keeper = Keeper(
            Part("API", (sys.executable, "-c", code.replace("\\\\n", "\\n")), grace_seconds=5), heard.append
        )
        running = asyncio.create_task(keeper.run())
        await until(keeper.ready.is_set)
        await until(lambda: any(news.event == LOG for news in heard))
        await keeper.stop()
        await running

    asyncio.run(run())
    for news in heard:
        Teller(json=False)(news)
    said = capsys.readouterr()
    assert said.err == '{"level": "warning", "message": "slow"}\n'
    assert "slow" not in said.out
