"""What a route gets from its request: the services of the process, the authenticated client, and role checks."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from purveyor.app.http.auth_middleware import API, HEADERS, PRINCIPAL
from purveyor.app.http.authentication import Authenticator, Principal, Role
from purveyor.app.http.problems import Problem
from purveyor.app.push_input import PushInput
from purveyor.app.telemetry.queue_metrics import QueueMetrics, RegistrySnapshots
from purveyor.delivery.credentials import Credentials
from purveyor.delivery.dead_letters.service import DeadLetters
from purveyor.delivery.expiry import Expiry
from purveyor.delivery.pull import PullService
from purveyor.delivery.registration_cache import RegistrationCache
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.queues.client import Queues
from purveyor.sources.http_events import EventPublisher
from purveyor.sources.schemas.cache import SchemaCache


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


def require_owner(request: Request, name: str) -> Principal:
    """Return the client; refuse it with 403 if it is not the subscription, whether or not that exists."""
    who = principal(request)
    if not who.owns(name):
        raise forbidden(who, f"subscription {name!r} itself")
    return who


def require_owner_or_admin(request: Request, name: str) -> Principal:
    """Return the client; refuse it with 403 if it is neither the subscription nor an administrator."""
    who = principal(request)
    if not who.is_admin and not who.owns(name):
        raise forbidden(who, f"subscription {name!r} itself, or an administrator")
    return who


def forbidden(who: Principal, wanted: str) -> Problem:
    """Return the problem for a client whose login is accepted but not allowed to do this."""
    return Problem(
        HTTPStatus.FORBIDDEN,
        f"{who.login!r} ({who.role.value}) may not do this",
        f"this needs {wanted}",
    )
