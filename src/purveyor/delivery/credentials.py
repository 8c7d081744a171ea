"""Who may speak for whom: passwords of subscriptions and tokens of all logins, as hashes in the bucket `credentials`.

    subscription.<name>   {"incarnation", "passwords": [{"hash", "until", "generation"}]}  the newest password first
    token.<id>            {"login", "incarnation", "hash", "label", "created", "until",
                           "generation", "parent", "bound"}                                one key for each token
    session.<id>          {}    a session of the console that was ended, as long as its cookie would be valid

A password belongs to one incarnation of a subscription: what a deleted one of the same name left behind opens nothing.
A password that is changed can stay valid for a while beside the new one, and a login can have several tokens: either
way its clients change over one by one, and none of them is turned away.

When a token ends is told in `tokens`.

Passwords are people's, so their hash is argon2. A token is 256 random bits: nobody can guess one, a plain hash is safe.
"""

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from purveyor.delivery.password_hashing import Hasher
from purveyor.delivery.tokens import (
    Password,
    Passwords,
    Token,
    TokenOptions,
    alive_tokens,
    binding,
    digest,
    read_password,
    read_token,
    token_json,
    while_parent,
    while_password,
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
from purveyor.model.json_fields import Json
from purveyor.model.stored_record import Kind
from purveyor.queues.client import Queues

BUCKET: Final = "credentials"
TOKEN_PREFIX: Final = "pvr"
_PASSWORD: Final = "subscription."
_TOKEN: Final = "token."
_SESSION: Final = "session."
MOST_TOKENS: Final = 100
"""Of one login."""
_SHAPE: Final = re.compile(rf"{TOKEN_PREFIX}_([0-9a-f]{{16}})_([A-Za-z0-9_-]{{43}})")
_ATTEMPTS: Final = 20
_AGAIN_SECONDS: Final = 1.0
_PASSWORDS_KEPT: Final = Kind("password", ("incarnation", "passwords"))
_TOKEN_KEPT: Final = Kind(
    "token", ("login", "incarnation", "hash", "label", "created", "until", "generation", "parent", "bound")
)
_MARKER_AGE: Final = timedelta(hours=1)
"""How long the mark of a deletion is kept: longer than any API process remembers a login without checking it again."""
_SPARE_AGE: Final = timedelta(minutes=5)
"""The server removes what has ended, so much later: its clock and ours may differ."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A password was right: for which incarnation of the subscription, and until when it is valid."""

    incarnation: str
    until: datetime | None
    generation: int = 0


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
            first = Passwords(incarnation, (Password(await self._hasher.hash(password)),), revision)
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

    async def set_password(
        self, name: str, incarnation: str, password: str, *, keep_seconds: float = 0, keep_tokens: bool = False
    ) -> None:
        """Set a new password. The last one is valid for a while longer, older ones are not.

        Tokens end with the last password, unless they are kept. Both changes are one write: no crash parts them.
        """
        new = await self._hasher.hash(password)
        for _ in range(_ATTEMPTS):
            kept, revision = await self._passwords(name)
            passwords: tuple[Password, ...] = (Password(new),)
            if kept is not None and kept.incarnation == incarnation:
                last = kept.passwords[0]
                passwords = (Password(new, generation=last.generation + (0 if keep_tokens else 1)),)
                if keep_seconds > 0:
                    passwords += (replace(last, until=datetime.now(UTC) + timedelta(seconds=keep_seconds)),)
            with contextlib.suppress(WrongRevision):
                await self._put(name, Passwords(incarnation, passwords, revision))
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
                return Opened(kept.incarnation, each.until, each.generation)
        return None

    async def remove(self, name: str, incarnation: str | None) -> None:
        """Forget the password and the tokens of a subscription that is gone; None: of all that had its name."""
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
        """Make a token for a login; return it and its text, which is told once and never again.

        1. It is stored. 2. All of the login are counted: one that is beyond the limit is removed, with `Refused`. So
        many that are made at once are not more than allowed. A crash between the two leaves one that nobody has.
        """
        chosen = options or TokenOptions()
        identity, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        text = f"{TOKEN_PREFIX}_{identity}_{secret}"
        now = datetime.now(UTC)
        kept, _ = (None, 0) if incarnation is None else await self._passwords(login)
        current = 0 if kept is None or kept.incarnation != incarnation else kept.passwords[0].generation
        token = Token(
            id=identity,
            login=login,
            incarnation=incarnation,
            label=chosen.label,
            created=now,
            until=None if chosen.seconds is None else now + timedelta(seconds=chosen.seconds),
            generation=current if chosen.generation is None else chosen.generation,
            parent=chosen.parent,
            bound=None if chosen.password is None else binding(text, chosen.password),
        ).until_at_most(chosen.until)
        bucket = await self._open()
        age = None if token.until is None else max(token.until - now, timedelta(0)) + _SPARE_AGE
        await bucket.create(token_key(identity), _TOKEN_KEPT.dump(token_json(token, secret)), max_age=age)
        found = [each.id for each in await self.tokens(login)]
        if identity in found[MOST_TOKENS:]:
            await bucket.delete(token_key(identity))
            raise Refused(
                f"login {login!r} has {MOST_TOKENS} tokens",
                fix="end one with DELETE /v1/tokens/{id}; GET /v1/tokens lists them",
                code=409,
            )
        if identity not in found and token.valid:
            raise Refused("the password, or the token, that it was to be made with has ended", fix="log in", code=409)
        return token, text

    async def check_token(self, text: str) -> Token | None:
        """The token that a text is; None if it is none, or it has ended."""
        shape = _SHAPE.fullmatch(text)
        identity, secret = shape.groups() if shape else ("0" * 16, "")
        try:
            entry = await (await self._open()).get(token_key(identity))
        except UnknownKey:
            return None
        value = _TOKEN_KEPT.read(entry.value, _TOKEN_KEPT.check, f"token {identity}")
        if not hmac.compare_digest(digest(secret), json_fields.text(value, "hash", "token")):
            return None
        token: Token | None = read_token(identity, value)
        if token is not None and token.incarnation is not None:
            token = while_password(token, (await self._passwords(token.login))[0])
        if token is not None and token.parent is not None:
            token = while_parent(token, await self._find_token(token.parent))
        return token if token is not None and token.valid else None

    async def tokens(self, login: str) -> list[Token]:
        """The tokens of a login that have not ended, oldest first."""
        return [token for token in await self._alive(await self._all_tokens(), login) if token.login == login]

    async def remove_token(self, login: str, identity: str) -> list[str]:
        """End a token of a login, and those that were made with it; NotFound if it has none of that id.

        Returns the ids of all that were ended. The token itself goes last: after a crash it can be ended again.
        """
        found = await self._all_tokens()
        if not any(token.id == identity and token.login == login for token in found):
            raise NotFound(f"login {login!r} has no token {identity!r}", fix="GET /v1/tokens lists them")
        ended = [*(token.id for token in found if token.parent == identity), identity]
        bucket = await self._open()
        for each in ended:
            await bucket.delete(token_key(each))
        return ended

    async def sweep(self) -> int:
        """Remove tokens that have ended, whoever made them; return how many. Any number of processes may do it."""
        found = await self._all_tokens(lenient=False)
        alive = {token.id for token in await self._alive(found)}
        ended = [token.id for token in found if token.id not in alive]
        bucket = await self._open()
        for identity in ended:
            await bucket.delete(token_key(identity))
        return len(ended)

    async def end_session(self, identity: str, seconds: float) -> None:
        """Tell every API process that a session of the console is over. It is kept as long as the session would be."""
        age = timedelta(seconds=max(seconds, 0)) + _SPARE_AGE
        await (await self._open()).put(session_key(identity), b"{}", max_age=age)

    async def _find_token(self, identity: str) -> Token | None:
        try:
            entry = await (await self._open()).get(token_key(identity))
        except UnknownKey:
            return None
        return read_token(identity, _TOKEN_KEPT.read(entry.value, _TOKEN_KEPT.check, f"token {identity}"))

    async def _alive(self, found: Sequence[Token], login: str | None = None) -> list[Token]:
        """Those of all tokens that have not ended, by the passwords of one login or of all."""
        names = {token.login for token in found if token.incarnation is not None and login in (None, token.login)}
        return alive_tokens(found, {name: (await self._passwords(name))[0] for name in names})

    async def _all_tokens(self, *, lenient: bool = True) -> list[Token]:
        """Every token, in the order in which they were made; those that are not understood are left out."""
        found: list[Token] = []
        bucket = await self._open()
        async with contextlib.aclosing(bucket.watch(f"{_TOKEN}>")) as changes:
            async for entry in changes:
                if entry is None:
                    break
                if entry.deleted:
                    continue
                identity = entry.key.removeprefix(_TOKEN)
                try:
                    found.append(read_token(identity, _TOKEN_KEPT.read(entry.value, _TOKEN_KEPT.check)))
                except UnreadableRecord as error:
                    if not lenient:  # what was made with it may not be judged without it
                        raise
                    _log.warning("token %s is left as it is: %s", identity, error)
        return found

    async def follow(self, changed: Callable[[str | None], None], begun: Callable[[], None] = _unheard) -> None:
        """Call `changed` with the key of everything that anybody changes, with None if some was missed. Without end.

        Sessions that were ended before are told at first. `begun` is called when all that happens from now on is seen.
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
                        elif current or entry.key.startswith(_SESSION):
                            changed(entry.key)
            except PurveyorError as error:
                _log.warning("changes of passwords are not seen at present: %s", error)
            changed(None)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _open(self) -> Bucket:
        if self._bucket is None:
            config = BucketConfig(name=BUCKET, replicas=self._replicas, marker_age=_MARKER_AGE)
            self._bucket = await self._queues.bucket(config)
        return self._bucket

    async def _passwords(self, name: str) -> tuple[Passwords | None, int]:
        """What is kept under a name, and the revision to give when it is written."""
        entry = await (await self._open()).newest(password_key(name))
        if entry is None or entry.deleted:
            return None, 0 if entry is None else entry.revision

        def build(given: Json) -> Passwords:
            value = _PASSWORDS_KEPT.check(given)
            passwords = tuple(map(_password, value["passwords"]))
            return Passwords(json_fields.text(value, "incarnation", "password"), passwords, entry.revision)

        return _PASSWORDS_KEPT.read(entry.value, build, f"subscription {name!r}"), entry.revision

    async def _put(self, name: str, kept: Passwords) -> None:
        value = {"incarnation": kept.incarnation, "passwords": [each.to_json() for each in kept.passwords]}
        await (await self._open()).update(password_key(name), _PASSWORDS_KEPT.dump(value), kept.revision)


def password_key(name: str) -> str:
    """The key of a subscription's passwords."""
    return f"{_PASSWORD}{name}"


def token_key(identity: str) -> str:
    """The key of a token."""
    return f"{_TOKEN}{identity}"


def session_key(identity: str) -> str:
    """The key of a session of the console that was ended."""
    return f"{_SESSION}{identity}"


def ended_session(key: str) -> str | None:
    """The id of the session that a key tells the end of."""
    return key.removeprefix(_SESSION) if key.startswith(_SESSION) else None


def token_id(text: str) -> str | None:
    """The id of the token that a text seems to be."""
    shape = _SHAPE.fullmatch(text)
    return None if shape is None else shape[1]


def _incarnation(kept: bytes) -> str | None:
    """Whose a password is, whatever else is kept with it."""
    try:
        found = json_fields.parse(kept, "password").get("incarnation")
    except InvalidInput:
        return None
    return found if isinstance(found, str) else None


def _password(given: Json) -> Password:
    json_fields.only(given, ("hash", "until", "generation"), "password")
    return read_password(given)
