"""Who is asking: HTTP Basic or a Bearer token, checked before anything else of a request is looked at.

A login that was right is remembered for some minutes under a keyed hash of what was sent (the key is this process's and
nowhere written), so that argon2 is paid once and not for every request. When its password or token changes, in
whichever process, it is forgotten; when its subscription is deleted, it counts no more.

A login that is wrong gets the same answer after the same work, whether its name exists or not.
"""

import asyncio
import base64
import binascii
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from http import HTTPStatus
from typing import Final, Protocol

from purveyor.app.http.limits import FailedLogins
from purveyor.app.http.models import LONGEST_PASSWORD
from purveyor.app.http.problems import Problem
from purveyor.delivery.credentials import Credentials, password_key, token_id, token_key
from purveyor.delivery.gate import Gate
from purveyor.delivery.hashing import Hasher
from purveyor.model.errors import InvalidName, UnknownSubscription
from purveyor.model.names import check_subscription_name

REMEMBER_SECONDS: Final = 300.0
_MOST_REMEMBERED: Final = 10_000
_LONGEST_HEADER: Final = 4096
_REALM: Final = {"WWW-Authenticate": 'Basic realm="purveyor", charset="UTF-8"'}


class Role(Enum):
    """What a login is for."""

    ADMIN = "admin"
    EVENTS = "events"
    PREFILL = "prefill"
    SUBSCRIPTION = "subscription"


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A login of the settings. `realms` are those it may publish into; None: all."""

    role: Role
    username: str
    password: str
    realms: frozenset[str] | None = None

    def __repr__(self) -> str:
        return f"Login({self.role.value}, {self.username!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who is asking."""

    role: Role
    login: str
    realms: frozenset[str] | None = None
    incarnation: str | None = None
    """Of the subscription that it is, if it is one."""

    @property
    def is_admin(self) -> bool:
        """Whether it may do what is an administrator's."""
        return self.role is Role.ADMIN

    def owns(self, name: str) -> bool:
        """Whether it is the subscription of that name."""
        return self.role is Role.SUBSCRIPTION and self.login == name


class Backend(Protocol):
    """What is needed of the server; raises an `Unavailable` while it is away."""

    @property
    def credentials(self) -> Credentials:
        """Passwords of subscriptions, and tokens."""

    @property
    def gate(self) -> Gate:
        """The subscriptions there are."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a client sent to say who it is: a user and a password, or a token (without a user)."""

    user: str
    secret: str
    key: str | None
    """Where that is kept, as `Credentials.follow` tells of changes."""


@dataclass(frozen=True, slots=True)
class _Believed:
    """A login that was right, and when that ends by itself."""

    principal: Principal
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class _Remembered:
    principal: Principal
    key: str | None
    until: float


@dataclass(slots=True, eq=False)
class _Attempt:
    """A login that is being checked."""

    key: str | None
    changed: bool = False
    task: "asyncio.Task[Principal | None] | None" = None


class Security:
    """See the module. The logins of the settings are hashed in `open`, and then work like all others."""

    def __init__(self, logins: Sequence[Login], hasher: Hasher, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logins = {login.username: login for login in logins}
        self._hasher = hasher
        self._clock = clock
        self._hashes: dict[str, str] = {}
        self._key = secrets.token_bytes(32)
        self._remembered: OrderedDict[bytes, _Remembered] = OrderedDict()
        self._under_way: dict[bytes, _Attempt] = {}
        self._failed = FailedLogins()

    async def open(self) -> None:
        """Hash the passwords of the settings."""
        for login in self._logins.values():
            self._hashes[login.username] = await self._hasher.hash(login.password)

    def is_reserved(self, name: str) -> bool:
        """Whether a name is that of a login of the settings."""
        return name in self._logins

    def login(self, username: str) -> Login | None:
        """A login of the settings."""
        return self._logins.get(username)

    def forget(self, key: str | None) -> None:
        """A password or token was changed (None: nobody knows which): check it again."""
        for attempt in self._under_way.values():
            attempt.changed = attempt.changed or key in (None, attempt.key)
        for place in [place for place, known in self._remembered.items() if key in (None, known.key)]:
            del self._remembered[place]

    def forget_password(self, name: str) -> None:
        """The password of a subscription was changed by this process."""
        self.forget(password_key(name))

    def forget_token(self, identity: str) -> None:
        """A token was ended by this process."""
        self.forget(token_key(identity))

    async def authenticate(self, header: str | None, address: str, backend: Backend) -> Principal:
        """Who is asking; a `Problem` if that cannot be told or believed."""
        if not header:
            raise Problem(HTTPStatus.UNAUTHORIZED, "no login was given", "send a user and password, or a token", _REALM)
        if len(header) > _LONGEST_HEADER:
            raise _wrong()
        place = hashlib.blake2b(header.encode("latin-1", "replace"), key=self._key, digest_size=32).digest()
        known = self._remembered.get(place)
        if known is not None and known.until > self._clock():
            if await _is_current(known.principal, backend):
                return known.principal
            self._remembered.pop(place, None)
        sent = _read(header)
        now = self._clock()
        wait = self._failed.wait_seconds(address, sent.user, now)
        if wait > 0:
            raise Problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                "too many logins have failed",
                "check the user and password, and wait",
                {"Retry-After": str(int(wait) + 1)},
            )
        principal = await self._check_once(place, sent, address, backend)
        if principal is None:
            raise _wrong()
        return principal

    async def _check_once(self, place: bytes, sent: _Sent, address: str, backend: Backend) -> Principal | None:
        """Of many that send the same at once, one is checked for all."""
        attempt = self._under_way.get(place)
        if attempt is None:
            attempt = self._under_way[place] = _Attempt(sent.key)
            self._failed.begin(address, sent.user, self._clock())
            attempt.task = asyncio.create_task(self._check(place, sent, attempt, backend))
            attempt.task.add_done_callback(lambda done: self._decided(place, sent, address, done))
        assert attempt.task is not None
        return await asyncio.shield(attempt.task)

    def _decided(self, place: bytes, sent: _Sent, address: str, done: "asyncio.Task[Principal | None]") -> None:
        self._under_way.pop(place, None)
        if done.cancelled() or done.exception() is not None:
            self._failed.undecided(address, sent.user)
        elif done.result() is None:
            self._failed.failed(address, self._clock())
        else:
            self._failed.succeeded(address, sent.user)

    async def _check(self, place: bytes, sent: _Sent, attempt: _Attempt, backend: Backend) -> Principal | None:
        believed = await (self._by_password if sent.user else self._by_token)(sent, backend)
        if believed is None or not await _is_current(believed.principal, backend):
            return None
        if not attempt.changed:
            left = REMEMBER_SECONDS
            if believed.until is not None:
                left = min(left, (believed.until - datetime.now(UTC)).total_seconds())
            self._remembered[place] = _Remembered(believed.principal, sent.key, self._clock() + left)
            while len(self._remembered) > _MOST_REMEMBERED:
                self._remembered.popitem(last=False)
        return believed.principal

    async def _by_password(self, sent: _Sent, backend: Backend) -> _Believed | None:
        login = self._logins.get(sent.user)
        if login is not None:
            right = await self._hasher.verify(self._hashes.get(login.username), sent.secret)
            return _Believed(_principal(login)) if right else None
        try:
            name = check_subscription_name(sent.user)
        except InvalidName:
            await self._hasher.verify(None, sent.secret)
            return None
        opened = await backend.credentials.check_password(name, sent.secret)
        if opened is None:
            return None
        principal = Principal(role=Role.SUBSCRIPTION, login=name, incarnation=opened.incarnation)
        return _Believed(principal, opened.until)

    async def _by_token(self, sent: _Sent, backend: Backend) -> _Believed | None:
        token = await backend.credentials.check_token(sent.secret)
        if token is None:
            return None
        if token.incarnation is not None:
            principal = Principal(role=Role.SUBSCRIPTION, login=token.login, incarnation=token.incarnation)
            return _Believed(principal, token.until)
        login = self._logins.get(token.login)
        return None if login is None else _Believed(_principal(login), token.until)


async def _is_current(principal: Principal, backend: Backend) -> bool:
    """Whether a subscription is still the one whose password was checked. Answered from memory."""
    if principal.incarnation is None:
        return True
    try:
        return (await backend.gate.look(principal.login)).incarnation == principal.incarnation
    except UnknownSubscription:
        return False


def _principal(login: Login) -> Principal:
    return Principal(role=login.role, login=login.username, realms=login.realms)


def _read(header: str) -> _Sent:
    scheme, _, rest = header.partition(" ")
    given = rest.strip()
    match scheme.lower():
        case "bearer" if given:
            return _Sent("", given, token_key(token_id(given) or ""))
        case "basic":
            try:
                user, colon, password = base64.b64decode(given, validate=True).decode().partition(":")
            except (binascii.Error, ValueError):
                raise _wrong() from None
            if colon and user and len(password) <= LONGEST_PASSWORD:
                return _Sent(user, password, password_key(user))
    raise _wrong()


def _wrong() -> Problem:
    """One answer, whatever is wrong."""
    return Problem(
        HTTPStatus.UNAUTHORIZED,
        "the login is not accepted",
        "check the user and password, or the token; a subscription logs in with its name",
        _REALM,
    )
