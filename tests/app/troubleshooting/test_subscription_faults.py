"""Faults of single subscriptions, as the guide to troubleshooting describes them. No pipeline runs."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from purveyor.queues.client import connect
from purveyor.queues.registry import SUBSCRIPTIONS
from tests.support.command_line import invoke
from tests.support.fault_guide import FaultCheck
from tests.support.faulty_system import FaultySystem
from tests.support.push import Site
from tests.support.running_api import Consumer, event, fill, problem, subscribe
from tests.support.waiting import wait_until

CLOSED = "http://127.0.0.1:1/"


@pytest.fixture
def consumer(system: FaultySystem, unique: str) -> Iterator[Consumer]:
    """Return a subscription with three messages."""
    yield subscribe(system.api, system.admin, unique)
    system.admin.delete(f"/v1/subscriptions/{unique}")


def pushed(system: FaultySystem, name: str, endpoint: str) -> None:
    system.start_push()
    subscribe(system.api, system.admin, name, delivery="push", push={"endpoint": endpoint})
    fill(system.address, name, range(1, 10))


@pytest.fixture
def pushed_name(system: FaultySystem, unique: str) -> Iterator[str]:
    yield unique
    system.admin.delete(f"/v1/subscriptions/{unique}")


def test_no_push_worker_runs(fault: FaultCheck, system: FaultySystem, pushed_name: str) -> None:
    system.stop_push()
    subscribe(system.api, system.admin, pushed_name, delivery="push", push={"endpoint": CLOSED})
    fill(system.address, pushed_name, range(1, 10))
    fault.shows(system, pushed_name)


def test_the_endpoint_answers_an_error(fault: FaultCheck, system: FaultySystem, pushed_name: str, site: Site) -> None:
    site.set_status(500)
    pushed(system, pushed_name, site.url(f"/configured?for={pushed_name}"))
    fault.shows(system, pushed_name)


def test_the_endpoint_cannot_be_reached(fault: FaultCheck, system: FaultySystem, pushed_name: str) -> None:
    pushed(system, pushed_name, CLOSED)
    fault.shows(system, pushed_name)


def test_push_may_not_use_the_address(fault: FaultCheck, system: FaultySystem, pushed_name: str) -> None:
    pushed(system, pushed_name, "http://10.11.12.13/in")
    fault.shows(system, pushed_name)


def test_the_consumer_is_away(fault: FaultCheck, system: FaultySystem, consumer: Consumer) -> None:
    fill(system.address, consumer.name, range(1, 4))
    fault.shows(system, consumer.name)


def test_the_consumer_does_not_acknowledge(fault: FaultCheck, system: FaultySystem, consumer: Consumer) -> None:
    fill(system.address, consumer.name, range(1, 4))
    for _ in range(2):
        consumer.next()
    before = system.page()
    got = [consumer.next()["sequence_number"] for _ in range(5)]
    fault.shows(system, consumer.name, before=before, users=[f"messages {got}"])


def test_the_consumer_rejects_messages(fault: FaultCheck, system: FaultySystem, consumer: Consumer) -> None:
    fill(system.address, consumer.name, range(1, 3))
    before = system.page()
    sequence = consumer.next()["sequence_number"]
    assert consumer.set_status(sequence, status="reject", reason="not ours").status_code == 200
    fault.shows(system, consumer.name, before=before)
    invoke("--data-dir", str(system.data), "dlq", "discard", "1", "--yes").ok()


def test_the_subscription_is_paused(fault: FaultCheck, system: FaultySystem, consumer: Consumer) -> None:
    assert system.admin.patch(f"/v1/subscriptions/{consumer.name}", json={"paused": True}).status_code == 200
    fill(system.address, consumer.name, range(1, 4))
    answer = consumer.get("messages/next", params={"timeout": 0})
    fault.shows(system, consumer.name, users=[f"{answer.status_code} {answer.text}"])


def test_a_newer_version_wrote_the_subscription(fault: FaultCheck, system: FaultySystem, consumer: Consumer) -> None:
    system.start_push()
    before = asyncio.run(_put_record(system, consumer.name, b'{"version": 99}'))
    answer = wait_until(lambda: found if (found := consumer.get()).status_code == 503 else None)
    fault.shows(system, consumer.name, users=[f"{answer.status_code} {answer.text}"])
    asyncio.run(_put_record(system, consumer.name, before))
    wait_until(lambda: consumer.get().status_code == 200)


async def _put_record(system: FaultySystem, name: str, value: bytes) -> bytes:
    """Store the record of a subscription, and return the one before."""
    async with connect(system.address) as queues:
        bucket = await queues.bucket(SUBSCRIPTIONS)
        entry = await bucket.get(f"{name}.definition")
        assert entry is not None
        await bucket.put(f"{name}.definition", value)
        return entry.value


def test_a_token_has_expired(fault: FaultCheck, system: FaultySystem, consumer: Consumer) -> None:
    made = consumer.client.post("/v1/tokens", json={"expires_in_seconds": 1})
    assert made.status_code == 201, made.text
    holder = system.api.client(headers={"Authorization": f"Bearer {made.json()['token']}"})
    path = f"/v1/subscriptions/{consumer.name}"
    answer = wait_until(lambda: found if (found := holder.get(path)).status_code == 401 else None)
    fault.shows(system, consumer.name, users=[f"{answer.status_code} {answer.text}"])


def test_a_client_has_the_wrong_password(fault: FaultCheck, system: FaultySystem, consumer: Consumer) -> None:
    guesses = [system.api.client(consumer.name, f"guess {number}") for number in range(40)]
    answers = []
    for each in guesses:
        answers.append(each.get(f"/v1/subscriptions/{consumer.name}"))
        if answers[-1].status_code == 429:
            break
    fault.shows(system, consumer.name, users=[f"{each.status_code} {each.text}" for each in answers])


def test_the_schema_refuses_an_event(fault: FaultCheck, system: FaultySystem) -> None:
    order = {"type": "object", "properties": {"total": {"type": "number"}}}
    topics = [{"realm": "shop", "topic": "orders"}]
    body = {"name": "order", "realms_topics": topics, "definition": order}
    assert system.admin.post("/v1/schemas", json=body).status_code == 201
    wrong = event(realm="shop", topic="orders", body={"new": {"total": "much"}})
    refused = problem(system.events.post("/v1/messages", json=wrong), 422)
    fault.shows(system, users=[json.dumps(refused)])
