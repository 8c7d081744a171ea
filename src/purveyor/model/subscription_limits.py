"""The limits of what a subscription or a schema asks for, checked when it is added or changed. Pure.

They are not checked when a definition is read: one that an older version stored keeps working as it did.
"""

from collections.abc import Iterable
from typing import Final

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.event_limits import (
    LONGEST_ATTRIBUTE_NAME_BYTES,
    LONGEST_ATTRIBUTE_VALUE_BYTES,
    LONGEST_REALM_BYTES,
    LONGEST_TOPIC_BYTES,
)
from purveyor.model.json_limits import check_halves, check_json, check_perhaps_empty, check_text
from purveyor.model.subscription import Filter, RealmTopic, Subscription
from purveyor.model.topic_cost import MOST_STEPS, cost
from purveyor.model.topics import is_exact

LARGEST_SUBSCRIPTION_BYTES: Final = 256 << 10


def check_subscription(definition: Subscription) -> Subscription:
    """Return a new definition, or raise InvalidInput if no part could store or match it safely."""
    check_topics(definition.realms_topics)
    return check_options(definition)


def check_options(definition: Subscription) -> Subscription:
    """The same for all but its topics: what can be changed later."""
    _check_filter(definition.filter)
    check_halves(definition.to_json(), f"subscription {definition.name}")
    size = len(json_fields.dump(definition.to_json()))
    if size > LARGEST_SUBSCRIPTION_BYTES:
        raise InvalidInput(
            f"subscription {definition.name!r} is {size} bytes long", fix=f"ask for less: {LARGEST_SUBSCRIPTION_BYTES}"
        )
    return definition


def check_topics(topics: Iterable[RealmTopic]) -> None:
    """Raise InvalidInput if a realm or topic is too long, or if matching one topic could take too many steps."""
    steps = 0
    for each in topics:
        check_text(each.realm, "realm", LONGEST_REALM_BYTES)
        check_text(each.topic, "topic", LONGEST_TOPIC_BYTES)
        if is_exact(each.topic):
            continue
        alone = cost(each.topic)
        steps += alone
        if alone > MOST_STEPS:
            raise InvalidInput(
                f"the expression {each.topic!r} can read one topic in too many ways ({alone:.1e} steps)",
                fix="use at most two of * + {n,} that can match the same characters, and fewer alternatives beside "
                "them; .* at the end and [^/]+ before / do not count",
            )
    if steps > MOST_STEPS:
        raise InvalidInput(
            f"all expressions together can read one topic in too many ways ({steps:.1e} steps)",
            fix="use fewer or simpler ones, or another subscription",
        )


def _check_filter(wanted: Filter) -> None:
    for name, values in wanted.attributes.items():
        check_text(name, "an attribute name in the filter", LONGEST_ATTRIBUTE_NAME_BYTES)
        for value in values:
            check_perhaps_empty(value, f"the filter for {name!r}", LONGEST_ATTRIBUTE_VALUE_BYTES)
    check_json({path: list(values) for path, values in wanted.fields.items()}, "filter.fields")
