import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from purveyor.app.json_views import message_json
from purveyor.delivery import lease_rules
from purveyor.delivery.pull import DeliveredMessage
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model.delivery_state import SubjectKind
from tests.support.running_api import Consumer, RunningApi, event, fill, problem, subscribe
from tests.support.waiting import wait_until

NOW = {"timeout": 0}


def waiting(address: Address, name: str) -> int:
    return int(request_api(address, f"STREAM.INFO.stream:{name}")["state"]["messages"])


def test_a_message_is_the_event_with_its_sequence_and_count(consumer: Consumer, address: Address, name: str) -> None:
    fill(address, name, range(7, 8), key="k", attributes={"tenant": "north"})
    answer = consumer.get("messages/next", params=NOW)
    expected = event(7, key="k", attributes={"tenant": "north"})
    assert answer.json() == {**expected, "sequence_number": 1, "num_delivered": 1}
    assert answer.headers["Purveyor-Position"] == "7"
    assert answer.headers["Purveyor-Id"] == "event-7"
    assert "Purveyor-Lease-Until" in answer.headers


def test_the_oldest_comes_again_until_it_is_acknowledged(consumer: Consumer, address: Address, name: str) -> None:
    fill(address, name, range(1, 3))
    assert [consumer.next()["num_delivered"] for _ in range(3)] == [1, 2, 3]
    done = consumer.set_status(1, status="ok")
    assert (done.status_code, done.json()) == (200, None)
    assert consumer.next()["sequence_number"] == 2
    problem(consumer.set_status(1, status="ok"), 404)
    problem(consumer.set_status(99, status="ok"), 404)
    problem(consumer.set_status(2, status="done"), 422)
    for strange in ("-1", "x", "9" * 30):
        problem(consumer.patch(f"messages/{strange}/status", json={"status": "ok"}), 422)


def test_pop_takes_the_message_out(consumer: Consumer, address: Address, name: str) -> None:
    fill(address, name, range(1, 3))
    assert consumer.next(pop=True)["sequence_number"] == 1
    assert consumer.next(pop=True)["sequence_number"] == 2
    assert consumer.next(pop=True) is None
    problem(consumer.set_status(1, status="ok"), 404)
    wait_until(lambda: not waiting(address, name))


def test_plain_requests_and_odd_ones_are_answered_alike(consumer: Consumer, address: Address, name: str) -> None:
    """Requests in the plain form use the fast path."""
    fill(address, name, range(1, 7))
    base = f"/v1/subscriptions/{name}/messages"
    queries = ("timeout=0", "pop=false&timeout=0", "timeout=0.0&pop=0", "timeout=0&x=1", "timeout=%30", "")
    bodies: tuple[bytes | Iterator[bytes], ...] = (
        b'{"status":"ok"}',
        b'{"status": "ok"}',
        b' {"status" : "ok", "reason": null}',
        iter((b'{"status":', b'"ok"}')),
        b'{"status": "\\u006fk"}',
        b'{"status": "ok", "delay": 3}',
    )
    for number, (query, body) in enumerate(zip(queries, bodies, strict=True), start=1):
        found = consumer.client.get(f"{base}/next?{query}")
        assert found.json() == {**event(number), "sequence_number": number, "num_delivered": 1}, query
        assert found.headers["content-type"] == "application/json"
        assert found.headers.keys() >= {"purveyor-position", "purveyor-id", "purveyor-lease-until"}
        json_response = {"Content-Type": "application/json"}
        reported = consumer.client.patch(f"{base}/{number}/status", content=body, headers=json_response)
        assert (reported.status_code, reported.json()) == (200, None), body
        problem(
            consumer.client.patch(f"{base}/{number}/status", content=b'{"status":"ok"}', headers=json_response), 404
        )
    problem(
        consumer.client.patch(f"{base}/1/status", content=b'{"status":', headers={"Content-Type": "text/plain"}), 422
    )
    assert consumer.client.put(f"{base}/next").status_code == 405


def test_a_long_poll_is_answered_when_a_message_comes(consumer: Consumer, address: Address, name: str) -> None:
    with ThreadPoolExecutor() as threads:
        polling = threads.submit(consumer.next, timeout=60)
        fill(address, name, range(1, 2))
        assert polling.result()["sequence_number"] == 1


@pytest.mark.parametrize("wrong", ["-1", "nan", "inf", "1e9", "soon", ""])
def test_a_strange_timeout_is_422(consumer: Consumer, wrong: str) -> None:
    problem(consumer.get("messages/next", params={"timeout": wrong}), 422)


def test_a_disconnected_client_gets_nothing_and_blocks_no_other(
    api: RunningApi, admin: httpx.Client, address: Address, name: str
) -> None:
    consumer = subscribe(api, admin, name, delivery="parallel")
    brief = httpx.Timeout(60, read=0.5)
    with pytest.raises(httpx.ReadTimeout):
        consumer.get("messages/next", params={"timeout": 60}, headers={"X-Consumer-Instance": "gone"}, timeout=brief)
    fill(address, name, range(1, 2))
    assert consumer.next("other", timeout=60)["sequence_number"] == 1


def test_another_instance_waits_and_takes_over_what_is_given_back(
    consumer: Consumer, address: Address, name: str
) -> None:
    fill(address, name, range(1, 2))
    assert consumer.next("a")["num_delivered"] == 1
    assert consumer.next("b") is None
    problem(consumer.set_status(1, "b", status="retry"), 409)
    problem(consumer.set_status(1, "b", status="extend"), 409)
    extended = consumer.set_status(1, "a", status="extend", lease_seconds=60)
    assert extended.status_code == 200
    assert extended.json()["lease_until"]
    assert consumer.set_status(1, "a", status="retry", delay=0).json() is None
    assert consumer.next("b")["num_delivered"] == 2
    problem(consumer.set_status(1, "b", status="retry", delay=-1), 422)


def test_what_is_rejected_becomes_a_dead_letter(consumer: Consumer, address: Address, name: str) -> None:
    fill(address, name, range(1, 3))
    consumer.next()
    assert consumer.set_status(1, status="reject", reason="no such mailbox").status_code == 200
    assert consumer.next()["sequence_number"] == 2
    letters = request_api(address, "STREAM.INFO.stream:dead-letters", {"subjects_filter": ">"})["state"]["subjects"]
    assert any(name in subject for subject in letters)


def test_many_are_leased_and_acknowledged_at_once(
    api: RunningApi, admin: httpx.Client, address: Address, name: str
) -> None:
    consumer = subscribe(api, admin, name, delivery="parallel")
    fill(address, name, range(1, 11))
    leased = consumer.post("messages/lease", json={"max": 6, "lease_seconds": 30, "instance": "a"})
    assert leased.status_code == 200
    messages = leased.json()["messages"]
    assert [each["sequence_number"] for each in messages] == [1, 2, 3, 4, 5, 6]
    assert messages[0].items() >= event(1).items()
    assert messages[0].keys() >= {"position", "lease_id", "lease_until", "num_delivered"}
    others = consumer.post("messages/lease", json={}, headers={"X-Consumer-Instance": "b"}).json()["messages"]
    assert [each["sequence_number"] for each in others] == [7, 8, 9, 10]
    assert consumer.post("messages/lease", json={}).json() == {"messages": []}
    body = {"status": "ok", "up_to": 4}
    assert consumer.patch("messages/status", json=body, headers={"X-Consumer-Instance": "a"}).json() == {
        "acknowledged": 4
    }
    problem(consumer.patch("messages/status", json={"status": "ok", "up_to": 8}), 409)
    problem(consumer.patch("messages/status", json={"status": "retry", "up_to": 8}), 422)
    for wrong in ({"max": 0}, {"max": 1001}, {"lease_seconds": 0}, {"instance": ""}, {"most": 1}):
        problem(consumer.post("messages/lease", json=wrong), 422)


def test_a_strange_instance_is_422(consumer: Consumer) -> None:
    problem(consumer.get("messages/next", params=NOW, headers={"X-Consumer-Instance": "x" * 201}), 422)


def test_the_messages_are_the_owners(api: RunningApi, admin: httpx.Client, consumer: Consumer, name: str) -> None:
    other = subscribe(api, admin, f"{name}-b")
    for client in (admin, other.client):
        base = f"/v1/subscriptions/{name}/messages"
        problem(client.get(f"{base}/next", params=NOW), 401)
        problem(client.get(f"{base}/next?timeout=0.00001&pop=0"), 401)
        problem(client.post(f"{base}/lease", json={}), 403)
        for status in ("ok", "reject", "extend"):
            problem(client.patch(f"{base}/1/status", json={"status": status}), 401)
        problem(client.patch(f"{base}/status", json={"status": "ok", "up_to": 1}), 403)


def test_twenty_consumers_at_once_get_each_message_once(
    api: RunningApi, admin: httpx.Client, address: Address, name: str
) -> None:
    consumer = subscribe(api, admin, name, delivery="parallel")
    fill(address, name, range(1, 61))
    seen: list[int] = []
    strange: list[httpx.Response] = []

    def work(instance: str) -> None:
        headers = {"X-Consumer-Instance": instance}
        while True:
            answer = consumer.get("messages/next", params=NOW, headers=headers)
            if answer.status_code != 200 or answer.json() is None:
                strange.extend([answer] if answer.status_code != 200 else [])
                return
            seen.append(answer.json()["sequence_number"])
            consumer.set_status(answer.json()["sequence_number"], instance, status="ok")

    with ThreadPoolExecutor(20) as threads:
        list(threads.map(work, [f"instance-{number}" for number in range(20)]))
    assert not strange
    assert sorted(seen) == list(range(1, 61))


def test_at_the_in_flight_limit_the_reason_is_reported(
    api: RunningApi, admin: httpx.Client, name: str, address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_rules, "MAX_IN_FLIGHT_MESSAGES", 3)
    consumer = subscribe(api, admin, name, delivery="parallel")
    fill(address, name, range(1, 4))
    assert len(consumer.post("messages/lease", json={"max": 10, "timeout": 0}).json()["messages"]) == 3
    assert consumer.next() is None  # there is nothing more
    fill(address, name, range(4, 6))
    for answer in (
        consumer.get("messages/next", params={"timeout": 0}),
        consumer.get("messages/next", params={"timeout": 0.1}),
        consumer.post("messages/lease", json={"timeout": 0}),
    ):
        assert "3 messages are leased or delayed" in problem(answer, 429)["detail"]
        assert answer.headers["retry-after"] == "1"
    assert consumer.set_status(1, status="retry", delay=600).status_code == 200
    problem(consumer.post("messages/lease", json={"timeout": 0}), 429)
    assert consumer.set_status(2, status="ok").status_code == 200
    assert consumer.next()["sequence_number"] == 4


def bodies() -> Iterator[tuple[bytes, dict[str, Any]]]:
    yield b'{"a": 1}', {"a": 1}
    yield b' {"a": {"b": "}"}} \n', {"a": {"b": "}"}}
    yield b"{}", {}
    yield b"not json", {"raw": "bm90IGpzb24="}
    yield b"", {"raw": ""}


@pytest.mark.parametrize(("data", "expected"), [*bodies()])
def test_any_message_in_a_queue_is_delivered_as_json(data: bytes, expected: dict[str, Any]) -> None:
    message = DeliveredMessage(
        sequence=3, position=1, kind=SubjectKind.MAIN, data=data, headers={}, num_delivered=2, lease=None, until=None
    )
    assert json.loads(message_json(message, {"position": 1})) == {
        **expected,
        "position": 1,
        "sequence_number": 3,
        "num_delivered": 2,
    }
