"""Starts the telemetry of a long-running process from its settings: logs, traces, and a port for Prometheus.

Only long-running commands import this module, because it imports structlog and the others. Logs go to standard error:
lines for people, or one JSON object per line for programs. All other code logs with the standard library; its `extra`
values (positions, ids, names) become fields.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final, TextIO

import structlog

from purveyor.app.cli.output import escape
from purveyor.app.settings import LogFormat, LogLevel, Settings
from purveyor.app.telemetry.prometheus import Read, serve_metrics
from purveyor.app.telemetry.traces import export_traces
from purveyor.model import tracing

PACKAGE: Final = "purveyor"
_LOGS: Final = frozenset({"log_format", "log_level"})
_TRACE: Final = ("trace_id", "span_id")
Line = MutableMapping[str, Any]


@contextlib.contextmanager
def telemetry(settings: Settings, part: str, read: Read | None = None, *, draws: bool = False) -> Iterator[str | None]:
    """Run telemetry until the end of the block. With `read`, serve metrics at the port of the settings.

    The block gets the URL of metrics that the API includes in its own; None if the API does not.

    A process that draws on the terminal (`draws`) logs there only if the settings ask for logs: its log file has them.
    """
    with contextlib.ExitStack() as stack:
        if not draws or settings.model_fields_set & _LOGS:
            debug = logging.getLogger().isEnabledFor(logging.DEBUG)  # the flag --debug
            level, libraries = (LogLevel.DEBUG,) * 2 if debug else (settings.log_level, LogLevel.WARNING)
            stack.enter_context(configure_logging(settings.log_format, level, {"part": part}, libraries=libraries))
        stack.enter_context(export_traces(settings.otel_endpoint, part))
        port = None if read is None else settings.metrics_port
        yield stack.enter_context(serve_metrics(port, read or tuple, host=settings.metrics_host))


@contextlib.contextmanager
def configure_logging(
    form: LogFormat,
    level: LogLevel,
    about: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
    *,
    libraries: LogLevel = LogLevel.WARNING,
) -> Iterator[None]:
    """Send the logs of this process to standard error in this form until the end of the block.

    Every line contains `about`. `level` is for Purveyor's own loggers, `libraries` for all others: their debug lines
    may hold secrets (the bridge to Spark repeats every call).
    """
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(),
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            _add_trace_ids,
            _add_fields(about or {}),
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(form, stream)],
    )
    own_level = logging.getLevelNamesMapping()[level.name]
    library_handler = logging.StreamHandler(stream or sys.stderr)
    library_handler.addFilter(lambda record: not record.name.startswith(PACKAGE))
    own_handler = logging.StreamHandler(stream or sys.stderr)
    for handler in (library_handler, own_handler):
        handler.setFormatter(formatter)
    library_level = max(own_level, logging.getLevelNamesMapping()[libraries.name])
    package = logging.getLogger(PACKAGE)
    with (
        _replace_handlers(logging.getLogger(), library_handler, library_level),
        _replace_handlers(package, own_handler, own_level),
    ):
        # Not through the root logger: the pipeline also writes our own lines to a file.
        package.propagate = False
        yield


@contextlib.contextmanager
def _replace_handlers(logger: logging.Logger, handler: logging.Handler, level: int) -> Iterator[None]:
    """Give a logger only this handler until the end of the block."""
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
        logger.setLevel(before[1])


def _renderers(form: LogFormat, stream: TextIO | None) -> list[Any]:
    if form is LogFormat.JSON:
        return [
            structlog.processors.format_exc_info,  # as text: variables may hold secrets
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(default=str),
        ]
    return [
        _escape_event,
        structlog.dev.ConsoleRenderer(
            colors=(stream or sys.stderr).isatty(),
            timestamp_key="at",
            pad_event_to=0,
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def _escape_event(_logger: object, _method: str, line: Line) -> Line:
    """Escape control characters: outside text must not forge log lines or control the terminal."""
    line["event"] = escape(str(line["event"]))
    return line


def _add_trace_ids(_logger: object, _method: str, line: Line) -> Line:
    """Add the ids of the current span, if there is one."""
    current = tracing.current_carrier()
    if current is not None:
        line.update(zip(_TRACE, tracing.trace_ids(current), strict=True))
    return line


def _add_fields(about: Mapping[str, str]) -> Callable[[object, str, Line], Line]:
    def add(_logger: object, _method: str, line: Line) -> Line:
        line.update(about)
        return line

    return add
