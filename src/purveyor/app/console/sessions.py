"""Who may use the console: the administrator, by a signed cookie that a login gives out.

The login is that of the API, with its check and its limit of attempts. The cookie says until when it counts and is
signed with a key made of a secret in the data directory and the administrator's password: whoever changes the password
ends every session. Any API process of the same directory takes it.

A logout ends the session: its id is stored in the bucket of credentials, which every API process follows
(`Credentials.end_session`). A process that has not read that bucket yet takes only sessions that it began itself.
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
    """Somebody who is logged in, until a time in seconds of the wall clock."""

    user: str
    until: int
    id: str

    @property
    def left_seconds(self) -> float:
        """For how long."""
        return self.until - time.time()


class Sessions:
    """Gives cookies out and reads them, and knows which sessions were ended."""

    def __init__(self, secret: bytes, login: Login) -> None:
        about = f"{login.username}\0{login.password}".encode("utf-8", "surrogatepass")
        self._key = hmac.digest(secret, about, "sha256")
        self._user = login.username
        self._begun: dict[str, float] = {}
        """Sessions of this process, and when they are over."""
        self._ended: dict[str, float] = {}
        """Sessions that were ended, in whichever process, and when they would be over."""
        self._knows_all = False

    def cookie(self, *, secure: bool) -> str:
        """The value of a Set-Cookie header for a new session."""
        until, identity = int(time.time()) + SESSION_SECONDS, secrets.token_urlsafe(8)
        _keep(self._begun, identity, until)
        body = f"{until}.{identity}"
        return _header(f"{body}.{self._signed(body)}", SESSION_SECONDS, secure=secure)

    def no_cookie(self, *, secure: bool) -> str:
        """The value of a Set-Cookie header that takes the cookie away."""
        return _header("", 0, secure=secure)

    def end(self, identity: str) -> None:
        """Take a session no more: somebody logged out of it, here or in another process."""
        _keep(self._ended, identity, time.time() + SESSION_SECONDS)

    def knows_all(self) -> None:
        """Say that all sessions are known that were ended in other processes: take those that they began."""
        self._knows_all = True

    def is_live(self, session: Session) -> bool:
        """Whether a session is neither over nor ended."""
        if session.left_seconds <= 0 or session.id in self._ended:
            return False
        return self._knows_all or session.id in self._begun

    def read(self, header: str | None) -> Session | None:
        """The session of a Cookie header; None if there is none, or it is over or not ours."""
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


def _keep(sessions: dict[str, float], identity: str, until: float) -> None:
    """Keep a session, and drop those that are over."""
    now = time.time()
    for each in [each for each, end in sessions.items() if end <= now]:
        del sessions[each]
    sessions[identity] = until


def _header(value: str, seconds: int, *, secure: bool) -> str:
    safe = "; Secure" if secure else ""
    return f"{COOKIE}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{safe}"


def admin_of(logins: Sequence[Login]) -> Login:
    """The login that the console is for."""
    return next(login for login in logins if login.role is Role.ADMIN)


def basic(user: str, password: str) -> str:
    """An Authorization header, as the API's own check takes it."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def read_secret(data_dir: Path) -> bytes:
    """The secret of the data directory, made if there is none. Of processes that start at once one makes it."""
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
                pass  # somebody else was quicker
            finally:
                draft.unlink()
        if path.stat().st_mode & 0o077:
            raise SetupError(f"others can read {path}", fix="remove it: it is made anew, and everybody logs in again")
        found = path.read_bytes()
    except OSError as error:
        raise SetupError(
            f"the secret of the console in {path} cannot be kept: {error.strerror}",
            fix="see that the data directory can be written, or set PURVEYOR_CONSOLE=false",
        ) from error
    if len(found) < _SECRET_BYTES:
        raise SetupError(f"{path} is not whole", fix="remove it: it is made anew, and everybody logs in again")
    return found
