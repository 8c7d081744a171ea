import json
from collections.abc import Iterator

import pytest

from purveyor.model.registration import PrefillStatus
from purveyor.pipeline.prefill import PrefillWorker, WorkerOptions
from purveyor.queues.catalogue import PREFILL
from purveyor.queues.dead_letters import DeadLetter
from tests.pipeline.prefill.bench import Bench, eventually

QUICK = WorkerOptions(first_pause_seconds=0.05, turn_seconds=0.05, progress_seconds=0.1)


@pytest.fixture
def worker(bench: Bench) -> Iterator[PrefillWorker]:
    worker = PrefillWorker(bench.shop.spark, bench.queues.address, bench.shop.archive, QUICK)
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

    await eventually(lambda: idle(bench))
    await bench.queues.publish("prefill", jobs[0][1][0].encode())  # once more: it is done, and stays so
    await eventually(lambda: idle(bench))

    for name in names:
        assert (await bench.state(name)).status is PrefillStatus.DONE
        assert len(await bench.stored(name)) == 20
    assert await bench.failures() == []


async def test_a_job_that_cannot_be_read_is_put_aside_and_the_rest_goes_on(
    bench: Bench, worker: PrefillWorker, unique: str
) -> None:
    await bench.publish("a/x", "1", {"id": 1})
    _, jobs = await bench.add(unique, "a/x")
    await bench.queues.publish("prefill", b"no job")
    for job in jobs:
        await bench.queues.publish("prefill", job.encode())
    worker.start()

    await eventually(lambda: idle(bench))

    [failure] = await bench.failures()
    assert failure.data == b"no job"
    assert "JSON" in failure.headers["Purveyor-Reason"]
    assert (await bench.state(unique)).status is PrefillStatus.DONE


async def test_a_prefill_that_fails_too_often_says_so_and_can_be_asked_for_again(
    bench: Bench, worker: PrefillWorker, unique: str
) -> None:
    await bench.publish_many("a/x", 20)
    _, [job] = await bench.add(unique, "a/x")
    await bench.limit(unique, 5)
    await bench.queues.publish("prefill", job.encode())
    worker.start()

    await eventually(lambda: idle(bench))

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
    await eventually(lambda: idle(bench))
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

    await eventually(begun)
    worker.stop()

    other = PrefillWorker(bench.shop.spark, bench.queues.address, bench.shop.archive, QUICK)
    other.start()
    try:
        await eventually(lambda: idle(bench))
    finally:
        other.stop()
    assert (await bench.state(unique)).status is PrefillStatus.DONE
    assert [message.body["new"]["id"] for message in await bench.stored(unique)] == list(range(1, 3001))
