"""Delivery settings are checked, and defaults are not stored."""

from typing import Any

import pytest

from purveyor.model.delivery_policy import DEFAULT_HIDDEN_FIELDS, Delivery, OrderBy, RetryPolicy
from purveyor.model.errors import InvalidInput
from purveyor.model.subscription import RealmTopic, Subscription

PLAIN: dict[str, Any] = {
    "name": "ox",
    "realms_topics": [{"realm": "udm", "topic": "users/user"}],
    "request_prefill": False,
}


def test_defaults_suit_a_simple_consumer() -> None:
    plain = Subscription.from_json(PLAIN)
    assert (plain.delivery, plain.order_by, plain.lease_seconds) == (Delivery.ORDERED, OrderBy.POSITION, 30)
    assert (plain.retry.max_attempts, plain.hidden_fields) == (None, DEFAULT_HIDDEN_FIELDS)
    assert plain.to_json() == PLAIN


@pytest.mark.parametrize(
    "given",
    [
        {"delivery": "parallel"},
        {"delivery": "parallel", "order_by": "key"},
        {"lease_seconds": 12.5},
        {"retry": {"max_attempts": 3, "min_backoff_seconds": 0.0, "max_backoff_seconds": 10.0}},
        {"hidden_fields": []},
        {"hidden_fields": ["salary", "notes"]},
    ],
)
def test_settings_survive_a_round_trip_through_json(given: dict[str, Any]) -> None:
    read = Subscription.from_json(PLAIN | given)
    assert read.to_json() == PLAIN | given
    assert not read.is_same_as(Subscription.from_json(PLAIN))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"delivery": "pushed"}, "ordered, parallel"),
        ({"delivery": "parallel", "order_by": "position"}, "cannot keep the order"),
        ({"order_by": "key"}, "cannot keep the order"),
        ({"lease_seconds": 0}, "a lease of 0"),
        ({"lease_seconds": "30"}, "lease_seconds"),
        ({"lease_seconds": True}, "lease_seconds"),
        ({"retry": {"max_attempts": 0}}, "attempts"),
        ({"retry": {"attempts": 1}}, "unknown field"),
        ({"retry": {"min_backoff_seconds": 5, "max_backoff_seconds": 1}}, "backoff"),
        ({"hidden_fields": "salary"}, "hidden_fields"),
        ({"hidden_fields": [1]}, "hidden_fields"),
        ({"password": "secret"}, "unknown field"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Subscription.from_json(PLAIN | given)


def test_whole_seconds_and_fractions_are_the_same_number() -> None:
    topics = (RealmTopic("udm", "users/user"),)
    whole = Subscription(name="ox", realms_topics=topics, lease_seconds=5, retry=RetryPolicy(min_backoff_seconds=2))
    assert whole.is_same_as(Subscription.from_json(whole.to_json()))
