"""The API beside a queue that is being migrated: 202 only when stored, else a 503 that says when to come back."""

import asyncio
import threading

import httpx

from purveyor.jetstream.address import Address
from purveyor.jetstream.config import ConsumerConfig, Retention, StreamConfig
from purveyor.queues.catalogue import incoming
from purveyor.queues.client import connect
from purveyor.queues.ensure import QueueStatus
from tests.app.http.conftest import RunningApi, event
from tests.conftest import OwnServer

QUEUE = incoming()


def test_events_are_stored_after_the_migration_or_refused_for_now(own_server: OwnServer) -> None:
    """It starts while the queue is sealed, too: the older system's API could not."""
    address = own_server().address
    assert asyncio.run(_seal(address)) is QueueStatus.SEALED_FOR_MIGRATION
    with RunningApi(lambda: address, patience_seconds=1.0) as hasty:
        events = hasty.client("events", "events-secret")
        hasty.when_ready()
        for body in (event(1), [event(2), event(3)]):
            answer = events.post("/v1/messages", json=body)
            assert answer.status_code == 503
            assert int(answer.headers["Retry-After"]) >= 1
    with RunningApi(lambda: address, patience_seconds=60.0) as patient:
        events = patient.client("events", "events-secret")
        patient.when_ready()
        answers: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: answers.append(events.post("/v1/messages", json=event(4))))
        waiting.start()
        asyncio.run(_drain(address))
        waiting.join()
        assert (answers[0].status_code, answers[0].json()["position"]) == (202, 2)


async def _seal(address: Address) -> QueueStatus:
    async with connect(address) as queues:
        await queues.streams.add(
            StreamConfig(name=QUEUE.stream, subjects=("incoming",), retention=Retention.WORK_QUEUE)
        )
        await queues.consumers.add(QUEUE.stream, ConsumerConfig(durable_name="durable_name:incoming"))
        await queues.publish("incoming", b"{}", msg_id="old")
        return (await queues.ensure(QUEUE, migrate=True)).status


async def _drain(address: Address) -> None:
    async with connect(address) as queues, asyncio.timeout(120):
        for message in await queues.fetch(QUEUE.stream, "dispatcher"):
            await message.ack(confirm=True)
        await queues.migrations.finish(QUEUE.name)
