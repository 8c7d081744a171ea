import json
from datetime import UTC, datetime

import pytest

from purveyor.model.control import CatchUpJob
from purveyor.model.registration import DispatchState, Record, Suspension
from purveyor.pipeline.prefill import catch_up
from purveyor.pipeline.prefill.workshop import Ending
from tests.pipeline.prefill.bench import Bench, ids


async def suspend(bench: Bench, record: Record, at: int) -> None:
    """As if the queue of a subscription had refused the message at a position."""
    found = await bench.registered(record.name)
    reason = Suspension(position=at, reason="full", at=datetime.now(UTC))
    state = DispatchState(incarnation=record.incarnation, next=at, suspended=reason)
    await bench.shop.registry.put_dispatch(record.name, state, found.dispatch_revision)


async def suspended(bench: Bench, record: Record, at: int) -> CatchUpJob:
    """The job that brings it back from there."""
    await suspend(bench, record, at)
    await bench.subscriptions.resume(record.name)
    [job] = await bench.jobs()
    assert isinstance(job, CatchUpJob)
    return job


async def test_what_was_missed_is_written_in_rounds_and_the_dispatcher_takes_over(
    bench: Bench, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "ROUND", 40)
    monkeypatch.setattr(catch_up, "SMALL_GAP", 10)
    record, _ = await bench.add(unique, "a/x", prefill=False)
    await bench.publish_many("a/x", 100)
    assert record.begin is not None
    job = await suspended(bench, record, record.begin + 1)

    assert await bench.run(job) is Ending.DONE

    written = await bench.stored(unique, "main")
    begin = record.begin + 1
    assert [message.position for message in written] == list(range(begin, begin + 100))
    assert ids(written) == [str(message.position) for message in written]
    state = (await bench.registered(unique)).dispatch
    assert state == DispatchState(incarnation=record.incarnation, next=begin + 100)


async def test_what_is_there_or_acknowledged_is_not_written_again(bench: Bench, unique: str) -> None:
    record, _ = await bench.add(unique, "a/x", prefill=False)
    await bench.publish_many("a/x", 20)
    assert record.begin is not None
    begin = record.begin + 1
    job = await suspended(bench, record, begin)
    acknowledged = {"incarnation": record.incarnation, "position": begin + 4}
    bucket = await bench.queues.bucket("acknowledged")
    await bucket.put(unique, json.dumps(acknowledged).encode())

    await bench.run(job)
    assert [message.position for message in await bench.stored(unique, "main")] == list(range(begin + 5, begin + 20))

    await bench.run(await suspended(bench, record, begin))
    assert [message.position for message in await bench.stored(unique, "main")] == list(range(begin + 5, begin + 20))


async def test_a_queue_that_still_refuses_stays_suspended_with_the_new_reason(bench: Bench, unique: str) -> None:
    record, _ = await bench.add(unique, "a/x", prefill=False)
    await bench.publish_many("a/x", 30)
    assert record.begin is not None
    job = await suspended(bench, record, record.begin + 1)
    await bench.limit(unique, 10)

    assert await bench.run(job) is Ending.DONE

    written = await bench.stored(unique, "main")
    state = (await bench.registered(unique)).dispatch
    assert state is not None
    assert state.suspended is not None
    assert state.next == state.suspended.position == record.begin + 1 + len(written)
    assert state.suspended.reason.startswith("full: ")

    await bench.limit(unique, -1)
    await bench.run(await suspended(bench, record, state.next))
    positions = [message.position for message in await bench.stored(unique, "main")]
    assert positions == list(range(record.begin + 1, record.begin + 31))
