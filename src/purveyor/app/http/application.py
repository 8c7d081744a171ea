"""The API application: it stays connected to the NATS server, and puts routes and middleware together.

The API listens as soon as it starts. Until it reaches the NATS server, and whenever the server does not answer,
requests get a 503 with this reason. So the parts of a deployment may start in any order.

The routes that monitoring reads (liveness, readiness and Prometheus metrics) need no login. No metric holds a secret, a
key or a body, but metrics name subscriptions and queues: block `/metrics` at the proxy if those names are confidential.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, TypeAdapter
from starlette.types import ASGIApp

from purveyor import __version__
from purveyor.app.console.console import Console, ConsoleOptions
from purveyor.app.console.console_login import ConsoleMiddleware
from purveyor.app.http import (
    attempts,
    context,
    dead_letters,
    events,
    messages,
    problems,
    schemas,
    subscription_status,
    subscriptions,
    tokens,
    topics,
)
from purveyor.app.http.authentication import Authenticator, Login
from purveyor.app.http.context import AuthMiddleware, Services
from purveyor.app.http.messages import FastPath
from purveyor.app.http.problems import document_errors
from purveyor.app.running_parts import API
from purveyor.app.subscription_input import PushInput
from purveyor.app.telemetry.part_metrics import PartMetrics, worker_name
from purveyor.app.telemetry.prometheus import CONTENT_TYPE, render
from purveyor.app.telemetry.queue_metrics import QueueMetrics, server_up
from purveyor.delivery.credentials import Credentials, PasswordHasher, ended_session
from purveyor.delivery.subscription_changes import RegistrationCache
from purveyor.jetstream.address import Address
from purveyor.model.errors import PurveyorError, ServerUnavailable, Unavailable
from purveyor.model.event import SUBJECT
from purveyor.queues.catalogue import DEFAULT_GROUP
from purveyor.queues.client import Queues, connect

_log = logging.getLogger(__name__)
_RECONNECT_INTERVAL_SECONDS: Final = 1.0
_CONNECTION_CHECK_INTERVAL_SECONDS: Final = 2.0
_WATCH_START_TIMEOUT_SECONDS: Final = 5.0
_TOKEN_CLEANUP_INTERVAL_SECONDS: Final = 3600.0
_SERIES_CLEANUP_INTERVAL_SECONDS: Final = 600.0
_CONSOLE_WORKER: Final = 1
_READINESS_TIMEOUT_SECONDS: Final = 2.0
"""A probe and `purveyor doctor` get an answer within this time also while the NATS server hangs."""
_DESCRIPTION: Final = """Every change, to every subscriber, in order, once.

Log in with HTTP Basic, or with a token: `Authorization: Bearer <token>`. A subscription logs in with its name. Every
error is a JSON body with `detail` (what happened) and `fix` (what to do). After a 503 you may try again."""

OpenServices = Callable[[Queues], contextlib.AbstractAsyncContextManager[Services]]


def _ignore_state(_event: str, _detail: str) -> None:
    """Ignore a change of the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOptions:
    """Options of an API process.

    The API calls `on_state` with `connected`, or with `waiting` and the reason, when its connection changes.
    """

    find_address: Callable[[], Address]
    logins: Sequence[Login] = field(repr=False)
    replicas: int = 1
    patience_seconds: float = 10.0
    """How long a request waits for a NATS server that does not answer, before it gets a 503."""
    on_state: Callable[[str, str], None] = _ignore_state
    push: PushInput = field(default_factory=PushInput)
    dead_letter_retention: timedelta | None = None
    """How long to keep dead letters; zero: for ever; None: as the queue is configured."""
    console: ConsoleOptions | None = None
    """With it, the API serves the console at `/`."""
    data_dir: Path | None = None
    """Where other processes announce their metrics, which the API includes in its own; None: it includes none."""
    dispatcher_group: str = DEFAULT_GROUP
    archive_seconds: float = 2.0
    """How long the archive of this deployment may collect events."""
    worker: int | None = None
    """The number of this process among those that share its port; None: it shares it with no other."""
    url: str | None = None
    """The URL that these processes share."""
    console_socket: Path | None = None
    """The Unix socket at which one of these processes serves the console to the others."""


class Api:
    """The state of an API process. `purveyor.app.wiring.build_api` builds it."""

    def __init__(
        self, options: ApiOptions, *, hasher: PasswordHasher, authenticator: Authenticator, open_services: OpenServices
    ) -> None:
        self._options = options
        self._hasher = hasher
        self._open_services = open_services
        self._services: Services | None = None
        self._waiting_for = "the API has not reached the NATS server yet"
        self.authenticator = authenticator
        self.push = options.push
        self.console: Console | None = None
        self.part_metrics = PartMetrics(options.data_dir, options.url if options.worker is not None else None)
        self.stopping = asyncio.Event()
        """Set it to answer long polls at once."""

    @property
    def process_name(self) -> str | None:
        """The name of this process in its metrics; None if it shares its port with no other."""
        worker = self._options.worker
        return None if worker is None else worker_name(API, worker)

    @property
    def console_socket(self) -> Path | None:
        """The Unix socket at which one of several processes on a port serves the console to the others."""
        return self._options.console_socket

    @property
    def serves_console(self) -> bool:
        """Whether this process serves the console itself: alone, or as the first of several processes on a port."""
        return self.console is not None and self._options.worker in (None, _CONSOLE_WORKER)

    @property
    def services(self) -> Services:
        """The services. Raise `ServerUnavailable` before the API has reached the NATS server."""
        if self._services is None:
            raise ServerUnavailable(self._waiting_for, fix="try again in a moment")
        return self._services

    @property
    def credentials(self) -> Credentials:
        """Passwords and tokens."""
        return self.services.credentials

    @property
    def registrations(self) -> RegistrationCache:
        """The registered subscriptions."""
        return self.services.registrations

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Connect to the NATS server, and stay connected until the end of the block."""
        await self.authenticator.open()
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
            await asyncio.sleep(_RECONNECT_INTERVAL_SECONDS)

    async def _serve(self, queues: Queues, over: asyncio.Event) -> None:
        """Serve requests on one connection until `over` is set or the server moves to another address."""
        async with self._open_services(queues) as services:
            await services.events.ensure()
            if self._options.dead_letter_retention is not None:
                await services.dead_letters.set_retention(self._options.dead_letter_retention)
            credentials_read, schemas_read = asyncio.Event(), asyncio.Event()

            def on_credentials_read() -> None:
                credentials_read.set()
                if self.console is not None:
                    self.console.sessions.accept_others()

            tasks = [
                asyncio.create_task(services.credentials.follow(self._on_credential, on_credentials_read)),
                asyncio.create_task(services.schema_cache.follow(schemas_read.set)),
                asyncio.create_task(services.expiry.run()),
                asyncio.create_task(_clean_up_tokens(services.credentials)),
                asyncio.create_task(_drop_old_series(services.queue_metrics)),
            ]
            try:
                # Before the first request: the start of the watch invalidates every cached login.
                await _wait_set(credentials_read, _WATCH_START_TIMEOUT_SECONDS)
                # The API accepts no event before it knows the schemas.
                await _wait_set(schemas_read, _WATCH_START_TIMEOUT_SECONDS)
                self._services = services
                queues.connection.on_state = self._on_connection
                self._options.on_state("connected", str(queues.address))
                while not await _wait_set(over, _CONNECTION_CHECK_INTERVAL_SECONDS):
                    await self._check_address(queues)
            finally:
                self._services = None
                queues.connection.on_state = None
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _check_address(self, queues: Queues) -> None:
        """Wait for a lost server. Raise `ServerUnavailable`, to connect again, if its address has changed."""
        if queues.connection.connected:
            return
        with contextlib.suppress(Unavailable):
            await queues.connection.wait_until_connected(0.01)
            return
        if self._options.find_address() != queues.address:
            raise ServerUnavailable(f"the NATS server is no longer at {queues.address}")

    def _on_credential(self, key: str | None) -> None:
        """Check logins again whose password or token changed, and end console sessions that were logged out."""
        session = None if key is None else ended_session(key)
        if session is None:
            self.authenticator.invalidate(key)
        elif self.console is not None:
            self.console.sessions.end(session)

    def _on_connection(self, state: str) -> None:
        if state == "connected":
            self._options.on_state("connected", "again")
        else:
            self._options.on_state("waiting", "the NATS server does not answer")


async def _wait_set(event: asyncio.Event, timeout_seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_seconds)
    return event.is_set()


async def _clean_up_tokens(credentials: Credentials) -> None:
    """Remove expired tokens periodically, until cancelled."""
    while True:
        try:
            await credentials.remove_invalid_tokens()
        except PurveyorError as error:
            _log.warning("cannot remove expired tokens now, will try again: %s", error)
        await asyncio.sleep(_TOKEN_CLEANUP_INTERVAL_SECONDS)


async def _drop_old_series(metrics: QueueMetrics) -> None:
    """Drop the series of deleted subscriptions periodically, until cancelled: scrapes may all go to other processes."""
    while True:
        await asyncio.sleep(_SERIES_CLEANUP_INTERVAL_SECONDS)
        await metrics.read()


def create_app(api: Api) -> ASGIApp:
    """Return the ASGI application: authentication, fast path, routes, and the console if there is one."""
    app = AuthMiddleware(FastPath(_build_routes(api)), authenticator=api.authenticator, backend=api)
    console, path = api.console, api.console_socket
    if console is None:
        return app
    if path is not None and not api.serves_console:
        from purveyor.app.console.forwarding import ConsoleForwarder  # noqa: PLC0415 - only workers need it

        return ConsoleForwarder(app, path, console.sessions)
    return ConsoleMiddleware(app, api, console.sessions, console.build_app)


def describe(api: Api) -> dict[str, Any]:
    """Return the OpenAPI document of all routes."""
    return _build_routes(api).openapi()


def _build_routes(api: Api) -> FastAPI:

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
    # The busiest first: the router tries them in order.
    for part in (
        *(messages, events, subscriptions, subscription_status, dead_letters),
        *(attempts, schemas, topics, tokens),
    ):
        app.include_router(part.router)
    app.include_router(probes_router)
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete_openapi(generate())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI documents this way to extend it
    return app


def _complete_openapi(schema: dict[str, Any]) -> dict[str, Any]:
    """Add the login schemes, the models that only OpenAPI uses, and the media type of errors."""
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
                for status in (*problems.COMMON_ERRORS, *(problems.NAMED_PATH_ERRORS if "{" in path else ())):
                    route["responses"].setdefault(str(int(status)), {"description": status.phrase})
            for number, answer in route["responses"].items():
                if number.startswith(("4", "5")):
                    body = {"schema": {"$ref": "#/components/schemas/ProblemBody"}}
                    answer["content"] = {problems.MEDIA_TYPE: body}
    return schema


probes_router = APIRouter(tags=["health"])


class Health(BaseModel):
    """The state of this process."""

    status: str = "ok"


class DegradedThing(BaseModel):
    """Something in the deployment that does not work, and what to do."""

    about: str
    text: str
    fix: str | None = None


class ReadinessBody(BaseModel):
    """Whether the API can serve requests (else it answers 503), and what does not work in its deployment."""

    status: Literal["ready", "degraded"]
    degraded: list[DegradedThing]


@probes_router.get("/healthz")
async def healthz() -> Health:
    """The process is alive. Restarting it would not solve any other problem."""
    return Health()


@probes_router.get("/readyz", responses=document_errors())
async def readyz(request: Request) -> ReadinessBody:
    """The NATS server answers, so the API can serve requests. 503 otherwise.

    `degraded` lists what else does not work, such as a part of the pipeline that hangs or an endpoint that is down.
    The status stays 200 then: another API process would serve the requests no better, so a load balancer must keep
    this one.
    """
    services = context.services(request)
    try:
        async with asyncio.timeout(_READINESS_TIMEOUT_SECONDS):
            await services.queues.connection.wait_until_connected(0.1)
            await services.queues.streams.names(subject=SUBJECT)
    except TimeoutError:  # it is suspended, or its machine does not answer
        address = services.queues.address
        raise ServerUnavailable(
            f"no NATS server answered at {address} for {_READINESS_TIMEOUT_SECONDS:g} s",
            fix="find out why: `purveyor doctor`",
        ) from None
    found = [
        DegradedThing(about=each.about, text=each.fact, fix=each.fix) for each in await services.readiness.degraded()
    ]
    return ReadinessBody(status="degraded" if found else "ready", degraded=found)


@probes_router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus, with those of the pipeline and of push under `purveyor up`.

    Of several API processes on one port any can answer: the page has the metrics of all, each with the label `process`.
    While the NATS server does not answer, `purveyor_nats_up` is 0.
    """
    api: Api = request.scope[context.API]
    try:
        found = await api.services.queue_metrics.read()
    except Unavailable:  # the API has not reached the server yet
        found = [server_up(there=False)]
    parts = await api.part_metrics.read()
    # Thousands of lines: keep the event loop free.
    page = await asyncio.to_thread(render, [*found, parts.up], parts.pages, api.process_name)
    return Response(page, headers={"Content-Type": CONTENT_TYPE})
