"""Who may speak for whom: passwords of subscriptions and tokens of all logins, as hashes in the bucket `credentials`.

    subscription.<name>   {"incarnation", "passwords": [{"hash", "until"}]}                the newest password first
    token.<id>            {"login", "incarnation", "hash", "label", "created", "until"}    one key for each token

A password belongs to one incarnation of a subscription: what a deleted one of the same name left behind opens nothing.
A password that is changed can stay valid for a while beside the new one, and a login can have several tokens: either
way its clients change over one by one, and none of them is turned away.

Passwords are people's, so their hash is argon2. A token is 256 random bits: nobody can guess one, a plain hash is safe.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from purveyor.delivery.hashing import Hasher
from purveyor.model import jsontext
from purveyor.model.errors import (
    AlreadyExists,
    NotFound,
    PurveyorError,
    Unavailable,
    UnknownKey,
    WrongRevision,
)
from purveyor.model.jsontext import Json
from purveyor.queues.client import Queues
from purveyor.queues.keyvalue import Bucket, BucketConfig

BUCKET: Final = "credentials"
TOKEN_PREFIX: Final = "pvr"
_PASSWORD: Final = "subscription."
_TOKEN: Final = "token."
_SHAPE: Final = re.compile(rf"{TOKEN_PREFIX}_([0-9a-f]{{16}})_([A-Za-z0-9_-]{{43}})")
_ATTEMPTS: Final = 20
_AGAIN_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token, without what makes it one: for whom it speaks, and until when."""

    id: str
    login: str
    incarnation: str | None
    """Of the subscription that it speaks for, if it does."""
    label: str
    created: datetime
    until: datetime | None

    @property
    def valid(self) -> bool:
        """Whether its time is not over."""
        return self.until is None or datetime.now(UTC) < self.until


@dataclass(frozen=True, slots=True)
class Opened:
    """A password was right: for which incarnation of the subscription, and until when it is valid."""

    incarnation: str
    until: datetime | None


@dataclass(frozen=True, slots=True)
class _Password:
    hash: str
    until: datetime | None = None

    @property
    def valid(self) -> bool:
        return self.until is None or datetime.now(UTC) < self.until

    def to_json(self) -> Json:
        return {"hash": self.hash, "until": None if self.until is None else self.until.isoformat()}


@dataclass(frozen=True, slots=True)
class _Passwords:
    """What is kept under a subscription's name."""

    incarnation: str
    passwords: tuple[_Password, ...]
    revision: int


def _unheard() -> None:
    """Nobody listens."""


class Credentials:
    """See the module. Every method raises an `Unavailable` when the server is away."""

    def __init__(self, queues: Queues, hasher: Hasher, *, replicas: int = 1) -> None:
        self._queues = queues
        self._hasher = hasher
        self._replicas = replicas
        self._bucket: Bucket | None = None

    async def set_first(self, name: str, incarnation: str, password: str) -> bool:
        """Give a subscription its password when it is added; False if it has this one. Of many at once one succeeds.

        `AlreadyExists` if it has another one.
        """
        kept, revision = await self._passwords(name)
        if kept is None or kept.incarnation != incarnation:
            first = _Passwords(incarnation, (_Password(await self._hasher.hash(password)),), revision)
            with contextlib.suppress(WrongRevision):  # somebody else was quicker: is it the same?
                await self._put(name, first)
                return True
        opened = await self.check_password(name, password)
        if opened is not None and opened.incarnation == incarnation:
            return False
        raise AlreadyExists(
            f"subscription {name!r} exists with another password",
            fix=f"give that one, or set a new one with PATCH /v1/subscriptions/{name}",
            code=409,
        )

    async def set_password(self, name: str, incarnation: str, password: str, *, keep_seconds: float = 0) -> None:
        """A new password. The last one is valid for a while longer, older ones are not."""
        new = _Password(await self._hasher.hash(password))
        for _ in range(_ATTEMPTS):
            kept, revision = await self._passwords(name)
            passwords: tuple[_Password, ...] = (new,)
            if kept is not None and kept.incarnation == incarnation and keep_seconds > 0:
                until = datetime.now(UTC) + timedelta(seconds=keep_seconds)
                passwords += (_Password(kept.passwords[0].hash, until),)
            with contextlib.suppress(WrongRevision):
                await self._put(name, _Passwords(incarnation, passwords, revision))
                return
        raise Unavailable(f"the password of subscription {name!r} is changed by others as well", fix="try again")

    async def check_password(self, name: str, password: str) -> Opened | None:
        """What a password opens; None if that is nothing.

        That takes as long for a name that does not exist. (While an old password is valid beside a new one, a wrong
        one takes longer.)
        """
        kept, _ = await self._passwords(name)
        valid = [each for each in kept.passwords if each.valid] if kept is not None else []
        if kept is None or not valid:
            await self._hasher.verify(None, password)
            return None
        for each in valid:
            if await self._hasher.verify(each.hash, password):
                return Opened(kept.incarnation, each.until)
        return None

    async def remove(self, name: str, incarnation: str) -> None:
        """Forget the password and the tokens of a subscription that is gone."""
        bucket = await self._open()
        kept, revision = await self._passwords(name)
        if kept is not None and kept.incarnation == incarnation:
            with contextlib.suppress(WrongRevision):
                await bucket.delete(password_key(name), revision=revision)
        for token in await self.tokens(name):
            if token.incarnation == incarnation:
                await bucket.delete(token_key(token.id))

    async def add_token(
        self, login: str, incarnation: str | None, *, label: str = "", seconds: float | None = None
    ) -> tuple[Token, str]:
        """A new token for a login, and its text, which is told once and never again."""
        identity, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        now = datetime.now(UTC)
        token = Token(
            id=identity,
            login=login,
            incarnation=incarnation,
            label=label,
            created=now,
            until=None if seconds is None else now + timedelta(seconds=seconds),
        )
        value = {
            "login": login,
            "incarnation": incarnation,
            "hash": _digest(secret),
            "label": label,
            "created": now.isoformat(),
            "until": None if token.until is None else token.until.isoformat(),
        }
        await (await self._open()).create(token_key(identity), jsontext.dump(value))
        return token, f"{TOKEN_PREFIX}_{identity}_{secret}"

    async def check_token(self, text: str) -> Token | None:
        """The token that a text is; None if it is none, or its time is over."""
        shape = _SHAPE.fullmatch(text)
        identity, secret = shape.groups() if shape else ("0" * 16, "")
        try:
            entry = await (await self._open()).get(token_key(identity))
        except UnknownKey:
            return None
        value = jsontext.parse(entry.value, "token")
        token = _token(identity, value)
        same = hmac.compare_digest(_digest(secret), jsontext.text(value, "hash", "token"))
        return token if same and token.valid else None

    async def tokens(self, login: str) -> list[Token]:
        """The tokens of a login, oldest first."""
        found: list[Token] = []
        bucket = await self._open()
        async with contextlib.aclosing(bucket.watch(f"{_TOKEN}>")) as changes:
            async for entry in changes:
                if entry is None:
                    break
                if not entry.deleted:
                    found.append(_token(entry.key.removeprefix(_TOKEN), jsontext.parse(entry.value, "token")))
        return sorted((token for token in found if token.login == login), key=lambda token: token.created)

    async def remove_token(self, login: str, identity: str) -> None:
        """End a token of a login; NotFound if it has none of that id."""
        if identity not in {token.id for token in await self.tokens(login)}:
            raise NotFound(f"login {login!r} has no token {identity!r}", fix="GET /v1/tokens lists them")
        await (await self._open()).delete(token_key(identity))

    async def follow(self, changed: Callable[[str | None], None], begun: Callable[[], None] = _unheard) -> None:
        """Call `changed` with the key of everything that anybody changes, with None if some was missed. Without end.

        `begun` is called when all that happens from now on is seen.
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
                        elif current:
                            changed(entry.key)
            except PurveyorError as error:
                _log.warning("changes of passwords are not seen at present: %s", error)
            changed(None)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._queues.bucket(BucketConfig(name=BUCKET, replicas=self._replicas))
        return self._bucket

    async def _passwords(self, name: str) -> tuple[_Passwords | None, int]:
        """What is kept under a name, and the revision to give when it is written."""
        entry = await (await self._open()).newest(password_key(name))
        if entry is None or entry.deleted:
            return None, 0 if entry is None else entry.revision
        value = jsontext.parse(entry.value, "password")
        passwords = tuple(
            _Password(jsontext.text(each, "hash", "password"), _moment(each, "until")) for each in value["passwords"]
        )
        incarnation = jsontext.text(value, "incarnation", "password")
        return _Passwords(incarnation, passwords, entry.revision), entry.revision

    async def _put(self, name: str, kept: _Passwords) -> None:
        value = {"incarnation": kept.incarnation, "passwords": [each.to_json() for each in kept.passwords]}
        await (await self._open()).update(password_key(name), jsontext.dump(value), kept.revision)


def password_key(name: str) -> str:
    """The key of a subscription's passwords."""
    return f"{_PASSWORD}{name}"


def token_key(identity: str) -> str:
    """The key of a token."""
    return f"{_TOKEN}{identity}"


def token_id(text: str) -> str | None:
    """The id of the token that a text seems to be."""
    shape = _SHAPE.fullmatch(text)
    return None if shape is None else shape[1]


def _token(identity: str, value: Json) -> Token:
    return Token(
        id=identity,
        login=jsontext.text(value, "login", "token"),
        incarnation=value.get("incarnation"),
        label=str(value.get("label") or ""),
        created=jsontext.moment(value, "created", "token"),
        until=_moment(value, "until"),
    )


def _moment(value: Json, name: str) -> datetime | None:
    return None if value.get(name) is None else jsontext.moment(value, name, "credential")


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
