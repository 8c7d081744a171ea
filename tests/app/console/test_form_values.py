"""The subscription form reads what it shows, sends only what changed, and finds the field of every mistake."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from purveyor.app.console.form_values import FormValues, read_change, read_new
from purveyor.app.subscription_input import PushInput
from purveyor.delivery.push.egress_policy import parse_ranges
from purveyor.delivery.push.push_request import SecretCipher
from purveyor.model.json_fields import Json
from purveyor.model.subscription import Subscription

URL = "https://shop.example/in"
DEFINITIONS: list[Json] = [
    {},
    {
        "realms_topics": [{"realm": "udm", "topic": "a{1,3}"}, {"realm": "shop", "topic": "x:y,z"}],
        "request_prefill": True,
    },
    {
        "filter": {
            "attributes": {"a": ["3", "true", "x=y"]},
            "fields": {"f": ["3", 3, 3.5, True, " ", "null", "a,b", "[1]"]},
        }
    },
    {"delivery": "parallel", "order_by": "key", "lease_seconds": 90.5, "retention_seconds": 86400},
    {"hidden_fields": []},
    {"hidden_fields": ["password", "a.b"], "retry": {"max_attempts": 3, "min_backoff_seconds": 0.05}},
    {
        "delivery": "push",
        "push": {"endpoint": URL, "secret": "env:PURVEYOR_PUSH_SECRET_X", "ack_deadline_seconds": 0.25},
    },
    {"delivery": "push", "order_by": "position", "push": {"endpoints": [URL, "https://b.example/"], "format": "raw"}},
]


@pytest.fixture
def push_input(tmp_path: Path) -> PushInput:
    return PushInput(lambda: SecretCipher.from_directory(tmp_path), parse_ranges(["127.0.0.1"]))


def definition(more: Json) -> Subscription:
    return Subscription.from_json({"name": "ox", "realms_topics": [{"realm": "udm", "topic": "users/user"}], **more})


@pytest.mark.parametrize("more", DEFINITIONS)
def test_a_form_that_is_not_touched_changes_nothing_and_makes_the_same_subscription(
    more: Json, push_input: PushInput
) -> None:
    wanted = definition(more)
    result = read_change(FormValues.of(wanted), wanted, push_input)
    assert (result.errors, result.body) == ({}, {})
    if wanted.push is None:
        made = read_new(FormValues.of(wanted), "secret", push_input)
        assert made.errors == {}
        del made.body["password"]
        assert Subscription.from_json(made.body).is_same_as(wanted)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "incoming"}, "name"),
        ({"name": "stage-x"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"topics": ""}, "topics"),
        ({"topics": "users/user"}, "topics"),
        ({"topics": "udm:a, shop:b"}, "topics"),
        ({"topics": "udm:("}, "topics"),
        ({"topics": "udm:.*a.*b.*c.*d"}, "topics"),
        ({"lease": "1ms"}, "lease"),
        ({"lease": "\ud800"}, "lease"),
        ({"retention": "200y"}, "retention"),
        ({"retention": "1ms"}, "retention"),
        ({"max_attempts": "0"}, "max_attempts"),
        ({"max_attempts": "\u0661"}, "max_attempts"),
        ({"min_backoff": "1h", "max_backoff": "1m"}, "min_backoff"),
        ({"max_backoff": "9w"}, "max_backoff"),
        ({"attributes": "x"}, "attributes"),
        ({"attributes": f"x={'y' * 2000}"}, "attributes"),
        ({"fields": "a..b=1"}, "fields"),
        ({"fields": "password=1"}, "fields"),
        ({"hiding": "given"}, "hidden_fields"),
        ({"hiding": "given", "hidden_fields": "a..b"}, "hidden_fields"),
        ({"delivery": "parallel", "order": "key", "hiding": "given", "hidden_fields": "uuid"}, "order"),
        ({"delivery": "push"}, "endpoints"),
        ({"delivery": "push", "endpoints": "ftp://x"}, "endpoints"),
        ({"delivery": "push", "endpoints": "https://10.0.0.1/"}, "endpoints"),
        ({"delivery": "push", "endpoints": URL, "ack_deadline": "1h"}, "ack_deadline"),
        ({"delivery": "push", "endpoints": URL, "after_dead_letter": "park_key"}, "after_dead_letter"),
        ({"delivery": "push", "endpoints": URL, "signing": "given", "secret": "short"}, "secret"),
        ({"delivery": "push", "endpoints": URL, "signing": "given"}, "secret"),
        ({"delivery": "push", "endpoints": URL, "bearer": "given", "bearer_token": "env:HOME"}, "bearer_token"),
    ],
)
def test_a_mistake_belongs_to_its_field(values: dict[str, Any], field: str, push_input: PushInput) -> None:
    result = read_new(FormValues(**{"name": "ox", "topics": "udm:users/user", **values}), "secret", push_input)
    assert [*result.errors] == [field], result.errors
    assert result.errors[field]


def test_several_mistakes_are_found_at_once(push_input: PushInput) -> None:
    values = FormValues(name="a b", topics="udm:(", delivery="push", endpoints="ftp://x", lease="1ms")
    assert set(read_new(values, "secret", push_input).errors) == {"name", "topics", "endpoints", "lease"}


def test_secrets_stay_go_or_are_replaced(push_input: PushInput) -> None:
    wanted = definition(DEFINITIONS[-2])
    values = FormValues.of(wanted)

    def changed(**more: Any) -> Json:
        given = {name: getattr(values, name) for name in FormValues.__slots__}
        result = read_change(FormValues(**{**given, **more}), wanted, push_input)
        assert result.errors == {}
        assert ("secret" in result.body.get("push", {}) and result.secret is not None) == (
            more.get("signing") == "generate"
        )
        return result.body

    assert changed(signing="none") == {"push": {"secret": None}}
    assert changed(bearer="given", bearer_token="t") == {"push": {"bearer_token": "t"}}
    assert changed(signing="generate")["push"]["secret"].startswith("whsec_")
    assert changed(delivery="parallel") == {"delivery": "parallel"}
    assert changed(retention="1d", ack_deadline="") == {
        "retention_seconds": 86400.0,
        "push": {"ack_deadline_seconds": 10.0},
    }


def test_a_prefill_goes_with_a_change_of_topics_only(push_input: PushInput) -> None:
    current = Subscription.from_json({"name": "ox", "realms_topics": [{"realm": "udm", "topic": "users/user"}]})
    given = {**asdict(FormValues.of(current)), "prefill_new_topics": True}
    assert read_change(FormValues(**given), current, push_input).body == {}
    result = read_change(FormValues(**{**given, "topics": "udm:users/user\nshop:orders/.{1,3}"}), current, push_input)
    wanted = [{"realm": "udm", "topic": "users/user"}, {"realm": "shop", "topic": "orders/.{1,3}"}]
    assert (result.errors, result.body) == ({}, {"realms_topics": wanted, "prefill_new_topics": True})
