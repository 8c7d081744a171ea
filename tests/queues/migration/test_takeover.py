"""Another machine completes a snapshot migration, or the error says what the operator has to do."""

import asyncio
import dataclasses
import shutil
from pathlib import Path

import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.maintenance import BUCKET
from purveyor.model.errors import MigrationNeeded
from purveyor.queues.client import Queues, connect
from purveyor.queues.migration.events import Step
from purveyor.queues.migration.lease import Leases
from purveyor.queues.migration.migrator import Migrator
from purveyor.queues.migration.plan import Strategy
from purveyor.queues.migration.record import QueueStatus
from tests.support.migrations import Worker, declare_queue, finish_migration, make_old_stream, publish, running
from tests.support.waiting import PATIENCE_SECONDS, until

HERE, ELSEWHERE = "container-1", "container-2"


class Crash(BaseException):
    """The end of a process."""


async def crash_at(step: Step, migrations: Migrator, name: str) -> None:
    """Begin a migration by snapshot, and end in it."""

    def crash(reached: Step) -> None:
        if reached is step:
            raise Crash

    crashing = migrations.with_options(dataclasses.replace(migrations.options, on_step=crash))
    with pytest.raises(Crash):
        await _take_part(crashing, name)


async def _take_part(migrations: Migrator, name: str) -> None:
    await migrations.begin(declare_queue(name), strategy=Strategy.SNAPSHOT)
    await finish_migration(migrations, declare_queue(name))


def elsewhere(migrations: Migrator, archives: Path | None, monkeypatch: pytest.MonkeyPatch) -> Migrator:
    """The migrations of another machine."""
    monkeypatch.setattr("socket.gethostname", lambda: ELSEWHERE)
    return migrations.with_options(dataclasses.replace(migrations.options, archives=archives))


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: HERE)


async def check_whole(queues: Queues, name: str, count: int = 5) -> None:
    """All messages are there, in order, once, for the reader that was there before."""
    worker = Worker(queues, f"stream:{name}")
    async with running(worker):
        await until(lambda: len(worker.done) >= count)
    assert worker.done == list(range(1, count + 1))
    assert (await queues.streams.info(f"stream:{name}")).state.messages == 0


@pytest.mark.parametrize("step", [Step.RECORDED, Step.SEALED, Step.PAUSED, Step.ARCHIVED])
async def test_before_the_stream_is_deleted_any_machine_takes_over(  # noqa: PLR0917 - fixtures
    queues: Queues, quick: Migrator, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Step
) -> None:
    await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 5)
    await crash_at(step, quick, unique)
    other = elsewhere(quick, tmp_path / "other machine", monkeypatch)
    await asyncio.wait_for(other.wait_until_done(unique), PATIENCE_SECONDS)
    record = await other.record(unique)
    assert record is not None
    assert record.archive is not None
    assert (record.archive.host, Path(record.archive.path).parent) == (ELSEWHERE, tmp_path / "other machine")
    await check_whole(queues, unique)


async def test_any_machine_that_mounts_a_shared_directory_finds_the_archive(
    queues: Queues, quick: Migrator, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 5)
    await crash_at(Step.DELETED, quick, unique)
    other = elsewhere(quick, None, monkeypatch)  # a pipeline that starts: it names no directory of its own
    await asyncio.wait_for(other.wait_until_done(unique), PATIENCE_SECONDS)
    await check_whole(queues, unique)


async def test_the_archive_is_found_in_the_directory_of_the_machine_that_goes_on(
    queues: Queues, quick: Migrator, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mounted in another place, or copied there."""
    await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 5)
    await crash_at(Step.DELETED, quick, unique)
    assert quick.options.archives is not None
    shutil.move(quick.options.archives, tmp_path / "mounted")
    other = elsewhere(quick, tmp_path / "mounted", monkeypatch)
    await asyncio.wait_for(other.wait_until_done(unique), PATIENCE_SECONDS)
    await check_whole(queues, unique)


async def test_what_is_restored_needs_no_archive_to_be_ended(
    queues: Queues, quick: Migrator, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 5)
    await crash_at(Step.CREATED, quick, unique)
    assert quick.options.archives is not None
    shutil.move(quick.options.archives, tmp_path / "away")
    await asyncio.wait_for(elsewhere(quick, None, monkeypatch).wait_until_done(unique), PATIENCE_SECONDS)
    await check_whole(queues, unique)


async def test_without_the_archive_the_error_says_where_it_is_and_what_to_run(
    queues: Queues, quick: Migrator, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 5)
    await crash_at(Step.DELETED, quick, unique)
    assert quick.options.archives is not None
    shutil.move(quick.options.archives, tmp_path / "away")
    publishing = asyncio.create_task(publish(queues, unique, 6, 6))
    other = elsewhere(quick, tmp_path / "other machine", monkeypatch)
    with pytest.raises(MigrationNeeded) as refused:
        await asyncio.wait_for(other.wait_until_done(unique), PATIENCE_SECONDS)
    for word in (HERE, str(quick.options.archives), f"purveyor queues apply {unique}", str(tmp_path / "other machine")):
        assert word in str(refused.value)
    assert await other.advance(unique) is QueueStatus.SEALED_FOR_MIGRATION  # programs wait, and make nothing anew
    assert stream not in await queues.streams.names()
    shutil.copytree(tmp_path / "away", tmp_path / "other machine")
    await asyncio.wait_for(other.wait_until_done(unique), PATIENCE_SECONDS)
    await publishing
    await check_whole(queues, unique, 6)


async def test_without_a_directory_the_error_says_how_to_take_over(
    queues: Queues, quick: Migrator, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 5)
    await crash_at(Step.SEALED, quick, unique)
    shutil.rmtree(quick.options.archives or "", ignore_errors=True)
    with pytest.raises(MigrationNeeded, match=f"{HERE}.*purveyor queues apply {unique}"):
        await asyncio.wait_for(elsewhere(quick, None, monkeypatch).wait_until_done(unique), PATIENCE_SECONDS)
    there = elsewhere(quick, tmp_path / "other machine", monkeypatch)
    await asyncio.wait_for(there.wait_until_done(unique), PATIENCE_SECONDS)
    await check_whole(queues, unique)


async def test_one_that_another_machine_works_on_is_waited_for(
    queues: Queues, quick: Migrator, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 5)
    await crash_at(Step.DELETED, quick, unique)
    assert quick.options.archives is not None
    shutil.move(quick.options.archives, tmp_path / "away")
    bucket = await queues.bucket(BUCKET)
    there = Leases(bucket, quick.options.lease_seconds)
    other = elsewhere(quick, None, monkeypatch)
    ending = asyncio.create_task(_ending(other, unique))
    holding = await until(lambda: _hold(there, unique))
    first = (await bucket.get(f"lease.{unique}")).revision
    await until(lambda: _renewed(queues, unique, first + 8))  # two lengths of a lease
    assert not ending.done()
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    assert isinstance(await asyncio.wait_for(ending, PATIENCE_SECONDS), MigrationNeeded)


async def _ending(migrations: Migrator, name: str) -> Exception | None:
    try:
        await migrations.wait_until_done(name)
    except MigrationNeeded as error:
        return error
    return None


async def _hold(leases: Leases, name: str) -> "asyncio.Task[None] | None":
    held: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def hold() -> None:
        async with leases.hold(name) as lease:
            held.set_result(lease is not None)
            if lease is not None:
                await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    return task if await held else None


async def _renewed(queues: Queues, name: str, revision: int) -> bool:
    return (await (await queues.bucket(BUCKET)).get(f"lease.{name}")).revision >= revision


async def test_an_archive_that_another_machine_has_replaced_is_never_restored(
    queues: Queues, quick: Migrator, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its readers' positions are out of date: what was acknowledged since would come again."""
    stream = await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 5)
    [in_hand] = await queues.fetch(stream, "reader", 1)
    in_time = quick.with_options(dataclasses.replace(quick.options, in_flight_seconds=0.1))
    await crash_at(Step.ARCHIVED, in_time, unique)
    await in_hand.ack(confirm=True)
    other = elsewhere(quick, tmp_path / "other machine", monkeypatch)
    await crash_at(Step.DELETED, other, unique)
    shutil.move(tmp_path / "other machine", tmp_path / "away")
    monkeypatch.setattr("socket.gethostname", lambda: HERE)
    with pytest.raises(MigrationNeeded, match=ELSEWHERE):
        await asyncio.wait_for(quick.wait_until_done(unique), PATIENCE_SECONDS)
    shutil.move(tmp_path / "away", tmp_path / "other machine")
    await asyncio.wait_for(other.wait_until_done(unique), PATIENCE_SECONDS)
    worker = Worker(queues, stream)
    async with running(worker):
        await until(lambda: len(worker.done) >= 4)
    assert worker.done == [2, 3, 4, 5]


async def test_programs_that_connect_for_each_poll_take_over_too(
    address: Address, queues: Queues, quick: Migrator, unique: str
) -> None:
    """As the pipeline does: what it has seen of the lease of a killed instance outlives the connection."""
    await make_old_stream(queues, unique)
    await publish(queues, unique, 1, 5)
    await crash_at(Step.PAUSED, quick, unique)

    async def look() -> bool:
        async with connect(address) as own:
            return await own.migrations.with_options(quick.options).advance(unique) is QueueStatus.READY

    await until(look)
    await check_whole(queues, unique)
