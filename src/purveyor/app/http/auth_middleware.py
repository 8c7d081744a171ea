"""The first that a request meets: who is asking, and how much it may send. Plain ASGI, because every request pays it.

Nothing of a body is read before the login was accepted.
"""

from http import HTTPStatus
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from purveyor.app.http.authentication import Backend, Security
from purveyor.app.http.problems import Problem, answer_to
from purveyor.app.http.request_metrics import counted

PRINCIPAL: Final = "purveyor.principal"
"""Where in the scope of a request the one who is asking is found."""
API: Final = "purveyor.api"
"""Where the API that serves it is found."""
HEADERS: Final = "purveyor.headers"
"""Where its headers are found, of each name the last."""
_OPEN: Final = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json"})
_EVENTS: Final = "/v1/messages"
LARGEST_BODY: Final = 256 << 10
LARGEST_EVENTS: Final = 16 << 20


class Guard:
    """See the module."""

    def __init__(self, app: ASGIApp, security: Security, backend: Backend) -> None:
        self._app = app
        self._security = security
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        headers: dict[bytes, bytes] = dict(scope["headers"])
        scope[HEADERS], scope[API] = headers, self._backend
        try:
            if path not in _OPEN:
                client = scope.get("client")
                header = headers.get(b"authorization")
                scope[PRINCIPAL] = await self._security.authenticate(
                    None if header is None else header.decode("latin-1"), client[0] if client else "", self._backend
                )
            limit = LARGEST_EVENTS if path == _EVENTS else LARGEST_BODY
            told = _told_length(headers.get(b"content-length"), limit)
        except Exception as error:  # noqa: BLE001 - the handlers of the application are further in
            await answer_to(error)(scope, receive, counted(scope, send))
            return
        await self._app(scope, receive if told else _limited(receive, limit), send)


def _told_length(header: bytes | None, limit: int) -> bool:
    """Whether the length of the body is told: then the server reads no more than that."""
    if header is None or not header.isdigit():
        return False
    if int(header) > limit:
        raise _too_large(limit)
    return True


def _limited(receive: Receive, limit: int) -> Receive:
    """For bodies that do not tell their length."""
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > limit:
            raise _too_large(limit)
        return message

    return counted


def _too_large(limit: int) -> Problem:
    return Problem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body has more than {limit} bytes",
        "send less; events can be sent in several requests",
    )
