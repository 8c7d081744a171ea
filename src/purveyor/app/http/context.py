"""The context of a request: the authenticated client, its roles, and the services of the process.

`AuthMiddleware`, the first layer of the API, authenticates a request, limits its body and puts the context into the
scope. It is plain ASGI, because every request pays. It reads nothing of a body before the login is accepted. It also
counts answers by route, method and status. Routes read the context with the functions of this module.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from purveyor.app.doctor.readiness import Readiness
from purveyor.app.http.authentication import CHALLENGE, Authenticator, Backend, Principal, Role
from purveyor.app.http.problems import Problem, answer_to
from purveyor.app.subscription_input import PushInput
from purveyor.app.telemetry.queue_metrics import QueueMetrics, RegistrySnapshots
from purveyor.delivery.credentials import Credentials
from purveyor.delivery.dead_letters.service import DeadLetters
from purveyor.delivery.expiry import Expiry
from purveyor.delivery.pull import PullService
from purveyor.delivery.subscription_changes import RegistrationCache
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.metrics import HTTP_REQUESTS
from purveyor.queues.client import Queues
from purveyor.sources.http_events import EventPublisher
from purveyor.sources.schemas.registry import SchemaCache

PRINCIPAL: Final = "purveyor.principal"
"""The key of the authenticated principal in the scope of a request."""
API: Final = "purveyor.api"
"""The key of the `Api` that serves the request."""
HEADERS: Final = "purveyor.headers"
"""The key of the headers of the request as a dict; the last header of each name wins."""
_PATHS_WITHOUT_LOGIN: Final = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json"})
_EVENTS_PATH: Final = "/v1/messages"
MAX_BODY_BYTES: Final = 256 << 10
MAX_EVENTS_BODY_BYTES: Final = 32 << 20
"""Twice the largest message of the embedded server: an event may be longer in a request than it is stored."""


class AuthMiddleware:
    """ASGI middleware that passes authenticated requests on and answers all others."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, backend: Backend) -> None:
        self._app = app
        self._authenticator = authenticator
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer why the API refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        scope[HEADERS], scope[API] = headers, self._backend
        try:
            if path not in _PATHS_WITHOUT_LOGIN:
                client = scope.get("client")
                header = headers.get(b"authorization")
                scope[PRINCIPAL] = await self._authenticator.authenticate(
                    None if header is None else header.decode("latin-1"), client[0] if client else "", self._backend
                )
            limit = MAX_EVENTS_BODY_BYTES if path == _EVENTS_PATH else MAX_BODY_BYTES
            has_length = _has_content_length(headers.get(b"content-length"), limit)
        except Exception as error:  # noqa: BLE001 - the exception handlers of the application are further in
            await answer_to(error)(scope, receive, count_response(scope, send))
            return
        await self._app(scope, receive if has_length else _limit_body(receive, limit), send)


def count_response(scope: Scope, send: Send) -> Send:
    """Return a `send` that counts the answer by route, method and status.

    The route is the documented one: with the names of subscriptions in it there would be a series for each.
    """

    async def send_and_count(message: Message) -> None:
        if message["type"] == "http.response.start":
            path = getattr(scope.get("route"), "path", None)
            HTTP_REQUESTS.add(str(path or "other"), scope["method"], str(message["status"]))
        await send(message)

    return send_and_count


def _has_content_length(header: bytes | None, limit: int) -> bool:
    """Return whether the request declares its length: then the server reads no more than that. 413 above the limit."""
    if header is None or not header.isdigit():
        return False
    if int(header) > limit:
        raise _too_large(limit)
    return True


def _limit_body(receive: Receive, limit: int) -> Receive:
    """Return a `receive` that limits a body of undeclared length."""
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise _too_large(limit)
        return message

    return receive_limited


def _too_large(limit: int) -> Problem:
    return Problem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body has more than {limit} bytes",
        "send less; events can be sent in several requests",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services of an API process. `purveyor.app.wiring` builds them when the API reaches the NATS server."""

    queues: Queues
    subscriptions: Subscriptions
    pull: PullService
    registrations: RegistrationCache
    credentials: Credentials
    expiry: Expiry
    events: EventPublisher
    dead_letters: DeadLetters
    schema_cache: SchemaCache
    registry_snapshots: RegistrySnapshots
    queue_metrics: QueueMetrics
    readiness: Readiness


class ApiObjects(Protocol):
    """The objects of an API process that its routes and its console use."""

    @property
    def services(self) -> Services:
        """The services. Raise `Unavailable` before the API has reached the NATS server."""

    @property
    def authenticator(self) -> Authenticator:
        """The authenticator."""

    @property
    def push(self) -> PushInput:
        """The check of push settings."""


class RawJson(Response):
    """An answer of encoded JSON bytes and raw headers: it skips the work that Starlette's responses do."""

    def __init__(self, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        self.status_code = HTTPStatus.OK
        self.background = None
        self.body = body
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json"), *headers]


def json_response(value: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Return a JSON answer without validating it against a model."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return Response(data, status, media_type="application/json")


def api(request: Request) -> ApiObjects:
    """Return the objects of the process."""
    found: ApiObjects = request.scope[API]
    return found


def services(request: Request) -> Services:
    """Return the services. Raise `Unavailable` before the API has reached the NATS server."""
    found: Services = request.scope[API].services
    return found


def authenticator(request: Request) -> Authenticator:
    """Return the authenticator."""
    found: Authenticator = request.scope[API].authenticator
    return found


def stopping(request: Request) -> asyncio.Event:
    """Return the event that is set when the API stops."""
    found: asyncio.Event = request.scope[API].stopping
    return found


def push(request: Request) -> PushInput:
    """Return the check of push settings."""
    found: PushInput = request.scope[API].push
    return found


def header(request: Request, name: bytes) -> str | None:
    """Return a header by its lower-case name."""
    headers: dict[bytes, bytes] = request.scope[HEADERS]
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


def principal(request: Request) -> Principal:
    """Return the authenticated client of the request."""
    found: Principal = request.scope[PRINCIPAL]
    return found


def require_role(request: Request, role: Role) -> Principal:
    """Return the client; refuse it with 403 if it has another role."""
    who = principal(request)
    if who.role is not role:
        raise forbidden(who, f"a login for {role.value}")
    return who


def require_one_of(request: Request, roles: Sequence[Role]) -> Principal:
    """Return the client; refuse it with 403 if it has none of the roles."""
    who = principal(request)
    if who.role not in roles:
        raise forbidden(who, f"a login for {' or '.join(role.value for role in roles)}")
    return who


def require_owner(request: Request, name: str, *, challenge: bool = False) -> Principal:
    """Return the client; refuse it with 403 if it is not the subscription, whether or not that exists.

    `challenge`: refuse it with 401, as the older system does; its clients distinguish the two.
    """
    who = principal(request)
    if not who.owns(name):
        raise forbidden(who, f"the login of subscription {name!r}: its name and password", challenge=challenge)
    return who


def require_owner_or_admin(request: Request, name: str, *, challenge: bool = False) -> Principal:
    """Return the client; refuse it with 403 if it is neither the subscription nor an administrator.

    `challenge`: refuse it with 401, as the older system does; its clients distinguish the two.
    """
    who = principal(request)
    if not who.is_admin and not who.owns(name):
        raise forbidden(who, f"the login of subscription {name!r}, or of an administrator", challenge=challenge)
    return who


def forbidden(who: Principal, wanted: str, *, challenge: bool = False) -> Problem:
    """Return the problem for a client whose login is accepted but not allowed to do this."""
    return Problem(
        HTTPStatus.UNAUTHORIZED if challenge else HTTPStatus.FORBIDDEN,
        f"{who.login!r} ({who.role.value}) may not do this",
        f"this needs {wanted}",
        CHALLENGE if challenge else None,
    )
