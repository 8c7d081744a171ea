"""The status of a subscription: what waits, how far it is, who holds messages, and what went wrong last."""

import json
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from purveyor.app.http.subscription_status import StatusBody
from purveyor.jetstream.address import Address
from purveyor.queues.client import Queues
from purveyor.queues.registry import ACKNOWLEDGED, DispatchState, Registry, Suspension
from tests.support.command_line import Cli, invoke, url_of
from tests.support.running_api import Consumer, RunningApi, event, fill, on_server, subscribe
from tests.support.waiting import wait_until


@pytest.fixture
def cli(address: Address, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(address))
    return invoke


def status(client: Consumer) -> Any:
    answer = client.get("status")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    StatusBody.model_validate(body)
    assert {*body} == {*StatusBody.model_fields}, "every field is there, also without a value"
    return body


def test_the_status_says_what_waits_who_holds_it_and_what_went_wrong(
    api: RunningApi, admin: httpx.Client, address: Address, name: str, cli: Cli
) -> None:
    consumer = subscribe(api, admin, name, delivery="parallel")
    empty = status(consumer)
    assert (empty["backlog"], empty["leased"], empty["leases"], empty["position"]) == (0, 0, [], None)
    assert (empty["oldest_age_seconds"], empty["last_error"], empty["dead_letters"]) == (None, None, 0)
    assert empty["begin"] <= empty["dispatched_up_to"]

    first = empty["begin"] + 1
    fill(address, name, range(first, first + 5))
    fill(address, name, [1], kind="prefill")
    held = consumer.post("messages/lease", json={"max": 2, "instance": "one", "lease_seconds": 600}).json()["messages"]
    got = consumer.next("two")
    assert consumer.set_status(got["sequence_number"], "two", status="retry", delay=600).status_code == 200
    assert consumer.set_status(held[1]["sequence_number"], "one", status="ok").status_code == 200
    rejected = consumer.next("two")["sequence_number"]
    assert consumer.set_status(rejected, "two", status="reject", reason="no").status_code == 200

    wait_until(lambda: status(consumer)["backlog"] == 4)  # the API deletes acknowledged messages a moment later
    now = status(consumer)
    assert now["backlog_by_kind"]["prefill"] + now["backlog_by_kind"]["main"] == 4
    assert now["position"] == first + 4
    assert now["acknowledged"] >= first
    assert now["oldest_age_seconds"] >= 0
    assert datetime.fromisoformat(now["oldest_stored"]) <= datetime.now(UTC)
    ((holder),) = now["leases"]
    assert (holder["instance"], holder["messages"], now["leased"]) == ("one", 1, 1)
    assert datetime.fromisoformat(holder["until"]) > datetime.now(UTC)
    assert (now["delayed"], now["dead_letters"]) == (1, 1)
    assert datetime.fromisoformat(now["next_attempt"]) > datetime.now(UTC)
    assert now["last_error"]["part"] == "delivery"
    assert now["last_error"]["sequence"] == got["sequence_number"]
    assert now["last_error"]["reason"] == "instance 'two' asked for a retry"

    assert admin.get(f"/v1/subscriptions/{name}/status").json()["backlog"] == 4
    shown = cli("subscription", "show", name, "--json").ok().json
    changing = {"oldest_age_seconds", "lag", "dispatched_up_to"}
    wanted = {field: value for field, value in now.items() if value is not None and field not in changing}
    assert {field: shown.get(field) for field in wanted} == wanted
    text = cli("subscription", "show", name).ok().out
    for line in ("Leased: 1 by one until ", "Delayed: 1 message, the next attempt at ", "Dead letters: 1\n"):
        assert f" {line}" in text
    assert f" Last error: delivery of message {got['sequence_number']}: instance 'two' asked for a retry (" in text


def test_the_lag_counts_from_the_beginning_and_from_a_suspension(
    api: RunningApi, admin: httpx.Client, address: Address, name: str
) -> None:
    consumer = subscribe(api, admin, name)
    begin = status(consumer)["begin"]

    async def publish_and_suspend(queues: Queues) -> int:
        last = 0
        for number in range(3):
            last = (await queues.publish("incoming", json.dumps(event(number)).encode())).sequence
        registry = await Registry.open(queues)
        found = await registry.get(name)
        full = Suspension(position=begin + 1, reason="maximum bytes exceeded", at=datetime.now(UTC))
        await registry.put_dispatch(
            name, DispatchState(incarnation=found.incarnation, next=begin + 1, suspended=full), found.dispatch_revision
        )
        return last

    last = on_server(address, publish_and_suspend)
    found = status(consumer)
    assert found["dispatched_up_to"] == begin
    assert found["lag"] >= last - begin
    assert found["last_error"]["part"] == "dispatch"
    assert found["last_error"]["reason"] == "maximum bytes exceeded"
    assert found["suspended"]["position"] == begin + 1
    assert consumer.patch(json={"paused": True}).status_code == 200
    assert status(consumer)["paused"] is True


def test_only_the_subscription_and_administrators_may_read_it(
    api: RunningApi, admin: httpx.Client, events: httpx.Client, name: str
) -> None:
    subscribe(api, admin, name)
    subscribe(api, admin, f"{name}-2")
    path = f"/v1/subscriptions/{name}/status"
    assert api.anybody.get(path).status_code == 401
    assert events.get(path).status_code == 403
    assert api.client(f"{name}-2", "the consumer's secret").get(path).status_code == 403
    unknown = admin.get(f"/v1/subscriptions/{name}-3/status")
    assert unknown.status_code == 404
    assert unknown.json()["fix"]
    assert admin.get("/v1/subscriptions/foo.bar/status").status_code in (404, 422)


def test_an_unreadable_delivery_state_is_shown_with_the_rest(
    api: RunningApi, admin: httpx.Client, address: Address, name: str
) -> None:
    consumer = subscribe(api, admin, name)
    fill(address, name, [10**6])

    async def upgrade(queues: Queues) -> None:
        value = {"version": 99, "incarnation": "x", "position": 1}
        await (await queues.bucket(ACKNOWLEDGED)).put(name, json.dumps(value).encode())

    on_server(address, upgrade)
    found = status(consumer)
    assert "version 99" in found["unreadable"]
    assert (found["backlog"], found["leases"]) == (1, [])
