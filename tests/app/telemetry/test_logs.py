"""Logs of the standard library as lines for people or for programs."""

import contextlib
import io
import json
import logging
from typing import Any

from purveyor.app.settings import LogFormat, LogLevel
from purveyor.app.telemetry.logs import configure_logging
from purveyor.model import tracing
from tests.support.command_line import Cli, invoke

LOG = logging.getLogger("purveyor.delivery.test")
PARENT = {"traceparent": f"00-{'a1' * 16}-{'b2' * 8}-01"}


def said(form: LogFormat, level: LogLevel = LogLevel.INFO) -> str:
    stream = io.StringIO()
    with configure_logging(form, level, {"part": "api"}, stream):
        LOG.info("stored %s at %d", "e-1", 7, extra={"position": 7, "subscription": "ox"})
        LOG.debug("not asked for")
        LOG.warning("a name\nwith \x1b[31mtricks")
        try:
            secret = "hunter2"
            raise ValueError(len(secret))
        except ValueError:
            LOG.exception("it failed")
        logging.getLogger("somelibrary").info("chatter")
        logging.getLogger("somelibrary").error("trouble")
    return stream.getvalue()


def test_json_is_one_object_a_line_with_positions_and_ids() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in said(LogFormat.JSON).splitlines()]
    assert [line["message"] for line in lines] == [
        "stored e-1 at 7",
        "a name\nwith \x1b[31mtricks",
        "it failed",
        "trouble",
    ]
    first = lines[0]
    assert (first["level"], first["logger"], first["part"]) == ("info", LOG.name, "api")
    assert (first["position"], first["subscription"]) == (7, "ox")
    assert first["at"].endswith("Z")
    assert "ValueError: 7" in lines[2]["exception"]
    assert "hunter2" not in lines[2]["exception"]  # a trace, not the values of variables


def test_text_is_for_people_and_cannot_be_forged() -> None:
    text = said(LogFormat.TEXT)
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
            LOG.info("inside")
        LOG.info("nobody hears this")
    finally:
        tracing.install_tracer(None)
    (line,) = stream.getvalue().splitlines()
    assert (json.loads(line)["trace_id"], json.loads(line)["span_id"]) == ("a1" * 16, "b2" * 8)


def test_libraries_say_no_more_at_our_debug_level() -> None:
    assert "not asked for" in said(LogFormat.TEXT, LogLevel.DEBUG)
    assert "chatter" not in said(LogFormat.TEXT, LogLevel.DEBUG)


def test_logging_is_restored_afterwards() -> None:
    loggers = logging.getLogger(), logging.getLogger("purveyor")

    def configuration() -> list[tuple[list[logging.Handler], int, bool]]:
        return [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]

    before = configuration()
    said(LogFormat.JSON)
    assert configuration() == before


def test_an_invalid_format_or_level_is_an_error(cli: Cli, monkeypatch: Any) -> None:
    monkeypatch.setenv("PURVEYOR_LOG_FORMAT", "yaml")
    invoke("serve", "api").refused("log_format", "PURVEYOR_LOG_FORMAT")
    monkeypatch.setenv("PURVEYOR_LOG_FORMAT", "json")
    monkeypatch.setenv("PURVEYOR_OTEL_ENDPOINT", "collector:4317")
    invoke("serve", "api").refused("otel_endpoint", "4318")
