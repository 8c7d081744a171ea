"""Servers that belong to one test."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from purveyor.jetstream.server import EmbeddedServer, ServerEvent, ServerOptions

FAST = ServerOptions(sync="2m")
"""For tests that do not lose power: no sync of each write."""


class OwnServer(Protocol):
    """Starts a server which belongs to one test alone: it may be killed, restarted and filled up."""

    def __call__(
        self,
        options: ServerOptions = ...,
        *,
        directory: Path | None = None,
        on_event: Callable[[ServerEvent], None] | None = None,
    ) -> EmbeddedServer: ...
