import json

import pytest

from purveyor.model.control_events import CatchUpJob
from purveyor.model.registration import DispatchState, Record
from purveyor.pipeline.prefill import catch_up
from purveyor.pipeline.prefill.job_context import JobResult
from tests.support.poison import Poison
from tests.support.prefill_bench import Bench, ids, suspend


async def suspended(bench: Bench, record: Record, at: int, group: str | None = None) -> CatchUpJob:
    """The job that brings it back from there."""
    await suspend(bench, record, at, group)
    await bench.subscriptions.resume(record.name)
    [job] = await bench.jobs()
    assert isinstance(job, CatchUpJob)
    return job


@pytest.mark.parametrize("group", [None, "dispatcher"], ids=["refused", "not understood"])
async def test_what_was_missed_is_written_in_rounds_and_the_dispatcher_takes_over(
    bench: Bench, unique: str, monkeypatch: pytest.MonkeyPatch, group: str | None
) -> None:
    monkeypatch.setattr(catch_up, "ROUND_POSITIONS", 40)
    monkeypatch.setattr(catch_up, "SMALL_GAP", 10)
    record, _ = await bench.add(unique, "a/x", prefill=False)
    await bench.publish_many("a/x", 100)
    assert record.begin is not None
    job = await suspended(bench, record, record.begin + 1, group)

    assert await bench.run(job) is JobResult.DONE

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

    assert await bench.run(job) is JobResult.DONE

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


async def test_an_event_that_cannot_be_written_is_parked_and_the_rest_is_caught_up(
    bench: Bench, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _ = await bench.add(unique, "a/x", prefill=False)
    await bench.publish_many("a/x", 4)
    assert record.begin is not None
    begin = record.begin + 1
    job = await suspended(bench, record, begin)
    Poison(monkeypatch).positions = {begin + 1: None}

    assert await bench.run(job) is JobResult.DONE

    assert [message.position for message in await bench.stored(unique, "main")] == [begin, begin + 2, begin + 3]
    parked = await bench.messages("stream:dead-letters", "dead-letters.incoming")
    assert [message.headers.get("Purveyor-Parked-Position") for message in parked][-1:] == [str(begin + 1)]
    assert (await bench.registered(unique)).suspended is None
