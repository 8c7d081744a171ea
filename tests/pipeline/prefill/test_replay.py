import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from purveyor.model.control_events import ReplayJob
from purveyor.model.errors import AlreadyExists, PublishRefused
from purveyor.model.message_headers import REPLAY_JOB
from purveyor.model.registration import PrefillStatus
from purveyor.model.subscription import RealmTopic
from purveyor.pipeline.prefill.job_context import Claim, JobResult, claim_run, start_replay
from purveyor.queues.catalogue import PREFILL
from purveyor.queues.registry import SUBSCRIPTIONS
from purveyor.queues.waiting_replays import WaitingReplay
from tests.support.prefill_harness import PrefillHarness, ids


async def test_the_events_of_a_range_come_once_more_in_their_order_and_untouched(
    harness: PrefillHarness, unique: str
) -> None:
    await harness.publish("a/x", "1", {"id": 1})
    first = await harness.publish("a/y", "2", {"id": 2}, {"id": 2, "was": True})
    await harness.publish("b/z", "3", {"id": 3})
    last = await harness.publish("a/x", "1", None, {"id": 1})
    await harness.publish("a/x", "4", {"id": 4})
    await harness.add(unique, "a/.*", prefill=False)
    job = await harness.subscriptions.replay(unique, first, last)

    assert await harness.run(job) is JobResult.DONE

    messages = await harness.stored(unique)
    assert [message.position for message in messages] == [first, last]
    assert [message.body for message in messages] == [
        {"old": {"id": 2, "was": True}, "new": {"id": 2}},
        {"old": {"id": 1}, "new": {}},
    ]
    assert ids(messages) == [f"replay:{job.job}:{first}", f"replay:{job.job}:{last}"]
    assert {message.headers[REPLAY_JOB] for message in messages} == {job.job}
    assert (await harness.state(unique)).status is PrefillStatus.DONE


async def test_a_replay_can_be_narrowed_to_some_topics(harness: PrefillHarness, unique: str) -> None:
    first = await harness.publish("a/x", "1", {"id": 1})
    wanted = await harness.publish("a/y", "2", {"id": 2})
    await harness.publish("b/y", "3", {"id": 3})
    await harness.add(unique, "a/.*", prefill=False)
    job = await harness.subscriptions.replay(unique, first, topics=[RealmTopic(harness.realm, ".*/y")])

    await harness.run(job)

    assert [message.position for message in await harness.stored(unique)] == [wanted]


async def test_a_replay_between_times_has_what_was_stored_between_them(harness: PrefillHarness, unique: str) -> None:
    await harness.publish("a/x", "1", {"id": 1})
    begin = datetime.now(UTC)
    wanted = await harness.publish("a/x", "2", {"id": 2})
    end = datetime.now(UTC)
    await harness.publish("a/x", "3", {"id": 3})
    await harness.add(unique, "a/x", prefill=False)

    await harness.run(await harness.subscriptions.replay(unique, begin, end))

    assert [message.position for message in await harness.stored(unique)] == [wanted]


async def test_an_interrupted_replay_continues_without_duplicates(harness: PrefillHarness, unique: str) -> None:
    await harness.publish_many("a/x", 2500)
    await harness.add(unique, "a/x", prefill=False)
    job = await harness.subscriptions.replay(unique, 1)
    await harness.limit(unique, 1100)
    with pytest.raises(PublishRefused):
        await harness.run(job)
    assert (await harness.state(unique)).status is PrefillStatus.RUNNING  # and so it is not given out
    await harness.limit(unique, -1)

    assert await harness.run(job) is JobResult.DONE
    assert await harness.run(job) is JobResult.DONE

    assert [message.body["new"]["id"] for message in await harness.stored(unique)] == list(range(1, 2501))


async def test_two_replays_of_one_subscription_come_one_after_the_other(harness: PrefillHarness, unique: str) -> None:
    first = await harness.publish("a/x", "1", {"id": 1})
    await harness.publish("a/x", "2", {"id": 2})
    await harness.add(unique, "a/x", prefill=False)
    one = await harness.subscriptions.replay(unique, first, first + 1)
    await harness.run(one)
    two = await harness.subscriptions.replay(unique, first, first + 1)
    found = await harness.registered(unique)
    assert found.prefill is not None
    running = replace(found.prefill, status=PrefillStatus.RUNNING)
    revision = await harness.context.registry.put_prefill(unique, running, found.prefill_revision)

    assert await harness.run(two) is JobResult.LATER

    await harness.context.registry.put_prefill(unique, found.prefill, revision)
    assert await harness.run(two) is JobResult.DONE
    jobs = [message.headers[REPLAY_JOB] for message in await harness.stored(unique)]
    assert jobs == [one.job, one.job, two.job, two.job]


async def test_a_replay_comes_behind_the_prefill(harness: PrefillHarness, unique: str) -> None:
    position = await harness.publish("a/x", "1", {"id": 1})
    _, [prefill] = await harness.add(unique, "a/x")
    job = await harness.subscriptions.replay(unique, position)
    assert isinstance(job, ReplayJob)

    assert await harness.run(job) is JobResult.LATER
    await harness.run(prefill)
    assert await harness.run(job) is JobResult.DONE

    assert ids(await harness.stored(unique)) == ["prefill:1:1", f"replay:{job.job}:{position}"]


async def test_a_second_replay_is_refused_until_the_first_has_begun(harness: PrefillHarness, unique: str) -> None:
    first = await harness.publish("a/x", "1", {"id": 1})
    await harness.add(unique, "a/x", prefill=False)
    answers = await asyncio.gather(
        *(harness.subscriptions.replay(unique, first) for _ in range(5)), return_exceptions=True
    )
    [accepted] = [each for each in answers if isinstance(each, ReplayJob)]
    refusal_error = [each for each in answers if isinstance(each, AlreadyExists)]
    assert len(refusal_error) == 4
    assert {error.code for error in refusal_error} == {409}
    assert f"waits already, job {accepted.job}" in refusal_error[0].message
    assert len(await harness.jobs()) == 1

    await harness.run(accepted)
    assert await harness.context.registry.waiting_replays.find(unique) is None
    assert isinstance(await harness.subscriptions.replay(unique, first), ReplayJob)


async def test_a_record_that_was_left_behind_keeps_no_replay_away(harness: PrefillHarness, unique: str) -> None:
    """By a crash before the job was stored, a purge, a subscription of the same name, a worker without records."""
    first = await harness.publish("a/x", "1", {"id": 1})
    record, _ = await harness.add(unique, "a/x", prefill=False)
    waiting = harness.context.registry.waiting_replays
    left = WaitingReplay(incarnation=record.incarnation, job="left", at=datetime.now(UTC) - timedelta(minutes=2))
    await waiting.claim(unique, left, first_sequence=1, begun=None)
    await harness.subscriptions.replay(unique, first)

    await harness.queues.streams.purge(PREFILL.stream)
    last = await harness.subscriptions.replay(unique, first)

    noted = await waiting.find(unique)
    assert noted is not None
    assert noted.job == last.job
    await harness.run(last)
    await waiting.adopt(unique, noted)
    await harness.subscriptions.replay(unique, first)
    await waiting.forget(unique, (await waiting.find(unique) or left).job)

    await waiting.adopt(unique, replace(noted, incarnation="another", job="another"))
    await harness.subscriptions.replay(unique, first)


async def test_a_record_without_a_stored_job_counts_for_a_minute(harness: PrefillHarness, unique: str) -> None:
    """Whoever wrote it may be about to store the job."""
    record, _ = await harness.add(unique, "a/x", prefill=False)
    young = WaitingReplay(incarnation=record.incarnation, job="young", at=datetime.now(UTC) + timedelta(hours=1))
    await harness.context.registry.waiting_replays.claim(unique, young, first_sequence=1, begun=None)
    with pytest.raises(AlreadyExists, match="job young"):
        await harness.subscriptions.replay(unique, 1)


async def test_a_subscription_that_is_deleted_leaves_no_record_of_its_replay(
    harness: PrefillHarness, unique: str
) -> None:
    await harness.add(unique, "a/x", prefill=False)
    await harness.subscriptions.replay(unique, 1)
    bucket = await harness.queues.bucket(SUBSCRIPTIONS)
    assert f"{unique}.replay" in await bucket.keys(f"{unique}.*")
    await harness.subscriptions.delete(unique)
    assert await bucket.keys(f"{unique}.*") == [f"{unique}.sequence"]


async def test_a_replay_that_waits_starts_no_work_on_spark(
    harness: PrefillHarness, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it begins in time is searched in the archive: not at each look."""

    def searched(*_: object) -> int:
        raise AssertionError("the archive was searched")

    await harness.publish("a/x", "1", {"id": 1})
    _, [prefill] = await harness.add(unique, "a/x")
    job = await harness.subscriptions.replay(unique, datetime(2026, 1, 1, tzinfo=UTC))
    with monkeypatch.context() as patched:
        patched.setattr("purveyor.pipeline.prefill.archive_queries.first_stored_at", searched)
        assert await harness.run(job) is JobResult.LATER
        await harness.run(prefill)
        with pytest.raises(AssertionError, match="searched"):
            await harness.run(job)
    assert await harness.run(job) is JobResult.DONE


async def test_a_replay_that_is_asked_for_while_a_job_runs_does_not_end_it(
    harness: PrefillHarness, unique: str
) -> None:
    first = await harness.publish("a/x", "1", {"id": 1})
    await harness.add(unique, "a/x", prefill=False)
    one = await harness.subscriptions.replay(unique, first)
    claim = await claim_run(
        harness.context.registry, await harness.registered(unique), one, lambda found: start_replay(found, one)
    )
    assert isinstance(claim, Claim)
    await harness.context.registry.waiting_replays.forget(unique, one.job)
    two = await harness.subscriptions.replay(unique, first)
    await claim.update(written=1)
    await claim.update(status=PrefillStatus.DONE)
    assert await harness.run(two) is JobResult.DONE
