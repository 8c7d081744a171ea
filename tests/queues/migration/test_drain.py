"""A queue that cannot change in place is sealed, drained and created again; no message is lost or doubled."""

import asyncio
import logging

import pyarrow as pa
import pytest

from purveyor.jetstream import PublishMode, PublishOptions, Target, append_once
from purveyor.jetstream.address import Address
from purveyor.jetstream.config import ConsumerConfig, Retention, Storage, StreamConfig
from purveyor.model.errors import MigrationNeeded, QueueMigrating
from purveyor.queues.client import Queues, connect
from purveyor.queues.migration.migrator import Migrator
from purveyor.queues.migration.record import QueueStatus
from tests.support.migrations import Worker, declare_queue, finish_migration, make_old_stream, publish, running
from tests.support.waiting import until


async def test_the_older_systems_queue_is_taken_over_in_place(
    queues: Queues, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A work queue with the durable of before, a backlog, and publishers that do not stop."""
    caplog.set_level(logging.INFO, "purveyor.migration")
    stream = await make_old_stream(queues, unique, durable="durable_name:incoming")
    await publish(queues, unique, 1, 30)
    publishing = asyncio.create_task(publish(queues, unique, 31, 300))
    queue = declare_queue(unique, Retention.INTEREST, "dispatcher")
    worker = Worker(queues, stream, "dispatcher")
    ensured = await queues.ensure(queue, migrate=True)
    assert ensured.require_usable().status is QueueStatus.SEALED_FOR_MIGRATION
    async with running(worker):
        await publishing
        await until(lambda: len(worker.done) >= 300)
    assert worker.done == list(range(1, 301))
    assert (await queues.ensure(queue)).status is QueueStatus.READY
    config = (await queues.streams.info(stream)).config
    assert (config.retention, config.sealed, config.subjects) == (Retention.INTEREST, False, queue.subjects)
    assert [each.name for each in await queues.consumers.list(stream)] == ["dispatcher"]
    logged = [record.getMessage() for record in caplog.records if stream in record.getMessage()]
    assert logged[0] == f"Stream '{stream}' sealed for migration"
    assert "messages remaining to drain" in logged[1]
    assert logged[-2:] == [
        f"Sealed stream '{stream}' is empty, completing migration",
        f"Migration completed for '{stream}'",
    ]
    assert caplog.records[-1].getMessage() == "Stream migration completed, resuming normal operation"


async def test_without_permission_the_error_names_the_guide(queues: Queues, unique: str) -> None:
    stream = await make_old_stream(queues, unique)
    ensured = await queues.ensure(declare_queue(unique))
    with pytest.raises(MigrationNeeded) as refused:
        ensured.require_usable()
    assert f"Stream '{stream}' update failed but migration not enabled. See docs/guides/migration.md." in str(
        refused.value
    )
    assert not (await queues.streams.info(stream)).config.sealed


async def test_an_empty_queue_is_created_again_at_once_and_continues_its_sequences(queues: Queues, unique: str) -> None:
    """And what an operator has set stays, although sealing destroys it."""
    stream = await make_old_stream(queues, unique, max_msgs=1000, max_msg_size=5000)
    await queues.streams.update(stream, {"max_age": 3600 * 10**9, "metadata": {"owner": "ops"}})
    await publish(queues, unique, 1, 3)
    for message in await queues.fetch(stream, "reader", 1):
        await message.ack(confirm=True)
    worker = Worker(queues, stream)
    async with running(worker):
        await until(lambda: worker.done == [2, 3])
    ensured = await queues.ensure(declare_queue(unique), migrate=True)
    assert ensured.status is QueueStatus.READY
    raw = await queues.streams.raw_info(stream)
    assert (raw["state"]["first_seq"], raw["state"]["last_seq"]) == (4, 3)
    assert (raw["config"]["max_msgs"], raw["config"]["max_age"], raw["config"]["max_msg_size"]) == (
        1000,
        3600 * 10**9,
        5000,
    )
    assert (raw["config"]["discard"], raw["config"]["deny_delete"]) == ("old", False)
    assert raw["config"]["metadata"]["owner"] == "ops"
    assert (await queues.publish(unique, b"4", msg_id="next")).sequence == 4
    assert (await queues.ensure(declare_queue(unique), migrate=True)).status is QueueStatus.READY


async def test_a_late_acknowledgement_of_before_removes_nothing_of_after(queues: Queues, unique: str) -> None:
    stream = await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 1)
    (late,) = await queues.fetch(stream, "reader")
    await late.ack(confirm=True)
    assert (await queues.ensure(declare_queue(unique), migrate=True)).status is QueueStatus.READY
    await publish(queues, unique, 2, 2)
    await late.ack()
    await queues.connection.flush()
    assert (await queues.streams.info(stream)).state.messages == 1


async def test_two_dispatchers_with_different_durables_drain_one_sealed_work_queue(
    address: Address, queues: Queues, unique: str
) -> None:
    """After it, each of them gets everything."""
    stream = await make_old_stream(queues, unique, durable="durable_name:incoming")
    await publish(queues, unique, 1, 40)
    async with connect(address) as second:
        primary, backup = Worker(queues, stream, "primary"), Worker(second, stream, "backup")
        for connected, name in ((queues, "primary"), (second, "backup")):
            ensured = await connected.ensure(declare_queue(unique, Retention.INTEREST, name), migrate=True)
            assert ensured.status is QueueStatus.SEALED_FOR_MIGRATION
        async with running(primary, backup):
            await publish(queues, unique, 41, 60)
            await until(lambda: {60} <= {*primary.done} & {*backup.done})
    assert sorted(number for number in primary.done + backup.done if number <= 40) == list(range(1, 41))
    assert [number for number in primary.done if number > 40] == list(range(41, 61))
    assert [number for number in backup.done if number > 40] == list(range(41, 61))


async def test_messages_past_their_deliveries_are_parked_so_that_a_drain_ends(
    queues: Queues, quick: Migrator, unique: str
) -> None:
    stream = await make_old_stream(queues, unique, durable=None)
    await queues.consumers.add(stream, ConsumerConfig(durable_name="reader", max_deliver=2, max_ack_pending=1))
    await publish(queues, unique, 1, 6)
    queue = declare_queue(unique)
    worker = Worker(queues, stream, poison=frozenset({2, 5}))
    await quick.begin(queue)
    async with running(worker):
        await finish_migration(quick, queue)
    assert worker.done == [1, 3, 4, 6]
    found = [await queues.streams.get_last("stream:dead-letters", f"dead-letters.stream-{unique}")]
    assert found[0].data == b"5"
    assert await queues.streams.subjects("stream:dead-letters", f"dead-letters.stream-{unique}") == {
        f"dead-letters.stream-{unique}": 2
    }


async def test_what_a_reader_of_before_gave_up_is_brought_back_for_those_of_now(
    queues: Queues, quick: Migrator, unique: str
) -> None:
    stream = await make_old_stream(queues, unique, durable=None)
    await queues.consumers.add(stream, ConsumerConfig(durable_name="old", max_deliver=1))
    await publish(queues, unique, 1, 3)
    for message in await queues.fetch(stream, "old", 3):
        await (message.nak() if message.data == b"2" else message.ack(confirm=True))
    assert await queues.fetch(stream, "old", 1, wait_seconds=0) == []
    queue = declare_queue(unique)
    await quick.begin(queue)
    worker = Worker(queues, stream)
    await eventually_removed(queues, quick, queue.name, stream)
    async with running(worker):
        await finish_migration(quick, queue)
    assert worker.done == [2]


async def eventually_removed(queues: Queues, migrations: Migrator, queue: str, stream: str) -> None:
    async def removed() -> bool:
        await migrations.advance(queue)
        return all(each.name != "old" for each in await queues.consumers.list(stream))

    await until(removed)


async def test_storage_and_subjects_change_on_the_way(queues: Queues, unique: str) -> None:
    stream = await make_old_stream(queues, unique, Retention.INTEREST, storage=Storage.MEMORY)
    await publish(queues, unique, 1, 5)
    worker = Worker(queues, stream)
    queue = declare_queue(unique)
    assert (await queues.ensure(queue, migrate=True)).status is QueueStatus.SEALED_FOR_MIGRATION
    async with running(worker):
        await queues.publish(f"{unique}.more", b"6", msg_id="6")
        await until(lambda: worker.done == [1, 2, 3, 4, 5, 6])
    config = (await queues.streams.info(stream)).config
    assert (config.storage, config.subjects) == (Storage.FILE, queue.subjects)


async def test_publishers_wait_no_longer_than_their_patience(address: Address, queues: Queues, unique: str) -> None:
    stream = await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 1)
    await queues.ensure(declare_queue(unique), migrate=True)
    async with connect(address, patience_seconds=2) as hasty:
        with pytest.raises(QueueMigrating):
            await hasty.publish(unique, b"2")
    assert (await queues.streams.info(stream)).state.messages == 1


@pytest.mark.parametrize("mode", list(PublishMode))
async def test_bulk_publishers_wait_and_keep_their_order(queues: Queues, unique: str, mode: PublishMode) -> None:
    stream = await make_old_stream(queues, unique, allow_atomic=True)
    await publish(queues, unique, 1, 1)
    await queues.ensure(declare_queue(unique), migrate=True)
    messages = ((unique, b"%d" % number, None, f"bulk-{number}") for number in range(2, 3001))
    publishing = asyncio.create_task(queues.publish_many(messages, PublishOptions(mode=mode)))
    worker = Worker(queues, stream)
    async with running(worker):
        assert (await publishing).stored == 2999
        await until(lambda: len(worker.done) >= 1500)
    assert worker.done == list(range(1, len(worker.done) + 1))


async def test_a_stream_that_is_no_queue_refuses_at_once_when_sealed(queues: Queues, unique: str) -> None:
    await queues.streams.add(StreamConfig(name=unique, subjects=(unique,)))
    await queues.streams.seal(unique)
    with pytest.raises(Exception, match="sealed"):
        await queues.publish(unique, b"x")


async def test_rows_that_are_appended_once_wait_too(address: Address, queues: Queues, unique: str) -> None:
    stream = await make_old_stream(queues, unique, allow_atomic=True)
    await publish(queues, unique, 1, 2)
    await queues.ensure(declare_queue(unique), migrate=True)
    rows = pa.table(
        {
            "position": pa.array(range(3, 203), pa.int64()),
            "data": pa.array([b"%d" % number for number in range(3, 203)], pa.binary()),
            "msg_id": pa.array([f"row-{number}" for number in range(3, 203)], pa.string()),
        }
    )
    target = Target(subject=unique, stream=stream)
    appending = asyncio.create_task(asyncio.to_thread(append_once, address, [(target, rows)]))
    worker = Worker(queues, stream)
    async with running(worker):
        (outcome,) = await appending
        assert (outcome.refused, outcome.last_position) == (None, 202)
        await until(lambda: len(worker.done) >= 202)
    assert worker.done == list(range(1, 203))
