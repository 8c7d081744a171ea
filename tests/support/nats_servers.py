"""Servers that belong to one test."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from purveyor.jetstream.server import EmbeddedServer, ServerEvent, ServerOptions

FAST = ServerOptions(sync="2m")
"""Options for tests without a power cut: the server does not sync each write."""


class OwnServer(Protocol):
    """Starts a server for one test, which may kill, restart and fill it."""

    def __call__(
        self,
        options: ServerOptions = ...,
        *,
        directory: Path | None = None,
        on_event: Callable[[ServerEvent], None] | None = None,
    ) -> EmbeddedServer: ...
