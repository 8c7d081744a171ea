"""During the migration of a queue the API answers 202 only when the event is stored, else 503 with Retry-After."""

import asyncio
import threading

import httpx

from purveyor.queues.migration.record import QueueStatus
from tests.support.migrations import drain_incoming, seal_incoming
from tests.support.nats_servers import OwnServer
from tests.support.running_api import RunningApi, event


def test_events_are_stored_after_the_migration_or_refused_for_now(own_server: OwnServer) -> None:
    """It starts while the queue is sealed, too: the older system's API could not."""
    address = own_server().address
    assert asyncio.run(seal_incoming(address)) is QueueStatus.SEALED_FOR_MIGRATION
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
        asyncio.run(drain_incoming(address))
        waiting.join()
        assert (answers[0].status_code, answers[0].json()["position"]) == (202, 2)
