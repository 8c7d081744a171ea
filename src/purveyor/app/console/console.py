"""The console of one API process: what its pages stand on, made and ended with the API.

NiceGUI knows one application per process, so there is one console per process.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from starlette.types import ASGIApp

from purveyor.app.console.collector import Gatherer
from purveyor.app.console.sessions import Sessions
from purveyor.app.http.authentication import Security
from purveyor.app.http.context import Services
from purveyor.app.push_input import PushEdge
from purveyor.jetstream.address import Address
from purveyor.model.errors import InvalidConfig
from purveyor.queues.catalogue import DEFAULT_GROUP
from purveyor.queues.client import Queues, connect

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleOptions:
    """What the console needs to be told."""

    secret: bytes = field(repr=False)
    """What sessions are signed with."""
    find_operator: Callable[[], Address] = field(repr=False)
    """Where the server is for who may do everything: to migrate, and to read queues that the API has no business in."""
    data_dir: Path
    replicas: int = 1
    group: str = DEFAULT_GROUP


class RunningApi(Protocol):
    """The API that the console is a part of."""

    security: Security
    push: PushEdge

    @property
    def services(self) -> Services:
        """Its services; raises an `Unavailable` while the server is away."""


class Console:
    """See the module."""

    def __init__(self, api: RunningApi, options: ConsoleOptions, sessions: Sessions) -> None:
        self._api = api
        self._stack = contextlib.AsyncExitStack()
        self.options = options
        self.sessions = sessions
        self.gatherer = Gatherer(lambda: api.services)

    @property
    def services(self) -> Services:
        """The services of the API."""
        return self._api.services

    @property
    def security(self) -> Security:
        """The logins of the API."""
        return self._api.security

    @property
    def push(self) -> PushEdge:
        """What push may reach, and how its secrets are kept."""
        return self._api.push

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """As long as the API runs."""
        looking = asyncio.create_task(self.gatherer.run())
        try:
            async with self._stack:
                yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def inside(self) -> ASGIApp:
        """The pages; made when somebody asks for the first."""
        global _taken  # noqa: PLW0603 - NiceGUI has one application per process, and so have we
        if _taken:
            raise InvalidConfig("a second console in one process", fix="give one of the APIs no console")
        _taken = True
        build = await asyncio.to_thread(_build)
        app, lifespan = build(self)
        await self._stack.enter_async_context(lifespan)
        return app

    async def as_operator(self, work: Callable[[Queues], Awaitable[T]]) -> T:
        """Do what the API itself may not, on a connection of its own that ends with it."""
        where = self.options.find_operator()
        async with connect(where, name="purveyor-console", patience_seconds=10) as queues:
            return await work(queues)


_taken = False


def _build() -> "Callable[[Console], tuple[ASGIApp, contextlib.AbstractAsyncContextManager[object]]]":
    from purveyor.app.console.asgi_app import build  # noqa: PLC0415 - brings NiceGUI: see `door`

    return build
