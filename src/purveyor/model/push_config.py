"""The push settings of a subscription: its endpoints, the format, and which status codes acknowledge a message.

A definition contains secrets only as references: `env:NAME`, or `sealed:...`, encrypted with a key that is stored
elsewhere. Variable names begin with `PURVEYOR_PUSH_SECRET_`: a user who may add a subscription can have such a variable
sent to any endpoint, and must not be able to name other variables of the push worker.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.model.stored_record import (
    FieldCodec,
    field_names,
    member_field,
    read_fields,
    text_field,
    write_fields,
)

DEFAULT_ACK_DEADLINE_SECONDS: Final = 10.0
SHORTEST_ACK_DEADLINE_SECONDS: Final = 0.1
LONGEST_ACK_DEADLINE_SECONDS: Final = 600.0
MOST_ENDPOINTS: Final = 32
SEALED: Final = "sealed:"
FROM_ENVIRONMENT: Final = "env:"
SECRET_PREFIX: Final = "PURVEYOR_PUSH_SECRET_"
"""The prefix of the variables that a definition may refer to."""
HIDDEN: Final = "***"
"""Shown instead of a sealed secret; in an update it means that the secret stays."""

_LONGEST_ENDPOINT_CHARACTERS: Final = 2000
_SECRET_REFERENCE: Final = re.compile(
    rf"{FROM_ENVIRONMENT}[A-Za-z_][A-Za-z0-9_]{{0,127}}|{SEALED}[A-Za-z0-9_=-]{{1,4000}}"
)
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class PushFormat(Enum):
    """The body that an endpoint receives."""

    PUBSUB = "pubsub"
    """A JSON object around the message, as Pub/Sub sends it."""
    RAW = "raw"
    """The event itself; headers describe it."""
    CLOUDEVENTS = "cloudevents"
    """The event itself as a CloudEvent in binary mode."""


class AckCodes(Enum):
    """Which status codes acknowledge a message."""

    PUBSUB = "pubsub"
    ALL = "2xx"

    def acknowledges(self, status: int) -> bool:
        """Return whether a status code acknowledges.

        >>> AckCodes.PUBSUB.acknowledges(204), AckCodes.PUBSUB.acknowledges(206), AckCodes.ALL.acknowledges(206)
        (True, False, True)
        """
        return status in _PUBSUB_CODES if self is AckCodes.PUBSUB else status == 102 or 200 <= status <= 299


_PUBSUB_CODES: Final = frozenset({102, 200, 201, 202, 204})


class AfterDeadLetter(Enum):
    """What happens to later messages with the key of a dead letter."""

    CONTINUE = "continue"
    PARK_KEY = "park_key"
    """They are parked too, until no dead letter of that key is left."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed URL: where to connect, and which path to request."""

    url: str
    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> "Endpoint":
        """Parse a URL; InvalidInput says what is wrong. The egress policy, which is checked elsewhere, allows hosts.

        >>> Endpoint.parse("https://shop.example/in?a=1")
        Endpoint(url='https://shop.example/in?a=1', scheme='https', host='shop.example', port=443, path='/in?a=1')
        """
        if not 0 < len(url) <= _LONGEST_ENDPOINT_CHARACTERS or not url.isascii() or not url.isprintable() or " " in url:
            raise _invalid(
                url, f"use 1 to {_LONGEST_ENDPOINT_CHARACTERS} printable ASCII characters, others percent-encoded"
            )
        try:
            found = urlsplit(url)
            host, port = found.hostname, found.port
        except ValueError as error:
            raise _invalid(url, str(error)) from None
        if found.scheme not in _DEFAULT_PORTS or not host:
            raise _invalid(url, "write https://host/path")
        if port == 0:
            raise _invalid(url, "port 0 cannot be reached")
        if "@" in found.netloc:
            raise _invalid(_without_login(found), "leave user and password out: set bearer_token or secret")
        if found.fragment:
            raise _invalid(url, "leave out what follows '#': it is never sent")
        path = (found.path or "/") + (f"?{found.query}" if found.query else "")
        return cls(url, found.scheme, host, port or _DEFAULT_PORTS[found.scheme], path)

    @property
    def origin(self) -> tuple[str, str, int]:
        """The receiver: scheme, host and port."""
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        """The value of the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """The push settings of one subscription."""

    endpoints: tuple[str, ...]
    """Several endpoints share the messages."""
    ack_deadline_seconds: float = DEFAULT_ACK_DEADLINE_SECONDS
    """An answer that is not complete by then counts as no answer."""
    format: PushFormat = PushFormat.PUBSUB
    ack_codes: AckCodes = AckCodes.PUBSUB
    after_dead_letter: AfterDeadLetter = AfterDeadLetter.CONTINUE
    secret: str | None = field(default=None, repr=False)
    """A reference to the secret that signs messages."""
    old_secret: str | None = field(default=None, repr=False)
    """The previous secret, which signs messages as well ..."""
    old_secret_until: datetime | None = None
    """... until this time."""
    bearer_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.endpoints) <= MOST_ENDPOINTS:
            raise InvalidInput(f"push to {len(self.endpoints)} endpoints", fix=f"give 1 to {MOST_ENDPOINTS}")
        for url in self.endpoints:
            Endpoint.parse(url)
        if not SHORTEST_ACK_DEADLINE_SECONDS <= self.ack_deadline_seconds <= LONGEST_ACK_DEADLINE_SECONDS:
            raise InvalidInput(
                f"an acknowledgement deadline of {self.ack_deadline_seconds:g} seconds",
                fix=f"give {SHORTEST_ACK_DEADLINE_SECONDS:g} to {LONGEST_ACK_DEADLINE_SECONDS:g}",
            )
        for reference in (self.secret, self.old_secret, self.bearer_token):
            if reference is not None and not _SECRET_REFERENCE.fullmatch(reference):
                raise InvalidInput(
                    "a secret in a definition that is neither encrypted nor a reference",
                    fix=f"give env:{SECRET_PREFIX}..., the name of a variable in the environment of the push worker",
                )
        if (self.old_secret is None) != (self.old_secret_until is None):
            raise InvalidInput("an old secret without its end, or an end without one", fix="give both, or neither")

    @property
    def targets(self) -> tuple[Endpoint, ...]:
        """The parsed endpoints."""
        return tuple(map(Endpoint.parse, self.endpoints))

    @classmethod
    def from_json(cls, data: object) -> "Push":
        """Build it from checked fields; InvalidInput names the wrong one. One `endpoint`, or several `endpoints`."""
        given = json_fields.mapping(data, "push settings")
        json_fields.reject_unknown(given, ("endpoint", "endpoints", *field_names(_FIELDS)), "push settings")
        return cls(endpoints=_endpoints(given), **read_fields(_FIELDS, given, "push settings"))

    def to_json(self) -> Json:
        """Return the stored fields, with secrets; fields equal to their defaults are omitted."""
        endpoints: Json = (
            {"endpoint": self.endpoints[0]} if len(self.endpoints) == 1 else {"endpoints": list(self.endpoints)}
        )
        return endpoints | write_fields(_FIELDS, self)

    def to_public_json(self) -> Json:
        """Return the fields for the API and the console: sealed secrets are hidden."""
        given = self.to_json()
        for name in ("secret", "old_secret", "bearer_token"):
            if str(given.get(name, "")).startswith(SEALED):
                given[name] = HIDDEN
        return given


def secret_variable(reference: str) -> str:
    """Return the name of the variable of a reference `env:NAME`; InvalidInput if a definition may not use it.

    >>> secret_variable("env:PURVEYOR_PUSH_SECRET_SHOP")
    'PURVEYOR_PUSH_SECRET_SHOP'
    """
    name = reference.removeprefix(FROM_ENVIRONMENT)
    if not name.startswith(SECRET_PREFIX) or name == SECRET_PREFIX:
        raise InvalidInput(
            f"the environment variable {name[:128]} is not allowed as a secret of push",
            fix=f"rename it for the push worker so that it begins with {SECRET_PREFIX}, and give that name",
        )
    return name


def _endpoints(given: Mapping[str, Any]) -> tuple[str, ...]:
    one, several = given.get("endpoint"), given.get("endpoints")
    if (one is None) == (several is None):
        raise InvalidInput("push needs an endpoint", fix="give `endpoint`, a URL, or `endpoints`, a list of them")
    found = [one] if several is None else several
    if not isinstance(found, list) or not all(isinstance(url, str) for url in found):
        raise InvalidInput(f"{json_fields.describe_type(found)} is no value for the endpoints", fix="give URLs")
    return tuple(dict.fromkeys(found))


def _read_seconds(given: Mapping[str, Any], name: str, _: str) -> float:
    value = given.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidInput(
            f"{json_fields.describe_type(value)} is no value for {name!r}", fix="give a number of seconds"
        )
    return float(value)


_FIELDS: Final = (
    FieldCodec("ack_deadline_seconds", _read_seconds, float, DEFAULT_ACK_DEADLINE_SECONDS, omit_default=True),
    member_field("format", PushFormat, default=PushFormat.PUBSUB, omit_default=True),
    member_field("ack_codes", AckCodes, default=AckCodes.PUBSUB, omit_default=True),
    member_field("after_dead_letter", AfterDeadLetter, default=AfterDeadLetter.CONTINUE, omit_default=True),
    text_field("secret", default=None, omit_default=True),
    text_field("old_secret", default=None, omit_default=True),
    text_field("bearer_token", default=None, omit_default=True),
    FieldCodec(
        "old_secret_until",
        json_fields.moment,
        lambda until: until.astimezone(UTC).isoformat(),
        default=None,
        omit_default=True,
    ),
)


def _without_login(found: SplitResult) -> str:
    return found._replace(netloc=found.netloc.rpartition("@")[2]).geturl()


def _invalid(url: str, fix: str) -> InvalidInput:
    return InvalidInput(f"invalid endpoint {url[:200]!r}", fix=fix)
