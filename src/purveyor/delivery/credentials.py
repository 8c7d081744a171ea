"""Credentials: passwords of subscriptions and tokens of all logins, as hashes in the bucket `credentials`.

    subscription.<name>   {"incarnation", "passwords": [{"hash", "until", "generation"}]}  the newest password first
    token.<id>            {"login", "incarnation", "hash", "label", "created", "until",
                           "generation", "parent", "bound"}                                one key for each token
    session.<id>          {}    a console session that was ended, while its cookie would be valid

A password belongs to one incarnation of a subscription: the password of a deleted subscription of the same name is not
accepted. After a change, the old password can stay valid for a while beside the new one, and a login can have several
tokens. So its clients can change over one by one without a refused login.

The rules by which tokens become invalid are in `tokens`.

People choose passwords, so their hash is argon2. A token has 256 random bits: it cannot be guessed, and a plain hash is
safe.

A check of a password is costly on purpose, and runs in a thread: the event loop never waits for it. There are fewer
threads than cores, so that other work continues while many clients log in at once. When too many checks are waiting,
further logins are refused.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

import argon2
from argon2.exceptions import Argon2Error, InvalidHashError

from purveyor.delivery.tokens import (
    Password,
    Passwords,
    Token,
    TokenOptions,
    binding_digest,
    digest,
    limit_to_parent,
    limit_to_password,
    read_password,
    read_token,
    token_json,
    valid_tokens,
)
from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.model import json_fields
from purveyor.model.errors import (
    AlreadyExists,
    InvalidInput,
    NotFound,
    PurveyorError,
    Refused,
    Unavailable,
    UnknownKey,
    UnreadableRecord,
    WrongRevision,
)
from purveyor.model.json_fields import Json, Kind
from purveyor.queues.client import Queues

# The minimum that OWASP recommends: about 20 ms and 19 MiB for each check.
_TIME_COST: Final = 2
_MEMORY_KIB: Final = 19 * 1024
_PARALLELISM: Final = 1
_MAX_WAITING_CHECKS: Final = 1000
_T = TypeVar("_T")
BUCKET: Final = "credentials"
TOKEN_PREFIX: Final = "pvr"
_PASSWORD_KEY_PREFIX: Final = "subscription."
_TOKEN_KEY_PREFIX: Final = "token."
_SESSION_KEY_PREFIX: Final = "session."
MAX_TOKENS_PER_LOGIN: Final = 100
_TOKEN_PATTERN: Final = re.compile(rf"{TOKEN_PREFIX}_([0-9a-f]{{16}})_([A-Za-z0-9_-]{{43}})")
_MAX_ATTEMPTS: Final = 20
_WATCH_RETRY_SECONDS: Final = 1.0
_PASSWORDS_RECORD: Final = Kind("password", ("incarnation", "passwords"))
_TOKEN_RECORD: Final = Kind(
    "token", ("login", "incarnation", "hash", "label", "created", "until", "generation", "parent", "bound")
)
_MARKER_AGE: Final = timedelta(hours=1)
"""How long the server keeps deletion markers: longer than an API process caches a successful login."""
_CLOCK_SKEW: Final = timedelta(minutes=5)
"""The server removes ended credentials this much later: its clock and ours may differ."""
_log = logging.getLogger(__name__)


class PasswordHasher:
    """Hashes and checks passwords. `close` ends its threads."""

    def __init__(self) -> None:
        self._argon = argon2.PasswordHasher(time_cost=_TIME_COST, memory_cost=_MEMORY_KIB, parallelism=_PARALLELISM)
        self._threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2), thread_name_prefix="purveyor-hash")
        self._waiting = 0
        self._random_hash = self._argon.hash(secrets.token_hex())

    async def hash(self, password: str) -> str:
        """Return a hash to store; it contains its salt and its costs."""
        return await self._run(lambda: self._argon.hash(password))

    async def verify(self, stored: str | None, password: str) -> bool:
        """Return whether a password matches a stored hash. Without a hash: False, after the same time."""
        matches = await self._run(lambda: self._verify(stored or self._random_hash, password))
        return matches and stored is not None

    def _verify(self, stored: str, password: str) -> bool:
        try:
            return self._argon.verify(stored, password)
        except (Argon2Error, InvalidHashError):
            return False

    async def _run(self, work: Callable[[], _T]) -> _T:
        if self._waiting >= _MAX_WAITING_CHECKS:
            raise Unavailable("too many logins are being checked", fix="try again in a moment")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the threads; drop waiting checks."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class PasswordMatch:
    """The incarnation that a correct password belongs to, and how long the password is valid."""

    incarnation: str
    until: datetime | None
    generation: int = 0


def _ignore() -> None:
    """Do nothing."""


class Credentials:
    """The credentials of a server. Every method raises an `Unavailable` when the server is away."""

    def __init__(self, queues: Queues, hasher: PasswordHasher, *, replicas: int = 1) -> None:
        self._queues = queues
        self._hasher = hasher
        self._replicas = replicas
        self._bucket: Bucket | None = None

    async def set_first_password(self, name: str, incarnation: str, password: str) -> bool:
        """Set the first password of a subscription; return False if it has this password already.

        Of many concurrent calls one succeeds. `AlreadyExists` if the subscription has another password.
        """
        stored, revision = await self._passwords(name)
        if stored is None or stored.incarnation != incarnation:
            first = Passwords(incarnation, (Password(await self._hasher.hash(password)),), revision)
            with contextlib.suppress(WrongRevision):  # another process was faster: compare its password
                await self._put(name, first)
                return True
        opened = await self.check_password(name, password)
        if opened is not None and opened.incarnation == incarnation:
            return False
        raise AlreadyExists(
            f"subscription {name!r} exists with another password",
            fix=f"give that password, or set a new one with PATCH /v1/subscriptions/{name}",
            code=409,
        )

    async def set_password(
        self, name: str, incarnation: str, password: str, *, keep_seconds: float = 0, keep_tokens: bool = False
    ) -> None:
        """Set a new password. The previous one stays valid for `keep_seconds`; older ones become invalid.

        Tokens become invalid with the previous password, unless `keep_tokens`. Both changes are one write.
        """
        new = await self._hasher.hash(password)
        for _ in range(_MAX_ATTEMPTS):
            stored, revision = await self._passwords(name)
            passwords: tuple[Password, ...] = (Password(new),)
            if stored is not None and stored.incarnation == incarnation:
                last = stored.passwords[0]
                passwords = (Password(new, generation=last.generation + (0 if keep_tokens else 1)),)
                if keep_seconds > 0:
                    passwords += (replace(last, until=datetime.now(UTC) + timedelta(seconds=keep_seconds)),)
            with contextlib.suppress(WrongRevision):
                await self._put(name, Passwords(incarnation, passwords, revision))
                return
        raise Unavailable(f"other processes change the password of subscription {name!r} too", fix="try again")

    async def check_password(self, name: str, password: str) -> PasswordMatch | None:
        """Check a password; None if it is wrong.

        The check takes as long for an unknown name. (While an old password is valid beside a new one, a wrong one takes
        longer.)
        """
        stored, _ = await self._passwords(name)
        valid = [each for each in stored.passwords if each.is_valid] if stored is not None else []
        if stored is None or not valid:
            await self._hasher.verify(None, password)
            return None
        for each in valid:
            if await self._hasher.verify(each.hash, password):
                return PasswordMatch(stored.incarnation, each.until, each.generation)
        return None

    async def remove(self, name: str, incarnation: str | None) -> None:
        """Remove the password and the tokens of a deleted subscription; None: of all incarnations of that name."""
        bucket = await self._open()
        entry = await bucket.newest(password_key(name))
        if entry is not None and not entry.deleted and incarnation in (None, _incarnation(entry.value)):
            with contextlib.suppress(WrongRevision):
                await bucket.delete(password_key(name), revision=entry.revision)
        for token in await self.tokens(name):
            if token.incarnation is not None and incarnation in (None, token.incarnation):
                await bucket.delete(token_key(token.id))

    async def add_token(
        self, login: str, incarnation: str | None, options: TokenOptions | None = None
    ) -> tuple[Token, str]:
        """Create a token for a login; return it and its text, which is not stored.

        1. The token is stored. 2. The tokens of the login are counted: one beyond the limit is removed, with `Refused`.
        So concurrent calls do not exceed the limit. A crash between the two leaves a token that no client has.
        """
        chosen = options or TokenOptions()
        identity, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        text = f"{TOKEN_PREFIX}_{identity}_{secret}"
        now = datetime.now(UTC)
        stored, _ = (None, 0) if incarnation is None else await self._passwords(login)
        current = 0 if stored is None or stored.incarnation != incarnation else stored.passwords[0].generation
        token = Token(
            id=identity,
            login=login,
            incarnation=incarnation,
            label=chosen.label,
            created=now,
            until=None if chosen.seconds is None else now + timedelta(seconds=chosen.seconds),
            generation=current if chosen.generation is None else chosen.generation,
            parent=chosen.parent,
            bound=None if chosen.password is None else binding_digest(text, chosen.password),
        ).until_at_most(chosen.until)
        bucket = await self._open()
        age = None if token.until is None else max(token.until - now, timedelta(0)) + _CLOCK_SKEW
        await bucket.create(token_key(identity), _TOKEN_RECORD.dump(token_json(token, secret)), max_age=age)
        found = [each.id for each in await self.tokens(login)]
        if identity in found[MAX_TOKENS_PER_LOGIN:]:
            await bucket.delete(token_key(identity))
            raise Refused(
                f"login {login!r} has {MAX_TOKENS_PER_LOGIN} tokens",
                fix="end one with DELETE /v1/tokens/{id}; GET /v1/tokens lists them",
                code=409,
            )
        if identity not in found and token.is_valid:
            raise Refused("the password or token of this request is no longer valid", fix="log in again", code=409)
        return token, text

    async def check_token(self, text: str) -> Token | None:
        """Return the token with this text; None if there is none or it is no longer valid."""
        shape = _TOKEN_PATTERN.fullmatch(text)
        identity, secret = shape.groups() if shape else ("0" * 16, "")
        try:
            entry = await (await self._open()).get(token_key(identity))
        except UnknownKey:
            return None
        value = _TOKEN_RECORD.read(entry.value, _TOKEN_RECORD.check, f"token {identity}")
        if not hmac.compare_digest(digest(secret), json_fields.text(value, "hash", "token")):
            return None
        token: Token | None = read_token(identity, value)
        if token is not None and token.incarnation is not None:
            token = limit_to_password(token, (await self._passwords(token.login))[0])
        if token is not None and token.parent is not None:
            token = limit_to_parent(token, await self._find_token(token.parent))
        return token if token is not None and token.is_valid else None

    async def tokens(self, login: str) -> list[Token]:
        """Return the valid tokens of a login, oldest first."""
        return [token for token in await self._valid_tokens(await self._all_tokens(), login) if token.login == login]

    async def remove_token(self, login: str, identity: str) -> list[str]:
        """Remove a token of a login, and those that it created; NotFound if the login has no such token.

        Return the ids of all removed tokens. The token itself is removed last: after a crash the call can be repeated.
        """
        found = await self._all_tokens()
        if not any(token.id == identity and token.login == login for token in found):
            raise NotFound(f"login {login!r} has no token {identity!r}", fix="GET /v1/tokens lists them")
        ended = [*(token.id for token in found if token.parent == identity), identity]
        bucket = await self._open()
        for each in ended:
            await bucket.delete(token_key(each))
        return ended

    async def remove_invalid_tokens(self) -> int:
        """Remove invalid tokens of all logins; return how many. Any number of processes may run it."""
        found = await self._all_tokens(lenient=False)
        valid = {token.id for token in await self._valid_tokens(found)}
        ended = [token.id for token in found if token.id not in valid]
        bucket = await self._open()
        for identity in ended:
            await bucket.delete(token_key(identity))
        return len(ended)

    async def end_session(self, identity: str, seconds: float) -> None:
        """Store for all API processes that a console session is over, for as long as it would be valid."""
        age = timedelta(seconds=max(seconds, 0)) + _CLOCK_SKEW
        await (await self._open()).put(session_key(identity), b"{}", max_age=age)

    async def _find_token(self, identity: str) -> Token | None:
        try:
            entry = await (await self._open()).get(token_key(identity))
        except UnknownKey:
            return None
        return read_token(identity, _TOKEN_RECORD.read(entry.value, _TOKEN_RECORD.check, f"token {identity}"))

    async def _valid_tokens(self, found: Sequence[Token], login: str | None = None) -> list[Token]:
        """Return the valid tokens, judged by the passwords of one login or of all."""
        names = {token.login for token in found if token.incarnation is not None and login in (None, token.login)}
        return valid_tokens(found, {name: (await self._passwords(name))[0] for name in names})

    async def _all_tokens(self, *, lenient: bool = True) -> list[Token]:
        """Return every token, oldest first. With `lenient`, skip tokens that this program does not understand."""
        found: list[Token] = []
        bucket = await self._open()
        async with contextlib.aclosing(bucket.watch(f"{_TOKEN_KEY_PREFIX}>")) as changes:
            async for entry in changes:
                if entry is None:
                    break
                if entry.deleted:
                    continue
                identity = entry.key.removeprefix(_TOKEN_KEY_PREFIX)
                try:
                    found.append(read_token(identity, _TOKEN_RECORD.read(entry.value, _TOKEN_RECORD.check)))
                except UnreadableRecord as error:
                    if not lenient:  # the validity of tokens that it created is unknown
                        raise
                    _log.warning("token %s is ignored: %s", identity, error)
        return found

    async def follow(self, changed: Callable[[str | None], None], begun: Callable[[], None] = _ignore) -> None:
        """Call `changed` with each changed key, and with None when changes may be missing. Runs until cancelled.

        The keys of ended sessions come first. `begun` is called when all later changes will be seen.
        """
        while True:
            try:
                bucket = await self._open()
                async with contextlib.aclosing(bucket.watch(values=False)) as changes:
                    current = False
                    async for entry in changes:
                        if entry is None:
                            current = True
                            changed(None)
                            begun()
                        elif current or entry.key.startswith(_SESSION_KEY_PREFIX):
                            changed(entry.key)
            except PurveyorError as error:
                _log.warning("changes of credentials cannot be watched now: %s", error)
            changed(None)
            await asyncio.sleep(_WATCH_RETRY_SECONDS)

    async def _open(self) -> Bucket:
        if self._bucket is None:
            config = BucketConfig(name=BUCKET, replicas=self._replicas, marker_age=_MARKER_AGE)
            self._bucket = await self._queues.bucket(config)
        return self._bucket

    async def _passwords(self, name: str) -> tuple[Passwords | None, int]:
        """Return the passwords of a subscription, and the revision for the next write."""
        entry = await (await self._open()).newest(password_key(name))
        if entry is None or entry.deleted:
            return None, 0 if entry is None else entry.revision

        def build(given: Json) -> Passwords:
            value = _PASSWORDS_RECORD.check(given)
            passwords = tuple(map(_password, value["passwords"]))
            return Passwords(json_fields.text(value, "incarnation", "password"), passwords, entry.revision)

        return _PASSWORDS_RECORD.read(entry.value, build, f"subscription {name!r}"), entry.revision

    async def _put(self, name: str, stored: Passwords) -> None:
        value = {"incarnation": stored.incarnation, "passwords": [each.to_json() for each in stored.passwords]}
        await (await self._open()).update(password_key(name), _PASSWORDS_RECORD.dump(value), stored.revision)


def password_key(name: str) -> str:
    """Return the key of a subscription's passwords."""
    return f"{_PASSWORD_KEY_PREFIX}{name}"


def token_key(identity: str) -> str:
    """Return the key of a token."""
    return f"{_TOKEN_KEY_PREFIX}{identity}"


def session_key(identity: str) -> str:
    """Return the key of an ended console session."""
    return f"{_SESSION_KEY_PREFIX}{identity}"


def ended_session(key: str) -> str | None:
    """Return the id of the ended session of a key; None for other keys."""
    return key.removeprefix(_SESSION_KEY_PREFIX) if key.startswith(_SESSION_KEY_PREFIX) else None


def token_id(text: str) -> str | None:
    """Return the id in the text of a token; None if the text has another form."""
    shape = _TOKEN_PATTERN.fullmatch(text)
    return None if shape is None else shape[1]


def _incarnation(stored: bytes) -> str | None:
    """Return the incarnation of stored passwords of any version."""
    try:
        found = json_fields.parse(stored, "password").get("incarnation")
    except InvalidInput:
        return None
    return found if isinstance(found, str) else None


def _password(given: Json) -> Password:
    json_fields.reject_unknown(given, ("hash", "until", "generation"), "password")
    return read_password(given)
