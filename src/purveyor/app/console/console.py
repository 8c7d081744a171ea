"""The console of one API process: the objects that its pages use. It lives as long as the API.

NiceGUI knows one application per process, so there is one console per process.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from starlette.types import ASGIApp

from purveyor.app.console.console_login import Sessions
from purveyor.app.console.snapshot import Collector
from purveyor.app.http.authentication import Authenticator
from purveyor.app.http.context import ApiObjects, Services
from purveyor.app.subscription_input import PushInput
from purveyor.jetstream.address import Address
from purveyor.model.errors import InvalidConfig
from purveyor.queues.catalogue import DEFAULT_GROUP
from purveyor.queues.client import Queues, connect

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleOptions:
    """Options of the console."""

    secret: bytes = field(repr=False)
    """The key that signs sessions."""
    find_operator: Callable[[], Address] = field(repr=False)
    """Returns the server address with operator rights: to migrate queues, and to read queues that the API may not."""
    data_dir: Path
    replicas: int = 1
    group: str = DEFAULT_GROUP


class Console:
    """The console: the collector, the sessions, and access to the services of the API."""

    def __init__(self, api: ApiObjects, options: ConsoleOptions, sessions: Sessions) -> None:
        self._api = api
        self._stack = contextlib.AsyncExitStack()
        self.options = options
        self.sessions = sessions
        self.collector = Collector(lambda: api.services)

    @property
    def services(self) -> Services:
        """The services of the API."""
        return self._api.services

    @property
    def authenticator(self) -> Authenticator:
        """The authenticator of the API."""
        return self._api.authenticator

    @property
    def push(self) -> PushInput:
        """The check of push settings."""
        return self._api.push

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Collect snapshots until the end of the block."""
        collecting = asyncio.create_task(self.collector.run())
        try:
            async with self._stack:
                yield
        finally:
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)

    async def build_app(self) -> ASGIApp:
        """Build the pages. `ConsoleMiddleware` calls this for the first session."""
        global _has_console  # noqa: PLW0603 - NiceGUI allows one application per process
        if _has_console:
            raise InvalidConfig("a second console in one process", fix="give one of the APIs no console")
        _has_console = True
        build_pages = await asyncio.to_thread(_import_pages)
        app, lifespan = build_pages(self)
        await self._stack.enter_async_context(lifespan)
        return app

    async def as_operator(self, work: Callable[[Queues], Awaitable[T]]) -> T:
        """Do work that needs operator rights, on its own connection."""
        where = self.options.find_operator()
        async with connect(where, name="purveyor-console", patience_seconds=10) as queues:
            return await work(queues)


_has_console = False


def _import_pages() -> "Callable[[Console], tuple[ASGIApp, contextlib.AbstractAsyncContextManager[object]]]":
    from purveyor.app.console.asgi_app import build_pages  # noqa: PLC0415 - imports NiceGUI: see `console_login`

    return build_pages
