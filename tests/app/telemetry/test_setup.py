"""The telemetry of a process starts and stops with it; logs are lines for people or for programs."""

import asyncio
import contextlib
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from purveyor.app.cli.up import EventPrinter
from purveyor.app.settings import LogFormat, LogLevel, Settings
from purveyor.app.telemetry.setup import configure_logging, telemetry
from purveyor.app.up.supervisor import LOG, ManagedProcess, Part, PartEvent, UpOptions, make_parts
from purveyor.jetstream.server.server_checks import free_port
from purveyor.model import tracing
from tests.support.command_line import Cli, invoke
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
    received: list[PartEvent] = []

    async def run() -> None:
        process = ManagedProcess(
            Part("API", (sys.executable, "-c", code.replace("\\\\n", "\\n")), grace_seconds=5), received.append
        )
        running = asyncio.create_task(process.run())
        await until(process.ready.is_set)
        await until(lambda: any(event.event == LOG for event in received))
        await process.stop()
        await running

    asyncio.run(run())
    for event in received:
        EventPrinter(json=False).print(event)
    reported = capsys.readouterr()
    assert reported.err == '{"level": "warning", "message": "slow"}\n'
    assert "slow" not in reported.out


LOGGER = logging.getLogger("purveyor.delivery.test")
PARENT = {"traceparent": f"00-{'a1' * 16}-{'b2' * 8}-01"}


def logged(form: LogFormat, level: LogLevel = LogLevel.INFO) -> str:
    stream = io.StringIO()
    with configure_logging(form, level, {"part": "api"}, stream):
        LOGGER.info("stored %s at %d", "e-1", 7, extra={"position": 7, "subscription": "ox"})
        LOGGER.debug("not asked for")
        LOGGER.warning("a name\nwith \x1b[31mtricks")
        try:
            secret = "hunter2"
            raise ValueError(len(secret))
        except ValueError:
            LOGGER.exception("it failed")
        logging.getLogger("somelibrary").info("chatter")
        logging.getLogger("somelibrary").error("trouble")
    return stream.getvalue()


def test_json_is_one_object_a_line_with_positions_and_ids() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in logged(LogFormat.JSON).splitlines()]
    assert [line["message"] for line in lines] == [
        "stored e-1 at 7",
        "a name\nwith \x1b[31mtricks",
        "it failed",
        "trouble",
    ]
    first = lines[0]
    assert (first["level"], first["logger"], first["part"]) == ("info", LOGGER.name, "api")
    assert (first["position"], first["subscription"]) == (7, "ox")
    assert first["at"].endswith("Z")
    assert "ValueError: 7" in lines[2]["exception"]
    assert "hunter2" not in lines[2]["exception"]  # a trace, not the values of variables


def test_text_is_for_people_and_cannot_be_forged() -> None:
    text = logged(LogFormat.TEXT)
    assert "stored e-1 at 7" in text
    assert "position=7" in text
    assert r"a name\nwith \x1b[31mtricks" in text
    assert "hunter2" not in text
    assert "chatter" not in text


def test_a_log_line_has_the_ids_of_its_span() -> None:
    class Echo:
        def span(self, *_: object) -> Any:
            return contextlib.nullcontext(PARENT)

        def record(self, *_: object) -> None: ...

        def link(self, *_: object) -> None: ...

    stream = io.StringIO()
    tracing.install_tracer(Echo())
    try:
        with configure_logging(LogFormat.JSON, LogLevel.INFO, stream=stream), tracing.span("accept"):
            LOGGER.info("inside")
        LOGGER.info("nobody hears this")
    finally:
        tracing.install_tracer(None)
    (line,) = stream.getvalue().splitlines()
    assert (json.loads(line)["trace_id"], json.loads(line)["span_id"]) == ("a1" * 16, "b2" * 8)


def test_libraries_say_no_more_at_our_debug_level() -> None:
    assert "not asked for" in logged(LogFormat.TEXT, LogLevel.DEBUG)
    assert "chatter" not in logged(LogFormat.TEXT, LogLevel.DEBUG)


def test_logging_is_restored_afterwards() -> None:
    loggers = logging.getLogger(), logging.getLogger("purveyor")

    def configuration() -> list[tuple[list[logging.Handler], int, bool]]:
        return [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]

    before = configuration()
    logged(LogFormat.JSON)
    assert configuration() == before


def test_an_invalid_format_or_level_is_an_error(cli: Cli, monkeypatch: Any) -> None:
    monkeypatch.setenv("PURVEYOR_LOG_FORMAT", "yaml")
    invoke("serve", "api").refused("log_format", "PURVEYOR_LOG_FORMAT")
    monkeypatch.setenv("PURVEYOR_LOG_FORMAT", "json")
    monkeypatch.setenv("PURVEYOR_OTEL_ENDPOINT", "collector:4317")
    invoke("serve", "api").refused("otel_endpoint", "4318")
