"""Fan-in, fan-out and load-balanced, with the API and the dispatcher running: the patterns of publish/subscribe."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.dispatch_harness import DispatchHarness
from tests.support.running_api import Consumer, RunningApi, event, subscribe

PUBLISHERS = 8
EACH = 25
LEASE_SECONDS = 5
"""Longer than a slow machine takes to acknowledge the messages of one lease."""
ALL = {(f"p-{publisher}", number) for publisher in range(PUBLISHERS) for number in range(EACH)}
TOPICS = [{"realm": "shop", "topic": "orders/.*"}]


@pytest.fixture
def api(harness: DispatchHarness) -> Iterator[RunningApi]:
    with RunningApi(lambda: harness.address) as running:
        yield running.when_ready()


def sent(publisher: int, number: int) -> dict[str, Any]:
    return event(number, realm="shop", topic=f"orders/{publisher}", publisher_name=f"p-{publisher}")


def publish(client: httpx.Client, publisher: int) -> None:
    """Some one by one, the rest at once and, as if the answer had been lost, once more."""
    for number in range(5):
        assert client.post("/v1/messages", json=sent(publisher, number)).status_code == 202
    many = [sent(publisher, number) for number in range(5, EACH)]
    header = {"Idempotency-Key": f"batch-of-{publisher}"}
    assert client.post("/v1/messages", json=many, headers=header).json()["stored"] == EACH - 5
    assert client.post("/v1/messages", json=many, headers=header).json()["duplicates"] == EACH - 5


def publisher_and_number(message: Any) -> tuple[str, int]:
    return message["publisher_name"], message["body"]["new"]["number"]


def take_all(consumer: Consumer) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    while len(found) < len(ALL):
        messages = consumer.post("messages/lease", json={"max": 100, "timeout": 60}).json()["messages"]
        assert messages, f"only {len(found)}"
        found += map(publisher_and_number, messages)
        consumer.patch("messages/status", json={"status": "ok", "up_to": messages[-1]["sequence_number"]})
    assert consumer.next() is None
    return found


def work(client: httpx.Client, name: str, instance: str) -> list[tuple[str, int]]:
    """One instance of many: a few at a time, each acknowledged by itself, until a lease has passed."""
    done: list[tuple[str, int]] = []
    headers = {"X-Consumer-Instance": instance}
    path = f"/v1/subscriptions/{name}/messages"
    while messages := client.post(
        f"{path}/lease", json={"max": 7, "timeout": 2 * LEASE_SECONDS}, headers=headers
    ).json()["messages"]:
        for message in messages:
            answer = client.patch(f"{path}/{message['sequence_number']}/status", json={"status": "ok"}, headers=headers)
            assert answer.status_code == 200
            done.append(publisher_and_number(message))
    return done


def test_fan_in_fan_out_and_load_balanced(harness: DispatchHarness, api: RunningApi) -> None:
    admin = api.client("admin", "admin-secret")
    first, second = (subscribe(api, admin, name, realms_topics=TOPICS) for name in ("first", "second"))
    shared = subscribe(api, admin, "shared", realms_topics=TOPICS, delivery="parallel", lease_seconds=LEASE_SECONDS)
    publishers = [api.client("events", "events-secret") for _ in range(PUBLISHERS)]
    harness.start()
    with ThreadPoolExecutor(PUBLISHERS) as threads:
        list(threads.map(publish, publishers, range(PUBLISHERS)))

    # Fan-in: what many send at once is there once, in the order of each of them.
    got = take_all(first)
    assert Counter(got) == Counter(ALL)
    for publisher in range(PUBLISHERS):
        assert [number for name, number in got if name == f"p-{publisher}"] == list(range(EACH))

    # Fan-out: each subscription gets everything, in the same order.
    assert take_all(second) == got

    # Load-balanced: instances share one subscription. One of them takes its share and is never heard of again.
    gone = shared.post("messages/lease", json={"max": 10, "timeout": 60}, headers={"X-Consumer-Instance": "gone"})
    assert len(gone.json()["messages"]) == 10
    instances = [f"instance-{number}" for number in range(3)]
    with ThreadPoolExecutor(len(instances)) as threads:
        shares = list(threads.map(lambda instance: work(shared.client, "shared", instance), instances))
    assert Counter(each for share in shares for each in share) == Counter(ALL)
    assert all(shares), "each had some of them"
