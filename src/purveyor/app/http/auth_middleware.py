"""The first layer of the API: it authenticates a request and limits its body. Plain ASGI, because every request pays.

It reads nothing of a body before the login is accepted. It also counts answers by route, method and status.
"""

from http import HTTPStatus
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from purveyor.app.http.authentication import Authenticator, Backend
from purveyor.app.http.problems import Problem, answer_to
from purveyor.model.metrics import HTTP_REQUESTS

PRINCIPAL: Final = "purveyor.principal"
"""The key of the authenticated principal in the scope of a request."""
API: Final = "purveyor.api"
"""The key of the `Api` that serves the request."""
HEADERS: Final = "purveyor.headers"
"""The key of the headers of the request as a dict; the last header of each name wins."""
_PATHS_WITHOUT_LOGIN: Final = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json"})
_EVENTS_PATH: Final = "/v1/messages"
MAX_BODY_BYTES: Final = 256 << 10
MAX_EVENTS_BODY_BYTES: Final = 16 << 20


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
