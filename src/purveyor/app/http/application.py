"""The API put together: one connection to the server, the services on it, the routes, and who may call them.

The API listens as soon as it is started. Until the server is reached, and whenever it is away, requests get a 503 that
says so; nothing has to be started in an order.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.types import ASGIApp

from purveyor import __version__
from purveyor.app.console.auth_middleware import Door
from purveyor.app.console.console import Console, ConsoleOptions
from purveyor.app.console.sessions import Sessions, admin_of
from purveyor.app.http import (
    dead_letters,
    events,
    health,
    messages,
    metrics,
    problems,
    schemas,
    subscriptions,
    tokens,
    topics,
)
from purveyor.app.http.auth_middleware import Guard
from purveyor.app.http.authentication import Login, Security
from purveyor.app.http.context import Services
from purveyor.app.http.fast_path import Express
from purveyor.app.push_input import PushEdge
from purveyor.app.telemetry.queue_metrics import QueueFigures
from purveyor.delivery.credentials import Credentials, ended_session
from purveyor.delivery.dead_letters.service import DeadLetters
from purveyor.delivery.expiry import Expiry
from purveyor.delivery.password_hashing import Hasher
from purveyor.delivery.pull import Pull
from purveyor.delivery.registration_cache import Gate
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.model.errors import PurveyorError, ServerUnavailable, Unavailable
from purveyor.queues.client import Queues, connect
from purveyor.sources.http_events import EventIntake
from purveyor.sources.schemas.cache import Book

_log = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 2.0
_WATCH_SECONDS: Final = 5.0
_SWEEP_SECONDS: Final = 3600.0
_DESCRIPTION: Final = """Every change, to every subscriber, in order, once.

Log in with HTTP Basic, or with a token: `Authorization: Bearer <token>`. A subscription logs in with its name. Every
error is a JSON body with `detail` (what happened) and `fix` (what to do); a 503 may be tried again."""


def _unheard(_event: str, _detail: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOptions:
    """What the API needs to be told. `on_state` hears of the connection: `connected`, or `waiting` with the reason."""

    find_address: Callable[[], Address]
    logins: Sequence[Login] = field(repr=False)
    replicas: int = 1
    patience_seconds: float = 10.0
    """How long a request waits for a server that is away, before it gets a 503."""
    on_state: Callable[[str, str], None] = _unheard
    push: PushEdge = field(default_factory=PushEdge)
    letters_kept: timedelta | None = None
    """How long dead letters are kept; zero: for ever; None: as the queue is set."""
    console: ConsoleOptions | None = None
    """With it, the console is served at `/`."""


class Api:
    """What lives as long as the process."""

    def __init__(self, options: ApiOptions) -> None:
        self._options = options
        self._hasher = Hasher()
        self._services: Services | None = None
        self._waiting_for = "the NATS server was not reached yet"
        self.security = Security(options.logins, self._hasher)
        self.push = options.push
        self.console: Console | None = None
        if options.console is not None:
            sessions = Sessions(options.console.secret, admin_of(options.logins))
            self.console = Console(self, options.console, sessions)
        self.stopping = asyncio.Event()
        """Set it, and long polls are answered at once: nobody waits for them."""

    @property
    def services(self) -> Services:
        """The services; `ServerUnavailable` before the server was reached for the first time."""
        if self._services is None:
            raise ServerUnavailable(self._waiting_for, fix="try again in a moment")
        return self._services

    @property
    def credentials(self) -> Credentials:
        """Passwords and tokens."""
        return self.services.credentials

    @property
    def gate(self) -> Gate:
        """The subscriptions there are."""
        return self.services.gate

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Reach for the server, and stay connected, as long as the block lasts."""
        await self.security.open()
        over = asyncio.Event()
        connecting = asyncio.create_task(self._stay_connected(over))
        try:
            yield
        finally:
            over.set()
            if self._services is None:
                connecting.cancel()  # it waits for a server
            await asyncio.gather(connecting, return_exceptions=True)
            self._hasher.close()

    async def _stay_connected(self, over: asyncio.Event) -> None:
        options = self._options
        while True:
            try:
                async with connect(
                    options.find_address(), name="purveyor-api", patience_seconds=options.patience_seconds
                ) as queues:
                    await self._serve(queues, over)
                    return
            except PurveyorError as error:
                self._waiting_for = error.message
                options.on_state("waiting", str(error))
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _serve(self, queues: Queues, over: asyncio.Event) -> None:
        replicas = self._options.replicas
        services = Services(
            queues=queues,
            subscriptions=Subscriptions(queues, replicas=replicas),
            pull=Pull(queues, replicas=replicas),
            gate=Gate(queues, lambda _name: None, replicas=replicas),
            credentials=Credentials(queues, self._hasher, replicas=replicas),
            intake=EventIntake(queues, replicas=replicas),
            letters=DeadLetters(queues, replicas=replicas),
            book=Book(queues, replicas=replicas),
            figures=QueueFigures(queues),
        )
        await services.intake.ensure()
        if self._options.letters_kept is not None:
            await services.letters.keep(self._options.letters_kept)
        watched, read = asyncio.Event(), asyncio.Event()

        def begun() -> None:
            watched.set()
            if self.console is not None:
                self.console.sessions.knows_all()

        following = asyncio.create_task(services.credentials.follow(self._on_credential, begun))
        reading = asyncio.create_task(services.book.follow(read.set))
        expiring = asyncio.create_task(Expiry(services.subscriptions, services.pull).run())
        sweeping = asyncio.create_task(_sweep(services.credentials))
        try:
            await _happens(watched, _WATCH_SECONDS)  # or logins that are right would be forgotten when it begins
            await _happens(read, _WATCH_SECONDS)  # no event is taken before the schemas are known
            self._services = services
            queues.connection.on_state = self._on_connection
            self._options.on_state("connected", str(queues.address))
            while not await _happens(over, _LOOK_SECONDS):
                await self._check(queues)
        finally:
            self._services = None
            queues.connection.on_state = None
            following.cancel()
            reading.cancel()
            expiring.cancel()
            sweeping.cancel()
            await asyncio.gather(following, reading, expiring, sweeping, return_exceptions=True)
            await services.book.close()
            services.intake.close()
            await services.letters.close()
            await services.gate.close()
            await services.pull.close()

    async def _check(self, queues: Queues) -> None:
        """A lost server is waited for, but one that turned us away, or is elsewhere now, is reached for anew."""
        if queues.connection.connected:
            return
        with contextlib.suppress(Unavailable):
            await queues.connection.wait_connected(0.01)
            return
        if self._options.find_address() != queues.address:
            raise ServerUnavailable(f"the NATS server is no longer at {queues.address}")

    def _on_credential(self, key: str | None) -> None:
        """Check logins again whose password or token was changed, and take no session that was ended."""
        session = None if key is None else ended_session(key)
        if session is None:
            self.security.forget(key)
        elif self.console is not None:
            self.console.sessions.end(session)

    def _on_connection(self, state: str) -> None:
        if state == "connected":
            self._options.on_state("connected", "again")
        else:
            self._options.on_state("waiting", "the NATS server is away")


async def _happens(event: asyncio.Event, within_seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), within_seconds)
    return event.is_set()


async def _sweep(credentials: Credentials) -> None:
    """Remove tokens that have ended now and then, until cancelled."""
    while True:
        try:
            await credentials.sweep()
        except PurveyorError as error:
            _log.warning("tokens that have ended are removed later: %s", error)
        await asyncio.sleep(_SWEEP_SECONDS)


def create_app(api: Api) -> ASGIApp:
    """The application that a server such as uvicorn runs."""
    app = Guard(Express(_routes(api)), security=api.security, backend=api)
    console = api.console
    return app if console is None else Door(app, api, console.sessions, console.inside)


def describe(api: Api) -> dict[str, Any]:
    """All routes, as `/openapi.json` tells them."""
    return _routes(api).openapi()


def _routes(api: Api) -> FastAPI:

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with api.running(), contextlib.nullcontext() if api.console is None else api.console.running():
            yield

    app = FastAPI(
        title="Purveyor",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    problems.install(app)
    # The busiest first: they are looked for in order.
    for part in (messages, events, subscriptions, dead_letters, schemas, topics, tokens, health, metrics):
        app.include_router(part.router)
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(described())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it
    return app


def _complete(schema: dict[str, Any]) -> dict[str, Any]:
    """The description with the ways to log in, and the errors as what they are."""
    parts = schema["components"]
    parts["securitySchemes"] = {
        "password": {"type": "http", "scheme": "basic"},
        "token": {"type": "http", "scheme": "bearer"},
    }
    for model in events.SCHEMAS:
        described = TypeAdapter(model).json_schema(ref_template="#/components/schemas/{model}")
        parts["schemas"] |= {**described.pop("$defs", {}), model.__name__: described}
    for path, routes in schema["paths"].items():
        for route in routes.values():
            if path.startswith("/v1/"):
                route["security"] = [{"password": []}, {"token": []}]
                for status in (*problems.OF_EVERY_ROUTE, *(problems.OF_PATHS_WITH_NAMES if "{" in path else ())):
                    route["responses"].setdefault(str(int(status)), {"description": status.phrase})
            for number, answer in route["responses"].items():
                if number.startswith(("4", "5")):
                    body = {"schema": {"$ref": "#/components/schemas/ProblemBody"}}
                    answer["content"] = {problems.MEDIA_TYPE: body}
    return schema
