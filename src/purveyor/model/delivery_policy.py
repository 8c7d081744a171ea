"""The delivery settings of a subscription: order, lease, retry, retention, hidden fields and push.

These are the optional parts of a definition; the defaults suit a simple consumer. `Push` holds the endpoints, the
format, and which status codes acknowledge a message.

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
from purveyor.model.json_fields import (
    FieldCodec,
    Json,
    field_names,
    member_field,
    read_fields,
    text_field,
    write_fields,
)
from purveyor.model.redaction import check_hidden_field
from purveyor.model.retries import Backoff

DEFAULT_LEASE_SECONDS: Final = 30.0
LONGEST_LEASE_SECONDS: Final = 12 * 3600.0
LONGEST_DELAY_SECONDS: Final = 7 * 24 * 3600.0
SHORTEST_RETENTION_SECONDS: Final = 1.0
LONGEST_RETENTION_SECONDS: Final = 100 * 365 * 24 * 3600.0

DEFAULT_HIDDEN_FIELDS: Final = (
    *("password", "pwhistory", "userPassword", "authPassword", "pwdHistory", "unicodePwd", "userPKCS12"),
    *("sambaLMPassword", "sambaNTPassword", "sambaPasswordHistory", "univentionRadiusPassword", "ipaNTHash"),
    *("krb5Key", "krbPrincipalKey", "krbExtraData"),
)
"""The default of `hidden_fields`: passwords, their hashes, and keys."""
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


class Delivery(Enum):
    """How messages are delivered to consumers."""

    ORDERED = "ordered"
    """To one consumer at a time: the oldest message until it is acknowledged."""
    PARALLEL = "parallel"
    """To many consumers at the same time, each with its own messages."""
    PUSH = "push"
    """A push worker sends messages to endpoints."""


class OrderBy(Enum):
    """The order that delivery keeps."""

    POSITION = "position"
    KEY = "key"
    """For each key: only the oldest message of a key is leased at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The treatment of a message that is not acknowledged."""

    max_attempts: int | None = None
    """The number of deliveries after which it becomes a dead letter; None: it is delivered for ever."""
    min_backoff_seconds: float = 1.0
    """The delay after the first failure; it doubles ..."""
    max_backoff_seconds: float = 600.0
    """... up to this."""

    def __post_init__(self) -> None:
        if self.max_attempts is not None and self.max_attempts < 1:
            raise InvalidInput(f"{self.max_attempts} attempts", fix="give 1 or more, or null for no end")
        if not 0 <= self.min_backoff_seconds <= self.max_backoff_seconds <= LONGEST_DELAY_SECONDS:
            raise InvalidInput(
                f"a backoff from {self.min_backoff_seconds:g} to {self.max_backoff_seconds:g} seconds",
                fix=f"give 0 or more, the smaller first, at most {LONGEST_DELAY_SECONDS:g}",
            )

    def backoff_seconds(self, attempts: int) -> float:
        """Return the backoff delay after `attempts` failures.

        >>> [RetryPolicy(max_backoff_seconds=5.0).backoff_seconds(attempts) for attempts in (1, 2, 3, 4, 5000)]
        [1.0, 2.0, 4.0, 5.0, 5.0]
        """
        return Backoff(self.min_backoff_seconds, self.max_backoff_seconds).delay_seconds(attempts)

    @classmethod
    def from_json(cls, data: object) -> "RetryPolicy":
        """Build it from checked fields; each may be missing."""
        given = json_fields.mapping({} if data is None else data, "retry policy")
        json_fields.reject_unknown(
            given, ("max_attempts", "min_backoff_seconds", "max_backoff_seconds"), "retry policy"
        )
        numbers = {name: value for name, value in given.items() if name != "max_attempts"}
        attempts = given.get("max_attempts")
        return cls(
            max_attempts=None if attempts is None else json_fields.whole(given, "max_attempts", "retry policy"),
            **{name: read_seconds(numbers, name, "retry policy") for name in numbers},
        )

    def to_json(self) -> Json:
        """Return the stored fields."""
        return {
            "max_attempts": self.max_attempts,
            "min_backoff_seconds": float(self.min_backoff_seconds),
            "max_backoff_seconds": float(self.max_backoff_seconds),
        }


def read_lease_seconds(data: Mapping[str, Any]) -> float:
    """Read the field `lease_seconds`."""
    if data.get("lease_seconds") is None:
        return DEFAULT_LEASE_SECONDS
    return check_lease_seconds(read_seconds(data, "lease_seconds", "subscription"))


def check_lease_seconds(value: float) -> float:
    """Check the duration of a lease."""
    if not 1 <= value <= LONGEST_LEASE_SECONDS:
        raise InvalidInput(f"a lease of {value:g} seconds", fix=f"give 1 to {LONGEST_LEASE_SECONDS:g}")
    return value


def read_retention(data: Mapping[str, Any]) -> float | None:
    """Read the field `retention_seconds`; without it messages are kept for ever."""
    if data.get("retention_seconds") is None:
        return None
    return check_retention(read_seconds(data, "retention_seconds", "subscription"))


def check_retention(value: float | None) -> float | None:
    """Check the time after which an unacknowledged message expires."""
    if value is not None and not SHORTEST_RETENTION_SECONDS <= value <= LONGEST_RETENTION_SECONDS:
        raise InvalidInput(
            f"a retention of {value:g} seconds",
            fix=f"give {SHORTEST_RETENTION_SECONDS:g} to {LONGEST_RETENTION_SECONDS:g}, or null for no end",
        )
    return value


def read_order(data: Mapping[str, Any]) -> tuple[Delivery, OrderBy | None]:
    """Read the fields `delivery` and `order_by`, which depend on each other."""
    delivery = json_fields.member(Delivery, {"delivery": data.get("delivery") or "ordered"}, "delivery", "subscription")
    if data.get("order_by") is None:
        return delivery, default_order(delivery)
    return delivery, json_fields.member(OrderBy, data, "order_by", "subscription")


def default_order(delivery: Delivery) -> OrderBy | None:
    """Return the order that a delivery mode keeps by default."""
    return OrderBy.POSITION if delivery is Delivery.ORDERED else None


def check_order(delivery: Delivery, order_by: OrderBy | None) -> None:
    """Raise InvalidInput if delivery mode and order contradict each other. Push can keep any order."""
    if delivery is not Delivery.PUSH and (delivery is Delivery.ORDERED) != (order_by is OrderBy.POSITION):
        kept = "nothing" if order_by is None else order_by.value
        raise InvalidInput(
            f"{delivery.value} delivery cannot keep the order by {kept}",
            fix="ordered is by position; parallel by key, or by nothing (null)",
        )


def read_hidden_fields(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Read the field `hidden_fields`; missing means the default, an empty list hides nothing."""
    found = data.get("hidden_fields")
    if found is None:
        return DEFAULT_HIDDEN_FIELDS
    if not isinstance(found, list) or not all(isinstance(name, str) and name for name in found):
        raise InvalidInput(
            f"{json_fields.describe_type(found)} is no value for 'hidden_fields'", fix="give a list of field names"
        )
    return tuple(dict.fromkeys(map(check_hidden_field, found)))


def read_seconds(data: Mapping[str, Any], name: str, what: str) -> float:
    """Read a field that is a number of seconds, 0 or more."""
    value = data.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise InvalidInput(
            f"the {what} has {json_fields.describe_type(value)} as {name!r}", fix=f"give {name!r} in seconds"
        )
    return float(value)


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
    """The treatment of later messages with the key of a dead letter."""

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
            raise _invalid_endpoint(
                url, f"use 1 to {_LONGEST_ENDPOINT_CHARACTERS} printable ASCII characters, others percent-encoded"
            )
        try:
            found = urlsplit(url)
            host, port = found.hostname, found.port
        except ValueError as error:
            raise _invalid_endpoint(url, str(error)) from None
        if found.scheme not in _DEFAULT_PORTS or not host:
            raise _invalid_endpoint(url, "write https://host/path")
        if port == 0:
            raise _invalid_endpoint(url, "port 0 cannot be reached")
        if "@" in found.netloc:
            raise _invalid_endpoint(_without_login(found), "leave user and password out: set bearer_token or secret")
        if found.fragment:
            raise _invalid_endpoint(url, "leave out what follows '#': it is never sent")
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
        json_fields.reject_unknown(given, ("endpoint", "endpoints", *field_names(_PUSH_FIELDS)), "push settings")
        return cls(endpoints=_read_endpoints(given), **read_fields(_PUSH_FIELDS, given, "push settings"))

    def to_json(self) -> Json:
        """Return the stored fields, with secrets; fields equal to their defaults are omitted."""
        endpoints: Json = (
            {"endpoint": self.endpoints[0]} if len(self.endpoints) == 1 else {"endpoints": list(self.endpoints)}
        )
        return endpoints | write_fields(_PUSH_FIELDS, self)

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


def _read_endpoints(given: Mapping[str, Any]) -> tuple[str, ...]:
    one, several = given.get("endpoint"), given.get("endpoints")
    if (one is None) == (several is None):
        raise InvalidInput("push needs an endpoint", fix="give `endpoint`, a URL, or `endpoints`, a list of them")
    found = [one] if several is None else several
    if not isinstance(found, list) or not all(isinstance(url, str) for url in found):
        raise InvalidInput(f"{json_fields.describe_type(found)} is no value for the endpoints", fix="give URLs")
    return tuple(dict.fromkeys(found))


def _read_push_seconds(given: Mapping[str, Any], name: str, _: str) -> float:
    value = given.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidInput(
            f"{json_fields.describe_type(value)} is no value for {name!r}", fix="give a number of seconds"
        )
    return float(value)


_PUSH_FIELDS: Final = (
    FieldCodec("ack_deadline_seconds", _read_push_seconds, float, DEFAULT_ACK_DEADLINE_SECONDS, omit_default=True),
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


def _invalid_endpoint(url: str, fix: str) -> InvalidInput:
    return InvalidInput(f"invalid endpoint {url[:200]!r}", fix=fix)
