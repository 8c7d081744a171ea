"""Who is asking: HTTP Basic or a Bearer token, checked before anything else of a request is looked at.

A login that was right is remembered for some minutes under a keyed hash of what was sent (the key is this process's and
nowhere written), so that argon2 is paid once and not for every request. When its password or token changes, in
whichever process, it is checked again; when its subscription is deleted, it counts no more.

A login that is wrong gets the same answer after the same work, whether its name exists or not. Who fails often has to
wait (`limits`). That never concerns a client which sends what was right when it was checked last: others may fail at
its login, or at its address, as often as they like.
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
from purveyor.app.http.login_throttle import Attempt, Kind, LoginLimits, Ruling
from purveyor.app.http.models import LONGEST_PASSWORD
from purveyor.app.http.problems import Problem
from purveyor.delivery.credentials import Credentials, password_key, token_id, token_key
from purveyor.delivery.password_hashing import Hasher
from purveyor.delivery.registration_cache import Gate
from purveyor.model.errors import InvalidName, Unavailable, UnknownSubscription
from purveyor.model.name_rules import check_subscription_name

REMEMBER_SECONDS: Final = 300.0
_MOST_REMEMBERED: Final = 10_000
_MOST_WAITING: Final = 1_000
"""Logins that wait for the outcome of others from the same address."""
_STALE: Final = float("-inf")
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
class Proof:
    """What a client logged in with. It bounds what the client may make of it."""

    until: datetime | None = None
    """When that ends by itself."""
    generation: int | None = None
    """Of the password of a subscription."""
    token: str | None = None
    """The id of the token, if it was one."""
    derived: bool = False
    """Whether that token was made with another one."""

    @property
    def is_current_password(self) -> bool:
        """Whether it was a password, and not one that is valid for a while beside a new one."""
        return self.token is None and self.until is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who is asking."""

    role: Role
    login: str
    realms: frozenset[str] | None = None
    incarnation: str | None = None
    """Of the subscription that it is, if it is one."""
    proof: Proof = Proof()

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
    key: str
    """Where that is kept, as `Credentials.follow` tells of changes."""

    @property
    def kind(self) -> Kind:
        """Which of the two it is."""
        return Kind.PASSWORD if self.user else Kind.TOKEN


@dataclass(slots=True)
class _Remembered:
    """A login that was right when it was checked last; from `until` on it is checked again."""

    principal: Principal
    key: str
    until: float


@dataclass(slots=True, eq=False)
class _Check:
    """A login that is being checked."""

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
        self._under_way: dict[bytes, _Check] = {}
        self._limits = LoginLimits()
        self._outcome = asyncio.Event()
        """Set, and replaced by another, when the outcome of a check is known."""
        self._waiting = 0

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
        """A password or token was changed (None: nobody knows which): check it again, and tokens with the password."""
        for check in self._under_way.values():
            check.changed = True
        for known in self._remembered.values():
            if key in (None, known.key, password_key(known.principal.login)):
                known.until = _STALE

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
        while True:
            known = self._remembered.get(place)
            if known is not None and known.until > self._clock():
                if await _is_current(known.principal, backend):
                    return known.principal
                known.until = _STALE
            sent = _read(header)
            attempt = Attempt.of(address_group(address), sent.kind, sent.user or sent.key)
            if known is not None or place in self._under_way or self._admits(attempt):
                break
            await self._wait_for_others()
        principal = await self._check_once(place, sent, attempt, backend)
        if principal is None:
            raise _wrong()
        return principal

    def _admits(self, attempt: Attempt) -> bool:
        """Whether an attempt may be made now; False: the outcome of others decides. A `Problem` if it is refused."""
        ruling, seconds = self._limits.ask(attempt, self._clock())
        if ruling is Ruling.REFUSED:
            wait = int(seconds) + 1
            raise Problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                "too many logins have failed",
                f"check the user and password, or the token, and try again in {wait} seconds",
                {"Retry-After": str(wait)},
            )
        return ruling is Ruling.ADMITTED

    async def _wait_for_others(self) -> None:
        """Return when the outcome of an attempt under way is known."""
        if self._waiting >= _MOST_WAITING:
            raise Unavailable("too many logins are being checked", fix="try again in a moment")
        self._waiting += 1
        try:
            await self._outcome.wait()
        finally:
            self._waiting -= 1

    async def _check_once(self, place: bytes, sent: _Sent, attempt: Attempt, backend: Backend) -> Principal | None:
        """Of many that send the same at once, one is checked for all."""
        check = self._under_way.get(place)
        if check is None:
            check = self._under_way[place] = _Check()
            self._limits.begin(attempt, self._clock())
            check.task = asyncio.create_task(self._check(place, sent, check, backend))
            check.task.add_done_callback(lambda done: self._decided(place, attempt, done))
        assert check.task is not None
        return await asyncio.shield(check.task)

    def _decided(self, place: bytes, attempt: Attempt, done: "asyncio.Task[Principal | None]") -> None:
        self._under_way.pop(place, None)
        now = self._clock()
        if done.cancelled() or done.exception() is not None:
            self._limits.undecided(attempt, now)
        elif done.result() is None:
            self._remembered.pop(place, None)
            self._limits.failed(attempt, now)
        else:
            self._limits.succeeded(attempt, now)
        self._outcome.set()
        self._outcome = asyncio.Event()

    async def _check(self, place: bytes, sent: _Sent, check: _Check, backend: Backend) -> Principal | None:
        principal = await (self._by_password if sent.user else self._by_token)(sent, backend)
        if principal is None or not await _is_current(principal, backend):
            return None
        left = REMEMBER_SECONDS
        if principal.proof.until is not None:
            left = min(left, (principal.proof.until - datetime.now(UTC)).total_seconds())
        until = _STALE if check.changed else self._clock() + left
        self._remembered[place] = _Remembered(principal, sent.key, until)
        while len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)
        return principal

    async def _by_password(self, sent: _Sent, backend: Backend) -> Principal | None:
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

    async def _by_token(self, sent: _Sent, backend: Backend) -> Principal | None:
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
    """Whether a subscription is still the one whose password was checked. Answered from memory."""
    if principal.incarnation is None:
        return True
    try:
        return (await backend.gate.look(principal.login)).incarnation == principal.incarnation
    except UnknownSubscription:
        return False


def _principal(login: Login, proof: Proof | None = None) -> Principal:
    return Principal(role=login.role, login=login.username, realms=login.realms, proof=proof or Proof())


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
