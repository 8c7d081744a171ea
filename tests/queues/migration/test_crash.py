"""kill -9 of an instance at every step of a migration: the next instance completes it; nothing is lost or doubled."""

import asyncio
import contextlib
import dataclasses
import signal
import sys
from pathlib import Path

import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.config import Retention
from purveyor.jetstream.maintenance import BUCKET
from purveyor.model.errors import LeaseLost
from purveyor.queues.client import Queues, connect
from purveyor.queues.migration.events import Step
from purveyor.queues.migration.lease import Lease, Leases, create_bucket
from purveyor.queues.migration.migrator import Migrator
from purveyor.queues.migration.plan import Strategy
from tests.queues.migration.crash_program import options, work
from tests.support.migrations import declare_queue, finish_migration, make_old_stream, publish
from tests.support.scale import LONG, chance
from tests.support.waiting import PATIENCE_SECONDS, until

SHARED = (Step.RECORDED, Step.SEALED, Step.DELETED, Step.CREATED, Step.READERS_MADE, Step.CONVERTED, Step.DONE)
STEPS = {
    Strategy.DRAIN: (*SHARED, Step.DRAINED),
    Strategy.SNAPSHOT: (*SHARED, Step.PAUSED, Step.ARCHIVED),
}
CASES = [(strategy, step) for strategy, steps in STEPS.items() for step in steps]
BACKLOG, ALL = 20, 40


def cases() -> list[tuple[Strategy, Step]]:
    """All in `make chaos`; a few of each way else."""
    if LONG:
        return CASES
    random = chance("crash of a migration")
    late = (Step.DELETED, Step.CREATED, Step.CONVERTED)
    return [
        pair
        for strategy in Strategy
        for pair in (
            (strategy, random.choice(late)),
            (strategy, random.choice([step for step in STEPS[strategy] if step not in late])),
        )
    ]


@pytest.mark.chaos
def test_the_next_instance_completes_the_migration_of_a_killed_one(
    address: Address, unique: str, tmp_path: Path
) -> None:
    async def play() -> None:
        await asyncio.gather(
            *(
                _killed_at(address, f"{unique}-{number}", fresh(tmp_path / str(number)), *case)
                for number, case in enumerate(cases())
            )
        )

    asyncio.run(play())


def fresh(directory: Path) -> Path:
    directory.mkdir()
    (directory / "processed").touch()
    return directory


async def _killed_at(address: Address, name: str, directory: Path, strategy: Strategy, step: Step) -> None:
    case = f"{strategy.value}, {step.value}"
    queue = declare_queue(name, Retention.INTEREST)
    async with connect(address, patience_seconds=30) as queues:
        await make_old_stream(queues, name)
        await publish(queues, name, 1, BACKLOG)
        publishing = asyncio.create_task(publish(queues, name, BACKLOG + 1, ALL))
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.queues.migration.crash_program",
            _url(address), name, strategy.value, str(directory), step.value,
            cwd=Path(__file__).parents[3],
        )  # fmt: skip
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await program.wait() == -signal.SIGKILL, case
            migrations = queues.migrations.with_options(options(directory))
            working = asyncio.create_task(work(queues, queue.stream, directory / "processed"))
            await finish_migration(migrations, queue)
            await publishing
            await _processed(directory, ALL)
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        _check_once_in_order(directory, strategy, case)
        raw = await queues.streams.raw_info(queue.stream)
        assert raw["config"]["retention"] == "interest", case
        assert not raw["config"].get("sealed"), case
        assert raw["state"]["messages"] == 0, case
        assert raw["state"]["last_seq"] == ALL, case
        assert [each.paused for each in await queues.consumers.list(queue.stream)] == [False], case


async def _processed(directory: Path, last: int) -> None:
    await until(lambda: str(last) in (directory / "processed").read_text().split())


def _check_once_in_order(directory: Path, strategy: Strategy, case: str) -> None:
    """The message of the killed instance may be processed and not acknowledged: it is delivered again."""
    numbers = [int(line) for line in (directory / "processed").read_text().split()]
    once = list(dict.fromkeys(numbers))
    assert once == list(range(1, ALL + 1)), f"{case}: {numbers}"
    assert len(numbers) - len(once) <= 1, f"{case}: {numbers}"


def _url(address: Address) -> str:
    host = address.urls[0].partition("://")[2]
    return f"nats://{address.user}:{address.password}@{host}"


async def test_one_that_slept_through_its_lease_deletes_nothing(queues: Queues, unique: str) -> None:
    """An instance believes that it holds the lease, and has already checked it: the server refuses its deletion."""
    stream = await make_old_stream(queues, unique)
    await queues.streams.seal(stream)
    await create_bucket(queues.streams._api, 1)
    bucket = await queues.bucket(BUCKET)
    asleep, awake = Leases(bucket, 0.2), Leases(bucket, 0.2)
    old = str((await queues.streams.raw_info(stream))["created"])
    async with asleep.hold(unique) as held:
        assert held is not None
        stale = Lease(bucket, unique, held.revision)  # as it was before it fell asleep, and never renewed since
        held.lose()
        await until(lambda: _takes_over(awake, queues, unique, old), what="a lease that runs out")
    await publish(queues, unique, 1, 3)
    new = str((await queues.streams.raw_info(stream))["created"])
    with pytest.raises(LeaseLost):
        # Even if it takes the new one for the old.
        await stale.delete_stream(queues.streams._api, queues._publisher, queues.streams, new)
    assert (await queues.streams.info(stream)).state.messages == 3


async def _takes_over(leases: Leases, queues: Queues, name: str, created: str) -> bool:
    async with leases.hold(name) as lease:
        if lease is None:
            return False
        await lease.delete_stream(queues.streams._api, queues._publisher, queues.streams, created)
        await make_old_stream(queues, name)
        return True


async def test_exactly_one_of_many_instances_creates_the_new_stream(
    address: Address, queues: Queues, unique: str, quick: Migrator
) -> None:
    await make_old_stream(queues, unique)
    queue = declare_queue(unique)
    steps: list[Step] = []
    async with contextlib.AsyncExitStack() as stack:
        connected = [await stack.enter_async_context(connect(address)) for _ in range(5)]
        noting = dataclasses.replace(quick.options, on_step=steps.append)
        instances = [each.migrations.with_options(noting) for each in connected]
        await asyncio.gather(*(each.begin(queue) for each in instances))
        await asyncio.gather(*(finish_migration(each, queue) for each in instances))
    assert [steps.count(step) for step in (Step.RECORDED, Step.DELETED, Step.CREATED, Step.DONE)] == [1, 1, 1, 1]
