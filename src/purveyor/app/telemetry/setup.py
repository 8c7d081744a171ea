"""Starts the telemetry of a long-running process from its settings: logs, traces, and a port for Prometheus.

A module of its own because only long-running commands may import structlog and the others.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

from purveyor.app.settings import LogLevel, Settings
from purveyor.app.telemetry.logs import configure_logging
from purveyor.app.telemetry.prometheus import Read, serve_metrics
from purveyor.app.telemetry.traces import export_traces

_LOGS: Final = frozenset({"log_format", "log_level"})


@contextlib.contextmanager
def telemetry(settings: Settings, part: str, read: Read | None = None, *, draws: bool = False) -> Iterator[None]:
    """Run telemetry until the end of the block. With `read`, serve metrics at the port of the settings.

    A process that draws on the terminal (`draws`) logs there only if the settings ask for logs: its log file has them.
    """
    with contextlib.ExitStack() as stack:
        if not draws or settings.model_fields_set & _LOGS:
            debug = logging.getLogger().isEnabledFor(logging.DEBUG)  # the flag --debug
            level, libraries = (LogLevel.DEBUG,) * 2 if debug else (settings.log_level, LogLevel.WARNING)
            stack.enter_context(configure_logging(settings.log_format, level, {"part": part}, libraries=libraries))
        stack.enter_context(export_traces(settings.otel_endpoint, part))
        if read is not None:
            stack.enter_context(serve_metrics(settings.metrics_port, read, host=settings.metrics_host))
        yield
