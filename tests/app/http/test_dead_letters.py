"""Dead letters over HTTP: a subscription handles its own, an administrator those of all parts."""

import time
from typing import Any

import httpx
import pytest

from purveyor.delivery.pull import open_pull
from purveyor.jetstream.address import Address
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues
from tests.support.running_api import Consumer, RunningApi, event, fill, on_server, problem, subscribe


@pytest.fixture
def ids(consumer: Consumer, address: Address) -> list[int]:
    """Reject three messages and return the ids of their dead letters."""
    fill(address, consumer.name, range(2, 5))
    for number in range(3):
        message = consumer.next()
        reason = "quota" if number else "no such mailbox"
        assert consumer.set_status(message["sequence_number"], status="reject", reason=reason).status_code == 200
    found = consumer.get("dead-letters").json()
    assert found["next"] is None
    return [each["id"] for each in found["dead_letters"]]


def numbers(consumer: Consumer) -> list[int]:
    """Return the messages delivered from now on."""
    got = []
    while (message := consumer.next(pop=True)) is not None:
        got.append(message["body"]["new"]["number"])
    return got


def test_a_subscription_sees_its_letters_whole(consumer: Consumer, ids: list[int]) -> None:
    listed = consumer.get("dead-letters", params={"reason": "mailbox"}).json()["dead_letters"]
    assert [(each["id"], each["reason"], each["attempts"]) for each in listed] == [(ids[0], "no such mailbox", 1)]
    page = consumer.get("dead-letters", params={"limit": 2}).json()
    assert page["next"] == ids[1]
    rest = consumer.get("dead-letters", params={"limit": 2, "after": page["next"]}).json()
    assert [each["id"] for each in rest["dead_letters"]] == ids[2:]
    letter = consumer.get(f"dead-letters/{ids[0]}").json()
    assert letter["headers"]["Purveyor-Position"] == ["2"]
    assert '"number": 2' in letter["data"]
    [attempt] = letter["attempts_log"]
    assert (attempt["status"], attempt["error"]) == (None, "rejected by instance 'default'")
    assert (attempt["excerpt"], letter["details"]["position"]) == ("no such mailbox", 2)
    problem(consumer.get("dead-letters/999999999"), 404)
    problem(consumer.get("dead-letters/x"), 422)
    problem(consumer.get("dead-letters", params={"limit": 0}), 422)


def test_letters_are_put_back_and_delivered_in_order(consumer: Consumer, ids: list[int], address: Address) -> None:
    problem(consumer.post("dead-letters", json={}), 422)
    problem(consumer.post("dead-letters", json={"all": True, "ids": ids}), 422)
    dry = consumer.post("dead-letters", json={"all": True, "dry_run": True}).json()
    assert (dry["chosen"], dry["done"], dry["targets"]) == (3, 0, {f"{consumer.name}.retry": 3})
    fill(address, consumer.name, [9])
    assert consumer.post("dead-letters", json={"ids": ids[2:]}).json()["done"] == 1
    assert consumer.post("dead-letters", json={"all": True}).json()["done"] == 2
    assert numbers(consumer) == [2, 3, 4, 9]
    problem(consumer.post("dead-letters", json={"ids": ids}), 404)


def test_letters_are_discarded(consumer: Consumer, ids: list[int]) -> None:
    problem(consumer.call("DELETE", "dead-letters"), 422)
    gone = consumer.call("DELETE", "dead-letters", params={"ids": ids[:2]}).json()
    assert (gone["done"], gone["failed"]) == (2, [])
    assert consumer.call("DELETE", "dead-letters", params={"all": True}).json()["done"] == 1
    assert consumer.get("dead-letters").json() == {"dead_letters": [], "next": None}
    assert numbers(consumer) == []


def test_letters_are_settled_page_by_page(consumer: Consumer, ids: list[int]) -> None:
    dry = {"all": True, "dry_run": True, "limit": 2}
    first = consumer.post("dead-letters", json=dry).json()
    assert (first["chosen"], first["next"]) == (2, ids[1])
    rest = consumer.post("dead-letters", json=dry | {"after": first["next"]}).json()
    assert (rest["chosen"], rest["next"]) == (1, None)
    gone = consumer.call("DELETE", "dead-letters", params={"all": True, "limit": 1, "after": ids[0]}).json()
    assert (gone["done"], gone["next"]) == (1, ids[1])
    assert [each["id"] for each in consumer.get("dead-letters").json()["dead_letters"]] == [ids[0], ids[2]]
    problem(consumer.post("dead-letters", json=dry | {"after": -1}), 422)


def test_a_subscription_cannot_read_or_change_dead_letters_of_another(
    api: RunningApi, admin: httpx.Client, events: httpx.Client, consumer: Consumer, ids: list[int]
) -> None:
    other = subscribe(api, admin, f"{consumer.name[:40]}-other")
    theirs = f"/v1/subscriptions/{consumer.name}/dead-letters"
    for client in (other.client, events):
        for method, path in (("GET", theirs), ("GET", f"{theirs}/{ids[0]}"), ("GET", "/v1/dead-letters")):
            problem(client.request(method, path), 403)
        problem(client.post(theirs, json={"all": True}), 403)
        problem(client.delete(theirs, params={"all": True}), 403)
        problem(client.post("/v1/dead-letters", json={"all": True}), 403)
        problem(client.delete(f"/v1/dead-letters?ids={ids[0]}"), 403)
    # Under its own name it finds only its own, also by number.
    problem(other.get(f"dead-letters/{ids[0]}"), 404)
    problem(other.post("dead-letters", json={"ids": ids}), 404)
    problem(other.call("DELETE", "dead-letters", params={"ids": ids}), 404)
    problem(api.anybody.get("/v1/dead-letters"), 401)
    assert len(consumer.get("dead-letters").json()["dead_letters"]) == 3


def test_an_administrator_deals_with_those_of_all_parts(
    admin: httpx.Client, consumer: Consumer, ids: list[int], address: Address, unique: str
) -> None:
    async def rubbish(queues: Queues) -> int:
        await queues.ensure(DEAD_LETTERS)
        return (await queues.publish(f"dead-letters.{unique}", b"\xff")).sequence

    number = on_server(address, rubbish)
    everything: list[dict[str, Any]] = []
    after: int | None = 0
    while after is not None:
        page = admin.get("/v1/dead-letters", params={"limit": 100, "after": after}).json()
        everything += page["dead_letters"]
        after = page["next"]
    assert {*ids, number} <= {each["id"] for each in everything}
    shown = admin.get(f"/v1/dead-letters/{number}").json()
    assert (shown["data_base64"], shown["origin"]) == ("/w==", unique)
    assert "not a dead letter" in shown["problem"]
    failed = admin.post("/v1/dead-letters", json={"ids": [number]}).json()
    assert (failed["done"], failed["failed"][0]["id"]) == (0, number)
    assert admin.delete("/v1/dead-letters", params={"ids": number}).json()["done"] == 1
    problem(admin.post("/v1/dead-letters", json={"subscription": consumer.name}), 422)
    report = admin.post("/v1/dead-letters", json={"subscription": consumer.name, "reason": "quota"}).json()
    assert report["done"] == 2
    assert (
        admin.get("/v1/dead-letters", params={"subscription": consumer.name}).json()["dead_letters"][0]["id"] == ids[0]
    )
    assert numbers(consumer) == [3, 4]


def test_retention_can_be_changed_and_expired_messages_are_reported(
    api: RunningApi, admin: httpx.Client, name: str, address: Address
) -> None:
    consumer = subscribe(api, admin, name, retention_seconds=3600)
    assert consumer.get().json()["retention_seconds"] == 3600
    problem(admin.patch(f"/v1/subscriptions/{name}", json={"retention_seconds": 0}), 422)
    fill(address, name, range(2, 5))

    async def later(queues: Queues) -> int:
        async with open_pull(queues, clock=lambda: time.time() + 4000) as pull:
            return await pull.expire(name)

    assert on_server(address, later) == 3
    reported = consumer.get().json()["expired"]
    assert (reported["count"], reported["position"]) == (3, 4)
    assert consumer.next() is None
    changed = admin.patch(f"/v1/subscriptions/{name}", json={"retention_seconds": None}).json()
    assert "retention_seconds" not in changed
    fill(address, name, [5])
    assert consumer.next()["body"] == event(5)["body"]
