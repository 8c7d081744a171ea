"""A full disk: the limit of the store follows the disk, and the server works again when its disk has room."""

from pathlib import Path

import pytest

from purveyor.jetstream.config import StreamConfig
from purveyor.jetstream.server import EmbeddedServer, EventKind, ServerEvent, ServerOptions
from purveyor.jetstream.server.server_checks import DiskCheck, DiskStatus, Limit, Space, check_disk, size_of
from purveyor.model.errors import PurveyorError
from purveyor.queues import connect
from tests.support.small_disk import SmallDisk
from tests.support.waiting import until

MIB = 1024 * 1024
ROOMY = Space(total_bytes=1000 * MIB, free_bytes=500 * MIB)
LIMIT = Limit(400 * MIB)


def test_a_limit_counts_what_is_stored_already() -> None:
    assert Space(1000 * MIB, 100 * MIB).limit_bytes(800 * MIB) == 875 * MIB
    assert Space(1000 * MIB, 0).limit_bytes(900 * MIB) == 900 * MIB
    assert Space(10**15, 10**14).limit_bytes(0) == 10**14 - 1024 * MIB


def test_a_disk_with_room_is_fine() -> None:
    assert check_disk(ROOMY, 100 * MIB, LIMIT, disk_was_full=False) == DiskCheck(DiskStatus.FINE)
    assert check_disk(ROOMY, None, LIMIT, disk_was_full=False) == DiskCheck(DiskStatus.FINE)


def test_after_a_full_disk_the_server_restarts_once_there_is_enough_room() -> None:
    full = check_disk(Space(1000 * MIB, MIB), 100 * MIB, LIMIT, disk_was_full=False)
    assert full.status is DiskStatus.FULL
    assert full.disk_was_full
    scarce = check_disk(Space(1000 * MIB, 60 * MIB), 100 * MIB, LIMIT, disk_was_full=True)
    assert scarce.status is DiskStatus.FULL
    assert scarce.disk_was_full
    again = check_disk(ROOMY, 100 * MIB, LIMIT, disk_was_full=True)
    assert again.status is DiskStatus.ROOM_AGAIN
    assert not again.disk_was_full


def test_a_store_at_its_limit_gets_a_larger_one_where_there_is_room() -> None:
    assert check_disk(ROOMY, 390 * MIB, LIMIT, disk_was_full=False).status is DiskStatus.ROOM_AGAIN
    assert check_disk(ROOMY, 390 * MIB, Limit(400 * MIB, chosen=True), disk_was_full=False).status is DiskStatus.FULL
    scarce = Space(1000 * MIB, 60 * MIB)
    assert check_disk(scarce, 390 * MIB, LIMIT, disk_was_full=False).status is DiskStatus.FULL


def test_the_size_of_a_directory_is_that_of_its_files(tmp_path: Path) -> None:
    assert size_of(tmp_path / "missing") == 0
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one").write_bytes(b"x" * 10)
    (tmp_path / "a" / "b" / "two").write_bytes(b"x" * 5)
    assert size_of(tmp_path) == 15


async def publish_until_refused(server: EmbeddedServer, stored: list[int]) -> PurveyorError:
    """Publish numbered messages of 64 KiB; add the number of each that the server confirmed."""
    async with connect(server.address, patience_seconds=5) as queues:
        for number in range(len(stored), 100_000):
            try:
                await queues.publish("S", b"%08d" % number + b"x" * 65_536, msg_id=str(number))
            except PurveyorError as error:
                return error
            stored.append(number)
    raise AssertionError("the disk never filled up")


async def publish_again(server: EmbeddedServer, stored: list[int]) -> None:
    """Publish one message; the same again until the server takes it."""
    number = len(stored)
    async with connect(server.address) as queues:
        await until(
            lambda: queues.publish("S", b"%08d" % number, msg_id=str(number)),
            what="room for a message",
            ignoring=(PurveyorError,),
        )
    stored.append(number)


async def numbers(server: EmbeddedServer, count: int) -> list[int]:
    async with connect(server.address) as queues:
        return [int((await queues.streams.get("S", each)).data[:8]) for each in range(1, count + 1)]


@pytest.mark.parametrize("filler", ["the store itself", "another file"])
async def test_nothing_confirmed_is_lost_and_the_server_works_again_when_there_is_room(
    small_disk: SmallDisk, filler: str
) -> None:
    events: list[ServerEvent] = []
    stored: list[int] = []
    options = ServerOptions(sync="2m")
    with EmbeddedServer(small_disk.path / "nats", options, on_event=events.append) as server:
        async with connect(server.address) as queues:
            await queues.streams.add(StreamConfig(name="S", subjects=("S",)))
            await queues.publish("S", b"%08d" % 0, msg_id="0")
        stored.append(0)
        if filler == "another file":
            small_disk.fill()
        refused = await publish_until_refused(server, stored)
        assert refused.fix is not None
        assert "disk" in refused.fix
        small_disk.grow()
        await publish_again(server, stored)
        assert await numbers(server, len(stored)) == stored
    kinds = [event.kind for event in events]
    assert EventKind.ROOM_AGAIN in kinds
    assert EventKind.DIED not in kinds


async def test_a_restart_on_a_disk_that_is_mostly_full_still_takes_messages(small_disk: SmallDisk) -> None:
    """The limit that nats-server chooses itself would be 75 % of what is free, less than what is stored already."""
    stored: list[int] = [0]
    options = ServerOptions(sync="2m", max_file_store=30 * MIB)
    with EmbeddedServer(small_disk.path / "nats", options) as server:
        async with connect(server.address) as queues:
            await queues.streams.add(StreamConfig(name="S", subjects=("S",)))
            await queues.publish("S", b"%08d" % 0, msg_id="0")
        await publish_until_refused(server, stored)
    with EmbeddedServer(small_disk.path / "nats", ServerOptions(sync="2m")) as server:
        await publish_again(server, stored)
        assert await numbers(server, len(stored)) == stored
