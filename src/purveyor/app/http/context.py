"""What a route is given: the services on the one connection of the process, and who is asking."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from purveyor.app.http.auth_middleware import API, HEADERS, PRINCIPAL
from purveyor.app.http.authentication import Principal, Role, Security
from purveyor.app.http.problems import Problem
from purveyor.app.push_input import PushEdge
from purveyor.app.telemetry.queue_metrics import QueueFigures
from purveyor.delivery.credentials import Credentials
from purveyor.delivery.dead_letters.service import DeadLetters
from purveyor.delivery.pull import Pull
from purveyor.delivery.registration_cache import Gate
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.queues.client import Queues
from purveyor.sources.http_events import EventIntake
from purveyor.sources.schemas.cache import Book


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What the routes stand on; made when the server is reached."""

    queues: Queues
    subscriptions: Subscriptions
    pull: Pull
    gate: Gate
    credentials: Credentials
    intake: EventIntake
    letters: DeadLetters
    book: Book
    figures: QueueFigures


class Raw(Response):
    """JSON as it lies there, with headers as they go out: what is sent for every message is not built up twice."""

    def __init__(self, body: bytes, *headers: tuple[bytes, bytes]) -> None:
        self.status_code = HTTPStatus.OK
        self.background = None
        self.body = body
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json"), *headers]


def as_json(value: object, status: HTTPStatus = HTTPStatus.OK) -> Response:
    """An answer that is as it should be already: no need to check it once more."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return Response(data, status, media_type="application/json")


def services(request: Request) -> Services:
    """The services; an `Unavailable` before the server was reached for the first time."""
    found: Services = request.scope[API].services
    return found


def security(request: Request) -> Security:
    """The logins."""
    found: Security = request.scope[API].security
    return found


def stopping(request: Request) -> asyncio.Event:
    """Set when the API is to stop."""
    found: asyncio.Event = request.scope[API].stopping
    return found


def push(request: Request) -> PushEdge:
    """What push settings go through."""
    found: PushEdge = request.scope[API].push
    return found


def header(request: Request, name: bytes) -> str | None:
    """A header, by its name in lower case."""
    headers: dict[bytes, bytes] = request.scope[HEADERS]
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


def principal(request: Request) -> Principal:
    """Who is asking."""
    found: Principal = request.scope[PRINCIPAL]
    return found


def require_role(request: Request, role: Role) -> Principal:
    """Refuse everybody else."""
    who = principal(request)
    if who.role is not role:
        raise forbidden(who, f"a login for {role.value}")
    return who


def require_one_of(request: Request, roles: Sequence[Role]) -> Principal:
    """Refuse all whose role is another."""
    who = principal(request)
    if who.role not in roles:
        raise forbidden(who, f"a login for {' or '.join(role.value for role in roles)}")
    return who


def require_owner(request: Request, name: str) -> Principal:
    """Only the subscription itself. Whether there is one of that name is no matter: others learn nothing."""
    who = principal(request)
    if not who.owns(name):
        raise forbidden(who, f"subscription {name!r} itself")
    return who


def require_owner_or_admin(request: Request, name: str) -> Principal:
    """The subscription itself, or an administrator."""
    who = principal(request)
    if not who.is_admin and not who.owns(name):
        raise forbidden(who, f"subscription {name!r} itself, or an administrator")
    return who


def forbidden(who: Principal, wanted: str) -> Problem:
    """The login is right, and not for this."""
    return Problem(
        HTTPStatus.FORBIDDEN,
        f"{who.login!r} ({who.role.value}) may not do this",
        f"it takes {wanted}",
    )
