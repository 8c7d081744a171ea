"""Both sides of a queue call `ensure`, in any order, from many processes at once."""

import asyncio
import dataclasses
import multiprocessing
import random
from datetime import timedelta

import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.config import AckPolicy, ConsumerConfig, Retention, Storage, StreamConfig
from purveyor.model.errors import InvalidName, MigrationNeeded
from purveyor.queues.catalogue import PREFILL, Queue, Reader, incoming, internal_queues, stage_queue, subscription_queue
from purveyor.queues.client import Queues, connect
from purveyor.queues.ensure import Action
from purveyor.queues.migration.plan import stream_differences
from purveyor.queues.migration.record import QueueStatus


def queue(name: str, retention: Retention = Retention.INTEREST, *readers: Reader) -> Queue:
    return Queue(
        name=name,
        purpose="a test",
        subjects=(f"{name}", f"{name}.>"),
        retention=retention,
        writer="test",
        readers=readers or (Reader(durable="reader", used_by="test"),),
    )


@pytest.mark.parametrize("retention", list(Retention))
async def test_it_creates_then_leaves_alone(queues: Queues, unique: str, retention: Retention) -> None:
    declared = queue(unique, retention)
    assert (await queues.ensure(declared)).action is Action.CREATED
    info = await queues.streams.info(declared.stream)
    assert info.config.retention is retention
    assert [c.name for c in await queues.consumers.list(declared.stream)] == ["reader"]
    again = await queues.ensure(declared)
    assert (again.status, again.action) == (QueueStatus.READY, Action.NOTHING)


async def test_nothing_written_after_ensure_is_lost_for_a_reader_that_comes_later(queues: Queues, unique: str) -> None:
    declared = queue(unique)
    await queues.ensure(declared)
    await queues.publish(unique, b"early", msg_id="1")
    await queues.ensure(declared)  # the reader starts
    (message,) = await queues.fetch(declared.stream, "reader")
    assert message.data == b"early"


async def test_an_interest_queue_keeps_what_is_written_while_it_is_being_made(queues: Queues, unique: str) -> None:
    """A writer that does not wait for `ensure` publishes as soon as the stream exists."""
    declared = queue(unique)
    stored: list[int] = []
    done = asyncio.Event()

    async def write() -> None:
        while not done.is_set():
            try:
                stored.append((await queues.publish(unique, b"x", msg_id=str(len(stored)))).sequence)
            except Exception:  # noqa: BLE001 - no stream yet
                await asyncio.sleep(0)

    writing = asyncio.create_task(write())
    await asyncio.sleep(0.02)
    await queues.ensure(declared)
    done.set()
    await writing
    assert (await queues.streams.info(declared.stream)).state.messages == len(stored)


async def test_what_can_change_in_place_is_changed_and_limits_of_the_operator_stay(queues: Queues, unique: str) -> None:
    await queues.ensure(queue(unique, Retention.LIMITS))
    stream = f"stream:{unique}"
    await queues.streams.update(stream, {"max_bytes": 1_000_000, "allow_direct": False})
    reader = Reader(durable="reader", used_by="test", ack_wait=timedelta(seconds=7), max_ack_pending=9)
    second = Reader(durable="second", used_by="test")
    ensured = await queues.ensure(queue(unique, Retention.INTEREST, reader, second))
    assert (ensured.status, ensured.action) == (QueueStatus.READY, Action.UPDATED)
    config = (await queues.streams.info(stream)).config
    assert (config.retention, config.max_bytes, config.allow_direct) == (Retention.INTEREST, 1_000_000, True)
    consumer = (await queues.consumers.info(stream, "reader")).config
    assert (consumer.ack_wait, consumer.max_ack_pending) == (timedelta(seconds=7), 9)


async def test_a_durable_of_a_work_queue_loses_its_limit_in_place_with_what_it_holds(
    queues: Queues, unique: str
) -> None:
    """As that of `prefill`, which had one."""
    limited = Reader(durable="reader", used_by="test", max_ack_pending=2)
    await queues.ensure(queue(unique, Retention.WORK_QUEUE, limited))
    for number in range(4):
        await queues.publish(unique, str(number).encode())
    stream = f"stream:{unique}"
    assert len(await queues.fetch(stream, "reader", 4, wait_seconds=0)) == 2
    assert PREFILL.readers[0].max_ack_pending == -1
    unlimited = dataclasses.replace(limited, max_ack_pending=PREFILL.readers[0].max_ack_pending)
    ensured = await queues.ensure(queue(unique, Retention.WORK_QUEUE, unlimited))
    assert (ensured.status, ensured.action) == (QueueStatus.READY, Action.UPDATED)
    assert [message.data for message in await queues.fetch(stream, "reader", 4, wait_seconds=0)] == [b"2", b"3"]
    assert (await queues.consumers.info(stream, "reader")).num_ack_pending == 4
    again = await queues.ensure(queue(unique, Retention.WORK_QUEUE, unlimited))
    assert again.action is Action.NOTHING


async def test_filters_of_a_durable_follow_the_declaration(queues: Queues, unique: str) -> None:
    one = Reader(durable="reader", used_by="test", filter_subjects=(f"{unique}.a",))
    two = dataclasses.replace(one, filter_subjects=(f"{unique}.a", f"{unique}.b"))
    for reader in (one, two, one):
        await queues.ensure(queue(unique, Retention.LIMITS, reader))
        config = (await queues.consumers.info(f"stream:{unique}", "reader")).config
        assert config.filters == reader.filter_subjects


async def test_a_work_queue_of_the_older_system_needs_migration_and_is_not_touched(queues: Queues, unique: str) -> None:
    stream = f"stream:{unique}"
    await queues.streams.add(
        StreamConfig(name=stream, subjects=(unique,), retention=Retention.WORK_QUEUE, allow_direct=False)
    )
    await queues.publish(unique, b"precious")
    before = await queues.streams.raw_info(stream)
    ensured = await queues.ensure(queue(unique))
    assert ensured.status is QueueStatus.NEEDS_MIGRATION
    assert "stream retention: workqueue -> interest" in map(str, ensured.differences)
    after = await queues.streams.raw_info(stream)
    assert (after["config"], after["state"]) == (before["config"], before["state"])
    with pytest.raises(MigrationNeeded, match="workqueue -> interest"):
        ensured.require_ready()
    await queues.streams.seal(stream)
    assert (await queues.ensure(queue(unique))).status is QueueStatus.SEALED_FOR_MIGRATION


async def test_a_durable_that_cannot_change_needs_migration(queues: Queues, unique: str) -> None:
    await queues.streams.add(StreamConfig(name=f"stream:{unique}", subjects=(unique,)))
    await queues.consumers.add(f"stream:{unique}", ConsumerConfig(durable_name="reader", ack_policy=AckPolicy.ALL))
    ensured = await queues.ensure(queue(unique, Retention.LIMITS))
    assert ensured.status is QueueStatus.NEEDS_MIGRATION
    assert [str(d) for d in ensured.differences if not d.in_place] == ["consumer reader ack_policy: all -> explicit"]


def test_storage_and_work_queues_cannot_change_in_place_and_the_rest_can() -> None:
    base = StreamConfig(name="s", subjects=("a", "b"))

    def in_place(**change: object) -> list[bool]:
        return [d.in_place for d in stream_differences(base, dataclasses.replace(base, **change))]  # type: ignore[arg-type]

    assert in_place(storage=Storage.MEMORY) == [False]
    assert in_place(retention=Retention.WORK_QUEUE) == [False]
    assert in_place(retention=Retention.INTEREST) == [True]
    assert in_place(num_replicas=3, subjects=("a",), allow_atomic=True) == [True, True, True]
    assert in_place(subjects=("b", "a"), max_msgs=5) == []


async def test_every_queue_of_the_catalogue_can_be_made_side_by_side(queues: Queues, unique: str) -> None:
    everything = (*internal_queues(), incoming(("primary", "backup")), subscription_queue(unique))
    for declared in (*everything, stage_queue(f"{unique}.place", 3)):
        assert (await queues.ensure(declared)).status is QueueStatus.READY
    readers = [c.name for c in await queues.consumers.list("stream:incoming")]
    assert set(readers) >= {"archive", "primary", "backup", "dispatcher"}


@pytest.mark.parametrize("name", ["incoming", "ldif", "prefill", "prefill-failures", "dead-letters", "stage-x", "a.b"])
def test_a_subscription_cannot_take_an_internal_name(name: str) -> None:
    with pytest.raises(InvalidName):
        subscription_queue(name)


PROCESSES, ROUNDS = 8, 50


def _race(address: Address, prefix: str, seed: int, barrier: object, results: object) -> None:
    async def run() -> list[str]:
        chance = random.Random(seed)
        async with connect(address) as queues:
            problems = []
            for number in range(ROUNDS):
                await asyncio.to_thread(barrier.wait)  # type: ignore[attr-defined]
                await asyncio.sleep(chance.random() * 0.005)
                declared = queue(f"{prefix}-{number}", list(Retention)[number % 3])
                try:
                    ensured = await queues.ensure(declared)
                    await queues.publish(declared.name, b"x", msg_id=f"{seed}")
                except Exception as error:  # noqa: BLE001 - reported by the parent
                    problems.append(f"round {number}: {error!r}")
                    continue
                if ensured.status is not QueueStatus.READY:
                    problems.append(f"round {number}: {ensured}")
            return problems

    results.put(asyncio.run(run()))  # type: ignore[attr-defined]


async def test_eight_processes_racing_agree(address: Address, queues: Queues, unique: str) -> None:
    """8 x 50 rounds: no error, one result, and no message of any of them lost."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(PROCESSES), context.Queue()
    racers = [
        context.Process(target=_race, args=(address, unique, seed, barrier, results)) for seed in range(PROCESSES)
    ]
    for racer in racers:
        racer.start()
    problems = [await asyncio.to_thread(results.get, timeout=120) for _ in racers]
    for racer in racers:
        await asyncio.to_thread(racer.join)
    assert [problem for found in problems for problem in found] == []
    for number in range(ROUNDS):
        info = await queues.streams.info(f"stream:{unique}-{number}")
        assert info.config.retention is list(Retention)[number % 3]
        assert [c.name for c in await queues.consumers.list(info.config.name)] == ["reader"]
        assert info.state.messages == PROCESSES
