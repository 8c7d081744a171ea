"""A temporary credential cannot create one that lives longer or cannot be ended."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from purveyor.jetstream.server import EmbeddedServer
from tests.support.running_api import Consumer, RunningApi, problem
from tests.support.waiting import wait_until

HOUR = 3600


def make(client: httpx.Client, **given: Any) -> Any:
    answer = client.post("/v1/tokens", json=given)
    assert answer.status_code == 201, answer.text
    return answer.json()


def with_token(api: RunningApi, made: Any) -> httpx.Client:
    return api.client(headers={"Authorization": f"Bearer {made['token']}"})


def status(client: httpx.Client) -> int:
    return client.get("/v1/tokens").status_code


def test_a_token_made_with_a_token_ends_no_later(api: RunningApi, consumer: Consumer) -> None:
    parent = make(consumer.client, expires_in_seconds=HOUR)
    holder = with_token(api, parent)
    child = make(holder, label="child")
    assert datetime.fromisoformat(child["expires"]) <= datetime.fromisoformat(parent["expires"])
    assert make(holder, expires_in_seconds=60)["expires"] < parent["expires"]
    refused = problem(holder.post("/v1/tokens", json={"expires_in_seconds": 2 * HOUR}), 422)
    assert "the token that creates it" in refused["detail"]


def test_a_token_made_with_a_token_ends_with_it(api: RunningApi, admin: httpx.Client, consumer: Consumer) -> None:
    parent = make(consumer.client)
    child = with_token(api, make(with_token(api, parent)))
    by_admin = make(admin)
    other = with_token(api, make(with_token(api, by_admin), login=consumer.name))
    assert [status(child), status(other)] == [200, 200]
    problem(child.post("/v1/tokens", json={}), 403)
    assert consumer.client.delete(f"/v1/tokens/{parent['id']}").status_code == 200
    problem(child.get("/v1/tokens"), 401)
    assert status(other) == 200
    assert admin.delete(f"/v1/tokens/{by_admin['id']}").status_code == 200
    problem(other.get("/v1/tokens"), 401)
    assert consumer.client.get("/v1/tokens").json() == []


def test_a_former_password_makes_nothing_that_lasts(api: RunningApi, consumer: Consumer) -> None:
    path = f"/v1/subscriptions/{consumer.name}"
    assert consumer.patch(json={"password": "next", "password_grace_seconds": HOUR}).status_code == 200
    former, current = consumer.client, api.client(consumer.name, "next")
    assert former.get(path).status_code == 200
    assert "was replaced" in problem(former.post("/v1/tokens", json={"expires_in_seconds": 1}), 403)["detail"]
    assert "current password" in problem(former.patch(path, json={"password": "mine"}), 403)["fix"]
    make(current)


def test_a_token_sets_no_password(api: RunningApi, admin: httpx.Client, consumer: Consumer) -> None:
    holder = with_token(api, make(consumer.client))
    path = f"/v1/subscriptions/{consumer.name}"
    assert "current password" in problem(holder.patch(path, json={"password": "mine"}), 403)["fix"]
    assert holder.patch(path, json={"paused": True}).status_code == 200
    assert consumer.get().json()["paused"] is True
    temporary = with_token(api, make(admin, expires_in_seconds=HOUR))  # an administrator is trusted with it
    assert temporary.patch(path, json={"password": "next"}).status_code == 200


def test_a_new_password_ends_the_tokens(api: RunningApi, consumer: Consumer) -> None:
    holder = with_token(api, make(consumer.client))
    assert status(holder) == 200
    assert consumer.patch(json={"password": "next"}).status_code == 200
    problem(holder.get("/v1/tokens"), 401)
    current = api.client(consumer.name, "next")
    assert current.get("/v1/tokens").json() == []
    assert status(with_token(api, make(current))) == 200


def test_in_every_process(nats_server: EmbeddedServer, consumer: Consumer) -> None:
    with RunningApi(lambda: nats_server.address) as other:
        holder = with_token(other.when_ready(), make(consumer.client))
        assert status(holder) == 200
        assert consumer.patch(json={"password": "next"}).status_code == 200
        wait_until(lambda: status(holder) == 401)


def test_tokens_end_with_the_former_password_when_that_stays_for_a_while(api: RunningApi, consumer: Consumer) -> None:
    holder = with_token(api, make(consumer.client))
    assert consumer.patch(json={"password": "next", "password_grace_seconds": HOUR}).status_code == 200
    assert status(holder) == 200
    [listed] = api.client(consumer.name, "next").get("/v1/tokens").json()
    assert datetime.fromisoformat(listed["expires"]) <= datetime.now(UTC) + timedelta(seconds=HOUR)
    child = make(holder)
    assert child["expires"] is not None
    newest = api.client(consumer.name, "next")
    assert newest.patch(f"/v1/subscriptions/{consumer.name}", json={"password": "third"}).status_code == 200
    problem(holder.get("/v1/tokens"), 401)
    problem(with_token(api, child).get("/v1/tokens"), 401)


def test_tokens_can_be_kept(api: RunningApi, consumer: Consumer) -> None:
    holder = with_token(api, make(consumer.client))
    assert consumer.patch(json={"password": "next", "keep_tokens": True}).status_code == 200
    problem(consumer.get(), 401)
    assert status(holder) == 200


def test_a_login_has_so_many_tokens_and_no_more(api: RunningApi, consumer: Consumer) -> None:
    made = [make(consumer.client) for _ in range(100)]
    refused = problem(consumer.client.post("/v1/tokens", json={}), 409)
    assert "100 tokens" in refused["detail"]
    assert len(consumer.client.get("/v1/tokens").json()) == 100
    consumer.client.delete(f"/v1/tokens/{made[0]['id']}")
    make(consumer.client)


def test_a_token_of_the_settings_ends_when_their_password_is_another(
    nats_server: EmbeddedServer, admin: httpx.Client
) -> None:
    made = make(admin, login="shop", expires_in_seconds=HOUR)
    with RunningApi(lambda: nats_server.address) as same:
        assert status(with_token(same.when_ready(), made)) == 200
    changed = RunningApi(lambda: nats_server.address)
    changed.change_password("shop", "another")
    with changed:
        assert status(changed.when_ready().client("shop", "another")) == 200
        problem(with_token(changed, made).get("/v1/tokens"), 401)
