import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from purveyor.model.control_events import ReplayJob
from purveyor.model.errors import AlreadyExists, PublishRefused
from purveyor.model.registration import PrefillStatus
from purveyor.model.subscription import RealmTopic
from purveyor.pipeline.prefill.job_context import Claim, JobResult, claim_run, start_replay
from purveyor.pipeline.prefill.queue_writer import REPLAY
from purveyor.queues.catalogue import PREFILL
from purveyor.queues.registry import SUBSCRIPTIONS
from purveyor.queues.waiting_replays import WaitingReplay
from tests.support.prefill_bench import Bench, ids


async def test_the_events_of_a_range_come_once_more_in_their_order_and_untouched(bench: Bench, unique: str) -> None:
    await bench.publish("a/x", "1", {"id": 1})
    first = await bench.publish("a/y", "2", {"id": 2}, {"id": 2, "was": True})
    await bench.publish("b/z", "3", {"id": 3})
    last = await bench.publish("a/x", "1", None, {"id": 1})
    await bench.publish("a/x", "4", {"id": 4})
    await bench.add(unique, "a/.*", prefill=False)
    job = await bench.subscriptions.replay(unique, first, last)

    assert await bench.run(job) is JobResult.DONE

    messages = await bench.stored(unique)
    assert [message.position for message in messages] == [first, last]
    assert [message.body for message in messages] == [
        {"old": {"id": 2, "was": True}, "new": {"id": 2}},
        {"old": {"id": 1}, "new": {}},
    ]
    assert ids(messages) == [f"replay:{job.job}:{first}", f"replay:{job.job}:{last}"]
    assert {message.headers[REPLAY] for message in messages} == {job.job}
    assert (await bench.state(unique)).status is PrefillStatus.DONE


async def test_a_replay_can_be_narrowed_to_some_topics(bench: Bench, unique: str) -> None:
    first = await bench.publish("a/x", "1", {"id": 1})
    wanted = await bench.publish("a/y", "2", {"id": 2})
    await bench.publish("b/y", "3", {"id": 3})
    await bench.add(unique, "a/.*", prefill=False)
    job = await bench.subscriptions.replay(unique, first, topics=[RealmTopic(bench.realm, ".*/y")])

    await bench.run(job)

    assert [message.position for message in await bench.stored(unique)] == [wanted]


async def test_a_replay_between_times_has_what_was_stored_between_them(bench: Bench, unique: str) -> None:
    await bench.publish("a/x", "1", {"id": 1})
    begin = datetime.now(UTC)
    wanted = await bench.publish("a/x", "2", {"id": 2})
    end = datetime.now(UTC)
    await bench.publish("a/x", "3", {"id": 3})
    await bench.add(unique, "a/x", prefill=False)

    await bench.run(await bench.subscriptions.replay(unique, begin, end))

    assert [message.position for message in await bench.stored(unique)] == [wanted]


async def test_an_interrupted_replay_continues_without_duplicates(bench: Bench, unique: str) -> None:
    await bench.publish_many("a/x", 2500)
    await bench.add(unique, "a/x", prefill=False)
    job = await bench.subscriptions.replay(unique, 1)
    await bench.limit(unique, 1100)
    with pytest.raises(PublishRefused):
        await bench.run(job)
    assert (await bench.state(unique)).status is PrefillStatus.RUNNING  # and so it is not given out
    await bench.limit(unique, -1)

    assert await bench.run(job) is JobResult.DONE
    assert await bench.run(job) is JobResult.DONE

    assert [message.body["new"]["id"] for message in await bench.stored(unique)] == list(range(1, 2501))


async def test_two_replays_of_one_subscription_come_one_after_the_other(bench: Bench, unique: str) -> None:
    first = await bench.publish("a/x", "1", {"id": 1})
    await bench.publish("a/x", "2", {"id": 2})
    await bench.add(unique, "a/x", prefill=False)
    one = await bench.subscriptions.replay(unique, first, first + 1)
    await bench.run(one)
    two = await bench.subscriptions.replay(unique, first, first + 1)
    found = await bench.registered(unique)
    assert found.prefill is not None
    running = replace(found.prefill, status=PrefillStatus.RUNNING)
    revision = await bench.context.registry.put_prefill(unique, running, found.prefill_revision)

    assert await bench.run(two) is JobResult.LATER

    await bench.context.registry.put_prefill(unique, found.prefill, revision)
    assert await bench.run(two) is JobResult.DONE
    jobs = [message.headers[REPLAY] for message in await bench.stored(unique)]
    assert jobs == [one.job, one.job, two.job, two.job]


async def test_a_replay_comes_behind_the_prefill(bench: Bench, unique: str) -> None:
    position = await bench.publish("a/x", "1", {"id": 1})
    _, [prefill] = await bench.add(unique, "a/x")
    job = await bench.subscriptions.replay(unique, position)
    assert isinstance(job, ReplayJob)

    assert await bench.run(job) is JobResult.LATER
    await bench.run(prefill)
    assert await bench.run(job) is JobResult.DONE

    assert ids(await bench.stored(unique)) == ["prefill:1:1", f"replay:{job.job}:{position}"]


async def test_a_second_replay_is_refused_until_the_first_has_begun(bench: Bench, unique: str) -> None:
    first = await bench.publish("a/x", "1", {"id": 1})
    await bench.add(unique, "a/x", prefill=False)
    answers = await asyncio.gather(
        *(bench.subscriptions.replay(unique, first) for _ in range(5)), return_exceptions=True
    )
    [accepted] = [each for each in answers if isinstance(each, ReplayJob)]
    refusal_error = [each for each in answers if isinstance(each, AlreadyExists)]
    assert len(refusal_error) == 4
    assert {error.code for error in refusal_error} == {409}
    assert f"waits already, job {accepted.job}" in refusal_error[0].message
    assert len(await bench.jobs()) == 1

    await bench.run(accepted)
    assert await bench.context.registry.waiting_replays.find(unique) is None
    assert isinstance(await bench.subscriptions.replay(unique, first), ReplayJob)


async def test_a_record_that_was_left_behind_keeps_no_replay_away(bench: Bench, unique: str) -> None:
    """By a crash before the job was stored, a purge, a subscription of the same name, a worker without records."""
    first = await bench.publish("a/x", "1", {"id": 1})
    record, _ = await bench.add(unique, "a/x", prefill=False)
    waiting = bench.context.registry.waiting_replays
    left = WaitingReplay(incarnation=record.incarnation, job="left", at=datetime.now(UTC) - timedelta(minutes=2))
    await waiting.claim(unique, left, first_sequence=1, begun=None)
    await bench.subscriptions.replay(unique, first)

    await bench.queues.streams.purge(PREFILL.stream)
    last = await bench.subscriptions.replay(unique, first)

    noted = await waiting.find(unique)
    assert noted is not None
    assert noted.job == last.job
    await bench.run(last)
    await waiting.adopt(unique, noted)
    await bench.subscriptions.replay(unique, first)
    await waiting.forget(unique, (await waiting.find(unique) or left).job)

    await waiting.adopt(unique, replace(noted, incarnation="another", job="another"))
    await bench.subscriptions.replay(unique, first)


async def test_a_record_without_a_stored_job_counts_for_a_minute(bench: Bench, unique: str) -> None:
    """Whoever wrote it may be about to store the job."""
    record, _ = await bench.add(unique, "a/x", prefill=False)
    young = WaitingReplay(incarnation=record.incarnation, job="young", at=datetime.now(UTC) + timedelta(hours=1))
    await bench.context.registry.waiting_replays.claim(unique, young, first_sequence=1, begun=None)
    with pytest.raises(AlreadyExists, match="job young"):
        await bench.subscriptions.replay(unique, 1)


async def test_a_subscription_that_is_deleted_leaves_no_record_of_its_replay(bench: Bench, unique: str) -> None:
    await bench.add(unique, "a/x", prefill=False)
    await bench.subscriptions.replay(unique, 1)
    bucket = await bench.queues.bucket(SUBSCRIPTIONS)
    assert f"{unique}.replay" in await bucket.keys(f"{unique}.*")
    await bench.subscriptions.delete(unique)
    assert await bucket.keys(f"{unique}.*") == [f"{unique}.sequence"]


async def test_a_replay_that_waits_starts_no_work_on_spark(
    bench: Bench, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it begins in time is searched in the archive: not at each look."""

    def searched(*_: object) -> int:
        raise AssertionError("the archive was searched")

    await bench.publish("a/x", "1", {"id": 1})
    _, [prefill] = await bench.add(unique, "a/x")
    job = await bench.subscriptions.replay(unique, datetime(2026, 1, 1, tzinfo=UTC))
    with monkeypatch.context() as patched:
        patched.setattr("purveyor.pipeline.prefill.archive_queries.first_stored_at", searched)
        assert await bench.run(job) is JobResult.LATER
        await bench.run(prefill)
        with pytest.raises(AssertionError, match="searched"):
            await bench.run(job)
    assert await bench.run(job) is JobResult.DONE


async def test_a_replay_that_is_asked_for_while_a_job_runs_does_not_end_it(bench: Bench, unique: str) -> None:
    first = await bench.publish("a/x", "1", {"id": 1})
    await bench.add(unique, "a/x", prefill=False)
    one = await bench.subscriptions.replay(unique, first)
    claim = await claim_run(
        bench.context.registry, await bench.registered(unique), one, lambda found: start_replay(found, one)
    )
    assert isinstance(claim, Claim)
    await bench.context.registry.waiting_replays.forget(unique, one.job)
    two = await bench.subscriptions.replay(unique, first)
    await claim.update(written=1)
    await claim.update(status=PrefillStatus.DONE)
    assert await bench.run(two) is JobResult.DONE
