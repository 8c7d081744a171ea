import json
from datetime import datetime
from typing import Any

import httpx
import pytest

from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import Queues
from purveyor.queues.registry import ACKNOWLEDGED, SUBSCRIPTIONS
from tests.support.running_api import (
    PASSWORD,
    Consumer,
    RunningApi,
    begin_replay,
    event,
    fill,
    on_server,
    problem,
    subscribe,
    wanted,
)
from tests.support.waiting import wait_until


def test_a_new_subscription_is_201_the_same_again_200_another_409(admin: httpx.Client, name: str) -> None:
    first = admin.post("/v1/subscriptions", json=wanted(name))
    assert first.status_code == 201
    assert first.json() == {
        "name": name,
        "realms_topics": [{"realm": "udm", "topic": "users/user"}],
        "request_prefill": False,
        "prefill_queue_status": "done",
    }
    again = admin.post("/v1/subscriptions", json=wanted(name))
    assert (again.status_code, again.json()) == (200, first.json())
    problem(admin.post("/v1/subscriptions", json=wanted(name, request_prefill=True)), 409)
    other = problem(admin.post("/v1/subscriptions", json=wanted(name, password="another")), 409)
    assert "another password" in other["detail"]
    assert admin.post("/v1/subscriptions", json=wanted(name)).status_code == 200


@pytest.mark.parametrize("bad", ["foo.bar", "a/b", "", "a b", "*", ">", "x" * 65, "incoming", "stage-x", "ü", "a\nb"])
def test_a_bad_name_is_422_and_the_list_still_works(admin: httpx.Client, bad: str) -> None:
    problem(admin.post("/v1/subscriptions", json=wanted(bad)), 422)
    assert admin.get("/v1/subscriptions").status_code == 200


@pytest.mark.parametrize("bad", ["foo.bar", "a%20b", "%2A", "x" * 65])
def test_a_bad_name_in_a_path_is_422(admin: httpx.Client, bad: str) -> None:
    for method in ("GET", "DELETE"):
        problem(admin.request(method, f"/v1/subscriptions/{bad}"), 422)
    problem(admin.patch(f"/v1/subscriptions/{bad}", json={"paused": True}), 422)
    problem(admin.post(f"/v1/subscriptions/{bad}/replay", json={"from": 1}), 422)


@pytest.mark.parametrize(
    "wrong",
    [
        {"realms_topics": []},
        {"realms_topics": [{"realm": "udm", "topic": "(?i)x"}]},
        {"realms_topics": "udm"},
        {"password": ""},
        {"password": None},
        {"lease_seconds": 0},
        {"delivery": "parallel", "order_by": "position"},
        {"filter": {"fields": {"a..b": ["x"]}}},
        {"filter": {"fields": {"a": {}}}},
        {"retry": {"max_attempts": 0}},
        {"hidden_fields": [1]},
        {"hidden_fields": ["a b"]},
        {"filter": {"fields": {"properties.userPassword": "x"}}},
        {"pasword": "misspelt"},
    ],
    ids=str,
)
def test_invalid_input_is_422_and_reveals_no_secret(admin: httpx.Client, name: str, wrong: dict[str, object]) -> None:
    answer = admin.post("/v1/subscriptions", json=wanted(name) | wrong)
    problem(answer, 422)
    assert PASSWORD not in answer.text
    problem(admin.get(f"/v1/subscriptions/{name}"), 404)


def test_the_name_of_a_login_cannot_be_taken(admin: httpx.Client) -> None:
    assert "login" in problem(admin.post("/v1/subscriptions", json=wanted("events")), 422)["detail"]


def test_options_come_back_as_they_were_given(admin: httpx.Client, name: str) -> None:
    options = {
        "filter": {"attributes": {"tenant": ["north"]}, "fields": {"level": [3, 4]}},
        "hidden_fields": ["salary"],
        "delivery": "parallel",
        "order_by": "key",
        "lease_seconds": 60.0,
        "retry": {"max_attempts": 5, "min_backoff_seconds": 1.0, "max_backoff_seconds": 60.0},
    }
    made = admin.post("/v1/subscriptions", json=wanted(name, **options))
    assert made.status_code == 201
    assert made.json().items() >= options.items()
    assert admin.post("/v1/subscriptions", json=wanted(name, **options)).status_code == 200
    assert PASSWORD not in admin.get("/v1/subscriptions").text


def test_the_list_is_the_administrators_and_holds_no_secret(
    admin: httpx.Client, consumer: Consumer, name: str, api: RunningApi
) -> None:
    found = admin.get("/v1/subscriptions")
    assert found.status_code == 200
    assert [each for each in found.json() if each["name"] == name] == [consumer.get().json()]
    assert PASSWORD not in found.text
    assert "argon2" not in found.text
    problem(api.client(name, PASSWORD).get("/v1/subscriptions"), 403)
    problem(api.client().get("/v1/subscriptions"), 401)


def test_a_subscription_sees_itself_and_no_other(
    admin: httpx.Client, consumer: Consumer, name: str, api: RunningApi
) -> None:
    assert consumer.get().json()["name"] == name
    mine = api.client(name, PASSWORD)
    subscribe(api, admin, f"{name}-b")
    there = mine.get(f"/v1/subscriptions/{name}-b")
    nowhere = mine.get(f"/v1/subscriptions/{name}-c")
    assert problem(there, 401) == {**problem(nowhere, 401), "fix": there.json()["fix"]}
    problem(mine.delete(f"/v1/subscriptions/{name}-b"), 401)
    problem(admin.get(f"/v1/subscriptions/{name}-c"), 404)


def test_the_owner_deletes_it_and_is_unknown_then(admin: httpx.Client, consumer: Consumer, name: str) -> None:
    gone = consumer.call("DELETE")
    assert (gone.status_code, gone.json()) == (200, None)
    problem(consumer.get(), 401)
    problem(consumer.get("messages/next", params={"timeout": 0}), 401)
    problem(admin.delete(f"/v1/subscriptions/{name}"), 404)


def test_a_name_that_is_used_again_has_nothing_of_the_old_one(
    api: RunningApi, admin: httpx.Client, consumer: Consumer, address: Address, name: str
) -> None:
    fill(address, name, range(1, 4))
    token = consumer.client.post("/v1/tokens", json={}).json()["token"]
    assert admin.delete(f"/v1/subscriptions/{name}").status_code == 200
    assert admin.post("/v1/subscriptions", json=wanted(name, password="new")).status_code == 201
    problem(consumer.get(), 401)
    problem(api.client(headers={"Authorization": f"Bearer {token}"}).get(f"/v1/subscriptions/{name}"), 401)
    fresh = api.client(name, "new")
    assert fresh.get(f"/v1/subscriptions/{name}/messages/next", params={"timeout": 0}).json() is None


def test_a_subscription_without_a_password_accepts_no_login_until_it_gets_one(
    api: RunningApi, admin: httpx.Client, name: str
) -> None:
    body = {field: value for field, value in wanted(name).items() if field != "password"}
    assert admin.post("/v1/subscriptions", json=body).status_code == 201
    assert admin.post("/v1/subscriptions", json=body).status_code == 200
    problem(api.client(name, PASSWORD).get(f"/v1/subscriptions/{name}"), 401)
    assert admin.post("/v1/subscriptions", json=wanted(name)).status_code == 201, "the password is new"
    assert api.client(name, PASSWORD).get(f"/v1/subscriptions/{name}").status_code == 200
    assert admin.post("/v1/subscriptions", json=body).status_code == 200, "the password stays"
    assert api.client(name, PASSWORD).get(f"/v1/subscriptions/{name}").status_code == 200


def test_the_details_hold_the_options_and_the_status(
    admin: httpx.Client, events: httpx.Client, consumer: Consumer, name: str, address: Address
) -> None:
    fill(address, name, range(3))
    path = f"/v1/subscriptions/{name}"
    details = consumer.client.get(path, params={"details": True}).json()
    status = consumer.get("status").json()
    assert details["realms_topics"] == [{"realm": "udm", "topic": "users/user"}]
    assert (details["state"], details["backlog"], details["backlog_by_kind"]) == (
        "active", 3, {"main": 3, "prefill": 0, "retry": 0}
    )  # fmt: skip
    assert {field for field in status if field not in details} == set()
    assert datetime.fromisoformat(details["created"]).tzinfo is not None
    (listed,) = [each for each in admin.get("/v1/subscriptions?details=true").json() if each["name"] == name]
    assert listed["backlog"] == 3
    assert {field: details[field] for field in listed} == listed
    problem(consumer.client.get("/v1/subscriptions?details=true"), 403)
    problem(events.get(f"{path}?details=true"), 401)
    problem(admin.get("/v1/subscriptions/nobody?details=true"), 404)
    problem(admin.get(f"{path}?details=maybe"), 422)


def test_a_failed_prefill_is_requested_again(
    api: RunningApi, admin: httpx.Client, events: httpx.Client, name: str
) -> None:
    consumer = subscribe(api, admin, name, request_prefill=True)
    path = f"/v1/subscriptions/{name}/prefill"
    assert admin.patch(path, json={"status": "failed", "reason": "no archive"}).status_code == 200
    for client in (consumer.client, events):
        problem(client.post(path), 403)
    again = api.client("prefill", "prefill-secret").post(path)
    assert (again.status_code, again.json()["status"], again.json()["attempt"]) == (202, "pending", 2)
    assert admin.post(path).json()["attempt"] == 2, "a pending prefill stays"
    other = subscribe(api, admin, f"{name}-none")
    problem(admin.post(f"/v1/subscriptions/{other.name}/prefill"), 409)


def test_a_subscription_added_again_without_a_password_accepts_no_login(
    api: RunningApi, consumer: Consumer, address: Address, name: str, admin: httpx.Client
) -> None:
    """By hand, on the command line, which knows no passwords: the old one must not open the new subscription."""
    assert consumer.get().status_code == 200

    async def again(queues: Queues) -> None:
        subscriptions = Subscriptions(queues)
        definition = (await subscriptions.get(name)).record.definition
        await subscriptions.delete(name)
        await subscriptions.add(definition)

    on_server(address, again)
    problem(consumer.get(), 401)
    assert admin.patch(f"/v1/subscriptions/{name}", json={"password": "set"}).status_code == 200
    assert api.client(name, "set").get(f"/v1/subscriptions/{name}").status_code == 200


def test_adding_that_was_cut_off_before_the_password_is_completed_by_the_same_again(
    api: RunningApi, admin: httpx.Client, address: Address, name: str
) -> None:
    definition = Subscription(name=name, realms_topics=(RealmTopic("udm", "users/user"),))
    on_server(address, lambda queues: Subscriptions(queues).add(definition))
    assert admin.post("/v1/subscriptions", json=wanted(name)).status_code == 201
    assert api.client(name, PASSWORD).get(f"/v1/subscriptions/{name}").status_code == 200


def test_options_are_changed_by_the_administrator(admin: httpx.Client, consumer: Consumer, name: str) -> None:
    changed = admin.patch(
        f"/v1/subscriptions/{name}",
        json={"filter": {"fields": {"department": ["it"]}}, "delivery": "parallel", "order_by": "key"},
    )
    assert changed.status_code == 200
    assert changed.json()["filter"]["fields"] == {"department": ["it"]}
    assert consumer.get().json() == changed.json()
    back = admin.patch(f"/v1/subscriptions/{name}", json={"filter": None, "delivery": "ordered"})
    assert not {"filter", "delivery", "order_by"} & back.json().keys()
    problem(consumer.patch(json={"hidden_fields": []}), 403)
    wrong: list[object] = [[], None, [{"realm": ".*", "topic": "a"}]]
    for topics in wrong:
        problem(admin.patch(f"/v1/subscriptions/{name}", json={"realms_topics": topics}), 422)
    problem(admin.patch(f"/v1/subscriptions/{name}-x", json={"filter": None}), 404)


def test_topics_are_changed_by_the_administrator_from_a_position_on(
    admin: httpx.Client, consumer: Consumer, name: str
) -> None:
    path, topics = f"/v1/subscriptions/{name}", [{"realm": "udm", "topic": "mail/.*"}]
    assert "in_force_after" not in consumer.get().json()
    changed = admin.patch(path, json={"realms_topics": topics, "prefill_new_topics": True, "lease_seconds": 60})
    assert changed.status_code == 200
    reported = changed.json()
    assert (reported["realms_topics"], reported["lease_seconds"], reported["prefill_queue_status"]) == (
        topics,
        60,
        "done",
    )
    assert consumer.get().json() == reported
    again = admin.patch(path, json={"realms_topics": topics, "prefill_new_topics": True})
    assert again.json() == reported, "the same request again changes nothing"
    later = admin.patch(path, json={"hidden_fields": ["salary"]}).json()
    assert later["in_force_after"] > reported["in_force_after"]
    problem(consumer.patch(json={"realms_topics": topics}), 403)
    problem(consumer.patch(json={"prefill_new_topics": True}), 403)
    refused = problem(admin.patch(path, json={"prefill_new_topics": True}), 422)
    assert "adds no topic" in refused["detail"]
    assert consumer.get().json() == later


def test_a_paused_subscription_hands_out_nothing(consumer: Consumer, address: Address, name: str) -> None:
    fill(address, name, range(1, 2))
    assert consumer.patch(json={"paused": True}).json()["paused"] is True
    assert consumer.next() is None
    assert "paused" not in consumer.patch(json={"paused": False}).json()
    assert consumer.next()["sequence_number"] == 1


def test_the_prefill_user_opens_the_queue(api: RunningApi, admin: httpx.Client, address: Address, name: str) -> None:
    consumer = subscribe(api, admin, name, request_prefill=True)
    prefill = api.client("prefill", "prefill-secret")
    path = f"/v1/subscriptions/{name}/prefill"
    fill(address, name, range(10, 12))
    fill(address, name, range(1, 3), kind="prefill")
    for status in ("pending", "running"):
        reported = prefill.patch(path, json={"status": status})
        assert (reported.status_code, reported.json()) == (200, None)
        assert consumer.get().json()["prefill_queue_status"] == status
        assert consumer.next() is None
    assert prefill.patch(path, json={"status": "failed", "reason": "no archive"}).status_code == 200
    assert consumer.get().json()["prefill_queue_reason"] == "no archive"
    assert "no archive" in problem(consumer.get("messages/next", params={"timeout": 0}), 409)["detail"]
    assert prefill.patch(path, json={"status": "pending"}).status_code == 200
    assert consumer.get().json()["prefill_queue_status"] == "pending"
    assert prefill.patch(path, json={"status": "done"}).status_code == 200
    numbers = []
    while (message := consumer.next()) is not None:
        numbers.append(message["body"]["new"]["number"])
        consumer.patch(f"messages/{message['sequence_number']}/status", json={"status": "ok"})
    assert numbers == [1, 2, 10, 11]
    problem(prefill.patch(path, json={"status": "finished"}), 422)
    problem(prefill.patch(f"/v1/subscriptions/{name}-x/prefill", json={"status": "done"}), 404)
    problem(consumer.patch("prefill", json={"status": "done"}), 403)


def test_a_replay_becomes_a_job(admin: httpx.Client, consumer: Consumer, address: Address, name: str) -> None:
    body = {"from": 1, "to": 5, "filter": {"realms_topics": [{"realm": "udm", "topic": "users/.*"}]}}
    asked = consumer.post("replay", json=body)
    assert asked.status_code == 202
    assert asked.json()["job"]
    for refused in (consumer.post("replay", json=body), admin.post(f"/v1/subscriptions/{name}/replay", json=body)):
        reported = problem(refused, 409)
        assert reported["detail"] == f"a replay of subscription {name!r} waits already, job {asked.json()['job']}"
        assert reported["fix"] == "ask again when that replay has begun"
    begin_replay(address, name, asked.json()["job"])
    assert consumer.get().json()["prefill_queue_status"] == "done"
    assert admin.post(f"/v1/subscriptions/{name}/replay", json={"from": "2026-01-01T00:00:00Z"}).status_code == 202
    problem(consumer.post("replay", json={"from": 5, "to": 1}), 422)
    problem(consumer.post("replay", json={"from": 0}), 422)
    beyond = problem(consumer.post("replay", json={"from": 99_999_999}), 422)
    assert beyond["detail"].startswith("the replay begins at position 99999999, and the newest position is ")
    assert beyond["fix"].startswith("give a position up to ")
    assert "in the future" in problem(consumer.post("replay", json={"from": "2099-01-01T00:00:00Z"}), 422)["detail"]
    problem(consumer.post("replay", json={}), 422)
    problem(admin.post(f"/v1/subscriptions/{name}-x/replay", json={"from": 1}), 404)


def test_what_is_accepted_after_the_201_comes_after_the_beginning(
    admin: httpx.Client, events: httpx.Client, address: Address, name: str
) -> None:
    """Whatever a dispatcher knew at that moment: it delivers what lies behind the beginning in the log."""
    assert admin.post("/v1/subscriptions", json=wanted(name)).status_code == 201
    position = events.post("/v1/messages", json=event()).json()["position"]
    begin = on_server(address, lambda queues: Subscriptions(queues).get(name)).record.begin
    assert begin is not None
    assert position > begin


def make_newer(address: Address, bucket: str, key: str, **unknown: Any) -> bytes:
    """Write a record as a newer program does; what it was before."""

    async def work(queues: Queues) -> bytes:
        kept = await queues.bucket(bucket)
        before = (await kept.get(key)).value
        await kept.put(key, json.dumps({**json.loads(before), **unknown}).encode())
        return before

    return on_server(address, work)


def put(address: Address, bucket: str, key: str, value: bytes) -> None:
    async def work(queues: Queues) -> None:
        await (await queues.bucket(bucket)).put(key, value)

    on_server(address, work)


@pytest.mark.parametrize("unknown", [{"version": 2}, {"zone": "eu"}], ids=["version", "field"])
def test_one_that_this_api_does_not_understand_is_503_with_the_reason_and_all_others_are_served(
    api: RunningApi, admin: httpx.Client, address: Address, name: str, unknown: dict[str, Any]
) -> None:
    one, other = (subscribe(api, admin, f"{name}-{number}") for number in (1, 2))
    for each in (one, other):
        fill(address, each.name, [1, 2])
    understood = make_newer(address, SUBSCRIPTIONS, f"{one.name}.definition", **unknown)

    pulled = one.get("messages/next", params={"timeout": 0})
    reported = problem(pulled, 503)
    assert next(iter(unknown)) in reported["detail"]
    assert "upgrade" in reported["fix"]
    assert pulled.headers["Retry-After"] == "30"
    for method, path in (("GET", ""), ("PATCH", ""), ("DELETE", ""), ("POST", "/replay")):
        body = {"paused": True} if method == "PATCH" else {"from": 1} if method == "POST" else None
        problem(admin.request(method, f"/v1/subscriptions/{one.name}{path}", json=body), 503)
    problem(admin.post("/v1/subscriptions", json=wanted(one.name)), 503)
    listed = {each["name"]: each for each in admin.get("/v1/subscriptions").json()}
    assert next(iter(unknown)) in listed[one.name]["unreadable"]
    assert "unreadable" not in listed[other.name]
    figure = f'purveyor_subscription_unreadable{{subscription="{one.name}"}} 1'
    wait_until(lambda: figure in api.anybody.get("/metrics").text)
    assert other.next()["body"]["new"]["number"] == 1

    put(address, SUBSCRIPTIONS, f"{one.name}.definition", understood)
    numbers = []
    while (message := one.next()) is not None:
        numbers.append(message["body"]["new"]["number"])
        assert one.set_status(message["sequence_number"], status="ok").status_code == 200
    assert numbers == [1, 2]


def test_an_administrator_deletes_one_that_is_not_understood_if_that_is_what_is_wanted(
    api: RunningApi, admin: httpx.Client, address: Address, name: str
) -> None:
    subscribe(api, admin, name)
    fill(address, name, [1])
    make_newer(address, SUBSCRIPTIONS, f"{name}.definition", version=2)
    problem(admin.delete(f"/v1/subscriptions/{name}"), 503)
    assert admin.delete(f"/v1/subscriptions/{name}", params={"force": "true"}).status_code == 200
    problem(admin.get(f"/v1/subscriptions/{name}"), 404)
    assert subscribe(api, admin, name).next() is None


def test_a_delivery_state_that_is_not_understood_is_503_and_left_as_it_is(
    api: RunningApi, admin: httpx.Client, address: Address, name: str
) -> None:
    consumer = subscribe(api, admin, name, retention_seconds=3600)
    fill(address, name, [1, 2])
    first = consumer.next()
    understood = make_newer(address, ACKNOWLEDGED, name, version=2)
    assert "version 2" in problem(consumer.set_status(first["sequence_number"], status="ok"), 503)["detail"]
    problem(consumer.get("messages/next", params={"timeout": 0}), 503)
    assert "version 2" in consumer.get().json()["unreadable"]
    put(address, ACKNOWLEDGED, name, understood)
    assert consumer.set_status(first["sequence_number"], status="ok").status_code == 200
    assert consumer.next()["body"]["new"]["number"] == 2
