"""The command line can set and change every option of a subscription that the HTTP API can."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from purveyor.app.cli import subscription_define
from purveyor.app.cli.subscription import app
from purveyor.app.cli.subscription_options import OptionFlags, Order, Resettable
from purveyor.app.cli.subscription_password import password
from purveyor.app.cli.subscription_push import PushFlags
from purveyor.app.http.models import NewSubscription, SubscriptionChange
from purveyor.app.subscription_input import PushInput, changed_definition, new_definition
from purveyor.model.delivery_policy import Delivery, OrderBy, Push, RetryPolicy
from purveyor.model.errors import InvalidInput
from purveyor.model.subscription import RealmTopic, Subscription
from tests.support.command_line import Cli

OPTIONS: Mapping[str, str] = {
    "filter.attributes": "filter_attribute",
    "filter.fields": "filter_field",
    "hidden_fields": "hide",
    "delivery": "delivery",
    "order_by": "order_by",
    "lease_seconds": "lease",
    "retry.max_attempts": "max_attempts",
    "retry.min_backoff_seconds": "min_backoff",
    "retry.max_backoff_seconds": "max_backoff",
    "retention_seconds": "retention",
    "push.endpoint": "push",
    "push.endpoints": "push",
    "push.ack_deadline_seconds": "ack_deadline",
    "push.format": "push_format",
    "push.ack_codes": "ack_codes",
    "push.after_dead_letter": "after_dead_letter",
    "push.secret": "secret_file",
    "push.bearer_token": "bearer_file",
}
"""The option of the API, and the parameter of both commands."""
NEW: Mapping[str, tuple[Callable[..., None], str]] = {
    "name": (subscription_define.add, "name"),
    "realms_topics": (subscription_define.add, "topic"),
    "request_prefill": (subscription_define.add, "prefill"),
    "password": (subscription_define.add, "password_file"),
}
CHANGED: Mapping[str, tuple[Callable[..., None], str]] = {
    "realms_topics": (subscription_define.edit, "topic"),
    "prefill_new_topics": (subscription_define.edit, "prefill"),
    "push.secret_grace_seconds": (subscription_define.edit, "keep_secret"),
    "password": (password, "password_file"),
    "password_grace_seconds": (password, "keep"),
    "keep_tokens": (password, "keep_tokens"),
}
ELSEWHERE = {"paused"}
"""`subscription pause` and `resume`."""
ONLY_WHEN_CHANGED = {"push.secret_grace_seconds"}


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        nested = [each for each in get_args(field.annotation) if inspect.isclass(each) and issubclass(each, BaseModel)]
        if nested and name != "realms_topics":
            yield from fields(nested[0], f"{prefix}{name}.")
        else:
            yield prefix + name


def test_a_field_of_the_api_has_a_flag_of_add() -> None:
    assert {*fields(NewSubscription)} - ONLY_WHEN_CHANGED == {*OPTIONS, *NEW}
    parameters = inspect.signature(subscription_define.add).parameters
    assert {*OPTIONS.values()} <= {*parameters}
    for command, name in NEW.values():
        assert name in inspect.signature(command).parameters


def test_a_field_of_the_api_has_a_flag_of_edit() -> None:
    assert {*fields(SubscriptionChange)} == {*OPTIONS, *CHANGED, *ELSEWHERE}
    parameters = inspect.signature(subscription_define.edit).parameters
    assert {*OPTIONS.values()} <= {*parameters}
    for command, name in CHANGED.values():
        assert name in inspect.signature(command).parameters
    assert {"pause", "resume"} <= {each.name for each in app.registered_commands}


def test_an_option_that_http_can_reset_can_be_reset() -> None:
    by_value = {"delivery", "push.endpoint", "push.endpoints"}  # they have no default: `--delivery`, `--push`
    in_push = {name.removeprefix("push.") for name in OPTIONS if name.startswith("push.")}
    words = {"ack_deadline_seconds", "format", "ack_codes", "after_dead_letter", "endpoint", "endpoints"}  # in words
    assert {name.partition(".")[0] for name in OPTIONS} - {"push"} - by_value | (in_push - words) == {
        each.field for each in Resettable
    }


def test_every_option_is_set_changed_and_reset(cli: Cli, unique: str) -> None:
    added = cli(
        "subscription", "add", unique, "-t", "udm:users/user", "--delivery", "parallel", "--order-by", "key",
        "--lease", "2m", "--max-attempts", "7", "--min-backoff", "2s", "--max-backoff", "20", "--retention", "7d",
        "--filter-field", "department=it", "--hide", "salary", "--json",
    ).ok().json  # fmt: skip
    assert (added["delivery"], added["order_by"], added["lease_seconds"]) == ("parallel", "key", 120.0)
    assert added["retry"] == {"max_attempts": 7, "min_backoff_seconds": 2.0, "max_backoff_seconds": 20.0}
    assert (added["retention_seconds"], added["hidden_fields"]) == (604800.0, ["salary"])
    text = cli("subscription", "show", unique).ok().out
    for line in ("Delivery: parallel", "Order: key", "Lease: 2m", "Tried: up to 7 times, after 2 to 20 s"):
        assert f" {line}\n" in text
    edit = ("subscription", "edit", unique)
    changed = cli(
        *edit, "--max-attempts", "9", "--filter-attribute", "tenant=north", "--lease", "1m", "--hide-nothing", "--json"
    ).ok().json  # fmt: skip
    assert changed["retry"] == {"max_attempts": 9, "min_backoff_seconds": 2.0, "max_backoff_seconds": 20.0}
    assert changed["filter"] == {"attributes": {"tenant": ["north"]}, "fields": {}}
    assert (changed["lease_seconds"], changed["hidden_fields"], changed["order_by"]) == (60.0, [], "key")
    ordered = cli(*edit, "--delivery", "ordered", "--retention", "1d", "--json").ok().json
    assert "delivery" not in ordered
    assert "order_by" not in ordered
    assert ordered["retention_seconds"] == 86400.0
    resets = [each for name in ("filter", "hide", "lease", "retry", "retention") for each in ("--reset", name)]
    plain = cli(*edit, *resets, "--json").ok().json
    assert not {"filter", "hidden_fields", "lease_seconds", "retry", "retention_seconds"} & {*plain}
    assert cli(*edit, "--delivery", "parallel").ok().out == f"Changed subscription {unique}\n"
    cli(*edit, "--delivery", "ordered", "--order-by", "key").refused("ordered delivery cannot keep the order by key")
    cli(*edit, "--reset", "filter", "--filter-field", "a=b").refused("filter is reset and has a new value")
    cli(*edit, "--reset", "secret").refused("has no endpoint", "--push")
    cli(*edit, "--delivery", "push").refused("needs an endpoint", "--push URL")
    assert cli(*edit, "--reset", "everything").code == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--delivery", "push"), "--push URL"),
        (("--order-by", "none"), "ordered delivery cannot keep the order by nothing"),
        (("--order-by", "key"), "ordered delivery cannot keep the order by key"),
        (("--delivery", "parallel", "--order-by", "position"), "parallel delivery cannot keep"),
        (("--delivery", "parallel", "--push", "https://a.example/"), "exclude each other"),
        (("--lease", "0"), "a lease of 0 seconds"),
        (("--lease", "13h"), "a lease of"),
        (("--retention", "100ms"), "a retention of"),
        (("--min-backoff", "nan"), "invalid duration"),
        (("--max-backoff", "1e400"), "invalid duration"),
        (("--max-attempts", "-1"), "max_attempts"),
    ],
)
def test_a_mistake_in_the_options_needs_no_server(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    monkeypatch.delenv("PURVEYOR_NATS_URL")
    monkeypatch.setenv("PURVEYOR_DATA_DIR", str(tmp_path / "no server"))
    assert "fix: " in cli("subscription", "add", "ox", "-t", "udm:users/user", *flags).refused(words).err


def ordered(**more: Any) -> Subscription:
    return Subscription(name="ox", realms_topics=(RealmTopic("udm", "users/user"),), **more)


def changed(to: Subscription, flags: OptionFlags) -> Subscription:
    return changed_definition(to, flags.changed_options(to.delivery, to.retry), PushInput())


def test_a_secret_can_be_removed_and_a_mode_left() -> None:
    push = Push(endpoints=("https://a.example/",), secret="env:PURVEYOR_PUSH_SECRET_A")
    pushed = ordered(delivery=Delivery.PUSH, order_by=None, push=push)
    unsigned = changed(pushed, OptionFlags(reset=(Resettable.SECRET, Resettable.BEARER)))
    assert unsigned.push == Push(endpoints=push.endpoints)
    by_key = changed(pushed, OptionFlags(order_by=Order.KEY, max_attempts=3))
    assert (by_key.order_by, by_key.push) == (OrderBy.KEY, push)
    assert by_key.retry == RetryPolicy(max_attempts=3)
    assert changed(by_key, OptionFlags(order_by=Order.NONE)).order_by is None
    assert changed(by_key, OptionFlags(delivery=Delivery.ORDERED)).push is None
    with pytest.raises(InvalidInput, match="secret is reset"):
        changed(pushed, OptionFlags(reset=(Resettable.SECRET,), push=PushFlags(secret="env:PURVEYOR_PUSH_SECRET_B")))


def test_a_repeated_add_keeps_its_generated_secret() -> None:
    flags = OptionFlags(push=PushFlags(urls=["https://a.example/"], secret="new", secret_generated=True))
    body = {"name": "ox", "realms_topics": [{"realm": "udm", "topic": "users/user"}]}
    existing = ordered(
        delivery=Delivery.PUSH,
        order_by=None,
        retry=RetryPolicy(max_backoff_seconds=60.0),
        push=Push(endpoints=("https://a.example/",), secret="env:PURVEYOR_PUSH_SECRET_A"),
    )
    again = new_definition({**body, **flags.new_options(keep_secret=True)}, PushInput(), existing)
    assert again.is_same_as(existing)


def test_an_endless_grace_is_refused(cli: Cli, unique: str) -> None:
    add = ("subscription", "add", unique, "-t", "udm:users/user", "--push", "https://a.example/")
    cli(*add, "--secret-env", "PURVEYOR_PUSH_SECRET_A").ok()
    new = ("subscription", "edit", unique, "--secret-env", "PURVEYOR_PUSH_SECRET_B")
    cli(*new, "--keep-secret", "1000d").refused("a grace of")
    cli(*new, "--keep-secret", "inf").refused("invalid duration")
    cli("subscription", "delete", unique, "--yes").ok()


def test_topics_are_replaced_added_and_removed(cli: Cli, unique: str) -> None:
    begin = cli("subscription", "add", unique, "-t", "udm:users/user", "--json").ok().json["begin"]
    edit = ("subscription", "edit", unique)
    added = cli(*edit, "--add-topic", "udm:groups/.*", "--add-topic", "udm:users/user", "--prefill", "--json").ok().json
    topics = [{"realm": "udm", "topic": "users/user"}, {"realm": "udm", "topic": "groups/.*"}]
    assert added["realms_topics"] == topics
    assert added["in_force_after"] > begin
    text = cli(*edit, "--remove-topic", "udm:users/user", "--lease", "2m").ok().out
    shown = cli("subscription", "show", unique).ok().out
    assert text == f"Changed subscription {unique}, in force after {text.split()[-1]}\n"
    assert f" In force after: {text.split()[-1]}\n" in shown
    assert " Lease: 2m\n" in shown
    replaced = cli(*edit, "-t", "shop:orders", "-t", "shop:.*", "--json").ok().json
    assert replaced["realms_topics"] == [{"realm": "shop", "topic": "orders"}, {"realm": "shop", "topic": ".*"}]
    assert cli(*edit, "-t", "shop:orders", "-t", "shop:.*").ok().out == f"Changed subscription {unique}\n"
    cli(*edit, "--remove-topic", "udm:users/user").refused("has no topic udm:users/user", "it has shop:orders, shop:.*")
    cli(*edit, "--remove-topic", "shop:orders", "--remove-topic", "shop:.*").refused("has no topic")
    cli(*edit, "-t", "a:b", "--add-topic", "c:d").refused("--topic replaces all topics")
    cli(*edit, "--prefill").refused("--prefill needs new topics")
    cli(*edit, "-t", "shop:orders", "--prefill").refused("adds no topic")
    cli(*edit, "--add-topic", ".*:.*").refused("a realm is exact")
    cli(*edit, "--add-topic", "shop:[a-z").refused("an unclosed set")
    cli("subscription", "delete", unique, "--yes").ok()
