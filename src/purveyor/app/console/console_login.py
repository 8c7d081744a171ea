"""Login, logout and sessions of the console. Every request for the console passes here.

`ConsoleMiddleware` is plain ASGI in front of the API's own middleware. A request for the API costs one comparison. The
first login imports the rest of the console, with NiceGUI, in a thread: the start of the API does not pay for it.

A session is a signed cookie for the administrator. The authenticator of the API checks the login and throttles
attempts. The cookie holds its end and is signed with a key derived from a secret in the data directory and the
administrator's password: a new password ends every session. Every API process with the same data directory accepts it.

A logout ends the session: the API stores its id in the bucket of credentials, which every API process follows
(`Credentials.end_session`). A process that has not read that bucket yet accepts only sessions that it began itself.
"""

import asyncio
import base64
import hashlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import parse_qs, quote, urlsplit

from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from purveyor.app.console.html import ICON, head, static
from purveyor.app.http.authentication import Authenticator, Backend, Login, Role
from purveyor.app.http.problems import Problem
from purveyor.model.errors import PurveyorError, SetupError

COOKIE: Final = "purveyor_console"
SESSION_SECONDS: Final = 12 * 3600
FILE_NAME: Final = "console.secret"
_SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Session:
    """A logged-in operator. `until` is a time in seconds of the wall clock."""

    user: str
    until: int
    id: str

    @property
    def left_seconds(self) -> float:
        """The seconds until the session ends."""
        return self.until - time.time()


class Sessions:
    """Issues and reads cookies, and keeps the sessions that were ended."""

    def __init__(self, secret: bytes, login: Login) -> None:
        about = f"{login.username}\0{login.password}".encode("utf-8", "surrogatepass")
        self._key = hmac.digest(secret, about, "sha256")
        self._user = login.username
        self._begun: dict[str, float] = {}
        """Sessions that this process began, and when they end."""
        self._ended: dict[str, float] = {}
        """Sessions that any process ended by a logout, and when to drop the entry."""
        self._accepts_others = False

    def cookie(self, *, secure: bool) -> str:
        """Return the Set-Cookie header of a new session."""
        until, identity = int(time.time()) + SESSION_SECONDS, secrets.token_urlsafe(8)
        _add(self._begun, identity, until)
        body = f"{until}.{identity}"
        return _header(f"{body}.{self._signed(body)}", SESSION_SECONDS, secure=secure)

    def expired_cookie(self, *, secure: bool) -> str:
        """Return the Set-Cookie header that removes the cookie."""
        return _header("", 0, secure=secure)

    def end(self, identity: str) -> None:
        """Refuse a session from now on: the operator logged out, here or in another process."""
        _add(self._ended, identity, time.time() + SESSION_SECONDS)

    def accept_others(self) -> None:
        """Accept sessions of other processes: this process now knows all logouts."""
        self._accepts_others = True

    def is_live(self, session: Session) -> bool:
        """Return whether a session has neither expired nor been ended."""
        if session.left_seconds <= 0 or session.id in self._ended:
            return False
        return self._accepts_others or session.id in self._begun

    def read(self, header: str | None) -> Session | None:
        """Return the session of a Cookie header; None if there is none, or it is invalid or has ended."""
        try:
            found = SimpleCookie(header or "").get(COOKIE)
        except CookieError:
            return None
        if found is None or len(found.value) > 512:
            return None
        body, _, signature = found.value.rpartition(".")
        until, _, identity = body.partition(".")
        if not hmac.compare_digest(signature.encode(), self._signed(body).encode()) or not until.isdecimal():
            return None
        session = Session(self._user, int(until), identity)
        return session if self.is_live(session) else None

    def _signed(self, body: str) -> str:
        digest = hmac.digest(self._key, body.encode("utf-8", "replace"), hashlib.sha256)
        return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _add(sessions: dict[str, float], identity: str, until: float) -> None:
    """Add a session, and drop expired ones."""
    now = time.time()
    for each in [each for each, end in sessions.items() if end <= now]:
        del sessions[each]
    sessions[identity] = until


def _header(value: str, seconds: int, *, secure: bool) -> str:
    safe = "; Secure" if secure else ""
    return f"{COOKIE}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{safe}"


def admin_login(logins: Sequence[Login]) -> Login:
    """Return the administrator's login."""
    return next(login for login in logins if login.role is Role.ADMIN)


def basic(user: str, password: str) -> str:
    """Return an Authorization header for the authenticator."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def read_secret(data_dir: Path) -> bytes:
    """Return the secret of the data directory. Create it if it is missing; of several processes one succeeds."""
    path = data_dir / FILE_NAME
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        draft = data_dir / f".{FILE_NAME}.{os.getpid()}"
        if not path.exists():
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as out:
                out.write(secrets.token_bytes(_SECRET_BYTES))
                out.flush()
                os.fsync(out.fileno())
            try:
                os.link(draft, path)
            except FileExistsError:
                pass  # another process was faster
            finally:
                draft.unlink()
        if path.stat().st_mode & 0o077:
            raise SetupError(
                f"other users can read {path}", fix="remove it: the API creates a new one, and operators log in again"
            )
        found = path.read_bytes()
    except OSError as error:
        raise SetupError(
            f"the console cannot store its secret in {path}: {error.strerror}",
            fix="make the data directory writable, or set PURVEYOR_CONSOLE=false",
        ) from error
    if len(found) < _SECRET_BYTES:
        raise SetupError(
            f"{path} is incomplete", fix="remove it: the API creates a new one, and operators log in again"
        )
    return found


SESSION: Final = "purveyor.session"
"""The key of the session in the scope of a request."""
LOGIN: Final = "/console/login"
LOGOUT: Final = "/console/logout"
API_PREFIX: Final = "/v1/"
"""The prefix of nearly all requests, checked first."""
_FRAMEWORK: Final = ("/_nicegui/", "/_nicegui_ws/")
MAX_FORM_BYTES: Final = 8192
_LOGOUT_WAIT_SECONDS: Final = 3.0
"""How long a logout waits until the other processes know of it."""
_LOGOUT_RETRY_SECONDS: Final = 2.0
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
    """The API that serves the console."""

    authenticator: Authenticator


BuildApp = Callable[[], Awaitable[ASGIApp]]


class ConsoleMiddleware:
    """ASGI middleware that serves the console to sessions and passes other requests to the API.

    `build_app` builds the pages when the first session needs them.
    """

    def __init__(self, app: ASGIApp, api: Api, sessions: Sessions, build_app: BuildApp) -> None:
        self._app = app
        self._api = api
        self._sessions = sessions
        self._build_app = build_app
        self._pages: ASGIApp | None = None
        self._build_lock = asyncio.Lock()
        self._logouts: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the console, or pass the request on to the API unchanged."""
        if scope["type"] == "lifespan" or scope["path"].startswith(API_PREFIX) or not is_console(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        session = self._sessions.read(headers.get(b"cookie", b"").decode("latin-1"))
        send = _with_headers(send)
        if not _is_same_origin(scope, headers):
            await _refuse(scope, receive, send, HTTPStatus.FORBIDDEN)
        elif scope["type"] == "http" and scope["path"] in (LOGIN, LOGOUT):
            await (await self._log_in_or_out(scope, receive, session))(scope, receive, send)
        elif session is None:
            await self._redirect_to_login(scope, receive, send)
        else:
            scope[SESSION] = session
            if scope["type"] == "websocket":
                receive = self._end_with_session(session, receive)
            await _ignore_disconnect(await self._get_pages(), scope, receive, send)

    def _end_with_session(self, session: Session, receive: Receive) -> Receive:
        """Return a `receive` that reports a disconnect when the session of the WebSocket has ended."""

        async def receive_while_valid() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and not self._sessions.is_live(session):
                return {"type": "websocket.disconnect", "code": _POLICY_VIOLATION, "reason": ""}
            return message

        return receive_while_valid

    async def _get_pages(self) -> ASGIApp:
        async with self._build_lock:
            if self._pages is None:
                self._pages = await self._build_app()
            return self._pages

    async def _redirect_to_login(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(_FRAMEWORK):
            wanted = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
            answer = RedirectResponse(f"{LOGIN}?next={quote(wanted)}", HTTPStatus.SEE_OTHER)
            await answer(scope, receive, send)
        else:
            await _refuse(scope, receive, send, HTTPStatus.UNAUTHORIZED)

    async def _log_in_or_out(self, scope: Scope, receive: Receive, session: Session | None) -> Response:
        secure = scope["scheme"] == "https"
        query = parse_qs(scope["query_string"].decode("latin-1"))
        wanted = _console_path(query.get("next", ["/"])[0])
        if scope["path"] == LOGOUT:
            if scope["method"] != "POST":
                return RedirectResponse("/", HTTPStatus.SEE_OTHER)
            if session is not None:
                await self._log_out(session)
            cookie = self._sessions.expired_cookie(secure=secure)
            return RedirectResponse(LOGIN, HTTPStatus.SEE_OTHER, {"set-cookie": cookie})
        if scope["method"] in ("GET", "HEAD"):
            if session is not None:
                return RedirectResponse(wanted, HTTPStatus.SEE_OTHER)
            return HTMLResponse(login_page(wanted), headers={"cache-control": "no-store"})
        if scope["method"] != "POST":
            return PlainTextResponse("", HTTPStatus.METHOD_NOT_ALLOWED)
        try:
            body = await read_body(receive, MAX_FORM_BYTES)
        except ClientDisconnect:  # half a password is no attempt to log in
            return PlainTextResponse("", HTTPStatus.BAD_REQUEST)
        form = parse_qs((body or b"").decode("utf-8", "replace"), keep_blank_values=True)
        user, password = (form.get(name, [""])[0] for name in ("user", "password"))
        wanted = _console_path(form.get("next", [wanted])[0])
        client = scope.get("client")
        problem = await self._problem(user, password, client[0] if client else "")
        if problem is not None:
            # Not WWW-Authenticate: browsers would show their own login dialog.
            later = (problem.headers or {}).get("Retry-After")
            return HTMLResponse(
                login_page(wanted, user=user, problem=problem.detail, fix=problem.fix),
                problem.status_code,
                {"cache-control": "no-store"} | ({} if later is None else {"retry-after": later}),
            )
        cookie = self._sessions.cookie(secure=secure)
        return RedirectResponse(wanted, HTTPStatus.SEE_OTHER, {"set-cookie": cookie})

    async def _log_out(self, session: Session) -> None:
        """End a session in this process at once, and in the others when the NATS server has stored the logout."""
        self._sessions.end(session.id)
        storing = asyncio.create_task(self._store_logout(session))
        self._logouts.add(storing)
        storing.add_done_callback(self._logouts.discard)
        await asyncio.wait([storing], timeout=_LOGOUT_WAIT_SECONDS)

    async def _store_logout(self, session: Session) -> None:
        while session.left_seconds > 0:
            try:
                await self._api.credentials.end_session(session.id, session.left_seconds)
            except PurveyorError as error:
                _log.warning("cannot store a logout for other API processes yet: %s", error)
                await asyncio.sleep(_LOGOUT_RETRY_SECONDS)
            else:
                return

    async def _problem(self, user: str, password: str, address: str) -> Problem | None:
        """Return why a login is refused; None if it is accepted."""
        try:
            principal = await self._api.authenticator.authenticate(basic(user, password), address, self._api)
        except Problem as problem:
            return problem
        except PurveyorError as error:
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, error.message, error.fix or "try again")
        if principal.is_admin:
            return None
        return Problem(HTTPStatus.FORBIDDEN, f"{user!r} is not an administrator", "log in as the administrator")


def is_console(path: str) -> bool:
    """Return whether a path belongs to the console. All others belong to the API.

    >>> is_console("/"), is_console("/console/queues"), is_console("/v1/subscriptions"), is_console("/consoles")
    (True, True, False, False)
    """
    return path in ("/", "/console") or path.startswith(("/console/", *_FRAMEWORK))


def _is_same_origin(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """Return whether a form or WebSocket comes from a page of the console; the cookies do not matter."""
    origin = headers.get(b"origin")
    if origin is None or (scope["type"] == "http" and scope["method"] in ("GET", "HEAD")):
        return True
    return urlsplit(origin.decode("latin-1")).netloc == headers.get(b"host", b"").decode("latin-1")


def _console_path(path: str) -> str:
    """Return the path if it belongs to the console, else `/`: a login must not redirect to another site."""
    parts = urlsplit(path)
    if parts.scheme or parts.netloc or not path.startswith("/") or path.startswith("//") or "\\" in path:
        return "/"
    return path if is_console(parts.path) and parts.path not in (LOGIN, LOGOUT) else "/"


async def _ignore_disconnect(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve a request and ignore the error that NiceGUI's middleware raises when the client disconnects."""
    disconnected = False

    async def receive_and_note() -> Message:
        nonlocal disconnected
        message = await receive()
        disconnected = disconnected or message["type"] == "http.disconnect"
        return message

    try:
        await app(scope, receive_and_note, send)
    except RuntimeError:
        if not disconnected:
            raise


async def _refuse(scope: Scope, receive: Receive, send: Send, status: HTTPStatus) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": status.phrase})
        return
    await PlainTextResponse(status.phrase, status)(scope, receive, send)


async def read_body(receive: Receive, max_bytes: int) -> bytes | None:
    """Return the body of a request; None if it is too large. Raise ClientDisconnect if the client leaves before."""
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        data += message.get("body", b"")
        if len(data) > max_bytes:
            return None
        if not message.get("more_body"):
            return bytes(data)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await send(message)

    return sending


def login_page(wanted: str, *, user: str = "", problem: str = "", fix: str = "") -> str:
    """Return the login form with the problem of the last attempt. Plain HTML: it needs no NiceGUI."""
    icon = "data:image/svg+xml," + ICON.replace("#", "%23").replace('"', "'")
    message = f'<div class="problem" role="alert">{escape(problem)}. {escape(fix)}.</div>' if problem else ""
    focus_user, focus_password = ("", " autofocus") if user else (" autofocus", "")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Log in · Purveyor</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="{icon}">{head()}<style>{static("login.css")}</style></head>'
        f'<body class="login"><form method="post" action="/console/login">'
        f'<div class="brand">{ICON}Purveyor</div><p>Log in as the administrator of the API.</p>{message}'
        f'<input type="hidden" name="next" value="{escape(wanted)}">'
        f'<label>User<input name="user" value="{escape(user)}" autocomplete="username" required{focus_user}></label>'
        '<label>Password<input name="password" type="password" autocomplete="current-password" required'
        f"{focus_password}></label>"
        '<button type="submit">Log in</button></form></body></html>'
    )
