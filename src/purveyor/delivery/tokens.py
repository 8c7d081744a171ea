"""Stored passwords and tokens, and the rules by which they become invalid. Pure.

A token becomes invalid when its time is over, or when the credential that created it becomes invalid:

- `generation`: a token of a subscription is valid while a password of its generation is. A new password begins a new
  generation, unless the tokens are to be kept.
- `bound`: a token of a login from the settings is valid while that login has the same password.
- `parent`: a token that was created with a token is valid while that one is.
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
    def is_valid(self) -> bool:
        """Whether its time is not over."""
        return self.until is None or datetime.now(UTC) < self.until

    def to_json(self) -> Json:
        """Return what `read_password` reads."""
        until = None if self.until is None else self.until.isoformat()
        return {"hash": self.hash, "until": until} | ({"generation": self.generation} if self.generation else {})


@dataclass(frozen=True, slots=True)
class Passwords:
    """The passwords of a subscription, the newest first."""

    incarnation: str
    passwords: tuple[Password, ...]
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token without its secret: its login, and how long it is valid."""

    id: str
    login: str
    incarnation: str | None
    """Of its subscription; None for a login from the settings."""
    label: str
    created: datetime
    until: datetime | None
    generation: int = 0
    """The generation of the subscription's password."""
    parent: str | None = None
    """The id of the token that created it, if a token did."""
    bound: str | None = field(default=None, repr=False)
    """A digest of its text and the password of its login, for a login from the settings."""

    @property
    def is_valid(self) -> bool:
        """Whether its time is not over."""
        return self.until is None or datetime.now(UTC) < self.until

    def is_bound(self, text: str, password: str) -> bool:
        """Return whether the login had this password when the token was created. Old tokens are not bound."""
        return self.bound is None or hmac.compare_digest(self.bound, binding_digest(text, password))

    def until_at_most(self, until: datetime | None) -> "Token":
        """Return the token with its end limited to a time."""
        ends = [each for each in (self.until, until) if each is not None]
        return replace(self, until=min(ends, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions:
    """The options of a new token."""

    label: str = ""
    seconds: float | None = None
    """How long it is valid; None: without a time limit."""
    until: datetime | None = None
    """The latest end."""
    generation: int | None = None
    """Of the password or token that creates it; None: the current one of its subscription."""
    parent: str | None = None
    """The id of the token that creates it."""
    password: str | None = field(default=None, repr=False)
    """The password of its login in the settings, to which it is bound."""


def limit_to_password(token: Token, stored: Passwords | None) -> Token | None:
    """Limit a token of a subscription to the end of the password of its generation; None if that has ended."""
    if stored is None or stored.incarnation != token.incarnation:
        return None if token.generation else token
    ends = [each.until for each in stored.passwords if each.is_valid and each.generation == token.generation]
    if not ends:
        return None
    return token if None in ends else token.until_at_most(max(end for end in ends if end is not None))


def limit_to_parent(token: Token, parent: Token | None) -> Token | None:
    """Limit a token to the end of its parent; None if that has ended."""
    return token.until_at_most(parent.until) if parent is not None and parent.is_valid else None


def valid_tokens(found: Sequence[Token], passwords: Mapping[str, Passwords | None]) -> list[Token]:
    """Return the valid tokens. `passwords` are those of the logins to check."""
    left = {
        token.id: limit_to_password(token, passwords[token.login])
        if token.incarnation is not None and token.login in passwords
        else token
        for token in found
    }
    ends = (
        limit_to_parent(token, left.get(token.parent)) if token is not None and token.parent is not None else token
        for token in left.values()
    )
    return [token for token in ends if token is not None and token.is_valid]


def read_token(identity: str, value: Json) -> Token:
    """Read a stored token."""
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
    """Return what `read_token` reads, with the hash of the secret."""
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
    """Read a stored password."""
    return Password(
        json_fields.text(value, "hash", "password"), _moment(value, "until"), generation=int(value.get("generation", 0))
    )


def digest(secret: str) -> str:
    """Return the hash that is stored for a token."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def binding_digest(text: str, password: str) -> str:
    """Return a digest that only a client with the text of the token can compare with a password."""
    return digest(f"{text}\0{password}")


def _moment(value: Json, name: str) -> datetime | None:
    return None if value.get(name) is None else json_fields.moment(value, name, "credential")
