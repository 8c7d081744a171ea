"""Carried over by a snapshot: every message, every position of every reader, and a way back from any crash."""

import asyncio
import dataclasses
from datetime import UTC, datetime, timedelta

import pytest

from purveyor.jetstream.config import ConsumerConfig, Retention, Storage
from purveyor.model.errors import DataLost, MigrationNeeded
from purveyor.queues.client import Queues
from purveyor.queues.ensure import Ensurer
from purveyor.queues.migration import recreate
from purveyor.queues.migration.events import Step
from purveyor.queues.migration.migrator import Migrator
from purveyor.queues.migration.plan import Strategy
from purveyor.queues.migration.record import QueueStatus
from purveyor.queues.migration.snapshot import has_enough_replicas
from tests.support.migrations import Worker, declare_queue, finish_migration, make_old_stream, publish, running
from tests.support.waiting import until


async def test_messages_positions_and_messages_in_flight_are_kept(queues: Queues, quick: Migrator, unique: str) -> None:
    """And an acknowledgement that was under way counts after it."""
    stream = await make_old_stream(queues, unique, durable=None)
    await queues.consumers.add(
        stream, ConsumerConfig(durable_name="reader", ack_wait=timedelta(seconds=1), max_ack_pending=10)
    )
    await publish(queues, unique, 1, 10)
    messages = await queues.fetch(stream, "reader", 5)
    await messages[0].ack(confirm=True)
    await messages[2].ack(confirm=True)  # 2, 4 and 5 are in hand
    await queues.streams.update(stream, {"allow_direct": True})
    before = [(each.sequence, each.timestamp) for each in await _all(queues, stream)]
    assert await quick.begin(declare_queue(unique), strategy=Strategy.SNAPSHOT) is QueueStatus.READY
    assert [(each.sequence, each.timestamp) for each in await _all(queues, stream)] == before
    await messages[1].ack(confirm=True)
    worker = Worker(queues, stream)
    async with running(worker):
        await until(lambda: len(worker.done) >= 7)
    assert sorted(worker.done) == [4, 5, 6, 7, 8, 9, 10]
    assert (await queues.streams.info(stream)).state.messages == 0


async def _all(queues: Queues, stream: str) -> "list[_Row]":
    found = []
    async for batch in queues.read_range(stream, 1, 1000):
        found += [_Row(row["sequence"], row["timestamp"]) for row in batch.to_pylist()]
    return found


@dataclasses.dataclass(frozen=True)
class _Row:
    sequence: int
    timestamp: datetime


async def test_publishers_and_readers_wait_and_go_on(queues: Queues, quick: Migrator, unique: str) -> None:
    stream = await make_old_stream(queues, unique, Retention.LIMITS, storage=Storage.MEMORY)
    await publish(queues, unique, 1, 50)
    worker = Worker(queues, stream)
    queue = declare_queue(unique, Retention.LIMITS)
    async with running(worker):
        publishing = asyncio.create_task(publish(queues, unique, 51, 150))
        assert (await quick.plan(queue)).strategy is Strategy.SNAPSHOT
        await quick.begin(queue)
        await finish_migration(quick, queue)
        await publishing
        await until(lambda: len(worker.done) >= 150)
    assert worker.done == list(range(1, 151))
    info = await queues.streams.info(stream)
    assert (info.config.storage, info.state.messages, info.state.last_seq) == (Storage.FILE, 150, 150)


async def test_the_archive_is_kept_until_the_next_success(queues: Queues, quick: Migrator, unique: str) -> None:
    archives = quick.options.archives
    assert archives is not None
    await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 3)
    await quick.begin(declare_queue(unique), strategy=Strategy.SNAPSHOT)
    (first,) = archives.iterdir()
    assert {each.name for each in first.iterdir()} == {"manifest.json", "stream.tar.s2"}
    assert first.stat().st_mode & 0o077 == 0
    await quick.begin(declare_queue(unique, Retention.WORK_QUEUE), strategy=Strategy.SNAPSHOT)
    (second,) = archives.iterdir()
    assert second != first
    assert (await queues.streams.info(f"stream:{unique}")).state.messages == 3


async def test_a_damaged_archive_is_never_restored(queues: Queues, quick: Migrator, unique: str) -> None:
    stream = await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 3)

    class Crash(BaseException):
        pass

    def crash(step: Step) -> None:
        if step is Step.DELETED:
            raise Crash

    crashing = quick.with_options(dataclasses.replace(quick.options, on_step=crash))
    with pytest.raises(Crash):
        await crashing.begin(declare_queue(unique), strategy=Strategy.SNAPSHOT)
    assert stream not in await queues.streams.names()
    assert quick.options.archives is not None
    (archive,) = quick.options.archives.iterdir()
    data = archive / "stream.tar.s2"
    whole = await asyncio.to_thread(data.read_bytes)
    await asyncio.to_thread(data.write_bytes, bytes(len(whole)))
    with pytest.raises(DataLost, match="damaged"):
        await finish_migration(quick, declare_queue(unique))
    await asyncio.to_thread(data.write_bytes, whole)
    # A program that only writes finds the queue gone, and brings it back instead of making an empty one.
    ensurer = Ensurer(queues.streams, queues.consumers, quick)

    async def ready() -> bool:
        return (await ensurer.ensure(declare_queue(unique))).status is QueueStatus.READY

    await until(ready)
    assert (await queues.streams.info(stream)).state.messages == 3


async def test_an_empty_restore_is_repeated_and_no_publisher_could_write_to_it(
    queues: Queues, quick: Migrator, unique: str
) -> None:
    """What a cluster was seen to leave behind when a node died: the stream, in its place, without its messages."""
    stream = await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 3)

    class Crash(BaseException):
        pass

    def crash(step: Step) -> None:
        if step is Step.DELETED:
            raise Crash

    crashing = quick.with_options(dataclasses.replace(quick.options, on_step=crash))
    with pytest.raises(Crash):
        await crashing.begin(declare_queue(unique), strategy=Strategy.SNAPSHOT)
    record = await quick.record(unique)
    assert record is not None
    await queues.streams._api.request(f"STREAM.CREATE.{stream}", recreate.restoring_config(record))
    publishing = asyncio.create_task(publish(queues, unique, 4, 5))
    await finish_migration(quick, declare_queue(unique))
    await publishing
    assert [each.sequence for each in await _all(queues, stream)] == [1, 2, 3, 4, 5]
    assert (await queues.streams.info(stream)).config.subjects == (unique, f"{unique}.>")


def test_a_majority_of_replicas_is_enough() -> None:
    good, behind, away = {"current": True}, {"current": False}, {"current": True, "offline": True}
    assert has_enough_replicas({})
    assert has_enough_replicas({"cluster": {"leader": "a", "replicas": [good, away]}})
    assert not has_enough_replicas({"cluster": {"leader": "a", "replicas": [behind, away]}})


async def test_scheduled_messages_and_those_that_expire_are_carried_over(
    queues: Queues, quick: Migrator, unique: str
) -> None:
    """In a sealed stream a schedule would never become due, so such a queue is not drained."""
    stream, api = f"stream:{unique}", queues.streams._api
    config = {"name": stream, "subjects": [unique, f"{unique}.>"], "retention": "limits", "storage": "memory"}
    await api.request(f"STREAM.CREATE.{stream}", config | {"allow_msg_ttl": True, "allow_msg_schedules": True})
    due = datetime.now(UTC) + timedelta(seconds=10)  # behind the plan, also on a busy machine
    schedule = {"Nats-Schedule": f"@at {due:%Y-%m-%dT%H:%M:%SZ}", "Nats-Schedule-Target": f"{unique}.due"}
    await queues.publish(f"{unique}.plan", b"later", headers=schedule)
    await queues.publish(f"{unique}.brief", b"gone soon", headers={"Nats-TTL": "10s"})
    queue = declare_queue(unique, Retention.LIMITS)
    plan = await quick.plan(queue)
    assert plan.strategy is Strategy.SNAPSHOT
    assert "scheduled" in (plan.obstacle(Strategy.DRAIN) or "")
    assert await quick.begin(queue) is QueueStatus.READY

    async def due_and_gone() -> bool:
        return set(await queues.streams.subjects(stream)) == {f"{unique}.due"}

    await until(due_and_gone)


async def test_a_start_never_takes_a_snapshot_by_itself(queues: Queues, unique: str) -> None:
    """It would need a directory that no setting names."""
    await make_old_stream(queues, unique, Retention.LIMITS, storage=Storage.MEMORY)
    with pytest.raises(MigrationNeeded, match="purveyor queues apply"):
        await queues.ensure(declare_queue(unique, Retention.LIMITS), migrate=True)
    assert not (await queues.streams.info(f"stream:{unique}")).config.sealed


async def test_a_drain_without_readers_can_become_a_snapshot(queues: Queues, quick: Migrator, unique: str) -> None:
    stream = await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 5)
    queue = declare_queue(unique)
    assert await quick.begin(queue) is QueueStatus.SEALED_FOR_MIGRATION
    assert await quick.begin(queue, strategy=Strategy.SNAPSHOT) is QueueStatus.READY
    assert (await queues.streams.info(stream)).state.messages == 5
