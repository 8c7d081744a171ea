"""Begins the telemetry of a long-running part, as its settings say: logs, traces, and a port for Prometheus."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

from purveyor.app.settings import LogLevel, Settings
from purveyor.app.telemetry.logs import logging_to
from purveyor.app.telemetry.metrics_server import Read, exporting
from purveyor.app.telemetry.traces import tracing_to

_LOGS: Final = frozenset({"log_format", "log_level"})


@contextlib.contextmanager
def telemetry(settings: Settings, part: str, read: Read | None = None, *, draws: bool = False) -> Iterator[None]:
    """As long as the block lasts. With `read`, Prometheus is answered at the port that is set; the API has its own.

    A part that draws on the terminal has no logs there unless somebody asks for them: they are in its file.
    """
    with contextlib.ExitStack() as stack:
        if not draws or settings.model_fields_set & _LOGS:
            debug = logging.getLogger().isEnabledFor(logging.DEBUG)  # the flag --debug
            level, libraries = (LogLevel.DEBUG,) * 2 if debug else (settings.log_level, LogLevel.WARNING)
            stack.enter_context(logging_to(settings.log_format, level, {"part": part}, libraries=libraries))
        stack.enter_context(tracing_to(settings.otel_endpoint, part))
        if read is not None:
            stack.enter_context(exporting(settings.metrics_port, read, host=settings.metrics_host))
        yield
