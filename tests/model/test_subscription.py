"""What a subscription asks for is checked when it is made, and decides which events it gets."""

from datetime import UTC, datetime
from typing import Any

import pytest

from purveyor.model.errors import InvalidInput, InvalidName
from purveyor.model.event import Event
from purveyor.model.subscription import Filter, RealmTopic, Subscription, matches

WHEN = datetime(2026, 11, 15, tzinfo=UTC)
FULL: dict[str, Any] = {
    "name": "ox",
    "realms_topics": [{"realm": "udm", "topic": "users/user"}, {"realm": "udm", "topic": "groups/.*"}],
    "request_prefill": True,
    "filter": {"attributes": {"tenant": ["north", "south"]}, "fields": {"new.level": [1, 2.5, True, "x"]}},
}


def event(
    new: dict[str, Any] | None = None, old: dict[str, Any] | None = None, *, topic: str = "users/user", **more: Any
) -> Event:
    return Event(
        publisher_name="p",
        ts=WHEN,
        realm="udm",
        topic=topic,
        new={"a": 1} if new is None else new,
        old=old or {},
        **more,
    )


def subscription(*topics: str, **given: Any) -> Subscription:
    return Subscription(
        name="ox", realms_topics=tuple(RealmTopic("udm", topic) for topic in topics or (".*",)), **given
    )


def gets(new: dict[str, Any], fields: dict[str, Any], old: dict[str, Any] | None = None) -> bool:
    return matches(subscription(filter=Filter.from_json({"fields": fields})), event(new, old))


def test_a_definition_is_the_same_after_the_way_through_json() -> None:
    read = Subscription.from_json(FULL)
    assert read.to_json() == FULL
    assert Subscription.from_json(read.to_json()) == read
    assert "filter" not in subscription().to_json()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"realms_topics": []}, "no topic"),
        ({"realms_topics": None}, "'realms_topics'"),
        ({"realms_topics": ["udm"]}, "realms_topics"),
        ({"realms_topics": [{"realm": "udm"}]}, "'topic'"),
        ({"realms_topics": [{"realm": "", "topic": "a"}]}, "'realm'"),
        ({"realms_topics": [{"realm": "udm", "topic": "a("}]}, "unclosed group"),
        ({"request_prefill": "yes"}, "'request_prefill'"),
        ({"filter": []}, "filter"),
        ({"filter": {"field": {}}}, "unknown field 'field'"),
        ({"filter": {"attributes": {"a": 1}}}, "'a'"),
        ({"filter": {"fields": {"a": None}}}, "'a'"),
        ({"filter": {"fields": {"a": [[1]]}}}, "'a'"),
        ({"filter": {"fields": {"a": []}}}, "'a'"),
        ({"filter": {"fields": {"a..b": 1}}}, "a..b"),
        ({"filter": {"fields": {"new": 1}}}, "'new'"),
        ({"filter": {"fields": {"a['b']": 1}}}, "invalid field"),
        ({"fitler": {}}, "'fitler'"),
    ],
)
def test_an_error_names_the_wrong_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Subscription.from_json(FULL | change)


@pytest.mark.parametrize("name", ["foo.bar", "a/b", "", "x" * 65])
def test_a_name_that_cannot_be_one_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        Subscription.from_json(FULL | {"name": name})
    with pytest.raises(InvalidName):
        Subscription(name=name, realms_topics=(RealmTopic("udm", "a"),))


def test_a_topic_named_twice_counts_once() -> None:
    twice = FULL | {"realms_topics": [*FULL["realms_topics"], FULL["realms_topics"][0]]}
    assert Subscription.from_json(twice) == Subscription.from_json(FULL)


def test_equal_definitions_are_distinguished_from_similar_ones() -> None:
    one, true = (subscription(filter=Filter(fields={"a": (value,)})) for value in (1, True))
    assert one == true
    assert not one.is_same_as(true)
    first = subscription(filter=Filter(fields={"a": (1,), "b": (2,)}))
    assert first.is_same_as(subscription(filter=Filter(fields={"b": (2,), "a": (1,)})))
    assert not subscription("a", "b").is_same_as(subscription("b", "a"))  # prefill goes in this order


def test_realm_is_exact_and_one_topic_is_enough() -> None:
    wanted = subscription("users/user", "groups/.*")
    assert matches(wanted, event())
    assert matches(wanted, event(topic="groups/group"))
    assert not matches(wanted, event(topic="computers/linux"))
    assert not matches(Subscription(name="ox", realms_topics=(RealmTopic("shop", ".*"),)), event())
    assert not matches(Subscription(name="ox", realms_topics=(RealmTopic("ud.", ".*"),)), event())


def test_every_attribute_must_have_one_of_its_values() -> None:
    wanted = subscription(filter=Filter(attributes={"tenant": ("north", "south"), "kind": ("a",)}))
    assert matches(wanted, event(attributes={"tenant": "south", "kind": "a", "more": "x"}))
    assert not matches(wanted, event(attributes={"tenant": "south"}))
    assert not matches(wanted, event(attributes={"tenant": "east", "kind": "a"}))
    assert not matches(wanted, event())


def test_a_field_is_read_from_new_and_if_absent_from_old() -> None:
    assert gets({"department": "it"}, {"department": "it"})
    assert gets({}, {"department": "it"}, {"department": "it"})
    assert gets({"department": None}, {"department": "it"}, {"department": "it"})
    assert not gets({"department": "hr"}, {"department": "it"}, {"department": "it"})
    assert gets({"department": "hr"}, {"old.department": "it"}, {"department": "it"})
    assert not gets({"other": 1}, {"new.department": "it"}, {"department": "it"})
    assert gets({"new": {"new": "x"}}, {"new.new.new": "x"})


def test_fields_are_found_inside_of_objects_and_lists() -> None:
    assert gets({"address": {"city": "Bremen"}}, {"address.city": ["Berlin", "Bremen"]})
    assert not gets({"address": "Bremen"}, {"address.city": "Bremen"})
    assert gets({"groups": ["a", "b"]}, {"groups": "b"})
    assert not gets({"groups": [["b"], {"b": "b"}]}, {"groups": "b"})
    assert not gets({"address": {"city": "Bremen"}}, {"address": "Bremen"})


def test_values_of_different_kinds_are_different() -> None:
    assert gets({"a": 1}, {"a": 1.0})
    assert not gets({"a": "1"}, {"a": 1})
    assert not gets({"a": 1}, {"a": "1"})
    assert not gets({"a": True}, {"a": 1})
    assert not gets({"a": 0}, {"a": False})
    assert gets({"a": False}, {"a": [False, 3]})
    assert gets({"a": ""}, {"a": ""})


def test_all_fields_must_match() -> None:
    assert gets({"a": 1, "b": 2}, {"a": 1, "b": [2, 3]})
    assert not gets({"a": 1, "b": 4}, {"a": 1, "b": [2, 3]})
