"""A bucket holds small state that many processes share and watch."""

import asyncio
import contextlib
from datetime import timedelta

import pytest

from purveyor.jetstream.key_value import BucketConfig, Entry, Operation
from purveyor.model.errors import AlreadyExists, InvalidName, UnknownKey, WrongRevision
from purveyor.queues.client import Queues, connect
from tests.support.nats_servers import OwnServer
from tests.support.waiting import PATIENCE_SECONDS, until


async def test_put_get_delete_purge(queues: Queues, unique: str) -> None:
    bucket = await queues.bucket(BucketConfig(name=unique, history=5))
    first = await bucket.put("app/port", b"7777")
    assert (await bucket.get("app/port")).value == b"7777"
    assert await bucket.put("app/port", b"7778") == first + 1
    await bucket.delete("app/port")
    with pytest.raises(UnknownKey, match="app/port"):
        await bucket.get("app/port")
    await bucket.put("a.b", b"")
    await bucket.purge("app/port")
    assert await bucket.keys() == ["a.b"]
    with pytest.raises(UnknownKey):
        await bucket.get("never")
    with pytest.raises(InvalidName):
        await bucket.put("no good", b"")


async def test_update_is_a_compare_and_set(queues: Queues, unique: str) -> None:
    bucket = await queues.bucket(unique)
    revision = await bucket.create("lease", b"mine")
    with pytest.raises(AlreadyExists):
        await bucket.create("lease", b"yours")
    newer = await bucket.update("lease", b"still mine", revision)
    with pytest.raises(WrongRevision):
        await bucket.update("lease", b"late", revision)
    with pytest.raises(WrongRevision):
        await bucket.delete("lease", revision=revision)
    await bucket.delete("lease", revision=newer)
    assert await bucket.create("lease", b"free again") > newer


async def test_of_many_creators_exactly_one_wins(queues: Queues, unique: str) -> None:
    bucket = await queues.bucket(unique)

    async def attempt(number: int) -> bool:
        try:
            await bucket.create("leader", str(number).encode())
        except AlreadyExists:
            return False
        return True

    won = await asyncio.gather(*(attempt(number) for number in range(20)))
    assert won.count(True) == 1
    assert (await bucket.get("leader")).value == str(won.index(True)).encode()


async def test_a_watch_yields_the_state_then_none_then_the_changes(queues: Queues, unique: str) -> None:
    bucket = await queues.bucket(unique)
    await bucket.put("a", b"1")
    await bucket.put("b", b"1")
    await bucket.put("a", b"2")
    seen: list[Entry | None] = []
    async with contextlib.aclosing(bucket.watch()) as changes:
        async for change in changes:
            seen.append(change)
            if change is None:
                await bucket.delete("b")
                await bucket.put("c", b"3")
            elif change.key == "c":
                break
    assert [(e.key, e.value, e.operation) if e else None for e in seen] == [
        ("b", b"1", Operation.PUT),
        ("a", b"2", Operation.PUT),
        None,
        ("b", b"", Operation.DELETE),
        ("c", b"3", Operation.PUT),
    ]
    assert not await queues.consumers.list(f"KV_{unique}")


async def test_an_empty_bucket_is_caught_up_at_once(queues: Queues, unique: str) -> None:
    bucket = await queues.bucket(unique)
    async with contextlib.aclosing(bucket.watch("only.*")) as changes:
        assert await anext(changes) is None
    assert await bucket.keys() == []


async def test_a_watch_continues_after_a_server_restart(own_server: OwnServer) -> None:
    server = own_server()
    async with connect(server.address) as queues:
        bucket = await queues.bucket("state")
        await bucket.put("a", b"1")
        async with contextlib.aclosing(bucket.watch()) as changes:
            assert (await anext(changes)).value == b"1"  # type: ignore[union-attr]
            assert await anext(changes) is None
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            waiting = asyncio.ensure_future(anext(changes))
            await bucket.put("a", b"2")
            change = await asyncio.wait_for(waiting, 120)
            assert change is not None
            assert change.value == b"2"


async def test_a_watch_ends_while_the_server_is_away(own_server: OwnServer) -> None:
    server = own_server()
    async with connect(server.address, patience_seconds=3600) as queues:
        bucket = await queues.bucket("state")
        changes = bucket.watch()
        assert await anext(changes) is None
        await asyncio.to_thread(server.stop)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await changes.aclose()


async def test_keys_and_deletion_markers_expire(queues: Queues, unique: str) -> None:
    """Also in a bucket that was created without that setting."""
    await (await queues.bucket(unique)).put("lasting", b"1")
    bucket = await queues.bucket(BucketConfig(name=unique, marker_age=timedelta(seconds=1)))
    await bucket.put("short", b"2", max_age=timedelta(seconds=1))
    await bucket.create("deleted", b"3", max_age=timedelta(hours=1))
    await bucket.delete("deleted")

    async def only_one_is_left() -> bool:
        return (await queues.streams.info(f"KV_{unique}")).state.messages == 1

    await until(only_one_is_left)
    assert await bucket.keys() == ["lasting"]
    assert await bucket.newest("deleted") is None
    assert await bucket.create("deleted", b"4")
