"""Authentication of requests: HTTP Basic or a Bearer token, checked before anything else of a request.

The authenticator caches an accepted login for some minutes under a keyed hash of the Authorization header (the key
lives in this process only), so that argon2 runs once and not for every request. When any process changes the password
or token, the authenticator checks the login again. When the subscription is deleted, the login ends.

A wrong login gets the same answer after the same work, whether its name exists or not. A client that fails often has
to wait (`login_throttle`). That never affects a client whose login was accepted at its last check: other clients may
fail at its login, or at its address, without effect on it.
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

from purveyor.app.http.connections import address_group
from purveyor.app.http.login_throttle import Attempt, CredentialKind, Decision, LoginThrottle
from purveyor.app.http.models import MAX_PASSWORD_LENGTH
from purveyor.app.http.problems import Problem
from purveyor.delivery.credentials import Credentials, PasswordHasher, password_key, token_id, token_key
from purveyor.delivery.subscription_changes import RegistrationCache
from purveyor.model.errors import InvalidName, Unavailable, UnknownSubscription
from purveyor.model.name_rules import check_subscription_name

LOGIN_CACHE_SECONDS: Final = 300.0
_MAX_CACHED_LOGINS: Final = 10_000
_MAX_WAITING_LOGINS: Final = 1_000
"""Logins that may wait for the outcome of others from the same address."""
_STALE: Final = float("-inf")
_MAX_HEADER_LENGTH: Final = 4096
CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="purveyor", charset="UTF-8"'}


class Role(Enum):
    """The purpose of a login."""

    ADMIN = "admin"
    EVENTS = "events"
    PREFILL = "prefill"
    SUBSCRIPTION = "subscription"


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A login from the settings. `realms` lists the realms it may publish into; None: all."""

    role: Role
    username: str
    password: str
    realms: frozenset[str] | None = None

    def __repr__(self) -> str:
        return f"Login({self.role.value}, {self.username!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The credential of a login. It limits the tokens that the client may create with it."""

    until: datetime | None = None
    """When the credential expires."""
    generation: int | None = None
    """The generation of the subscription's password."""
    token: str | None = None
    """The id of the token, if the credential is a token."""
    derived: bool = False
    """Whether the token was created with another token."""

    @property
    def is_current_password(self) -> bool:
        """Whether the credential is a password that is not about to be replaced."""
        return self.token is None and self.until is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The authenticated client of a request."""

    role: Role
    login: str
    realms: frozenset[str] | None = None
    incarnation: str | None = None
    """The incarnation of the subscription, if the client is one."""
    proof: Proof = Proof()

    @property
    def is_admin(self) -> bool:
        """Whether the client is an administrator."""
        return self.role is Role.ADMIN

    def owns(self, name: str) -> bool:
        """Return whether the client is the subscription of that name."""
        return self.role is Role.SUBSCRIPTION and self.login == name


class Backend(Protocol):
    """The services that authentication needs. They raise `Unavailable` while the NATS server does not answer."""

    @property
    def credentials(self) -> Credentials:
        """Passwords of subscriptions, and tokens."""

    @property
    def registrations(self) -> RegistrationCache:
        """The subscriptions there are."""


@dataclass(frozen=True, slots=True)
class _SentLogin:
    """The content of an Authorization header: a user and a password, or a token without a user."""

    user: str
    secret: str
    key: str
    """The key of the stored credential, as `Credentials.follow` reports changes."""

    @property
    def kind(self) -> CredentialKind:
        """Whether it is a password or a token."""
        return CredentialKind.PASSWORD if self.user else CredentialKind.TOKEN


@dataclass(slots=True)
class _CachedLogin:
    """A login that was accepted at its last check. The authenticator checks it again from `until` on."""

    principal: Principal
    key: str
    until: float


@dataclass(slots=True, eq=False)
class _Check:
    """A check in progress."""

    changed: bool = False
    task: "asyncio.Task[Principal | None] | None" = None


class Authenticator:
    """Checks logins and caches accepted ones.

    `open` hashes the passwords of the settings; from then on those logins work like all others.
    """

    def __init__(
        self, logins: Sequence[Login], hasher: PasswordHasher, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logins = {login.username: login for login in logins}
        self._hasher = hasher
        self._clock = clock
        self._hashes: dict[str, str] = {}
        self._key = secrets.token_bytes(32)
        self._cache: OrderedDict[bytes, _CachedLogin] = OrderedDict()
        self._checks: dict[bytes, _Check] = {}
        self._throttle = LoginThrottle()
        self._check_ended = asyncio.Event()
        """Set, and replaced by another event, when a check ends."""
        self._waiting = 0

    async def open(self) -> None:
        """Hash the passwords of the settings."""
        for login in self._logins.values():
            self._hashes[login.username] = await self._hasher.hash(login.password)

    def is_reserved(self, name: str) -> bool:
        """Return whether a login of the settings has this name."""
        return name in self._logins

    def login(self, username: str) -> Login | None:
        """Return the login of the settings with this name."""
        return self._logins.get(username)

    def invalidate(self, key: str | None) -> None:
        """Check a login again because its password or token changed, and with a password also its tokens.

        None: any credential may have changed.
        """
        for check in self._checks.values():
            check.changed = True
        for cached in self._cache.values():
            if key in (None, cached.key, password_key(cached.principal.login)):
                cached.until = _STALE

    def invalidate_password(self, name: str) -> None:
        """Check the logins of a subscription again: this process changed its password."""
        self.invalidate(password_key(name))

    def invalidate_token(self, identity: str) -> None:
        """Check a token again: this process ended it."""
        self.invalidate(token_key(identity))

    async def authenticate(self, header: str | None, address: str, backend: Backend) -> Principal:
        """Return the client of an Authorization header. Raise a `Problem` if the login is missing or wrong."""
        if not header:
            raise Problem(
                HTTPStatus.UNAUTHORIZED,
                "the request has no login",
                "send a user and password, or a token",
                CHALLENGE,
            )
        if len(header) > _MAX_HEADER_LENGTH:
            raise _login_refused()
        cache_key = hashlib.blake2b(header.encode("latin-1", "replace"), key=self._key, digest_size=32).digest()
        while True:
            cached = self._cache.get(cache_key)
            if cached is not None and cached.until > self._clock():
                if await _is_current(cached.principal, backend):
                    return cached.principal
                cached.until = _STALE
            sent = _parse(header)
            attempt = Attempt.of(address_group(address), sent.kind, sent.user or sent.key)
            if cached is not None or cache_key in self._checks or self._is_admitted(attempt):
                break
            await self._wait_for_others()
        principal = await self._check_once(cache_key, sent, attempt, backend)
        if principal is None:
            raise _login_refused()
        return principal

    def _is_admitted(self, attempt: Attempt) -> bool:
        """Return whether an attempt may be made now; False: wait for the outcome of others.

        Raise a `Problem` if the throttle refuses it.
        """
        decision, seconds = self._throttle.decide(attempt, self._clock())
        if decision is Decision.REFUSED:
            wait = int(seconds) + 1
            raise Problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                "too many logins have failed",
                f"check the user and password, or the token, and try again in {wait} seconds",
                {"Retry-After": str(wait)},
            )
        return decision is Decision.ADMITTED

    async def _wait_for_others(self) -> None:
        """Wait until an attempt in progress ends."""
        if self._waiting >= _MAX_WAITING_LOGINS:
            raise Unavailable("too many logins are being checked", fix="try again in a moment")
        self._waiting += 1
        try:
            await self._check_ended.wait()
        finally:
            self._waiting -= 1

    async def _check_once(
        self, cache_key: bytes, sent: _SentLogin, attempt: Attempt, backend: Backend
    ) -> Principal | None:
        """Check a login, once for all requests that send it at the same time."""
        check = self._checks.get(cache_key)
        if check is None:
            check = self._checks[cache_key] = _Check()
            self._throttle.begin(attempt, self._clock())
            check.task = asyncio.create_task(self._check(cache_key, sent, check, backend))
            check.task.add_done_callback(lambda done: self._finish_check(cache_key, attempt, done))
        assert check.task is not None
        return await asyncio.shield(check.task)

    def _finish_check(self, cache_key: bytes, attempt: Attempt, done: "asyncio.Task[Principal | None]") -> None:
        self._checks.pop(cache_key, None)
        now = self._clock()
        if done.cancelled() or done.exception() is not None:
            self._throttle.cancel(attempt, now)
        elif done.result() is None:
            self._cache.pop(cache_key, None)
            self._throttle.record_failure(attempt, now)
        else:
            self._throttle.record_success(attempt, now)
        self._check_ended.set()
        self._check_ended = asyncio.Event()

    async def _check(self, cache_key: bytes, sent: _SentLogin, check: _Check, backend: Backend) -> Principal | None:
        principal = await (self._check_password if sent.user else self._check_token)(sent, backend)
        if principal is None or not await _is_current(principal, backend):
            return None
        left = LOGIN_CACHE_SECONDS
        if principal.proof.until is not None:
            left = min(left, (principal.proof.until - datetime.now(UTC)).total_seconds())
        until = _STALE if check.changed else self._clock() + left
        self._cache[cache_key] = _CachedLogin(principal, sent.key, until)
        while len(self._cache) > _MAX_CACHED_LOGINS:
            self._cache.popitem(last=False)
        return principal

    async def _check_password(self, sent: _SentLogin, backend: Backend) -> Principal | None:
        login = self._logins.get(sent.user)
        if login is not None:
            right = await self._hasher.verify(self._hashes.get(login.username), sent.secret)
            return _principal(login) if right else None
        try:
            name = check_subscription_name(sent.user)
        except InvalidName:
            await self._hasher.verify(None, sent.secret)
            return None
        opened = await backend.credentials.check_password(name, sent.secret)
        if opened is None:
            return None
        proof = Proof(until=opened.until, generation=opened.generation)
        return Principal(role=Role.SUBSCRIPTION, login=name, incarnation=opened.incarnation, proof=proof)

    async def _check_token(self, sent: _SentLogin, backend: Backend) -> Principal | None:
        token = await backend.credentials.check_token(sent.secret)
        if token is None:
            return None
        derived = token.parent is not None
        proof = Proof(until=token.until, generation=token.generation, token=token.id, derived=derived)
        if token.incarnation is not None:
            return Principal(role=Role.SUBSCRIPTION, login=token.login, incarnation=token.incarnation, proof=proof)
        login = self._logins.get(token.login)
        if login is None or not token.is_bound(sent.secret, login.password):
            return None
        return _principal(login, proof)


async def _is_current(principal: Principal, backend: Backend) -> bool:
    """Return whether the subscription is still the incarnation whose password was checked. Reads only a cache."""
    if principal.incarnation is None:
        return True
    try:
        return (await backend.registrations.get(principal.login)).incarnation == principal.incarnation
    except UnknownSubscription:
        return False


def _principal(login: Login, proof: Proof | None = None) -> Principal:
    return Principal(role=login.role, login=login.username, realms=login.realms, proof=proof or Proof())


def _parse(header: str) -> _SentLogin:
    scheme, _, rest = header.partition(" ")
    given = rest.strip()
    match scheme.lower():
        case "bearer" if given:
            return _SentLogin("", given, token_key(token_id(given) or ""))
        case "basic":
            try:
                user, colon, password = base64.b64decode(given, validate=True).decode().partition(":")
            except (binascii.Error, ValueError):
                raise _login_refused() from None
            if colon and user and len(password) <= MAX_PASSWORD_LENGTH:
                return _SentLogin(user, password, password_key(user))
    raise _login_refused()


def _login_refused() -> Problem:
    """Return the one answer for every wrong login."""
    return Problem(
        HTTPStatus.UNAUTHORIZED,
        "the login is not accepted",
        "check the user and password, or the token; a subscription logs in with its name",
        CHALLENGE,
    )
