"""Streams keep what their limits, retention and discard policies say."""

from datetime import timedelta

import pytest

from purveyor.jetstream.config import (
    AckPolicy,
    ConsumerConfig,
    Discard,
    Retention,
    Storage,
    StreamConfig,
    stored_size,
)
from purveyor.model.errors import (
    AlreadyExists,
    ConfigRefused,
    InvalidConfig,
    InvalidName,
    PublishRefused,
    UnknownMessage,
    UnknownStream,
)
from purveyor.queues.client import Queues
from tests.support.bulk_messages import fill
from tests.support.waiting import until


async def test_a_stored_message_takes_the_computed_bytes(queues: Queues, unique: str) -> None:
    subject = unique[-4:]  # four characters
    await queues.streams.add(StreamConfig(name=unique, subjects=(subject,)))
    await queues.publish(subject, b"hello")
    assert (await queues.streams.info(unique)).state.bytes == stored_size(4, 5) == 39


async def test_headers_cost_their_block_and_four_bytes(queues: Queues, unique: str) -> None:
    await queues.streams.add(StreamConfig(name=unique, subjects=(unique,)))
    await queues.publish(unique, b"hello1", msg_id="1")
    block = len(b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n")
    assert (await queues.streams.info(unique)).state.bytes == stored_size(len(unique), 6, block)


async def test_a_repeated_message_id_is_stored_once_within_the_window(queues: Queues, unique: str) -> None:
    await queues.streams.add(StreamConfig(name=unique, subjects=(unique,)))  # two minutes
    receipts = [await queues.publish(unique, b"hello", msg_id="1") for _ in range(4)]
    assert [receipt.duplicate for receipt in receipts] == [False, True, True, True]
    assert (await queues.streams.info(unique)).state.messages == 1

    await queues.streams.update(unique, {"duplicate_window": timedelta(milliseconds=100)})

    async def forgotten() -> bool:
        return not (await queues.publish(unique, b"hello", msg_id="1")).duplicate

    await until(forgotten)


async def test_discard_old_makes_room_and_discard_new_refuses(queues: Queues, unique: str) -> None:
    old, new = f"{unique}-old", f"{unique}-new"
    await queues.streams.add(StreamConfig(name=old, subjects=(old,), max_msgs=3))
    await queues.streams.add(StreamConfig(name=new, subjects=(new,), max_msgs=3, discard=Discard.NEW))
    await fill(queues, old, 5)
    state = (await queues.streams.info(old)).state
    assert (state.messages, state.first_seq, state.last_seq) == (3, 3, 5)
    await fill(queues, new, 3)
    with pytest.raises(PublishRefused) as refused:
        await queues.publish(new, b"one too many")
    assert refused.value.err_code == 10077
    assert refused.value.fix


async def test_each_limit_holds(queues: Queues, unique: str) -> None:
    config = StreamConfig(name=unique, subjects=(f"{unique}.*",), max_msgs_per_subject=1, max_msg_size=100)
    await queues.streams.add(config)
    await fill(queues, f"{unique}.a", 3)
    await fill(queues, f"{unique}.b", 2)
    assert await queues.streams.subjects(unique) == {f"{unique}.a": 1, f"{unique}.b": 1}
    with pytest.raises(PublishRefused, match="larger than the stream's maximum"):
        await queues.publish(f"{unique}.a", b"x" * 101)
    short = {"max_age": timedelta(milliseconds=200), "duplicate_window": timedelta(milliseconds=100)}
    await queues.streams.update(unique, short)

    async def empty() -> bool:
        return (await queues.streams.info(unique)).state.messages == 0

    await until(empty)
    await queues.streams.update(unique, {"max_age": timedelta(0), "max_bytes": 200, "max_msgs_per_subject": -1})
    await fill(queues, f"{unique}.a", 20)
    assert (await queues.streams.info(unique)).state.bytes <= 200


async def test_discarding_new_per_subject_needs_its_limit(queues: Queues, unique: str) -> None:
    with pytest.raises(InvalidConfig):
        await queues.streams.add(StreamConfig(name=unique, subjects=(unique,), discard_new_per_subject=True))
    config = StreamConfig(
        name=unique,
        subjects=(unique,),
        discard=Discard.NEW,
        discard_new_per_subject=True,
        max_msgs_per_subject=1,
    )
    await queues.streams.add(config)
    await queues.publish(unique, b"1")
    with pytest.raises(PublishRefused):
        await queues.publish(unique, b"2")


@pytest.mark.parametrize(
    ("retention", "left"),
    [(Retention.LIMITS, [3, 3]), (Retention.INTEREST, [3, 2]), (Retention.WORK_QUEUE, [2, 2])],
)
async def test_retention_decides_when_a_message_leaves(
    queues: Queues, unique: str, retention: Retention, left: list[int]
) -> None:
    """One consumer acknowledges, then (where a second may exist) the other."""
    await queues.streams.add(StreamConfig(name=unique, subjects=(unique,), retention=retention))
    readers = ["one"] if retention is Retention.WORK_QUEUE else ["one", "two"]
    for reader in readers:
        await queues.consumers.add(unique, ConsumerConfig(durable_name=reader))
    await fill(queues, unique, 3)
    seen = []
    for reader in readers:
        (message,) = await queues.fetch(unique, reader)
        await message.ack(confirm=True)
        seen.append((await queues.streams.info(unique)).state.messages)
    assert seen == left[: len(readers)]


async def test_an_interest_stream_without_consumers_keeps_nothing(queues: Queues, unique: str) -> None:
    await queues.streams.add(StreamConfig(name=unique, subjects=(unique,), retention=Retention.INTEREST))
    await fill(queues, unique, 3)
    assert (await queues.streams.info(unique)).state.messages == 0


async def test_a_work_queue_takes_one_consumer_per_subject(queues: Queues, unique: str) -> None:
    config = StreamConfig(name=unique, subjects=(f"{unique}.*",), retention=Retention.WORK_QUEUE)
    await queues.streams.add(config)
    await queues.consumers.add(unique, ConsumerConfig(durable_name="a", filter_subject=f"{unique}.a"))
    await queues.consumers.add(unique, ConsumerConfig(durable_name="b", filter_subject=f"{unique}.b"))
    with pytest.raises(ConfigRefused):
        await queues.consumers.add(unique, ConsumerConfig(durable_name="c", filter_subject=f"{unique}.>"))
    with pytest.raises(ConfigRefused):
        await queues.consumers.add(
            unique, ConsumerConfig(durable_name="d", filter_subject=f"{unique}.d", ack_policy=AckPolicy.NONE)
        )


async def test_a_sealed_stream_takes_and_loses_nothing_but_can_be_read(queues: Queues, unique: str) -> None:
    await queues.streams.add(StreamConfig(name=unique, subjects=(unique,)))
    await fill(queues, unique, 2)
    assert (await queues.streams.seal(unique)).config.sealed
    assert (await queues.streams.seal(unique)).config.sealed
    with pytest.raises(PublishRefused, match="sealed"):
        await queues.publish(unique, b"more")
    with pytest.raises(ConfigRefused, match="sealed"):
        await queues.streams.purge(unique)
    assert (await queues.streams.get(unique, 2)).data == b"order 2"


async def test_purge_takes_all_or_a_subject_or_up_to_a_sequence_or_all_but_some(queues: Queues, unique: str) -> None:
    await queues.streams.add(StreamConfig(name=unique, subjects=(f"{unique}.*",)))
    for subject in ("a", "b"):
        await fill(queues, f"{unique}.{subject}", 5)
    assert await queues.streams.purge(unique, subject=f"{unique}.a", keep=1) == 4
    assert await queues.streams.purge(unique, before_sequence=8) == 3
    assert await queues.streams.purge(unique) == 3
    assert (await queues.streams.info(unique)).state.messages == 0


async def test_single_messages_are_read_and_deleted(queues: Queues, unique: str) -> None:
    await queues.streams.add(StreamConfig(name=unique, subjects=(f"{unique}.*",), storage=Storage.MEMORY))
    await queues.publish(f"{unique}.a", b"\x00\xff", headers={"Tag": ["x", "y"], "Who": "Zoë"})
    await queues.publish(f"{unique}.b", b"")
    stored = await queues.streams.get(unique, 1)
    assert (stored.data, stored.headers) == (b"\x00\xff", {"Tag": ("x", "y"), "Who": ("Zoë",)})
    assert (await queues.streams.get_last(unique, f"{unique}.*")).sequence == 2
    await queues.streams.delete_message(unique, 1)
    with pytest.raises(UnknownMessage, match="sequence 1"):
        await queues.streams.get(unique, 1)
    assert (await queues.streams.get_next(unique, 1)).sequence == 2


async def test_adding_the_same_stream_again_succeeds_and_a_different_one_fails(queues: Queues, unique: str) -> None:
    config = StreamConfig(name=unique, subjects=(unique,))
    first, second = await queues.streams.add(config), await queues.streams.add(config)
    assert first.created == second.created
    with pytest.raises(AlreadyExists):
        await queues.streams.add(StreamConfig(name=unique, subjects=(f"{unique}.other",)))
    with pytest.raises(ConfigRefused, match="overlap"):
        await queues.streams.add(StreamConfig(name=f"{unique}-2", subjects=(unique,)))


async def test_an_update_keeps_unknown_settings(queues: Queues, unique: str) -> None:
    await queues.streams.add(StreamConfig(name=unique, subjects=(unique,)))
    raw = (await queues.streams.raw_info(unique))["config"]
    await queues.streams.update(unique, {"republish": {"src": ">", "dest": "copy.>"}})
    await queues.streams.update(unique, {"max_msgs": 7})
    after = (await queues.streams.raw_info(unique))["config"]
    assert after["republish"] == {"src": ">", "dest": "copy.>"}
    assert {k: v for k, v in after.items() if k not in ("republish", "max_msgs")} == {
        k: v for k, v in raw.items() if k != "max_msgs"
    }


async def test_a_missing_resource_is_named_in_the_error(queues: Queues) -> None:
    with pytest.raises(UnknownStream, match="'NOPE'"):
        await queues.streams.info("NOPE")
    with pytest.raises(UnknownStream):
        await queues.streams.remove("NOPE")
    with pytest.raises(InvalidName):
        await queues.streams.info("no.pe")
