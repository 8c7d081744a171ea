"""The flags of `purveyor subscription add` and `edit`, as the options of the HTTP API.

`OptionFlags` turns flags into the fields that a request to the API has, so both surfaces can set the same options.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Final

import typer

from purveyor.app.cli.parsers import parse_duration, parse_pair, parse_scalar, parse_seconds, parse_topic
from purveyor.app.cli.subscription_push import PushFlags
from purveyor.model.delivery_policy import HIDDEN, Delivery, OrderBy, RetryPolicy, check_order, default_order
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.model.subscription import RealmTopic, Scalar

DEFAULT_ATTEMPTS: Final = 5
_PUSH_RETRY: Final = RetryPolicy(max_backoff_seconds=60.0)
"""The retry policy of a push subscription that the command line adds."""


class Order(Enum):
    """The order in which messages are delivered."""

    POSITION = "position"
    KEY = "key"
    NONE = "none"


class Resettable(Enum):
    """An option that `edit --reset` sets back to its default."""

    FILTER = "filter"
    HIDE = "hide"
    ORDER_BY = "order-by"
    LEASE = "lease"
    RETRY = "retry"
    RETENTION = "retention"
    SECRET = "secret"
    BEARER = "bearer"

    @property
    def field(self) -> str:
        """The name of the option in the API."""
        return _FIELDS[self]


_FIELDS: Final[Mapping[Resettable, str]] = {
    Resettable.FILTER: "filter",
    Resettable.HIDE: "hidden_fields",
    Resettable.ORDER_BY: "order_by",
    Resettable.LEASE: "lease_seconds",
    Resettable.RETRY: "retry",
    Resettable.RETENTION: "retention_seconds",
    Resettable.SECRET: "secret",
    Resettable.BEARER: "bearer_token",
}
_IN_PUSH: Final = (Resettable.SECRET, Resettable.BEARER)

FilterAttribute = Annotated[
    list[str] | None,
    typer.Option(
        "--filter-attribute",
        metavar="NAME=VALUE",
        help="Only events with this attribute; the same name again adds a value.",
    ),
]
FilterField = Annotated[
    list[str] | None,
    typer.Option(
        "--filter-field",
        metavar="PATH=VALUE",
        help="Only objects with this field; the same path again adds a value.",
    ),
]
Hide = Annotated[
    list[str] | None,
    typer.Option("--hide", metavar="FIELD", help="Remove this field, instead of the password fields; repeatable."),
]
HideNothing = Annotated[bool, typer.Option("--hide-nothing", help="Remove no fields, not even passwords.")]
Retention = Annotated[
    str | None,
    typer.Option("--retention", metavar="DURATION", help="Unacknowledged messages expire after this time, such as 7d."),
]
DeliveryOption = Annotated[
    Delivery | None,
    typer.Option(
        "--delivery",
        help="To one consumer at a time in order, to many at the same time, or to endpoints; default: ordered, "
        "with --push push.",
        show_default=False,
    ),
]
Lease = Annotated[
    str | None,
    typer.Option(
        "--lease", metavar="DURATION", help="How long a consumer may hold a message; default: 30s.", show_default=False
    ),
]
MaxAttempts = Annotated[
    int | None,
    typer.Option("--max-attempts", metavar="N", help="Failed attempts after which a message becomes a dead letter."),
]
MinBackoff = Annotated[
    str | None,
    typer.Option(
        "--min-backoff",
        metavar="DURATION",
        help="The delay after the first failure, which doubles with each; default: 1s.",
    ),
]
MaxBackoff = Annotated[
    str | None,
    typer.Option("--max-backoff", metavar="DURATION", help="The longest delay; default: 10m, for push 60s."),
]
OrderOption = Annotated[
    Order | None, typer.Option("--order-by", help="Keep the order of all messages, of each key, or none.")
]
DeadLetters = Annotated[
    bool,
    typer.Option("--dead-letter", help=f"Make a dead letter after --max-attempts, or {DEFAULT_ATTEMPTS} attempts."),
]
Reset = Annotated[
    list[Resettable] | None,
    typer.Option("--reset", help="Set this option back to its default, or remove this secret; repeatable."),
]
NewTopics = Annotated[
    list[str] | None,
    typer.Option("--topic", "-t", metavar="REALM:TOPIC", help="Replace all topics by this one; repeatable."),
]
AddTopics = Annotated[
    list[str] | None, typer.Option("--add-topic", metavar="REALM:TOPIC", help="Add this topic; repeatable.")
]
RemoveTopics = Annotated[
    list[str] | None, typer.Option("--remove-topic", metavar="REALM:TOPIC", help="Remove this topic; repeatable.")
]
PrefillNewTopics = Annotated[
    bool, typer.Option("--prefill", help="Deliver the current state of the objects of new topics first.")
]


@dataclass(frozen=True, slots=True)
class TopicFlags:
    """The topics to set, or to add and to remove."""

    topics: tuple[RealmTopic, ...] = ()
    added: tuple[RealmTopic, ...] = ()
    removed: tuple[RealmTopic, ...] = ()
    prefill: bool = False

    @classmethod
    def parse(
        cls, topics: list[str] | None, added: list[str] | None, removed: list[str] | None, *, prefill: bool
    ) -> "TopicFlags":
        """Build it from the flags; InvalidInput for flags that exclude each other."""
        flags = cls(_parse_topics(topics), _parse_topics(added), _parse_topics(removed), prefill)
        if flags.topics and (flags.added or flags.removed):
            raise InvalidInput(
                "--topic replaces all topics, so --add-topic and --remove-topic have no meaning beside it",
                fix="give --topic alone, or only the others",
            )
        if prefill and not (flags.topics or flags.added):
            raise InvalidInput("--prefill needs new topics", fix="add --add-topic REALM:TOPIC")
        return flags

    def options(self, now: tuple[RealmTopic, ...]) -> Json:
        """Return the option of the API for a subscription with these topics; none if the flags change no topic."""
        if not (self.topics or self.added or self.removed):
            return {}
        for each in self.removed:
            if each not in now:
                raise InvalidInput(
                    f"the subscription has no topic {each.realm}:{each.topic}",
                    fix=f"it has {', '.join(f'{topic.realm}:{topic.topic}' for topic in now)}",
                )
        wanted = self.topics or (*(each for each in now if each not in self.removed), *self.added)
        return {"realms_topics": [each.to_json() for each in dict.fromkeys(wanted)]}


def _parse_topics(given: list[str] | None) -> tuple[RealmTopic, ...]:
    return tuple(dict.fromkeys(map(parse_topic, given or [])))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionFlags:
    """The flags for the options of a subscription; None where a flag is missing."""

    filter_attributes: list[str] | None = None
    filter_fields: list[str] | None = None
    hide: list[str] | None = None
    hide_nothing: bool = False
    retention: str | None = None
    delivery: Delivery | None = None
    lease: str | None = None
    order_by: Order | None = None
    max_attempts: int | None = None
    min_backoff: str | None = None
    max_backoff: str | None = None
    dead_letter: bool = False
    push: PushFlags = field(default_factory=PushFlags)
    topics: TopicFlags = field(default_factory=TopicFlags)
    """The change of topics; only of `edit`."""
    reset: tuple[Resettable, ...] = ()

    def new_options(self, *, keep_secret: bool = False) -> Json:
        """Return the options of a new subscription. With `keep_secret`, an existing secret replaces a generated one."""
        push = self.push.options()
        delivery = self._delivery(Delivery.PUSH if self.push.urls else Delivery.ORDERED)
        if (push or delivery is Delivery.PUSH) and not self.push.urls:
            raise InvalidInput("push delivery and push flags need an endpoint", fix="add --push URL")
        options = self._options(delivery)
        if delivery is not Delivery.ORDERED:
            options["delivery"] = delivery.value
        if push and keep_secret and self.push.secret_generated:
            options["push"]["secret"] = HIDDEN
        if self._sets_retry or push:
            options["retry"] = self._retry(_PUSH_RETRY if push else RetryPolicy())
        return options

    def changed_options(self, delivery: Delivery, retry: RetryPolicy) -> Json:
        """Return the options to change of a subscription with this delivery mode and retry policy; None resets one."""
        removed: Json = {each.field: None for each in self.reset if each in _IN_PUSH}
        push = self.push.options()
        becomes = self._delivery(Delivery.PUSH if self.push.urls else delivery)
        if becomes is not Delivery.PUSH and (push or removed):
            raise InvalidInput("the subscription has no endpoint", fix="add --push URL to change it to push")
        if becomes is Delivery.PUSH and delivery is not Delivery.PUSH and not self.push.urls:
            raise InvalidInput("push delivery needs an endpoint", fix="add --push URL")
        options: Json = {each.field: None for each in self.reset if each not in _IN_PUSH}
        given = self._options(becomes)
        twice = [*({*options} & {*given}), *({*removed} & {*push})]
        if twice:
            raise InvalidInput(f"{twice[0]} is reset and has a new value", fix="give one of them")
        options |= given
        if becomes is not delivery:
            options["delivery"] = becomes.value
        if self._sets_retry:
            options["retry"] = self._retry(RetryPolicy() if Resettable.RETRY in self.reset else retry)
        if removed:
            options["push"] = {**removed, **push}
        return options

    @property
    def _sets_retry(self) -> bool:
        return self.dead_letter or any(
            each is not None for each in (self.max_attempts, self.min_backoff, self.max_backoff)
        )

    def _delivery(self, implied: Delivery) -> Delivery:
        if self.delivery is None:
            return implied
        if self.push.urls and self.delivery is not Delivery.PUSH:
            raise InvalidInput(f"--push and --delivery {self.delivery.value} exclude each other", fix="leave one out")
        return self.delivery

    def _options(self, delivery: Delivery) -> Json:
        """Return the options that need nothing of an existing subscription but its delivery mode."""
        options: Json = {}
        if self.filter_attributes or self.filter_fields:
            fields = [(path, parse_scalar(text)) for path, text in map(parse_pair, self.filter_fields or [])]
            options["filter"] = {
                "attributes": _values(map(parse_pair, self.filter_attributes or [])),
                "fields": _values(fields),
            }
        if self.hide_nothing and self.hide:
            raise InvalidInput("--hide and --hide-nothing exclude each other", fix="give one of them")
        if self.hide_nothing or self.hide:
            options["hidden_fields"] = list(self.hide or ())
        if self.retention is not None:
            options["retention_seconds"] = parse_duration(self.retention).total_seconds()
        if self.lease is not None:
            options["lease_seconds"] = parse_duration(self.lease).total_seconds()
        if self.order_by is not None:
            options["order_by"] = self._order(delivery)
        if push := self.push.options():
            options["push"] = push
        return options

    def _order(self, delivery: Delivery) -> str | None:
        wanted = None if self.order_by in (None, Order.NONE) else OrderBy(self.order_by.value)
        check_order(delivery, wanted)  # null would mean the default, which is by position for ordered delivery
        return None if wanted is default_order(delivery) or wanted is None else wanted.value

    def _retry(self, kept: RetryPolicy) -> Json:
        least = kept.min_backoff_seconds if self.min_backoff is None else parse_seconds(self.min_backoff)
        most = max(least, kept.max_backoff_seconds) if self.max_backoff is None else parse_seconds(self.max_backoff)
        attempts = kept.max_attempts if self.max_attempts is None else self.max_attempts
        if attempts is None and self.dead_letter:
            attempts = DEFAULT_ATTEMPTS
        return {"max_attempts": attempts, "min_backoff_seconds": least, "max_backoff_seconds": most}


def _values(pairs: Iterable[tuple[str, Scalar]]) -> dict[str, list[Scalar]]:
    found: dict[str, list[Scalar]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return found
