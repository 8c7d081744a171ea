"""Logs of long-running parts: lines for people, or one JSON object a line for programs; on standard error.

Parts log with the standard library and know nothing of this; what they pass as `extra` (positions, ids, names) becomes
fields. Only here structlog is known.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final, TextIO

import structlog

from purveyor.app.cli.sanitize import safe
from purveyor.app.settings import LogFormat, LogLevel
from purveyor.model import tracing

PACKAGE: Final = "purveyor"
_TRACE: Final = ("trace_id", "span_id")
Line = MutableMapping[str, Any]


@contextlib.contextmanager
def logging_to(
    form: LogFormat,
    level: LogLevel,
    about: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
    *,
    libraries: LogLevel = LogLevel.WARNING,
) -> Iterator[None]:
    """Send the logs of this process to standard error in that form, as long as the block lasts.

    `about` stands in every line. Our own are told from `level` on, those of `libraries` from theirs: what they say in
    detail (the bridge to Spark repeats every call) may hold secrets.
    """
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(),
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
            _traced,
            _adding(about or {}),
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(form, stream)],
    )
    number = logging.getLevelNamesMapping()[level.name]
    others = logging.StreamHandler(stream or sys.stderr)
    others.addFilter(lambda record: not record.name.startswith(PACKAGE))
    ours = logging.StreamHandler(stream or sys.stderr)
    for handler in (others, ours):
        handler.setFormatter(formatter)
    apart = max(number, logging.getLevelNamesMapping()[libraries.name])
    package = logging.getLogger(PACKAGE)
    with _instead(logging.getLogger(), others, apart), _instead(package, ours, number):
        # Not by way of the root: the pipeline sends what is ours to a file as well, and no further.
        package.propagate = False
        yield


@contextlib.contextmanager
def _instead(logger: logging.Logger, handler: logging.Handler, level: int) -> Iterator[None]:
    """A logger with this handler instead of those that it had."""
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
            structlog.processors.format_exc_info,  # as text: with the values of variables it would tell secrets
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(default=str),
        ]
    return [
        _readable,
        structlog.dev.ConsoleRenderer(
            colors=(stream or sys.stderr).isatty(),
            timestamp_key="at",
            pad_event_to=0,
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def _readable(_logger: object, _method: str, line: Line) -> Line:
    """What comes from outside cannot forge a line of its own, or speak to the terminal."""
    line["event"] = safe(str(line["event"]))
    return line


def _traced(_logger: object, _method: str, line: Line) -> Line:
    """The span in which a line was written, if there is one."""
    current = tracing.current()
    if current is not None:
        line.update(zip(_TRACE, tracing.ids(current), strict=True))
    return line


def _adding(about: Mapping[str, str]) -> Callable[[object, str, Line], Line]:
    def add(_logger: object, _method: str, line: Line) -> Line:
        line.update(about)
        return line

    return add
