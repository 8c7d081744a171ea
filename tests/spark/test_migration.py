"""A query continues through the migration of its queue: it drains the sealed stream, and follows the next one."""

import asyncio
from typing import Any

from purveyor.jetstream.config import Retention
from purveyor.model.errors import UnknownStream
from purveyor.queues.catalogue import Queue, Reader
from purveyor.queues.client import connect
from purveyor.queues.migration.record import QueueStatus
from tests.support.broker import Broker
from tests.support.spark_session import Collector, Read
from tests.support.waiting import wait_until


def test_two_queries_drain_a_sealed_work_queue_by_position_and_continue_after_it(
    broker: Broker, follow: Read, collector: Collector, unique: str
) -> None:
    """Each of them gets every message once, in order; the checkpoints stay as they are."""
    stream = f"stream:{unique}"
    broker.make(stream, subjects=[unique], retention="workqueue", allow_direct=False)
    broker.durable(stream, "durable_name:incoming")
    broker.add(unique, [str(number) for number in range(1, 41)])
    names = ("dispatcher", "archive")
    queue = Queue(
        name=unique,
        purpose="a test",
        subjects=(unique,),
        retention=Retention.INTEREST,
        writer="test",
        readers=tuple(Reader(durable=name, used_by="test") for name in names),
    )

    async def ensure() -> QueueStatus:
        async with connect(broker.address) as queues:
            return (await queues.ensure(queue, migrate=True)).status

    assert asyncio.run(ensure()) is QueueStatus.SEALED_FOR_MIGRATION
    collector.finish(follow(stream, durable=names[0], maxOffsetsPerTrigger=25), checkpoint=names[0])
    assert collector.sequences(names[0]) == list(range(1, 41))
    assert broker.state(stream)["messages"] == 40, "the other query has not read them"
    query = collector.start(
        follow(stream, durable=names[1], idleWaitMillis=100), checkpoint=names[1], available_now=False
    )
    wait_until(lambda: _config(broker, stream)["retention"] == "interest")
    assert not _config(broker, stream).get("sealed")
    assert broker.state(stream)["first_seq"] == 41
    assert broker.consumers(stream) == sorted(names)
    broker.add(unique, [str(number) for number in range(41, 61)])
    wait_until(lambda: len(collector.sequences(names[1])) == 60)  # the same query, never stopped
    wait_until(lambda: broker.floor(stream, names[1]) == 60)
    query.stop()
    collector.finish(follow(stream, durable=names[0]), checkpoint=names[0])  # from the checkpoint of before
    for name in names:
        assert collector.sequences(name) == list(range(1, 61))
        assert collector.texts(name) == [str(number) for number in range(1, 61)]
    assert broker.state(stream)["messages"] == 0


def _config(broker: Broker, stream: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = broker.ask(f"STREAM.INFO.{stream}")["config"]
    except UnknownStream:
        return {"sealed": True, "retention": ""}
    return found
