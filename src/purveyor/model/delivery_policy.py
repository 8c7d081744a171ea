"""How a subscription wants its messages: in which order, for how long at a time, how often, and without which fields.

These are the optional parts of a definition; what is not given has the value that a simple consumer expects.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.model.redaction import check_hidden

DEFAULT_LEASE_SECONDS: Final = 30.0
LONGEST_LEASE_SECONDS: Final = 12 * 3600.0
LONGEST_DELAY_SECONDS: Final = 7 * 24 * 3600.0
SHORTEST_RETENTION_SECONDS: Final = 1.0
LONGEST_RETENTION_SECONDS: Final = 100 * 365 * 24 * 3600.0

DEFAULT_HIDDEN: Final = (
    *("password", "pwhistory", "userPassword", "authPassword", "pwdHistory", "unicodePwd", "userPKCS12"),
    *("sambaLMPassword", "sambaNTPassword", "sambaPasswordHistory", "univentionRadiusPassword", "ipaNTHash"),
    *("krb5Key", "krbPrincipalKey", "krbExtraData"),
)
"""What no subscriber gets unless it says what it wants hidden instead: passwords, their hashes, and keys."""


class Delivery(Enum):
    """Who gets messages at the same time."""

    ORDERED = "ordered"
    """One consumer at a time, the oldest message until it is acknowledged."""
    PARALLEL = "parallel"
    """Many consumers, each with messages of its own."""
    PUSH = "push"
    """Nobody asks: messages are sent to endpoints."""


class OrderBy(Enum):
    """What the order of messages is kept by."""

    POSITION = "position"
    KEY = "key"
    """For each object: of the messages about one, only the oldest is out at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """What becomes of a message that is not acknowledged."""

    max_attempts: int | None = None
    """After so many deliveries it becomes a dead letter; None: it is delivered for ever."""
    min_backoff_seconds: float = 1.0
    """The pause after the first failure; it doubles ..."""
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
        """The pause after so many attempts.

        >>> [RetryPolicy(max_backoff_seconds=5.0).backoff_seconds(attempts) for attempts in (1, 2, 3, 4, 5000)]
        [1.0, 2.0, 4.0, 5.0, 5.0]
        """
        return min(self.min_backoff_seconds * 2.0 ** min(attempts - 1, 64), self.max_backoff_seconds)

    @classmethod
    def from_json(cls, data: object) -> "RetryPolicy":
        """From `{"max_attempts": ..., "min_backoff_seconds": ..., "max_backoff_seconds": ...}`; each may be missing."""
        given = json_fields.mapping({} if data is None else data, "retry policy")
        json_fields.only(given, ("max_attempts", "min_backoff_seconds", "max_backoff_seconds"), "retry policy")
        numbers = {name: value for name, value in given.items() if name != "max_attempts"}
        attempts = given.get("max_attempts")
        return cls(
            max_attempts=None if attempts is None else json_fields.whole(given, "max_attempts", "retry policy"),
            **{name: seconds(numbers, name, "retry policy") for name in numbers},
        )

    def to_json(self) -> Json:
        """As `from_json` takes it."""
        return {
            "max_attempts": self.max_attempts,
            "min_backoff_seconds": float(self.min_backoff_seconds),
            "max_backoff_seconds": float(self.max_backoff_seconds),
        }


def read_lease_seconds(data: Mapping[str, Any]) -> float:
    """The field `lease_seconds`."""
    if data.get("lease_seconds") is None:
        return DEFAULT_LEASE_SECONDS
    return check_lease_seconds(seconds(data, "lease_seconds", "subscription"))


def check_lease_seconds(value: float) -> float:
    """A time for which a message may be leased."""
    if not 1 <= value <= LONGEST_LEASE_SECONDS:
        raise InvalidInput(f"a lease of {value:g} seconds", fix=f"give 1 to {LONGEST_LEASE_SECONDS:g}")
    return value


def read_retention(data: Mapping[str, Any]) -> float | None:
    """The field `retention_seconds`; without one, messages wait for ever."""
    if data.get("retention_seconds") is None:
        return None
    return check_retention(seconds(data, "retention_seconds", "subscription"))


def check_retention(value: float | None) -> float | None:
    """A time after which a message that nobody acknowledged expires."""
    if value is not None and not SHORTEST_RETENTION_SECONDS <= value <= LONGEST_RETENTION_SECONDS:
        raise InvalidInput(
            f"a retention of {value:g} seconds",
            fix=f"give {SHORTEST_RETENTION_SECONDS:g} to {LONGEST_RETENTION_SECONDS:g}, or null for no end",
        )
    return value


def read_order(data: Mapping[str, Any]) -> tuple[Delivery, OrderBy | None]:
    """The fields `delivery` and `order_by`, which belong together."""
    delivery = json_fields.member(Delivery, {"delivery": data.get("delivery") or "ordered"}, "delivery", "subscription")
    if data.get("order_by") is None:
        return delivery, default_order(delivery)
    return delivery, json_fields.member(OrderBy, data, "order_by", "subscription")


def default_order(delivery: Delivery) -> OrderBy | None:
    """The order that is kept when none was asked for."""
    return OrderBy.POSITION if delivery is Delivery.ORDERED else None


def check_order(delivery: Delivery, order_by: OrderBy | None) -> None:
    """Refuse what contradicts itself. Push can keep any order."""
    if delivery is not Delivery.PUSH and (delivery is Delivery.ORDERED) != (order_by is OrderBy.POSITION):
        kept = "nothing" if order_by is None else order_by.value
        raise InvalidInput(
            f"{delivery.value} delivery cannot keep the order by {kept}",
            fix="ordered is by position; parallel by key, or by nothing (null)",
        )


def read_hidden(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The field `hidden_fields`; missing means the default, an empty list hides nothing."""
    found = data.get("hidden_fields")
    if found is None:
        return DEFAULT_HIDDEN
    if not isinstance(found, list) or not all(isinstance(name, str) and name for name in found):
        raise InvalidInput(
            f"{json_fields.kind(found)} is no value for 'hidden_fields'", fix="give a list of field names"
        )
    return tuple(dict.fromkeys(map(check_hidden, found)))


def seconds(data: Mapping[str, Any], name: str, what: str) -> float:
    """A field that is a number of seconds, 0 or more."""
    value = data.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise InvalidInput(f"the {what} has {json_fields.kind(value)} as {name!r}", fix=f"give {name!r} in seconds")
    return float(value)
