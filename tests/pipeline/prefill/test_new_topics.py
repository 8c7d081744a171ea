"""The objects of topics that a change added come once, behind what is there, and before the events of these topics."""

from dataclasses import replace

import pytest

from purveyor.delivery.pull import open_pull
from purveyor.jetstream.headers import POSITION
from purveyor.model.control_events import Job, PrefillJob
from purveyor.model.errors import PrefillFailed
from purveyor.model.registration import PrefillStatus
from purveyor.model.subscription import Filter, RealmTopic
from purveyor.pipeline.dispatch.topic_prefill import begin_prefill
from purveyor.pipeline.prefill import jobs
from purveyor.pipeline.prefill.job_context import JobResult
from purveyor.pipeline.prefill.worker import after_failure
from tests.support.prefill_harness import PrefillHarness


async def change(
    harness: PrefillHarness, name: str, *topics: str, wanted: Filter | None = None
) -> tuple[int, PrefillJob]:
    """Change the topics with a prefill, and do what the dispatcher does when it passes the change; return the job."""
    done = await harness.subscriptions.redefine(
        name,
        lambda now: replace(
            now,
            realms_topics=tuple(RealmTopic(harness.realm, topic) for topic in topics),
            filter=wanted or now.filter,
        ),
        prefill_new_topics=True,
    )
    assert done.position is not None
    await begin_prefill(harness.queues, name, done.record.incarnation, done.position + 1)
    [job] = await harness.jobs()
    assert isinstance(job, PrefillJob)
    return done.position, job


async def numbers(harness: PrefillHarness, name: str) -> list[int]:
    return [message.body["new"]["id"] for message in await harness.stored(name)]


async def test_objects_of_new_topics_come_in_the_order_of_the_topics_by_the_new_filter(
    harness: PrefillHarness, unique: str
) -> None:
    await harness.add(unique, "a/x", prefill=False)
    for number, (topic, city) in enumerate([("a/x", "Rome"), ("b/y", "Rome"), ("a/y", "Rome"), ("a/y", "Oslo")]):
        await harness.publish(topic, str(number), {"id": number, "city": city}, {"id": number})
    _, job = await change(harness, unique, "b/.*", "a/.*", wanted=Filter(fields={"city": ("Rome",)}))
    await harness.publish("a/y", "2", {"id": 9, "city": "Rome"})

    assert await harness.run(job) is JobResult.DONE

    assert await numbers(harness, unique) == [1, 2]
    assert [message.body["old"] for message in await harness.stored(unique)] == [{}, {}]


async def test_an_attempt_that_was_cut_off_is_continued_and_nothing_that_waits_is_lost(
    harness: PrefillHarness, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prefill is done and not yet delivered when new topics are prefilled behind it."""
    for number in range(3):
        await harness.publish("a/x", str(number), {"id": number})
        await harness.publish("b/y", str(number), {"id": 10 + number})
        await harness.publish("c/z", str(number), {"id": 20 + number})
    _, [first] = await harness.add(unique, "a/x")
    await harness.run(first)
    _, job = await change(harness, unique, "a/x", "b/y")

    with monkeypatch.context() as dying:
        dying.setattr(jobs, "next_piece", _die)
        with pytest.raises(MemoryError):
            await harness.run(job)
    assert (await harness.state(unique)).status is PrefillStatus.RUNNING
    assert await numbers(harness, unique) == [0, 1, 2, 10, 11, 12]

    # Meanwhile the dispatcher passes another change: it belongs to the same prefill, behind the piece that runs.
    _, next_job = await change(harness, unique, "a/x", "b/y", "c/z")
    assert (await harness.state(unique)).status is PrefillStatus.PENDING
    done: list[Job] = [next_job, job]
    assert [await harness.run(each) for each in done] == [JobResult.DONE, JobResult.DONE]
    assert await numbers(harness, unique) == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    state = await harness.state(unique)
    assert (state.status, state.written) == (PrefillStatus.DONE, 6)


def _die(*_: object) -> None:
    raise MemoryError


async def test_the_consumer_gets_its_backlog_then_the_objects_and_then_the_events_behind_the_change(
    harness: PrefillHarness, unique: str
) -> None:
    record, _ = await harness.add(unique, "a/x", prefill=False)
    await harness.publish("b/y", "1", {"id": 1})

    async def dispatched(number: int) -> None:
        body = b'{"id": %d}' % number
        await harness.queues.publish(f"{unique}.main", body, headers={POSITION: str(100 + number)})

    async with open_pull(harness.queues) as pull:

        async def next_id() -> bytes | None:
            message = await pull.next(unique)
            if message is None:
                return None
            await pull.acknowledge(unique, message.sequence)
            return message.data

        await dispatched(2)
        await dispatched(3)
        assert await next_id() == b'{"id": 2}'
        topics = (RealmTopic(harness.realm, "a/x"), RealmTopic(harness.realm, "b/y"))
        await harness.subscriptions.redefine(
            unique, lambda now: replace(now, realms_topics=topics), prefill_new_topics=True
        )
        pull.invalidate(unique)
        assert await next_id() == b'{"id": 3}', "the backlog flows until the dispatcher reaches the change"
        await begin_prefill(harness.queues, unique, record.incarnation, 10**6)
        await dispatched(4)
        pull.invalidate(unique)
        assert await next_id() is None
        [job] = await harness.jobs()
        state = after_failure(await harness.registered(unique), _as_run(job), "no archive")
        assert state is not None
        revision = (await harness.registered(unique)).prefill_revision
        await harness.context.registry.put_prefill(unique, state, revision)
        pull.invalidate(unique)
        with pytest.raises(PrefillFailed, match="no archive"):
            await next_id()
        again = await harness.subscriptions.request_prefill(unique)
        assert (again.status, again.through) == (PrefillStatus.PENDING, again.position)
        [job] = await harness.jobs()
        assert await harness.run(job) is JobResult.DONE
        pull.invalidate(unique)
        first = await next_id()
        assert first is not None
        assert b'"id": 1' in first or b'"id":1' in first
        assert [await next_id() for _ in range(2)] == [b'{"id": 4}', None]


def _as_run(job: Job) -> PrefillJob:
    assert isinstance(job, PrefillJob)
    return job
