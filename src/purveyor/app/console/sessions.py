"""Sessions of the console: signed cookies for the administrator.

The authenticator of the API checks the login and throttles attempts. The cookie holds its end and is signed with a key
derived from a secret in the data directory and the administrator's password: a new password ends every session. Every
API process with the same data directory accepts it.

A logout ends the session: the API stores its id in the bucket of credentials, which every API process follows
(`Credentials.end_session`). A process that has not read that bucket yet accepts only sessions that it began itself.
"""

import base64
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Final

from purveyor.app.http.authentication import Login, Role
from purveyor.model.errors import SetupError

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
