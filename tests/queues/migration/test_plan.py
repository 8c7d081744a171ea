"""What applying would do, decided without a server."""

import dataclasses
from typing import Any

import pytest

from purveyor.jetstream.config import (
    AckPolicy,
    ConsumerConfig,
    ConsumerInfo,
    Retention,
    Storage,
    StreamConfig,
    StreamInfo,
    StreamState,
)
from purveyor.model.errors import InvalidInput, UnreadableRecord
from purveyor.queues.catalogue import DEAD_LETTERS, incoming
from purveyor.queues.migration.plan import Change, LiveQueue, Strategy, plan_queue
from purveyor.queues.migration.record import ArchiveLocation, Record, continue_metadata
from purveyor.queues.migration.recreate import continues_from, initial_config, target_config, target_durables
from purveyor.queues.migration.snapshot import find_restore_loss
from tests.support.migrations import declare_queue

QUEUE = declare_queue("orders")


def live(config: StreamConfig, *consumers: ConsumerConfig, messages: int = 5, **raw: object) -> LiveQueue:
    infos = tuple(
        ConsumerInfo(stream_name=config.name, name=each.durable_name or "", config=each) for each in consumers
    )
    info = StreamInfo(config=config, state=StreamState(messages=messages, first_seq=1, last_seq=messages))
    return LiveQueue(info, infos, {"name": config.name, "subjects": list(config.subjects), **raw}, "then")


def old(**changes: object) -> StreamConfig:
    return dataclasses.replace(QUEUE.config(), **changes)  # type: ignore[arg-type]


READER = QUEUE.readers[0].consumer()


def test_what_is_missing_is_made_and_what_is_right_is_left_alone() -> None:
    assert plan_queue(QUEUE, None).change is Change.CREATE
    assert plan_queue(QUEUE, live(old(), READER)).change is Change.NOTHING
    missing = plan_queue(QUEUE, live(old()))
    assert (missing.change, missing.why) == (Change.UPDATE, ("durable reader is missing",))


def test_limits_and_interest_change_in_place_and_work_queues_do_not() -> None:
    assert plan_queue(QUEUE, live(old(retention=Retention.LIMITS), READER)).change is Change.UPDATE
    plan = plan_queue(QUEUE, live(old(retention=Retention.WORK_QUEUE), READER))
    assert (plan.change, plan.choose_strategy(None), plan.choose_strategy(Strategy.SNAPSHOT)) == (
        Change.DRAIN, Strategy.DRAIN, Strategy.SNAPSHOT
    )  # fmt: skip
    assert plan.why == ("stream retention: workqueue -> interest",)


@pytest.mark.parametrize(
    ("queue", "config"),
    [
        (DEAD_LETTERS, dataclasses.replace(DEAD_LETTERS.config(), storage=Storage.MEMORY)),
        (declare_queue("orders", Retention.LIMITS), old(retention=Retention.LIMITS, storage=Storage.MEMORY)),
    ],
)
def test_a_queue_that_no_reader_would_drain_needs_a_snapshot(queue: object, config: StreamConfig) -> None:
    plan = plan_queue(queue, live(config))  # type: ignore[arg-type]
    assert plan.change is Change.SNAPSHOT
    with pytest.raises(InvalidInput, match="cannot be migrated by drain") as refused:
        plan.choose_strategy(Strategy.DRAIN)
    assert refused.value.fix == "use --strategy snapshot"


def test_a_durable_that_holds_its_newest_message_for_good_rules_out_a_drain() -> None:
    queue = incoming()
    config = dataclasses.replace(queue.config(), storage=Storage.MEMORY)
    readers = [reader.consumer() for reader in queue.readers]
    assert plan_queue(queue, live(config, *readers)).change is Change.SNAPSHOT
    assert plan_queue(queue, live(config, *readers, messages=0)).change is Change.DRAIN
    assert plan_queue(queue, live(config, *readers[:2])).change is Change.DRAIN
    outbox = incoming(outboxes=("4f0c",)).readers[-1].consumer()  # of an application that this program does not know
    assert plan_queue(queue, live(config, *readers[:2], outbox)).change is Change.SNAPSHOT


def test_a_work_queue_takes_no_two_readers_of_one_subject_over_by_snapshot() -> None:
    queue = declare_queue("orders", Retention.WORK_QUEUE)
    other = dataclasses.replace(READER, durable_name="other")
    plan = plan_queue(queue, live(old(), READER, other))
    assert plan.change is Change.DRAIN
    assert "one consumer per subject" in (plan.obstacle(Strategy.SNAPSHOT) or "")
    apart = [dataclasses.replace(READER, durable_name=name, filter_subjects=(f"orders.{name}",)) for name in "ab"]
    assert plan_queue(queue, live(old(), *apart)).obstacle(Strategy.SNAPSHOT) is None


def test_a_durable_that_must_become_another_is_drained_or_nothing_can_be_done() -> None:
    wrong = dataclasses.replace(READER, ack_policy=AckPolicy.ALL)
    assert plan_queue(QUEUE, live(old(), wrong)).change is Change.DRAIN
    limits = declare_queue("orders", Retention.LIMITS)
    blocked = plan_queue(limits, live(old(retention=Retention.LIMITS), wrong))
    assert blocked.change is Change.BLOCKED
    with pytest.raises(InvalidInput, match="never drains"):
        blocked.choose_strategy(None)


def test_the_new_stream_keeps_what_an_operator_has_set() -> None:
    raw: dict[str, Any] = {"max_age": 7, "metadata": {"owner": "ops", "_nats.ver": "2"}, "unknown": 1, "first_seq": 9}
    target = target_config(live(old(retention=Retention.WORK_QUEUE), **raw), QUEUE, replicas=3)
    assert (target["max_age"], target["unknown"], target["num_replicas"]) == (7, 1, 3)
    assert (target["retention"], target["subjects"]) == ("interest", ["orders", "orders.>"])
    assert target["metadata"] == {"owner": "ops", "purveyor.continues": "then"}
    assert "first_seq" not in target
    sealed = live(old(sealed=True), deny_delete=True, discard="new", sealed=True)
    unsealed = target_config(sealed, QUEUE, replicas=1)
    assert (unsealed["sealed"], unsealed["deny_delete"], unsealed["discard"]) == (False, False, "old")


def test_durables_of_others_stay_unless_they_were_the_one_reader_of_a_work_queue() -> None:
    other = dataclasses.replace(READER, durable_name="backup")
    names = [each["durable_name"] for each in target_durables(live(old(), READER, other), QUEUE)]
    assert names == ["reader", "backup"]
    before = live(old(retention=Retention.WORK_QUEUE), dataclasses.replace(READER, durable_name="old"))
    assert [each["durable_name"] for each in target_durables(before, QUEUE)] == ["reader"]


def test_a_record_comes_back_as_it_was_and_takes_in_others() -> None:
    record = Record(
        queue="orders",
        stream="stream:orders",
        strategy=Strategy.SNAPSHOT,
        created="then",
        target={"retention": "interest", "subjects": ["orders"]},
        durables=({"durable_name": "a"},),
        archive=ArchiveLocation(host="here", path="/there"),
        last_sequence=7,
    )
    assert Record.decode(record.encode()) == record
    joined = record.with_durables(({"durable_name": "a", "x": 1}, {"durable_name": "b"}))
    assert joined.durables == ({"durable_name": "a"}, {"durable_name": "b"})
    assert initial_config(record)["retention"] == "limits"
    for rubbish in (b"", b"[]", b"{}", b'{"strategy": "other"}'):
        with pytest.raises(UnreadableRecord):
            Record.decode(rubbish)


def test_a_stream_remembers_the_streams_it_goes_on_from() -> None:
    metadata: dict[str, str] = {}
    for number in range(20):
        metadata = continue_metadata(metadata, f"t{number}")
    assert continues_from({"metadata": metadata}, "t19")
    assert continues_from({"metadata": metadata}, "t12")
    assert not continues_from({"metadata": metadata}, "t1")  # a list that grows for ever would not fit
    assert not continues_from({}, "t19")


def test_a_restore_that_lost_messages_is_detected() -> None:
    was = {"messages": 5, "last_seq": 9}
    interest, work_queue = {"retention": "interest"}, {"retention": "workqueue"}
    assert find_restore_loss(was, was, interest) is None
    assert find_restore_loss(was, was | {"messages": 4}, interest) == "it holds 4 messages and not 5"
    assert find_restore_loss(was, was | {"messages": 4}, work_queue) is None
    assert find_restore_loss(was, was | {"messages": 4}, interest | {"allow_msg_ttl": True}) is None
    assert find_restore_loss(was, was | {"last_seq": 8}, work_queue) == "it ends at 8 and not at 9"
