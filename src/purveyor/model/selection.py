"""The part of a definition that decides which events a subscription gets, and what its consumers see of them.

A change of this part is in force from an exact position on: its control event is in `incoming`. All other options of a
subscription are about delivery, and change when they are written.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from purveyor.model import json_fields
from purveyor.model.delivery_policy import read_hidden_fields
from purveyor.model.json_fields import Json
from purveyor.model.name_rules import is_exact, topic_matches
from purveyor.model.subscription import Filter, RealmTopic, Subscription, read_topics

_FIELDS: Final = ("realms_topics", "filter", "hidden_fields")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Topics, filter and hidden fields."""

    realms_topics: tuple[RealmTopic, ...]
    filter: Filter
    hidden_fields: tuple[str, ...]

    @classmethod
    def of(cls, definition: Subscription) -> "Selection":
        """Return the selection of a definition."""
        return cls(
            realms_topics=definition.realms_topics, filter=definition.filter, hidden_fields=definition.hidden_fields
        )

    def apply_to(self, definition: Subscription) -> Subscription:
        """Return the definition with this selection; InvalidInput if its other options do not allow it."""
        return replace(
            definition, realms_topics=self.realms_topics, filter=self.filter, hidden_fields=self.hidden_fields
        )

    def for_dispatch(self, name: str) -> Subscription:
        """Return a definition that selects the same events, with the default options of delivery."""
        return Subscription(
            name=name, realms_topics=self.realms_topics, filter=self.filter, hidden_fields=self.hidden_fields
        )

    def is_same_as(self, other: "Selection") -> bool:
        """Return whether both are the same. `==` takes True and 1 in a filter as equal."""
        return self.for_dispatch("x").is_same_as(other.for_dispatch("x"))

    def to_json(self) -> Json:
        """Return the stored fields."""
        return {
            "realms_topics": [topic.to_json() for topic in self.realms_topics],
            "filter": self.filter.to_json(),
            "hidden_fields": list(self.hidden_fields),
        }

    @classmethod
    def from_json(cls, data: object) -> "Selection":
        """Build it from checked fields; InvalidInput says what is wrong."""
        given = json_fields.mapping(data, "selection")
        json_fields.reject_unknown(given, _FIELDS, "selection")
        return cls(
            realms_topics=read_topics(given, "realms_topics"),
            filter=Filter.from_json(given.get("filter")),
            hidden_fields=read_hidden_fields(given),
        )


def new_topics(before: Selection, after: Selection) -> tuple[RealmTopic, ...]:
    """Return the topics that a change adds, in their order."""
    known = frozenset(before.realms_topics)
    return tuple(topic for topic in after.realms_topics if topic not in known)


@lru_cache(maxsize=1000)
def may_overlap(one: RealmTopic, other: RealmTopic) -> bool:
    """Return whether an event may match both. Two expressions of one realm may always overlap.

    >>> users, groups = RealmTopic("udm", "users/user"), RealmTopic("udm", "groups/.*")
    >>> may_overlap(users, groups), may_overlap(groups, RealmTopic("udm", "groups/group"))
    (False, True)
    """
    if one.realm != other.realm:
        return False
    if is_exact(one.topic):
        return topic_matches(other.topic, one.topic)
    return not is_exact(other.topic) or topic_matches(one.topic, other.topic)
