"""Alerts on the metrics of a real API: each comes for its cause, and none before. No pipeline runs."""

import asyncio
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from purveyor.jetstream.server import EmbeddedServer
from purveyor.model.registration import PrefillState, PrefillStatus, Suspension
from purveyor.queues.client import connect
from purveyor.queues.registry import SUBSCRIPTIONS, DispatchState, Registry
from tests.deploy.alerting import fired, shipped_rules
from tests.support.metrics_page import MetricsPage
from tests.support.migrations import drain_incoming, seal_incoming
from tests.support.nats_servers import OwnServer
from tests.support.running_api import Consumer, RunningApi, event, fill, subscribe, wanted
from tests.support.waiting import wait_until

AGES = frozenset({"purveyor_queue_oldest_age_seconds", "purveyor_push_failing_seconds"})


@pytest.fixture
def server(own_server: OwnServer) -> EmbeddedServer:
    return own_server()


@pytest.fixture
def api(server: EmbeddedServer) -> Iterator[RunningApi]:
    with RunningApi(lambda: server.address, patience_seconds=1.0) as running:
        yield running.when_ready()


@pytest.fixture
def admin(api: RunningApi) -> httpx.Client:
    return api.client("admin", "admin-secret")


@pytest.fixture
def events(api: RunningApi) -> httpx.Client:
    return api.client("events", "events-secret")


@pytest.fixture
def consumer(api: RunningApi, admin: httpx.Client) -> Consumer:
    return subscribe(api, admin, "ox")


def test_each_shipped_alert_is_fired_by_its_cause_in_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*alert*.py"))
    assert {rule["alert"] for rule in shipped_rules()} <= set(re.findall(r'"(Purveyor\w+)"', tests))


def page(api: RunningApi) -> str:
    answer = api.anybody.get("/metrics")
    assert answer.status_code == 200
    return answer.text


def page_with(api: RunningApi, name: str, **labels: str) -> str:
    """Wait until a metric is above 0, and return the page."""

    def found() -> str | None:
        text = page(api)
        return text if MetricsPage(text).get(name, **labels) else None

    result: str = wait_until(found, what=name)
    return result


def test_an_idle_api_is_calm(api: RunningApi, consumer: Consumer) -> None:
    # The registration is an event, and no pipeline reads it.
    assert fired([page(api)], growing=AGES) <= {"PurveyorIncomingOld"}
    assert not fired([page(api)])


def test_a_server_that_is_away(api: RunningApi, server: EmbeddedServer, events: httpx.Client) -> None:
    server.stop()
    wait_until(lambda: MetricsPage(page(api)).get("nats_up") == 0)
    assert fired([page(api)]) == {"PurveyorNatsAway"}
    pages = []
    for _ in range(2):
        assert events.post("/v1/messages", json=event()).status_code == 503
        pages.append(page(api))
    assert fired(pages) == {"PurveyorApiErrors", "PurveyorNatsAway"}


def test_events_that_no_part_takes(api: RunningApi, events: httpx.Client) -> None:
    assert events.post("/v1/messages", json=event()).status_code == 202
    waiting = page_with(api, "queue_oldest_age_seconds", queue="incoming", kind="internal")
    assert fired([waiting], growing=AGES) == {"PurveyorIncomingOld"}


def test_messages_that_a_consumer_does_not_take_or_rejects(
    api: RunningApi, server: EmbeddedServer, consumer: Consumer
) -> None:
    before = page(api)
    fill(server.address, consumer.name, range(1, 4))
    waiting = page_with(api, "queue_oldest_age_seconds", queue="ox", kind="subscription")
    assert "PurveyorSubscriptionOld" in fired([waiting], growing=AGES, minutes=120)
    again = [page(api)]
    for _ in range(5):  # without an acknowledgement, each request gets the same message
        sequence = consumer.next()["sequence_number"]
        again.append(page(api))
    assert fired(again) == {"PurveyorRedeliveries"}
    assert consumer.set_status(sequence, status="reject", reason="not ours").status_code == 200
    parked = page_with(api, "dead_letters", origin="subscription-ox")
    assert fired([before, *[parked] * 70], minutes=70) >= {"PurveyorDeadLetters"}


@pytest.mark.parametrize("cause", ["suspended", "prefill_failed", "unreadable"])
def test_a_subscription_that_gets_nothing(
    api: RunningApi, server: EmbeddedServer, consumer: Consumer, cause: str
) -> None:
    asyncio.run(_break_subscription(server, consumer.name, cause))
    broken = page_with(api, f"subscription_{cause}", subscription=consumer.name)
    alerts = {
        "suspended": "PurveyorSubscriptionSuspended",
        "prefill_failed": "PurveyorPrefillFailed",
        "unreadable": "PurveyorSubscriptionUnreadable",
    }
    assert fired([broken]) == {alerts[cause]}


async def _break_subscription(server: EmbeddedServer, name: str, cause: str) -> None:
    async with connect(server.address) as queues:
        registry = await Registry.open(queues)
        found = await registry.get(name)
        if cause == "suspended":
            suspension = Suspension(position=7, reason="the queue is full", at=datetime.now(UTC))
            state = DispatchState(incarnation=found.incarnation, next=7, suspended=suspension)
            await registry.put_dispatch(name, state, found.dispatch_revision)
        elif cause == "prefill_failed":
            failed = PrefillState(incarnation=found.incarnation, status=PrefillStatus.FAILED, position=1)
            await registry.put_prefill(name, failed, found.prefill_revision)
        else:
            bucket = await queues.bucket(SUBSCRIPTIONS)
            await bucket.put(f"{name}.definition", b'{"version": 99}')


def test_a_push_subscription_without_a_worker(api: RunningApi, server: EmbeddedServer, admin: httpx.Client) -> None:
    push = {"endpoint": "https://example.com/in"}
    assert admin.post("/v1/subscriptions", json=wanted("hook", delivery="push", push=push)).status_code == 201
    fill(server.address, "hook", range(1, 2))
    unpushed = page_with(api, "push_failing_seconds", subscription="hook")
    assert "PurveyorPushFailing" in fired([unpushed], growing=AGES)


def test_publishers_that_wait_for_a_migration(server: EmbeddedServer) -> None:
    asyncio.run(seal_incoming(server.address))
    with RunningApi(lambda: server.address, patience_seconds=60.0) as api:
        events = api.when_ready().client("events", "events-secret")
        waiting = threading.Thread(target=lambda: events.post("/v1/messages", json=event(2)))
        waiting.start()
        page_with(api, "publishers_waiting", queue="incoming")
        sealed = page_with(api, "queue_sealed", queue="incoming", kind="internal")
        assert {"PurveyorQueueSealed", "PurveyorPublishersWait"} <= fired([sealed])
        asyncio.run(drain_incoming(server.address))
        waiting.join()
