"""Consumers begin at their start position, count their deliveries, and understand every kind of acknowledgement."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta

import pytest

from purveyor.jetstream.config import (
    AckPolicy,
    ConsumerConfig,
    Deliver,
    Replay,
    Retention,
    StreamConfig,
)
from purveyor.jetstream.messages import Message, parse_delivery
from purveyor.jetstream.puller import PullOptions
from purveyor.model.errors import AlreadyExists, InvalidConfig, InvalidInput, UnknownConsumer, UnknownStream
from purveyor.queues.client import Queues
from tests.support.bulk_messages import fill
from tests.support.waiting import until


async def orders(queues: Queues, name: str, count: int) -> None:
    await queues.streams.add(StreamConfig(name=name, subjects=(name,)))
    await fill(queues, name, count)


async def next_one(queues: Queues, stream: str, consumer: str, wait_seconds: float = 60) -> Message:
    (message,) = await queues.fetch(stream, consumer, wait_seconds=wait_seconds)
    return message


async def test_a_consumer_counts_deliveries_and_acknowledgements(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 0)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="DISPATCH", ack_wait=timedelta(seconds=2)))

    async def numbers() -> tuple[int, int, int, int, int]:
        info = await queues.consumers.info(unique, "DISPATCH")
        return (
            info.delivered.consumer_seq,
            info.delivered.stream_seq,
            info.ack_floor.stream_seq,
            info.num_ack_pending,
            info.num_redelivered,
        )

    assert await numbers() == (0, 0, 0, 0, 0)
    await queues.publish(unique, b"order 4")
    await (await next_one(queues, unique, "DISPATCH")).ack(confirm=True)
    assert await numbers() == (1, 1, 1, 0, 0)
    await queues.publish(unique, b"order 5")
    await next_one(queues, unique, "DISPATCH")  # not acknowledged
    assert await numbers() == (2, 2, 1, 1, 0)
    again = await next_one(queues, unique, "DISPATCH")  # comes again after the ack wait
    assert (again.data, again.delivery.delivered) == (b"order 5", 2)
    assert await numbers() == (3, 2, 1, 1, 1)
    await again.ack(confirm=True)
    assert (await numbers())[2:] == (2, 0, 0)


@pytest.mark.parametrize(
    ("deliver", "expected"),
    [
        ({"deliver_policy": Deliver.ALL}, b"order 1"),
        ({"deliver_policy": Deliver.LAST}, b"order 20"),
        ({"deliver_policy": Deliver.BY_START_SEQUENCE, "opt_start_seq": 10}, b"order 10"),
    ],
)
async def test_a_consumer_begins_at_its_start_position(
    queues: Queues, unique: str, deliver: dict[str, object], expected: bytes
) -> None:
    await orders(queues, unique, 20)
    config = ConsumerConfig(durable_name="C", ack_policy=AckPolicy.NONE, **deliver)  # type: ignore[arg-type]
    await queues.consumers.add(unique, config)
    assert (await next_one(queues, unique, "C")).data == expected


async def test_new_and_start_time(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 3)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="NEW", deliver_policy=Deliver.NEW))
    second = (await queues.streams.get(unique, 2)).timestamp
    await queues.consumers.add(
        unique, ConsumerConfig(durable_name="TIME", deliver_policy=Deliver.BY_START_TIME, opt_start_time=second)
    )
    assert (await next_one(queues, unique, "TIME")).data == b"order 2"
    await queues.publish(unique, b"fresh")
    assert (await next_one(queues, unique, "NEW")).data == b"fresh"


async def test_ack_all_acknowledges_everything_before(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 10)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="C", ack_policy=AckPolicy.ALL))
    messages = await queues.fetch(unique, "C", 10)
    await messages[6].ack(confirm=True)
    info = await queues.consumers.info(unique, "C")
    assert (info.ack_floor.stream_seq, info.num_ack_pending) == (7, 3)


async def test_nak_redelivers_at_once_or_after_a_delay(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 1)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="C"))
    await (await next_one(queues, unique, "C")).nak()
    again = await next_one(queues, unique, "C")
    assert again.delivery.delivered == 2
    delay, began = timedelta(seconds=0.4), time.monotonic()
    await again.nak(delay=delay, confirm=True)
    assert (await next_one(queues, unique, "C")).delivery.delivered == 3
    assert time.monotonic() - began >= delay.total_seconds()


async def test_in_progress_restarts_the_ack_wait(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 1)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="C", ack_wait=timedelta(seconds=6)))
    message = await next_one(queues, unique, "C")
    for _ in range(8):  # longer than the wait, in steps that are much shorter
        await message.in_progress(confirm=True)
        assert await queues.fetch(unique, "C", wait_seconds=0.8) == []
    await message.ack(confirm=True)
    assert (await queues.consumers.info(unique, "C")).num_redelivered == 0


async def test_ack_next_acknowledges_and_returns_the_next(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 2)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="C"))
    second = await (await next_one(queues, unique, "C")).ack_next()
    assert second is not None
    assert second.data == b"order 2"
    assert await second.ack_next(wait_seconds=0.2) is None
    assert (await queues.consumers.info(unique, "C")).ack_floor.stream_seq == 2


async def test_term_ends_redelivery_with_a_reason(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 1)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="C"))
    advisories = await queues.connection.subscribe(f"$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.{unique}.C")
    message = await next_one(queues, unique, "C")
    await message.term("not an order", confirm=True)
    advisory = await advisories.next(60)
    assert advisory is not None
    assert b"not an order" in advisory.data
    info = await queues.consumers.info(unique, "C")
    assert (info.num_ack_pending, info.num_pending) == (0, 0)  # it is neither awaited nor delivered again
    with pytest.raises(InvalidInput):
        await message.term("two\r\nlines")


async def test_max_deliver_and_backoff_bound_the_attempts(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 1)
    config = ConsumerConfig(durable_name="C", max_deliver=3, backoff=(timedelta(seconds=0.1), timedelta(seconds=0.2)))
    await queues.consumers.add(unique, config)
    attempts = [(await next_one(queues, unique, "C")).delivery.delivered for _ in range(3)]
    assert attempts == [1, 2, 3]
    assert await queues.fetch(unique, "C", wait_seconds=0.6) == []
    with pytest.raises(InvalidConfig):
        await queues.consumers.add(
            unique, ConsumerConfig(durable_name="D", max_deliver=1, backoff=(timedelta(1), timedelta(2)))
        )


async def test_an_unused_ephemeral_consumer_is_deleted(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 1)
    info = await queues.consumers.add(unique, ConsumerConfig(inactive_threshold=timedelta(seconds=2)))
    assert info.name in [consumer.name for consumer in await queues.consumers.list(unique)]

    async def gone() -> bool:
        return not await queues.consumers.list(unique)

    await until(gone)


async def test_replay_original_keeps_the_original_intervals(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 1)
    await asyncio.sleep(0.5)  # the pace itself, not a guess
    await queues.publish(unique, b"order 2")
    stamps = [(await queues.streams.get(unique, n)).timestamp for n in (1, 2)]
    assert stamps[0] is not None
    assert stamps[1] is not None
    pace = stamps[1] - stamps[0]
    await queues.consumers.add(unique, ConsumerConfig(durable_name="C", replay_policy=Replay.ORIGINAL))
    began, arrivals = datetime.now(UTC), []
    async with contextlib.aclosing(queues.pull(unique, "C")) as messages:
        async for message in messages:
            arrivals.append(datetime.now(UTC))
            await message.ack()
            if len(arrivals) == 2:
                break
    assert arrivals[1] - began > pace * 0.8


async def test_acknowledgements_are_sampled(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 2)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="C", sample_freq="100"))
    async with contextlib.aclosing(queues.consumers.samples(unique, "C")) as samples:
        first = asyncio.ensure_future(anext(samples))
        await asyncio.sleep(0)
        await queues.connection.flush()
        await (await next_one(queues, unique, "C")).ack(confirm=True)
        sample = await asyncio.wait_for(first, 120)
    assert (sample.stream, sample.consumer, sample.sequence, sample.deliveries) == (unique, "C", 1, 1)
    assert sample.delay > timedelta(0)


async def test_pause_and_resume(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 1)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="C"))
    await queues.consumers.pause(unique, "C", datetime.now(UTC) + timedelta(hours=1))
    assert (await queues.consumers.info(unique, "C")).paused
    assert await queues.fetch(unique, "C", wait_seconds=0.3) == []
    await queues.consumers.resume(unique, "C")
    assert (await next_one(queues, unique, "C")).data == b"order 1"
    with pytest.raises(InvalidInput):
        await queues.consumers.pause(unique, "C", datetime.now(UTC) - timedelta(hours=1))


async def test_a_reset_moves_a_durable_and_deletes_messages_that_all_have_passed(queues: Queues, unique: str) -> None:
    config = StreamConfig(name=unique, subjects=(unique,), retention=Retention.INTEREST)
    await queues.streams.add(config)
    for reader in ("a", "b"):
        await queues.consumers.add(unique, ConsumerConfig(durable_name=reader))
    await fill(queues, unique, 10)
    await queues.consumers.reset(unique, "a", 6)
    assert (await queues.streams.info(unique)).state.messages == 10
    await queues.consumers.reset(unique, "b", 4)
    assert (await queues.streams.info(unique)).state.first_seq == 4
    assert (await next_one(queues, unique, "a")).sequence == 6


async def test_the_pull_loop_yields_all_in_order_and_nacks_the_rest(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 250)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="C", ack_wait=timedelta(minutes=5)))
    seen = []
    async with contextlib.aclosing(queues.pull(unique, "C", PullOptions(batch=40))) as messages:
        async for message in messages:
            await message.ack()
            seen.append(message.sequence)
            if len(seen) == 200:
                break
    assert seen == list(range(1, 201))
    rest: list[int] = []
    while len(rest) < 50:  # not after five minutes: they were handed back
        for message in await queues.fetch(unique, "C", 50, wait_seconds=1):
            await message.ack(confirm=True)
            rest.append(message.sequence)
    assert sorted(rest) == list(range(201, 251))


async def test_a_pull_loop_closed_early_nacks_messages_in_flight(queues: Queues, unique: str) -> None:
    await queues.streams.add(StreamConfig(name=unique, subjects=(unique,)))
    await queues.publish_many((unique, bytes(20_000), None, None) for _ in range(2000))
    await queues.consumers.add(unique, ConsumerConfig(durable_name="C", ack_wait=timedelta(minutes=5)))
    seen: set[int] = set()
    for _ in range(10):
        async with contextlib.aclosing(queues.pull(unique, "C", PullOptions(batch=500))) as messages:
            async for message in messages:
                await message.ack(confirm=True)
                seen.add(message.sequence)
                break

    async def all_seen() -> bool:
        for message in await queues.fetch(unique, "C", 500, wait_seconds=1):
            await message.ack()
            seen.add(message.sequence)
        return len(seen) == 2000

    await until(all_seen)


async def test_a_pull_loop_ends_with_an_error_when_its_consumer_is_deleted(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 1)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="C"))

    async def consume() -> None:
        async with contextlib.aclosing(queues.pull(unique, "C")) as messages:
            async for message in messages:
                await message.ack()

    async with asyncio.TaskGroup() as group:
        loop = group.create_task(_expect_unknown(consume()))

        async def delivered() -> bool:
            return (await queues.consumers.info(unique, "C")).ack_floor.stream_seq == 1

        await until(delivered)
        await queues.consumers.remove(unique, "C")
    assert loop.result()


async def _expect_unknown(work: Awaitable[None]) -> bool:
    with pytest.raises((UnknownConsumer, UnknownStream)):
        await work
    return True


async def test_add_does_not_overwrite_a_consumer_with_other_settings(queues: Queues, unique: str) -> None:
    await orders(queues, unique, 0)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="C", max_ack_pending=5))
    with pytest.raises(AlreadyExists):
        await queues.consumers.add(unique, ConsumerConfig(durable_name="C", max_ack_pending=6))
    await queues.consumers.set(unique, ConsumerConfig(durable_name="C", max_ack_pending=6))
    assert (await queues.consumers.info(unique, "C")).config.max_ack_pending == 6
    with pytest.raises(UnknownConsumer, match="'unknown'"):
        await queues.fetch(unique, "unknown")


def test_both_forms_of_the_reply_subject_are_parsed() -> None:
    short = parse_delivery("$JS.ACK.S.C.2.7.3.1794771965086878736.12")
    long = parse_delivery("$JS.ACK._.hash.S.C.2.7.3.1794771965086878736.12.rnd")
    assert short == long
    assert short is not None
    assert (short.stream, short.delivered, short.sequence, short.pending) == ("S", 2, 7, 12)
    assert parse_delivery("_INBOX.x") is None
