"""Passwords and tokens as they are kept, and the rules by which they end. Pure.

A token ends with its time, and with what it was made with:

- `generation`: a token of a subscription is valid as long as a password of its generation is. A new password begins a
  new generation, unless the tokens are to be kept.
- `bound`: a token of a login of the settings is valid as long as that login has the same password.
- `parent`: a token that was made with a token ends with that one.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from purveyor.model import json_fields
from purveyor.model.json_fields import Json


@dataclass(frozen=True, slots=True)
class Password:
    """A password of a subscription, as its hash."""

    hash: str
    until: datetime | None = None
    generation: int = 0

    @property
    def valid(self) -> bool:
        """Whether its time is not over."""
        return self.until is None or datetime.now(UTC) < self.until

    def to_json(self) -> Json:
        """As `read_password` takes it."""
        until = None if self.until is None else self.until.isoformat()
        return {"hash": self.hash, "until": until} | ({"generation": self.generation} if self.generation else {})


@dataclass(frozen=True, slots=True)
class Passwords:
    """What is kept under a subscription's name."""

    incarnation: str
    passwords: tuple[Password, ...]
    revision: int


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
    generation: int = 0
    """Of the password of its subscription."""
    parent: str | None = None
    """The id of the token that it was made with, if it was."""
    bound: str | None = field(default=None, repr=False)
    """A digest of its text and the password of its login, if that is one of the settings."""

    @property
    def valid(self) -> bool:
        """Whether its time is not over."""
        return self.until is None or datetime.now(UTC) < self.until

    def is_bound(self, text: str, password: str) -> bool:
        """Return whether the login had this password when the token was made. Older tokens are bound to none."""
        return self.bound is None or hmac.compare_digest(self.bound, binding(text, password))

    def until_at_most(self, until: datetime | None) -> "Token":
        """Return the token with an end that is no later than another one."""
        ends = [each for each in (self.until, until) if each is not None]
        return replace(self, until=min(ends, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions:
    """What a new token is made with."""

    label: str = ""
    seconds: float | None = None
    """How long it is valid; None: without an end of its own."""
    until: datetime | None = None
    """When it ends at the latest."""
    generation: int | None = None
    """Of the password, or the token, that it is made with; None: the current one of its subscription."""
    parent: str | None = None
    """The id of the token that it is made with."""
    password: str | None = field(default=None, repr=False)
    """The password of its login in the settings, to which it is bound."""


def while_password(token: Token, kept: Passwords | None) -> Token | None:
    """Return a token of a subscription with the end of the password of its generation; None if it has ended."""
    if kept is None or kept.incarnation != token.incarnation:
        return None if token.generation else token
    ends = [each.until for each in kept.passwords if each.valid and each.generation == token.generation]
    if not ends:
        return None
    return token if None in ends else token.until_at_most(max(end for end in ends if end is not None))


def while_parent(token: Token, parent: Token | None) -> Token | None:
    """Return a token with the end of the one that it was made with; None if that has ended."""
    return token.until_at_most(parent.until) if parent is not None and parent.valid else None


def alive_tokens(found: Sequence[Token], passwords: Mapping[str, Passwords | None]) -> list[Token]:
    """Return those of all tokens that have not ended. `passwords` are those of the logins that are asked about."""
    left = {
        token.id: while_password(token, passwords[token.login])
        if token.incarnation is not None and token.login in passwords
        else token
        for token in found
    }
    ends = (
        while_parent(token, left.get(token.parent)) if token is not None and token.parent is not None else token
        for token in left.values()
    )
    return [token for token in ends if token is not None and token.valid]


def read_token(identity: str, value: Json) -> Token:
    """Read a token as it is kept."""
    return Token(
        id=identity,
        login=json_fields.text(value, "login", "token"),
        incarnation=value.get("incarnation"),
        label=str(value.get("label") or ""),
        created=json_fields.moment(value, "created", "token"),
        until=_moment(value, "until"),
        generation=int(value.get("generation", 0)),
        parent=value.get("parent"),
        bound=value.get("bound"),
    )


def token_json(token: Token, secret: str) -> Json:
    """As `read_token` takes it, with the hash of its secret."""
    value: Json = {
        "login": token.login,
        "incarnation": token.incarnation,
        "hash": digest(secret),
        "label": token.label,
        "created": token.created.isoformat(),
        "until": None if token.until is None else token.until.isoformat(),
    }
    more = {"generation": token.generation or None, "parent": token.parent, "bound": token.bound}
    return value | {name: each for name, each in more.items() if each is not None}


def read_password(value: Json) -> Password:
    """Read one of the passwords of a subscription."""
    return Password(
        json_fields.text(value, "hash", "password"), _moment(value, "until"), generation=int(value.get("generation", 0))
    )


def digest(secret: str) -> str:
    """Return the hash by which a token is known."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def binding(text: str, password: str) -> str:
    """Return a digest that can be compared with a password only by a client that has the text of the token."""
    return digest(f"{text}\0{password}")


def _moment(value: Json, name: str) -> datetime | None:
    return None if value.get(name) is None else json_fields.moment(value, name, "credential")
