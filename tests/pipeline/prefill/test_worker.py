import json
from collections.abc import Iterator
from typing import Any

import pytest

from purveyor.model.control_events import ReplayJob, decode_job
from purveyor.model.errors import AlreadyExists
from purveyor.model.registration import PrefillState, PrefillStatus
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.pipeline.prefill import PrefillWorker, WorkerOptions
from purveyor.queues.catalogue import PREFILL
from purveyor.queues.dead_letters.letter import DeadLetter
from tests.support.prefill_harness import PrefillHarness
from tests.support.waiting import until

QUICK = WorkerOptions(first_pause_seconds=0.05, turn_seconds=0.05, upgrade_seconds=0.1, progress_seconds=0.1)


@pytest.fixture
def worker(harness: PrefillHarness) -> Iterator[PrefillWorker]:
    worker = PrefillWorker(harness.context.spark, harness.queues.address, harness.context.archive, QUICK)
    yield worker
    worker.stop()


async def idle(harness: PrefillHarness) -> bool:
    return (await harness.queues.streams.info(PREFILL.stream)).state.messages == 0


async def test_jobs_are_taken_from_the_queue_and_answered(
    harness: PrefillHarness, worker: PrefillWorker, unique: str
) -> None:
    await harness.publish_many("a/x", 20)
    names = [f"{unique[:40]}-{number}" for number in range(3)]
    jobs = [await harness.add(name, "a/x") for name in names]
    for _, [job] in jobs:
        await harness.queues.publish("prefill", job.encode())
    worker.start()

    await until(lambda: idle(harness))
    await harness.queues.publish("prefill", jobs[0][1][0].encode())  # once more: it is done, and stays so
    await until(lambda: idle(harness))

    for name in names:
        assert (await harness.state(name)).status is PrefillStatus.DONE
        assert len(await harness.stored(name)) == 20
    assert await harness.failures() == []


async def test_an_unreadable_job_is_set_aside_and_other_jobs_continue(
    harness: PrefillHarness, worker: PrefillWorker, unique: str
) -> None:
    await harness.publish("a/x", "1", {"id": 1})
    _, jobs = await harness.add(unique, "a/x")
    await harness.queues.publish("prefill", b"no job")
    for job in jobs:
        await harness.queues.publish("prefill", job.encode())
    worker.start()

    await until(lambda: idle(harness))

    [failure] = await harness.failures()
    assert failure.data == b"no job"
    assert "JSON" in failure.headers["Purveyor-Reason"]
    assert (await harness.state(unique)).status is PrefillStatus.DONE


async def test_a_prefill_that_fails_too_often_has_a_reason_and_can_be_requested_again(
    harness: PrefillHarness, worker: PrefillWorker, unique: str
) -> None:
    await harness.publish_many("a/x", 20)
    _, [job] = await harness.add(unique, "a/x")
    await harness.limit(unique, 5)
    await harness.queues.publish("prefill", job.encode())
    worker.start()

    await until(lambda: idle(harness))

    state = await harness.state(unique)
    assert state.status is PrefillStatus.FAILED
    assert state.reason is not None
    assert "full" in state.reason
    [failure] = await harness.failures()
    assert json.loads(failure.data)["job"] == job.job
    letter = DeadLetter.from_message({name: (value,) for name, value in failure.headers.items()}, failure.data)
    assert (letter.reason, letter.attempts) == (state.reason, 3)

    await harness.limit(unique, -1)
    await harness.subscriptions.request_prefill(unique)
    await until(lambda: idle(harness))
    assert (await harness.state(unique)).status is PrefillStatus.DONE
    assert len(await harness.stored(unique)) == 20


async def test_a_worker_that_is_stopped_gives_its_job_back_at_once(
    harness: PrefillHarness, worker: PrefillWorker, unique: str
) -> None:
    await harness.publish_many("a/x", 3000)
    _, [job] = await harness.add(unique, "a/x")
    await harness.queues.publish("prefill", job.encode())
    worker.start()

    async def begun() -> bool:
        return (await harness.state(unique)).status is not PrefillStatus.PENDING

    await until(begun)
    worker.stop()

    other = PrefillWorker(harness.context.spark, harness.queues.address, harness.context.archive, QUICK)
    other.start()
    try:
        await until(lambda: idle(harness))
    finally:
        other.stop()
    assert (await harness.state(unique)).status is PrefillStatus.DONE
    assert [message.body["new"]["id"] for message in await harness.stored(unique)] == list(range(1, 3001))


@pytest.mark.parametrize("unknown", [{"version": 2}, {"zone": "eu"}], ids=["version", "field"])
async def test_a_job_of_a_newer_program_waits_for_an_upgrade_and_other_jobs_continue(
    harness: PrefillHarness,
    worker: PrefillWorker,
    unique: str,
    unknown: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await harness.publish_many("a/x", 5)
    _, [newer] = await harness.add(f"{unique}-a", "a/x")
    _, [current] = await harness.add(f"{unique}-b", "a/x")
    await harness.queues.publish("prefill", json.dumps({**newer.to_json(), **unknown}).encode())
    await harness.queues.publish("prefill", current.encode())
    worker.start()

    async def done(name: str) -> bool:
        return (await harness.state(name)).status is PrefillStatus.DONE

    async def reported() -> bool:
        return "upgrade" in ((await harness.state(newer.name)).reason or "")

    await until(lambda: done(current.name))
    await until(reported)
    assert (await harness.state(newer.name)).status is PrefillStatus.PENDING
    assert await harness.failures() == []

    real = decode_job  # the worker is upgraded: what was unknown means nothing to this job
    monkeypatch.setattr(
        "purveyor.pipeline.prefill.worker.decode_job",
        lambda data: real(json.dumps({key: value for key, value in json.loads(data).items() if key not in unknown})),
    )
    await until(lambda: idle(harness))
    assert (await harness.state(newer.name)).status is PrefillStatus.DONE
    assert len(await harness.stored(newer.name)) == 5


@pytest.mark.parametrize("part", ["definition", "prefill"])
async def test_a_job_of_a_subscription_that_is_not_understood_waits_and_changes_nothing(
    harness: PrefillHarness, worker: PrefillWorker, unique: str, part: str
) -> None:
    await harness.publish_many("a/x", 5)
    _, [job] = await harness.add(unique, "a/x")
    bucket = await harness.queues.bucket("subscriptions")
    understood = await bucket.get(f"{unique}.{part}")
    newer = json.dumps({**json.loads(understood.value), "version": 2}).encode()
    revision = await bucket.put(f"{unique}.{part}", newer)
    await harness.queues.publish("prefill", job.encode())
    worker.start()

    async def handled() -> bool:
        return worker.handled > 1

    await until(handled)
    assert (await bucket.get(f"{unique}.{part}")).revision == revision
    assert await harness.failures() == []
    await bucket.put(f"{unique}.{part}", understood.value)
    await until(lambda: idle(harness))
    assert (await harness.state(unique)).status is PrefillStatus.DONE
    assert len(await harness.stored(unique)) == 5


async def test_jobs_that_wait_keep_no_other_subscription_from_its_prefill(
    harness: PrefillHarness, worker: PrefillWorker, unique: str
) -> None:
    """However many there are: they wait for a prefill that never ends."""
    await harness.publish("a/x", "1", {"id": 1})
    names = [f"{unique[:40]}-{number}" for number in range(20)]
    for name in names:
        await harness.add(name, "a/x")  # its prefill is pending, and its job is lost
    for name in names:
        await harness.subscriptions.replay(name, 1)
    worker.start()

    async def all_wait() -> bool:
        info = await harness.queues.consumers.info(PREFILL.stream, "prefill")
        return info.num_ack_pending >= len(names) and worker.handled >= len(names)

    await until(all_wait)
    topics = (RealmTopic(harness.realm, "a/x"),)
    await harness.subscriptions.add(Subscription(name=unique, realms_topics=topics, request_prefill=True))

    async def done() -> bool:
        return (await harness.state(unique)).status is PrefillStatus.DONE

    await until(done)

    async def only_waiting_jobs_are_left() -> bool:  # the worker acknowledges a job after it has noted the result
        return (await harness.queues.streams.info(PREFILL.stream)).state.messages == len(names)

    await until(only_waiting_jobs_are_left)


async def test_a_replay_that_waits_is_noted_by_the_worker_if_it_is_not(
    harness: PrefillHarness, worker: PrefillWorker, unique: str
) -> None:
    """An API without these records stored it, or one that ended before it wrote where the job is."""
    record, [prefill] = await harness.add(unique, "a/x")
    job = ReplayJob(name=unique, incarnation=record.incarnation, job=f"job-of-{unique}", from_=1)
    sequence = (await harness.queues.publish("prefill", job.encode())).sequence
    worker.start()

    async def noted() -> bool:
        found = await harness.context.registry.waiting_replays.find(unique)
        return found is not None and (found.job, found.sequence) == (job.job, sequence)

    await until(noted)
    with pytest.raises(AlreadyExists, match=job.job):
        await harness.subscriptions.replay(unique, 1)
    await harness.queues.publish("prefill", prefill.encode())
    await until(lambda: idle(harness))
    assert await harness.context.registry.waiting_replays.find(unique) is None


async def test_a_replay_that_is_given_up_makes_way_for_another(
    harness: PrefillHarness, worker: PrefillWorker, unique: str
) -> None:
    await harness.add(unique, "a/x")
    found = await harness.registered(unique)
    failed = PrefillState(incarnation=found.incarnation, status=PrefillStatus.FAILED, position=1, reason="no archive")
    await harness.context.registry.put_prefill(unique, failed, found.prefill_revision)
    job = await harness.subscriptions.replay(unique, 1)
    worker.start()

    await until(lambda: idle(harness))
    [failure] = await harness.failures()
    assert json.loads(failure.data)["job"] == job.job
    assert await harness.context.registry.waiting_replays.find(unique) is None


async def test_a_replay_of_a_subscription_that_is_gone_leaves_no_record(
    harness: PrefillHarness, worker: PrefillWorker, unique: str
) -> None:
    """It was deleted between the record and the job."""
    await harness.add(unique, "a/x", prefill=False)
    await harness.subscriptions.replay(unique, 1)
    noted = await harness.context.registry.waiting_replays.find(unique)
    assert noted is not None
    await harness.subscriptions.delete(unique)
    await harness.context.registry.waiting_replays.adopt(unique, noted)
    worker.start()
    await until(lambda: idle(harness))
    assert await harness.context.registry.waiting_replays.find(unique) is None


@pytest.mark.parametrize("unknown", [{"version": 2}, {"zone": "eu"}], ids=["version", "field"])
async def test_where_the_record_of_a_waiting_replay_is_not_understood_only_replays_wait(
    harness: PrefillHarness, worker: PrefillWorker, unique: str, unknown: dict[str, Any]
) -> None:
    first = await harness.publish("a/x", "1", {"id": 1})
    one, other = f"{unique}-a", f"{unique}-b"
    for name in (one, other):
        await harness.add(name, "a/x", prefill=False)
    for name in (one, other):
        await harness.subscriptions.replay(name, first)
    bucket = await harness.queues.bucket("subscriptions")
    understood = await bucket.get(f"{one}.replay")
    newer = json.dumps({**json.loads(understood.value), **unknown}).encode()
    revision = await bucket.put(f"{one}.replay", newer)
    worker.start()

    async def replayed() -> bool:
        return len(await harness.stored(other)) == 1 and worker.handled > 2

    await until(replayed)
    assert (await harness.registered(one)).prefill is None  # delivery goes on
    assert await harness.failures() == []
    assert (await bucket.get(f"{one}.replay")).revision == revision

    await bucket.put(f"{one}.replay", understood.value)
    await until(lambda: idle(harness))
    assert len(await harness.stored(one)) == 1
    assert await harness.context.registry.waiting_replays.find(one) is None
