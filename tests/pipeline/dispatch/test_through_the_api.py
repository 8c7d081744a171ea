"""What a client of the HTTP API is promised, with the API and the dispatcher running: nothing is lost on the way."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from purveyor.model.event import Event
from purveyor.pipeline.prefill.worker import PrefillWorker
from purveyor.queues.client import connect
from purveyor.stages import Context, SqlStore, Stages
from tests.support.dispatch_harness import DispatchHarness
from tests.support.running_api import Consumer, RunningApi, event, subscribe
from tests.support.waiting import PATIENCE_SECONDS, wait_until


@pytest.fixture
def api(harness: DispatchHarness) -> Iterator[RunningApi]:
    with RunningApi(lambda: harness.address) as running:
        yield running.when_ready()


@pytest.fixture
def prefill(harness: DispatchHarness) -> Iterator[None]:
    """What catches up a queue that was resumed."""
    stopping = threading.Event()
    worker = PrefillWorker(harness.spark, harness.address, harness.settings().archive)
    thread = threading.Thread(target=worker.run, args=(stopping,))
    thread.start()
    yield
    stopping.set()
    thread.join(PATIENCE_SECONDS)


def take(consumer: Consumer, count: int) -> list[int]:
    """So many messages, acknowledged; and then there are no more."""
    numbers: list[int] = []
    while len(numbers) < count:
        messages = consumer.post("messages/lease", json={"max": 100, "timeout": 60}).json()["messages"]
        assert messages, f"only {numbers}"
        numbers += [message["body"]["new"]["number"] for message in messages]
        consumer.patch("messages/status", json={"status": "ok", "up_to": messages[-1]["sequence_number"]})
    assert consumer.next() is None
    return numbers


def publish(events: httpx.Client, first: int, last: int) -> None:
    """Some one by one, the rest at once."""
    middle = first + 5
    for number in range(first, middle):
        assert events.post("/v1/messages", json=event(number)).status_code == 202
    many = [event(number) for number in range(middle, last + 1)]
    assert events.post("/v1/messages", json=many).status_code == 202


async def publish_by_stage(harness: DispatchHarness, database: str, numbers: range) -> None:
    """Send a message to a stage for each number; its handler publishes an event."""
    async with connect(harness.address) as queues:
        stages = Stages(queues, store=SqlStore(database), app="shop")
        orders = stages.endpoint("orders", request=Event, reply=str)

        @orders.last_stage(exactly_once=True)
        async def place(ctx: Context[None], order: Event) -> str:
            return await ctx.publish(order)

        async with stages:
            for number in numbers:
                await stages.ask(orders, Event.from_json(event(number)), timeout=120)


def test_events_right_after_the_201_are_delivered_and_a_full_queue_is_reported_and_caught_up(
    harness: DispatchHarness, api: RunningApi, prefill: None, tmp_path: Path
) -> None:
    """Nothing is lost between the 201 and the dispatcher, and a queue has a bound. Events of stages come as others."""
    admin, events = api.client("admin", "admin-secret"), api.client("events", "events-secret")
    harness.start()
    consumers = []
    for turn in range(3):
        consumers.append(subscribe(api, admin, f"new-{turn}"))
        publish(events, 100 * turn, 100 * turn + 19)
    for turn, consumer in enumerate(consumers):
        expected = [each for later in range(turn, 3) for each in range(100 * later, 100 * later + 20)]
        assert take(consumer, len(expected)) == expected

    asyncio.run(publish_by_stage(harness, f"sqlite:///{tmp_path / 'stages.db'}", range(60, 80)))
    for consumer in consumers:
        assert take(consumer, 20) == list(range(60, 80))

    full = subscribe(api, admin, "full")
    harness.broker.update("stream:full", max_bytes=4000, discard="new")
    publish(events, 300, 329)
    reported = wait_until(lambda: full.get().json().get("suspended"))
    assert "full" in reported["reason"]
    assert int(harness.broker.state("stream:full")["bytes"]) <= 4000
    assert take(consumers[0], 30) == list(range(300, 330))  # the others are not concerned

    harness.broker.update("stream:full", max_bytes=-1, discard="old")
    assert full.patch(json={"paused": False}).status_code == 200
    assert take(full, 30) == list(range(300, 330))
    wait_until(lambda: "suspended" not in full.get().json())
