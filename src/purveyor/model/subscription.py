"""A subscription: a named interest in realms and topics, with a filter, and the rule which events match it.

`matches` is the reference: matching in Spark SQL must agree with it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from purveyor.model import json_fields
from purveyor.model.delivery_policy import (
    DEFAULT_HIDDEN_FIELDS,
    DEFAULT_LEASE_SECONDS,
    AfterDeadLetter,
    Delivery,
    OrderBy,
    Push,
    RetryPolicy,
    check_lease_seconds,
    check_order,
    check_retention,
    default_order,
    read_hidden_fields,
    read_lease_seconds,
    read_order,
    read_retention,
)
from purveyor.model.errors import InvalidInput
from purveyor.model.event import KEY_FIELDS, Event, check_realm_or_topic
from purveyor.model.json_fields import Json
from purveyor.model.name_rules import check_subscription_name, check_topic, topic_matches
from purveyor.model.redaction import find_hiding_field

Scalar: TypeAlias = str | int | float | bool

_PATH: Final = re.compile(r"""[^\s.\[\]'"\\`$]+(\.[^\s.\[\]'"\\`$]+)*""")
_SIDES: Final = ("new", "old")
_FIELDS: Final = (
    "name",
    "realms_topics",
    "request_prefill",
    "filter",
    "delivery",
    "order_by",
    "lease_seconds",
    "retry",
    "retention_seconds",
    "hidden_fields",
    "push",
)


@dataclass(frozen=True, slots=True)
class RealmTopic:
    """An exact realm, and a topic: exact, or a regular expression that must match in full (see `name_rules`)."""

    realm: str
    topic: str

    def __post_init__(self) -> None:
        check_realm_or_topic(self.realm, "realm")
        check_topic(check_realm_or_topic(self.topic, "topic"))

    @classmethod
    def from_json(cls, data: object) -> "RealmTopic":
        """Build it from `{"realm": ..., "topic": ...}`."""
        fields = json_fields.mapping(data, "entry of realms_topics")
        json_fields.reject_unknown(fields, ("realm", "topic"), "entry of realms_topics")
        return cls(json_fields.text(fields, "realm", "subscription"), json_fields.text(fields, "topic", "subscription"))

    def to_json(self) -> Json:
        """Return the stored fields."""
        return {"realm": self.realm, "topic": self.topic}

    def matches(self, realm: str, topic: str) -> bool:
        """Return whether it matches the realm and topic of an event."""
        return self.realm == realm and topic_matches(self.topic, topic)


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects the events whose attributes and fields all have one of the given values.

    A path such as `address.city` names a field of the object: in new, and if new has none (or null), in old. The prefix
    `new.` or `old.` selects one side. A field that is a list has each of its elements as a value.
    Strings, numbers and true/false are different: "1" is not 1, and 1 is not true; 1 and 1.0 are the same number.
    """

    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fields: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in (*self.attributes.items(), *self.fields.items()):
            if not name or not values:
                raise InvalidInput(f"the filter for {name!r} has no name or no values", fix="give at least one value")
        for path in self.fields:
            if not _PATH.fullmatch(path) or path in _SIDES:
                raise InvalidInput(
                    f"invalid field {path!r} in the filter",
                    fix="write names from the outside in, separated by dots: department, address.city, new.department",
                )

    def __bool__(self) -> bool:
        return bool(self.attributes or self.fields)

    @classmethod
    def from_json(cls, data: object) -> "Filter":
        """Build it from `{"attributes": {name: value or values}, "fields": {path: value or values}}`, both optional."""
        given = json_fields.mapping({} if data is None else data, "filter")
        json_fields.reject_unknown(given, ("attributes", "fields"), "filter")
        return cls(
            attributes={
                name: tuple(_value(value, name, (str,)) for value in _values(found))
                for name, found in json_fields.mapping(given.get("attributes") or {}, "filter by attributes").items()
            },
            fields={
                path: tuple(_value(value, path, (str, int, float, bool)) for value in _values(found))
                for path, found in json_fields.mapping(given.get("fields") or {}, "filter by fields").items()
            },
        )

    def to_json(self) -> Json:
        """Return the stored fields, each value in a list."""
        return {
            "attributes": {name: list(values) for name, values in self.attributes.items()},
            "fields": {path: list(values) for path, values in self.fields.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """The definition of a subscription. Prefill follows the order of its topics."""

    name: str
    realms_topics: tuple[RealmTopic, ...]
    request_prefill: bool = False
    filter: Filter = field(default_factory=Filter)
    delivery: Delivery = Delivery.ORDERED
    order_by: OrderBy | None = OrderBy.POSITION
    """The order that delivery keeps: by position for ordered delivery, else by key or none."""
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    """How long a consumer holds a message before another consumer may receive it."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    retention_seconds: float | None = None
    """How long an unacknowledged message stays in the queue; None: for ever."""
    hidden_fields: tuple[str, ...] = DEFAULT_HIDDEN_FIELDS
    """Fields of the object that its consumers never receive (see `redaction`)."""
    push: Push | None = None
    """The push settings of push delivery."""

    def __post_init__(self) -> None:
        check_subscription_name(self.name)
        check_order(self.delivery, self.order_by)
        check_lease_seconds(self.lease_seconds)
        self._check_push()
        check_retention(self.retention_seconds)
        if not self.realms_topics:
            raise InvalidInput(f"subscription {self.name!r} has no topic", fix="give at least one realm and topic")
        self._check_hidden()

    def _check_push(self) -> None:
        if (self.delivery is Delivery.PUSH) != (self.push is not None):
            raise InvalidInput(
                f"{self.delivery.value} delivery {'without' if self.push is None else 'with'} push settings",
                fix="push delivery has push settings with an endpoint, and no other has",
            )
        parks_by_key = self.push is not None and self.push.after_dead_letter is AfterDeadLetter.PARK_KEY
        if parks_by_key and self.order_by is not OrderBy.KEY:
            raise InvalidInput("messages are parked by key without an order by key", fix="set order_by to key")

    def _check_hidden(self) -> None:
        """Raise InvalidInput for a filter that would reveal a hidden field, and for an order by a hidden key."""
        for path in self.filter.fields:
            found = find_hiding_field(self.hidden_fields, path)
            if found is not None:
                raise InvalidInput(
                    f"the filter by {path!r} would reveal the hidden field {found!r}",
                    fix="filter by another field, or list the fields to hide in hidden_fields",
                )
        for name in KEY_FIELDS if self.order_by is OrderBy.KEY else ():
            if find_hiding_field(self.hidden_fields, name) is not None:
                raise InvalidInput(
                    f"the order by key cannot be kept when {name!r} is hidden",
                    fix="hide other fields, or keep no order (order_by null)",
                )

    @classmethod
    def from_json(cls, data: object) -> "Subscription":
        """Build it from checked fields; InvalidInput or InvalidName says what is wrong. Repeated topics count once."""
        given = json_fields.mapping(data, "subscription")
        json_fields.reject_unknown(given, _FIELDS, "subscription")
        delivery, order_by = read_order(given)
        return cls(
            name=json_fields.text(given, "name", "subscription"),
            realms_topics=read_topics(given, "realms_topics"),
            request_prefill=json_fields.flag(given, "request_prefill", "subscription"),
            filter=Filter.from_json(given.get("filter")),
            delivery=delivery,
            order_by=order_by,
            lease_seconds=read_lease_seconds(given),
            retry=RetryPolicy.from_json(given.get("retry")),
            retention_seconds=read_retention(given),
            hidden_fields=read_hidden_fields(given),
            push=None if given.get("push") is None else Push.from_json(given["push"]),
        )

    def to_json(self) -> Json:
        """Return the stored fields; fields equal to their defaults are omitted."""
        given: Json = {
            "name": self.name,
            "realms_topics": [topic.to_json() for topic in self.realms_topics],
            "request_prefill": self.request_prefill,
        }
        if self.filter:
            given["filter"] = self.filter.to_json()
        if self.delivery is not Delivery.ORDERED:
            given["delivery"] = self.delivery.value
        if self.order_by is not default_order(self.delivery) and self.order_by is not None:
            given["order_by"] = self.order_by.value
        if self.lease_seconds != DEFAULT_LEASE_SECONDS:
            given["lease_seconds"] = float(self.lease_seconds)
        if self.retry != RetryPolicy():
            given["retry"] = self.retry.to_json()
        if self.retention_seconds is not None:
            given["retention_seconds"] = float(self.retention_seconds)
        if self.hidden_fields != DEFAULT_HIDDEN_FIELDS:
            given["hidden_fields"] = list(self.hidden_fields)
        if self.push is not None:
            given["push"] = self.push.to_json()
        return given

    def to_public_json(self) -> Json:
        """Return the fields for the API, the CLI and the console: without secrets."""
        given = self.to_json()
        if self.push is not None:
            given["push"] = self.push.to_public_json()
        return given

    def is_same_as(self, other: "Subscription") -> bool:
        """Return whether both definitions are the same. `==` takes True and 1 in a filter as equal."""
        return _canonical(self) == _canonical(other)


def read_topics(data: Mapping[str, Any], name: str) -> tuple[RealmTopic, ...]:
    """Read a field that is a list of realms and topics; a repeated one counts once."""
    topics = data.get(name)
    if not isinstance(topics, list):
        raise InvalidInput(
            f"{json_fields.describe_type(topics)} is no value for {name!r}",
            fix='give a list of {"realm": ..., "topic": ...}',
        )
    return tuple(dict.fromkeys(RealmTopic.from_json(topic) for topic in topics))


def matches(subscription: Subscription, event: Event) -> bool:
    """Return whether an event matches a subscription. Pure, and the reference for every other implementation."""
    if not any(wanted.matches(event.realm, event.topic) for wanted in subscription.realms_topics):
        return False
    wanted = subscription.filter
    return all(event.attributes.get(name) in values for name, values in wanted.attributes.items()) and all(
        any(_equal(found, value) for found in field_values(event, path) for value in values)
        for path, values in wanted.fields.items()
    )


def field_values(event: Event, path: str) -> tuple[Scalar, ...]:
    """Return the values at a path of a filter in an event; see `Filter`."""
    first, _, rest = path.partition(".")
    if first in _SIDES and rest:
        found = _find_value(event.new if first == "new" else event.old, rest)
    else:
        found = _find_value(event.new, path)
        found = _find_value(event.old, path) if found is None else found
    values = found if isinstance(found, list) else [found]
    return tuple(value for value in values if isinstance(value, str | int | float | bool))


def _find_value(obj: object, path: str) -> object:
    for name in path.split("."):
        if not isinstance(obj, Mapping):
            return None
        obj = obj.get(name)
    return obj


def _equal(found: Scalar, wanted: Scalar) -> bool:
    return _type(found) is _type(wanted) and found == wanted


def _type(value: Scalar) -> type:
    return float if type(value) is int else type(value)


def _values(found: object) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _value(value: Any, name: str, kinds: tuple[type, ...]) -> Any:
    if type(value) not in kinds:
        raise InvalidInput(
            f"the filter for {name!r} has {json_fields.describe_type(value)} as a value",
            fix="give a string" if kinds == (str,) else "give a string, a number, true or false",
        )
    return value


def _canonical(subscription: Subscription) -> bytes:
    given = subscription.to_json()
    for part in ("attributes", "fields"):
        if "filter" in given:
            given["filter"][part] = dict(sorted(given["filter"][part].items()))
    return json_fields.dump(given)
