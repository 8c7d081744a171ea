"""The way into the console: everything of it passes here, and without a session nothing of it is seen.

Plain ASGI before the API's own guard. A path of the API costs one comparison. The rest of the console, NiceGUI with it,
is imported when somebody logs in for the first time, in a thread: the API's start does not pay for it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final, Protocol
from urllib.parse import parse_qs, quote, urlsplit

from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from purveyor.app.console.pages.login import login_page
from purveyor.app.console.sessions import Session, Sessions, basic
from purveyor.app.http.authentication import Backend, Security
from purveyor.app.http.problems import Problem
from purveyor.model.errors import PurveyorError

SESSION: Final = "purveyor.session"
"""Where in the scope of a request the session is found."""
LOGIN: Final = "/console/login"
LOGOUT: Final = "/console/logout"
_API: Final = "/v1/"
"""Where nearly all requests go: told apart first."""
_FRAMEWORK: Final = ("/_nicegui/", "/_nicegui_ws/")
_LARGEST_FORM: Final = 8192
_TELL_SECONDS: Final = 3.0
"""How long a logout waits until other processes are told."""
_AGAIN_SECONDS: Final = 2.0
_POLICY_VIOLATION: Final = 1008
_log = logging.getLogger(__name__)
_HEADERS: Final = (
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'none'; form-action 'self'",
    ),
)


class Api(Backend, Protocol):
    """The API behind the door."""

    security: Security


Inside = Callable[[], Awaitable[ASGIApp]]


class Door:
    """See the module. `inside` makes the console itself when it is needed."""

    def __init__(self, app: ASGIApp, api: Api, sessions: Sessions, inside: Inside) -> None:
        self._app = app
        self._api = api
        self._sessions = sessions
        self._make = inside
        self._inside: ASGIApp | None = None
        self._making = asyncio.Lock()
        self._telling: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the console, or pass the request on to the API as it came."""
        if scope["type"] == "lifespan" or scope["path"].startswith(_API) or not is_console(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        session = self._sessions.read(headers.get(b"cookie", b"").decode("latin-1"))
        send = _with_headers(send)
        if not _same_origin(scope, headers):
            await _refuse(scope, receive, send, HTTPStatus.FORBIDDEN)
        elif scope["type"] == "http" and scope["path"] in (LOGIN, LOGOUT):
            await (await self._enter_or_leave(scope, receive, session))(scope, receive, send)
        elif session is None:
            await self._send_away(scope, receive, send)
        else:
            scope[SESSION] = session
            if scope["type"] == "websocket":
                receive = self._while_live(session, receive)
            await _patiently(await self._console(), scope, receive, send)

    def _while_live(self, session: Session, receive: Receive) -> Receive:
        """Let nothing through of a socket whose session is over or was ended: for the console it is closed."""

        async def receiving() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and not self._sessions.is_live(session):
                return {"type": "websocket.disconnect", "code": _POLICY_VIOLATION, "reason": ""}
            return message

        return receiving

    async def _console(self) -> ASGIApp:
        async with self._making:
            if self._inside is None:
                self._inside = await self._make()
            return self._inside

    async def _send_away(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(_FRAMEWORK):
            wanted = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
            answer = RedirectResponse(f"{LOGIN}?next={quote(wanted)}", HTTPStatus.SEE_OTHER)
            await answer(scope, receive, send)
        else:
            await _refuse(scope, receive, send, HTTPStatus.UNAUTHORIZED)

    async def _enter_or_leave(self, scope: Scope, receive: Receive, session: Session | None) -> Response:
        secure = scope["scheme"] == "https"
        query = parse_qs(scope["query_string"].decode("latin-1"))
        wanted = _inner(query.get("next", ["/"])[0])
        if scope["path"] == LOGOUT:
            if scope["method"] != "POST":
                return RedirectResponse("/", HTTPStatus.SEE_OTHER)
            if session is not None:
                await self._log_out(session)
            cookie = self._sessions.no_cookie(secure=secure)
            return RedirectResponse(LOGIN, HTTPStatus.SEE_OTHER, {"set-cookie": cookie})
        if scope["method"] in ("GET", "HEAD"):
            if session is not None:
                return RedirectResponse(wanted, HTTPStatus.SEE_OTHER)
            return HTMLResponse(login_page(wanted), headers={"cache-control": "no-store"})
        if scope["method"] != "POST":
            return PlainTextResponse("", HTTPStatus.METHOD_NOT_ALLOWED)
        form = parse_qs((await _body(receive)).decode("utf-8", "replace"), keep_blank_values=True)
        user, password = (form.get(name, [""])[0] for name in ("user", "password"))
        wanted = _inner(form.get("next", [wanted])[0])
        client = scope.get("client")
        problem = await self._problem(user, password, client[0] if client else "")
        if problem is not None:
            later = (problem.headers or {}).get("Retry-After")  # and not WWW-Authenticate: browsers would ask as well
            return HTMLResponse(
                login_page(wanted, user=user, problem=problem.detail, fix=problem.fix),
                problem.status_code,
                {"cache-control": "no-store"} | ({} if later is None else {"retry-after": later}),
            )
        cookie = self._sessions.cookie(secure=secure)
        return RedirectResponse(wanted, HTTPStatus.SEE_OTHER, {"set-cookie": cookie})

    async def _log_out(self, session: Session) -> None:
        """End a session in this process at once, and in all others; when the server is away, as soon as it is back."""
        self._sessions.end(session.id)
        telling = asyncio.create_task(self._tell_others(session))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        await asyncio.wait([telling], timeout=_TELL_SECONDS)

    async def _tell_others(self, session: Session) -> None:
        while session.left_seconds > 0:
            try:
                await self._api.credentials.end_session(session.id, session.left_seconds)
            except PurveyorError as error:
                _log.warning("other API processes are told of a logout later: %s", error)
                await asyncio.sleep(_AGAIN_SECONDS)
            else:
                return

    async def _problem(self, user: str, password: str, address: str) -> Problem | None:
        """Why somebody is not let in; None: come in."""
        try:
            principal = await self._api.security.authenticate(basic(user, password), address, self._api)
        except Problem as problem:
            return problem
        except PurveyorError as error:
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, error.message, error.fix or "try again")
        if principal.is_admin:
            return None
        return Problem(HTTPStatus.FORBIDDEN, f"{user!r} is no administrator", "log in as the administrator")


def is_console(path: str) -> bool:
    """Whether a path is the console's. All others are the API's.

    >>> is_console("/"), is_console("/console/queues"), is_console("/v1/subscriptions"), is_console("/consoles")
    (True, True, False, False)
    """
    return path in ("/", "/console") or path.startswith(("/console/", *_FRAMEWORK))


def _same_origin(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """Nobody else's page may send a form or open a socket here, whatever the browser does with the cookie."""
    origin = headers.get(b"origin")
    if origin is None or (scope["type"] == "http" and scope["method"] in ("GET", "HEAD")):
        return True
    return urlsplit(origin.decode("latin-1")).netloc == headers.get(b"host", b"").decode("latin-1")


def _inner(path: str) -> str:
    """A path of the console to go on to, and nothing else: a login must not lead to somebody else's page."""
    parts = urlsplit(path)
    if parts.scheme or parts.netloc or not path.startswith("/") or path.startswith("//") or "\\" in path:
        return "/"
    return path if is_console(parts.path) and parts.path not in (LOGIN, LOGOUT) else "/"


async def _patiently(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a request whose client may leave: middleware of the framework takes that for an error of its own."""
    gone = False

    async def listening() -> Message:
        nonlocal gone
        message = await receive()
        gone = gone or message["type"] == "http.disconnect"
        return message

    try:
        await app(scope, listening, send)
    except RuntimeError:
        if not gone:
            raise


async def _refuse(scope: Scope, receive: Receive, send: Send, status: HTTPStatus) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": status.phrase})
        return
    await PlainTextResponse(status.phrase, status)(scope, receive, send)


async def _body(receive: Receive) -> bytes:
    data = b""
    while True:  # to the end, or to more than a login can be
        message = await receive()
        data += bytes(message.get("body", b""))
        if len(data) > _LARGEST_FORM:
            return b""
        if not message.get("more_body"):
            return data


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await send(message)

    return sending
