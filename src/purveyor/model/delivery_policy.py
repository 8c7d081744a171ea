"""The delivery settings of a subscription: order, lease, retry, retention and hidden fields.

These are the optional parts of a definition; the defaults suit a simple consumer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from purveyor.model import json_fields
from purveyor.model.backoff import Backoff
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.model.redaction import check_hidden_field

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
    """What happens to a message that is not acknowledged."""

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
