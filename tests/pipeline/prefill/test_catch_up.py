import json

import pytest

from purveyor.model.control_events import CatchUpJob
from purveyor.model.registration import DispatchState, Record
from purveyor.pipeline.prefill import jobs
from purveyor.pipeline.prefill.job_context import JobResult
from tests.support.poison import Poison
from tests.support.prefill_harness import PrefillHarness, ids, suspend


async def suspended(harness: PrefillHarness, record: Record, at: int, group: str | None = None) -> CatchUpJob:
    """The job that brings it back from there."""
    await suspend(harness, record, at, group)
    await harness.subscriptions.resume(record.name)
    [job] = await harness.jobs()
    assert isinstance(job, CatchUpJob)
    return job


@pytest.mark.parametrize("group", [None, "dispatcher"], ids=["refused", "not understood"])
async def test_what_was_missed_is_written_in_rounds_and_the_dispatcher_takes_over(
    harness: PrefillHarness, unique: str, monkeypatch: pytest.MonkeyPatch, group: str | None
) -> None:
    monkeypatch.setattr(jobs, "ROUND_POSITIONS", 40)
    monkeypatch.setattr(jobs, "SMALL_GAP_POSITIONS", 10)
    record, _ = await harness.add(unique, "a/x", prefill=False)
    await harness.publish_many("a/x", 100)
    assert record.begin is not None
    job = await suspended(harness, record, record.begin + 1, group)

    assert await harness.run(job) is JobResult.DONE

    written = await harness.stored(unique, "main")
    begin = record.begin + 1
    assert [message.position for message in written] == list(range(begin, begin + 100))
    assert ids(written) == [str(message.position) for message in written]
    state = (await harness.registered(unique)).dispatch
    assert state == DispatchState(incarnation=record.incarnation, next=begin + 100)


async def test_what_is_there_or_acknowledged_is_not_written_again(harness: PrefillHarness, unique: str) -> None:
    record, _ = await harness.add(unique, "a/x", prefill=False)
    await harness.publish_many("a/x", 20)
    assert record.begin is not None
    begin = record.begin + 1
    job = await suspended(harness, record, begin)
    acknowledged = {"incarnation": record.incarnation, "position": begin + 4}
    bucket = await harness.queues.bucket("acknowledged")
    await bucket.put(unique, json.dumps(acknowledged).encode())

    await harness.run(job)
    assert [message.position for message in await harness.stored(unique, "main")] == list(range(begin + 5, begin + 20))

    await harness.run(await suspended(harness, record, begin))
    assert [message.position for message in await harness.stored(unique, "main")] == list(range(begin + 5, begin + 20))


async def test_a_queue_that_still_refuses_stays_suspended_with_the_new_reason(
    harness: PrefillHarness, unique: str
) -> None:
    record, _ = await harness.add(unique, "a/x", prefill=False)
    await harness.publish_many("a/x", 30)
    assert record.begin is not None
    job = await suspended(harness, record, record.begin + 1)
    await harness.limit(unique, 10)

    assert await harness.run(job) is JobResult.DONE

    written = await harness.stored(unique, "main")
    state = (await harness.registered(unique)).dispatch
    assert state is not None
    assert state.suspended is not None
    assert state.next == state.suspended.position == record.begin + 1 + len(written)
    assert state.suspended.reason.startswith("full: ")

    await harness.limit(unique, -1)
    await harness.run(await suspended(harness, record, state.next))
    positions = [message.position for message in await harness.stored(unique, "main")]
    assert positions == list(range(record.begin + 1, record.begin + 31))


async def test_an_event_that_cannot_be_written_is_parked_and_the_rest_is_caught_up(
    harness: PrefillHarness, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, _ = await harness.add(unique, "a/x", prefill=False)
    await harness.publish_many("a/x", 4)
    assert record.begin is not None
    begin = record.begin + 1
    job = await suspended(harness, record, begin)
    Poison(monkeypatch).positions = {begin + 1: None}

    assert await harness.run(job) is JobResult.DONE

    assert [message.position for message in await harness.stored(unique, "main")] == [begin, begin + 2, begin + 3]
    parked = await harness.messages("stream:dead-letters", "dead-letters.incoming")
    assert [message.headers.get("Purveyor-Parked-Position") for message in parked][-1:] == [str(begin + 1)]
    assert (await harness.registered(unique)).suspended is None
