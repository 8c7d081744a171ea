"""The metrics of the API are cheap, open and correct."""

import asyncio
import json
import threading

import httpx
import pytest

from purveyor.app.telemetry import queue_metrics
from purveyor.app.telemetry.queue_metrics import QueueMetrics, RegistrySnapshots
from purveyor.jetstream.address import Address
from purveyor.jetstream.config import StreamConfig
from purveyor.queues.client import Queues, connect
from tests.support.metrics_page import MetricsPage
from tests.support.migrations import drain_incoming, seal_incoming
from tests.support.nats_servers import OwnServer
from tests.support.running_api import Consumer, RunningApi, event, fill
from tests.support.waiting import wait_until


def page(client: httpx.Client) -> MetricsPage:
    answer = client.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    return MetricsPage(answer.text)


def test_the_life_of_messages_is_counted(
    api: RunningApi, consumer: Consumer, events: httpx.Client, address: Address
) -> None:
    name = consumer.name
    before = page(api.anybody)
    assert events.post("/v1/messages", json=event(id=f"{name}-1")).status_code == 202
    assert events.post("/v1/messages", json=event(id=f"{name}-1")).status_code == 202
    fill(address, name, range(1, 5))
    first = consumer.next()["sequence_number"]
    assert consumer.next()["sequence_number"] == first
    assert consumer.set_status(first, status="ok").status_code == 200
    second = consumer.next()["sequence_number"]
    assert consumer.set_status(second, status="reject", reason="not ours").status_code == 200
    third = consumer.next()["sequence_number"]
    assert consumer.set_status(third, status="retry", delay=0).status_code == 200
    after = page(api.anybody)
    reported = {
        figure: after.since(before, f"messages_{figure}_total", subscription=name)
        for figure in ("delivered", "redelivered", "acknowledged", "returned")
    }
    assert reported == {"delivered": 4, "redelivered": 1, "acknowledged": 1, "returned": 1}
    assert after.since(before, "events_published_total", result="stored") == 1
    assert after.since(before, "events_published_total", result="duplicate") == 1
    assert after.since(before, "dead_letters_parked_total", origin=f"subscription:{name}") == 1
    route = "/v1/subscriptions/{name}/messages/next"
    assert after.since(before, "http_requests_total", route=route, method="GET", status="200") == 4
    assert after.get("nats_up") == 1

    def looked_up() -> bool:
        now = page(api.anybody)
        return (
            now.get("queue_messages", queue=name, kind="subscription") == 2
            and (now.get("queue_oldest_age_seconds", queue=name, kind="subscription") or 0) > 0
            and (now.get("queue_bytes", queue=name, kind="subscription") or 0) > 0
            and now.get("queue_written_total", queue=name, kind="subscription") == 4
            and now.get("dead_letters", origin=f"subscription-{name}") == 1
            and now.get("queue_sealed", queue="incoming", kind="internal") == 0
            and (now.get("subscriptions", state="active") or 0) >= 1
        )

    wait_until(looked_up)


def test_a_dead_letter_that_was_settled_is_counted_no_more(
    api: RunningApi, admin: httpx.Client, consumer: Consumer, address: Address
) -> None:
    """Its receipt stays in the queue, under a subject of its own: that must not begin a series, and fire the alert."""
    name = consumer.name
    fill(address, name, range(1, 4))
    for _ in range(3):
        sequence = consumer.next()["sequence_number"]
        assert consumer.set_status(sequence, status="reject", reason="not ours").status_code == 200
    wait_until(lambda: page(api.anybody).get("dead_letters", origin=f"subscription-{name}") == 3)
    letters = admin.get(f"/v1/subscriptions/{name}/dead-letters").json()["dead_letters"]
    discarded = admin.request("DELETE", f"/v1/subscriptions/{name}/dead-letters", params={"ids": letters[0]["id"]})
    assert discarded.status_code == 200, discarded.text
    retried = admin.post(f"/v1/subscriptions/{name}/dead-letters", json={"ids": [letters[1]["id"]]})
    assert retried.status_code == 200, retried.text
    wait_until(lambda: page(api.anybody).get("dead_letters", origin=f"subscription-{name}") == 1)
    assert not [label for label in page(api.anybody).labels if label.startswith("settled.")]


def test_a_subscription_that_is_gone_leaves_no_series(
    api: RunningApi, admin: httpx.Client, consumer: Consumer, address: Address
) -> None:
    fill(address, consumer.name, range(1, 2))
    consumer.next()
    assert consumer.name in page(api.anybody).labels
    assert admin.delete(f"/v1/subscriptions/{consumer.name}").status_code == 200
    wait_until(lambda: consumer.name not in page(api.anybody).labels)


def test_it_answers_without_a_server_and_without_a_login() -> None:
    nowhere = Address(("nats://127.0.0.1:1",))
    with RunningApi(lambda: nowhere) as api:
        assert page(api.anybody).get("nats_up") == 0


def test_a_thousand_queues_cost_a_handful_of_questions(own_server: OwnServer) -> None:
    """Without a request per subscription: those would be thousands at each scrape."""
    address = own_server().address

    async def look() -> tuple[int, int]:
        async with connect(address) as connected:
            configs = [StreamConfig(name=f"stream:s{n}", subjects=(f"s{n}.main",)) for n in range(300)]
            await asyncio.gather(*map(connected.streams.add, configs))
            asked = await _asked(connected)
            await QueueMetrics(connected, RegistrySnapshots(connected)).read()
            return len(configs), await _asked(connected) - asked

    streams, questions = asyncio.run(look())
    assert questions < 12, f"{questions} questions for {streams} streams"


async def _asked(connected: Queues) -> int:
    """Return the number of JetStream requests that the server has answered, with this one."""
    answer = await connected.connection.request("$JS.API.INFO")
    return int(json.loads(answer.data)["api"]["total"])


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_publishers_that_wait_for_a_migration_are_seen(own_server: OwnServer, many: bool) -> None:
    address = own_server().address
    asyncio.run(seal_incoming(address))
    with RunningApi(lambda: address, patience_seconds=60.0) as api:
        events = api.when_ready().client("events", "events-secret")
        before = page(api.anybody)
        body = [event(2), event(3), event(4)] if many else event(2)
        waiting = threading.Thread(target=lambda: events.post("/v1/messages", json=body))
        waiting.start()
        wait_until(lambda: page(api.anybody).get("publishers_waiting", queue="incoming") == 1)
        during = page(api.anybody)
        assert during.get("publisher_buffered_messages", queue="incoming") == (3 if many else 1)
        assert during.since(before, "publisher_wait_seconds_total", queue="incoming") > 0
        wait_until(lambda: page(api.anybody).get("queue_sealed", queue="incoming", kind="internal") == 1)
        asyncio.run(drain_incoming(address))
        waiting.join()
        after = page(api.anybody)
        assert after.get("publishers_waiting", queue="incoming") == 0
        assert after.get("publisher_buffered_messages", queue="incoming") == 0
        assert after.since(before, "publisher_waits_total", queue="incoming") == 1


def test_an_unreachable_server_is_a_metric(own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_metrics, "_TIMEOUT_SECONDS", 0.3)
    server = own_server()
    with RunningApi(lambda: server.address, patience_seconds=1.0) as api:
        api.when_ready()
        assert page(api.anybody).get("nats_up") == 1
        server.stop()
        wait_until(lambda: page(api.anybody).get("nats_up") == 0)
        server.start()
        wait_until(lambda: page(api.anybody).get("nats_up") == 1)
