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
from tests.support.prefill_bench import Bench
from tests.support.waiting import until

QUICK = WorkerOptions(first_pause_seconds=0.05, turn_seconds=0.05, upgrade_seconds=0.1, progress_seconds=0.1)


@pytest.fixture
def worker(bench: Bench) -> Iterator[PrefillWorker]:
    worker = PrefillWorker(bench.context.spark, bench.queues.address, bench.context.archive, QUICK)
    yield worker
    worker.stop()


async def idle(bench: Bench) -> bool:
    return (await bench.queues.streams.info(PREFILL.stream)).state.messages == 0


async def test_jobs_are_taken_from_the_queue_and_answered(bench: Bench, worker: PrefillWorker, unique: str) -> None:
    await bench.publish_many("a/x", 20)
    names = [f"{unique[:40]}-{number}" for number in range(3)]
    jobs = [await bench.add(name, "a/x") for name in names]
    for _, [job] in jobs:
        await bench.queues.publish("prefill", job.encode())
    worker.start()

    await until(lambda: idle(bench))
    await bench.queues.publish("prefill", jobs[0][1][0].encode())  # once more: it is done, and stays so
    await until(lambda: idle(bench))

    for name in names:
        assert (await bench.state(name)).status is PrefillStatus.DONE
        assert len(await bench.stored(name)) == 20
    assert await bench.failures() == []


async def test_an_unreadable_job_is_set_aside_and_other_jobs_continue(
    bench: Bench, worker: PrefillWorker, unique: str
) -> None:
    await bench.publish("a/x", "1", {"id": 1})
    _, jobs = await bench.add(unique, "a/x")
    await bench.queues.publish("prefill", b"no job")
    for job in jobs:
        await bench.queues.publish("prefill", job.encode())
    worker.start()

    await until(lambda: idle(bench))

    [failure] = await bench.failures()
    assert failure.data == b"no job"
    assert "JSON" in failure.headers["Purveyor-Reason"]
    assert (await bench.state(unique)).status is PrefillStatus.DONE


async def test_a_prefill_that_fails_too_often_has_a_reason_and_can_be_requested_again(
    bench: Bench, worker: PrefillWorker, unique: str
) -> None:
    await bench.publish_many("a/x", 20)
    _, [job] = await bench.add(unique, "a/x")
    await bench.limit(unique, 5)
    await bench.queues.publish("prefill", job.encode())
    worker.start()

    await until(lambda: idle(bench))

    state = await bench.state(unique)
    assert state.status is PrefillStatus.FAILED
    assert state.reason is not None
    assert "full" in state.reason
    [failure] = await bench.failures()
    assert json.loads(failure.data)["job"] == job.job
    letter = DeadLetter.from_message({name: (value,) for name, value in failure.headers.items()}, failure.data)
    assert (letter.reason, letter.attempts) == (state.reason, 3)

    await bench.limit(unique, -1)
    await bench.subscriptions.request_prefill(unique)
    await until(lambda: idle(bench))
    assert (await bench.state(unique)).status is PrefillStatus.DONE
    assert len(await bench.stored(unique)) == 20


async def test_a_worker_that_is_stopped_gives_its_job_back_at_once(
    bench: Bench, worker: PrefillWorker, unique: str
) -> None:
    await bench.publish_many("a/x", 3000)
    _, [job] = await bench.add(unique, "a/x")
    await bench.queues.publish("prefill", job.encode())
    worker.start()

    async def begun() -> bool:
        return (await bench.state(unique)).status is not PrefillStatus.PENDING

    await until(begun)
    worker.stop()

    other = PrefillWorker(bench.context.spark, bench.queues.address, bench.context.archive, QUICK)
    other.start()
    try:
        await until(lambda: idle(bench))
    finally:
        other.stop()
    assert (await bench.state(unique)).status is PrefillStatus.DONE
    assert [message.body["new"]["id"] for message in await bench.stored(unique)] == list(range(1, 3001))


@pytest.mark.parametrize("unknown", [{"version": 2}, {"zone": "eu"}], ids=["version", "field"])
async def test_a_job_of_a_newer_program_waits_for_an_upgrade_and_other_jobs_continue(
    bench: Bench, worker: PrefillWorker, unique: str, unknown: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.publish_many("a/x", 5)
    _, [newer] = await bench.add(f"{unique}-a", "a/x")
    _, [current] = await bench.add(f"{unique}-b", "a/x")
    await bench.queues.publish("prefill", json.dumps({**newer.to_json(), **unknown}).encode())
    await bench.queues.publish("prefill", current.encode())
    worker.start()

    async def done(name: str) -> bool:
        return (await bench.state(name)).status is PrefillStatus.DONE

    async def told() -> bool:
        return "upgrade" in ((await bench.state(newer.name)).reason or "")

    await until(lambda: done(current.name))
    await until(told)
    assert (await bench.state(newer.name)).status is PrefillStatus.PENDING
    assert await bench.failures() == []

    real = decode_job  # the worker is upgraded: what was unknown means nothing to this job
    monkeypatch.setattr(
        "purveyor.pipeline.prefill.worker.decode_job",
        lambda data: real(json.dumps({key: value for key, value in json.loads(data).items() if key not in unknown})),
    )
    await until(lambda: idle(bench))
    assert (await bench.state(newer.name)).status is PrefillStatus.DONE
    assert len(await bench.stored(newer.name)) == 5


@pytest.mark.parametrize("part", ["definition", "prefill"])
async def test_a_job_of_a_subscription_that_is_not_understood_waits_and_changes_nothing(
    bench: Bench, worker: PrefillWorker, unique: str, part: str
) -> None:
    await bench.publish_many("a/x", 5)
    _, [job] = await bench.add(unique, "a/x")
    bucket = await bench.queues.bucket("subscriptions")
    understood = await bucket.get(f"{unique}.{part}")
    newer = json.dumps({**json.loads(understood.value), "version": 2}).encode()
    revision = await bucket.put(f"{unique}.{part}", newer)
    await bench.queues.publish("prefill", job.encode())
    worker.start()

    async def handled() -> bool:
        return worker.handled > 1

    await until(handled)
    assert (await bucket.get(f"{unique}.{part}")).revision == revision
    assert await bench.failures() == []
    await bucket.put(f"{unique}.{part}", understood.value)
    await until(lambda: idle(bench))
    assert (await bench.state(unique)).status is PrefillStatus.DONE
    assert len(await bench.stored(unique)) == 5


async def test_jobs_that_wait_keep_no_other_subscription_from_its_prefill(
    bench: Bench, worker: PrefillWorker, unique: str
) -> None:
    """However many there are: they wait for a prefill that never ends."""
    await bench.publish("a/x", "1", {"id": 1})
    names = [f"{unique[:40]}-{number}" for number in range(20)]
    for name in names:
        await bench.add(name, "a/x")  # its prefill is pending, and its job is lost
    for name in names:
        await bench.subscriptions.replay(name, 1)
    worker.start()

    async def all_wait() -> bool:
        info = await bench.queues.consumers.info(PREFILL.stream, "prefill")
        return info.num_ack_pending >= len(names) and worker.handled >= len(names)

    await until(all_wait)
    topics = (RealmTopic(bench.realm, "a/x"),)
    await bench.subscriptions.add(Subscription(name=unique, realms_topics=topics, request_prefill=True))

    async def done() -> bool:
        return (await bench.state(unique)).status is PrefillStatus.DONE

    await until(done)
    assert (await bench.queues.streams.info(PREFILL.stream)).state.messages == len(names)


async def test_a_replay_that_waits_is_noted_by_the_worker_if_it_is_not(
    bench: Bench, worker: PrefillWorker, unique: str
) -> None:
    """An API without these records stored it, or one that ended before it wrote where the job is."""
    record, [prefill] = await bench.add(unique, "a/x")
    job = ReplayJob(name=unique, incarnation=record.incarnation, job=f"job-of-{unique}", from_=1)
    sequence = (await bench.queues.publish("prefill", job.encode())).sequence
    worker.start()

    async def noted() -> bool:
        found = await bench.context.registry.waiting_replays.find(unique)
        return found is not None and (found.job, found.sequence) == (job.job, sequence)

    await until(noted)
    with pytest.raises(AlreadyExists, match=job.job):
        await bench.subscriptions.replay(unique, 1)
    await bench.queues.publish("prefill", prefill.encode())
    await until(lambda: idle(bench))
    assert await bench.context.registry.waiting_replays.find(unique) is None


async def test_a_replay_that_is_given_up_makes_way_for_another(
    bench: Bench, worker: PrefillWorker, unique: str
) -> None:
    await bench.add(unique, "a/x")
    found = await bench.registered(unique)
    failed = PrefillState(incarnation=found.incarnation, status=PrefillStatus.FAILED, position=1, reason="no archive")
    await bench.context.registry.put_prefill(unique, failed, found.prefill_revision)
    job = await bench.subscriptions.replay(unique, 1)
    worker.start()

    await until(lambda: idle(bench))
    [failure] = await bench.failures()
    assert json.loads(failure.data)["job"] == job.job
    assert await bench.context.registry.waiting_replays.find(unique) is None


async def test_a_replay_of_a_subscription_that_is_gone_leaves_no_record(
    bench: Bench, worker: PrefillWorker, unique: str
) -> None:
    """It was deleted between the record and the job."""
    await bench.add(unique, "a/x", prefill=False)
    await bench.subscriptions.replay(unique, 1)
    noted = await bench.context.registry.waiting_replays.find(unique)
    assert noted is not None
    await bench.subscriptions.delete(unique)
    await bench.context.registry.waiting_replays.adopt(unique, noted)
    worker.start()
    await until(lambda: idle(bench))
    assert await bench.context.registry.waiting_replays.find(unique) is None


@pytest.mark.parametrize("unknown", [{"version": 2}, {"zone": "eu"}], ids=["version", "field"])
async def test_where_the_record_of_a_waiting_replay_is_not_understood_only_replays_wait(
    bench: Bench, worker: PrefillWorker, unique: str, unknown: dict[str, Any]
) -> None:
    first = await bench.publish("a/x", "1", {"id": 1})
    one, other = f"{unique}-a", f"{unique}-b"
    for name in (one, other):
        await bench.add(name, "a/x", prefill=False)
    for name in (one, other):
        await bench.subscriptions.replay(name, first)
    bucket = await bench.queues.bucket("subscriptions")
    understood = await bucket.get(f"{one}.replay")
    newer = json.dumps({**json.loads(understood.value), **unknown}).encode()
    revision = await bucket.put(f"{one}.replay", newer)
    worker.start()

    async def replayed() -> bool:
        return len(await bench.stored(other)) == 1 and worker.handled > 2

    await until(replayed)
    assert (await bench.registered(one)).prefill is None  # delivery goes on
    assert await bench.failures() == []
    assert (await bucket.get(f"{one}.replay")).revision == revision

    await bucket.put(f"{one}.replay", understood.value)
    await until(lambda: idle(bench))
    assert len(await bench.stored(one)) == 1
    assert await bench.context.registry.waiting_replays.find(one) is None
