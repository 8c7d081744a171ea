import asyncio
import time

import pytest

from purveyor.model.errors import LeaseLost, UnknownKey, UnreadableRecord
from purveyor.queues.client import Queues
from purveyor.queues.permissions import SOURCES_BUCKET
from purveyor.sources.ldap.directory import Directory, Mode
from purveyor.sources.ldap.source_store import HeldSource, SourceState, SourceStore, decode_state


def state(epoch: int, cookie: str | None = "rid=001,csn=1") -> SourceState:
    return SourceState(
        uri="ldap://a", base="dc=a", filter="(objectClass=*)", mode=Mode.SYNCREPL, epoch=epoch, cookie=cookie, entries=3
    )


async def take(queues: Queues, source: str, store: SourceStore | None = None) -> HeldSource:
    taken = await (store or await SourceStore.open(queues)).take(source)
    assert taken is not None
    return taken


async def test_each_takeover_has_a_larger_epoch(queues: Queues, unique: str) -> None:
    first = await take(queues, unique)
    assert first.epoch >= int(time.time()) - 60
    await first.save(state(first.epoch))
    await first.release()
    second = await take(queues, unique)
    assert second.epoch == first.epoch + 1
    assert second.state == state(second.epoch)


async def test_an_epoch_is_not_used_again_after_the_state_was_deleted(queues: Queues, unique: str) -> None:
    first = await take(queues, unique)
    await first.save(state(first.epoch))
    await first.release()
    store = await SourceStore.open(queues)
    assert await store.forget(unique)
    second = await take(queues, unique)
    assert (second.epoch, second.state) == (first.epoch + 1, None)


async def test_a_source_that_another_process_holds_is_not_taken(queues: Queues, unique: str) -> None:
    await take(queues, unique)
    store = await SourceStore.open(queues)
    assert await store.take(unique) is None
    owner = await store.owner(unique)
    assert owner is not None
    assert owner.pid is not None


async def test_a_lease_that_this_process_left_behind_is_taken_at_once(queues: Queues, unique: str) -> None:
    first = await take(queues, unique, await SourceStore.open(queues, instance="this"))
    assert await (await SourceStore.open(queues, instance="other")).take(unique) is None
    again = await take(queues, unique, await SourceStore.open(queues, instance="this"))
    assert again.epoch == first.epoch + 1


async def test_a_writer_that_paused_finds_its_source_taken_and_stores_no_cookie(queues: Queues, unique: str) -> None:
    paused = await take(queues, unique)
    await paused.save(state(paused.epoch))
    store = await SourceStore.open(queues, lease_seconds=0.0)
    await store.take(unique)
    taken = await take(queues, unique, store)
    with pytest.raises(LeaseLost):
        await paused.save(state(paused.epoch, "late"))
    with pytest.raises(LeaseLost):
        await paused.ensure_held(0.0)
    await paused.release()  # changes nothing
    stored = await store.state(unique)
    assert stored is not None
    assert (stored.epoch, stored.cookie) == (taken.epoch, "rid=001,csn=1")
    await taken.ensure_held(0.0)


async def test_a_deleted_state_is_not_written_again_with_an_old_cookie(queues: Queues, unique: str) -> None:
    store = await SourceStore.open(queues)
    taken = await take(queues, unique, store)
    await taken.save(state(taken.epoch))
    deleted = asyncio.Event()

    async def watch() -> None:
        async for _ in store.watch_deletions(unique, taken.revision):
            deleted.set()

    watching = asyncio.create_task(watch())
    try:
        await store.forget(unique)
        await asyncio.wait_for(deleted.wait(), 30)
    finally:
        watching.cancel()
    with pytest.raises(UnknownKey):
        await taken.save(state(taken.epoch, "after the deletion"))
    await taken.save(state(taken.epoch, None))
    stored = await store.state(unique)
    assert stored is not None
    assert stored.cookie is None


async def test_a_state_of_a_newer_version_stops_its_source(queues: Queues, unique: str) -> None:
    bucket = await queues.bucket(SOURCES_BUCKET)
    await bucket.put(unique, b'{"version":2,"cookie":"x"}')
    with pytest.raises(UnreadableRecord, match=unique):
        await (await SourceStore.open(queues)).take(unique)


@pytest.mark.parametrize("unknown", ['"version":2', '"zone":"eu"'])
async def test_a_lease_of_a_newer_version_stops_its_source_and_stays(queues: Queues, unique: str, unknown: str) -> None:
    """Nothing says who holds it: the process that does not understand it must not take the source over."""
    bucket = await queues.bucket(SOURCES_BUCKET)
    taken = await take(queues, unique)
    await taken.release()
    key = f"{unique}.lease"
    understood = (await bucket.get(key)).value
    revision = await bucket.put(key, understood.replace(b'"version":1', unknown.encode()))
    with pytest.raises(UnreadableRecord, match=unique):
        await (await SourceStore.open(queues)).take(unique)
    assert (await bucket.get(key)).revision == revision
    await bucket.put(key, understood)
    assert (await take(queues, unique)).epoch == taken.epoch + 1


def test_a_cookie_is_valid_for_its_base_filter_and_mode_only() -> None:
    stored = state(1)
    same = Directory(uri="ldap://other", base="DC=a")
    assert stored.continues(same, Mode.SYNCREPL)
    assert not stored.continues(same, Mode.ACCESSLOG)
    assert not stored.continues(Directory(uri="ldap://a", base="dc=b"), Mode.SYNCREPL)
    assert not stored.continues(Directory(uri="ldap://a", base="dc=a", filter="(uid=*)"), Mode.SYNCREPL)
    assert not state(1, None).continues(same, Mode.SYNCREPL)


def test_a_damaged_state_names_its_source() -> None:
    with pytest.raises(UnreadableRecord, match="source 'people'"):
        decode_state(b"{", "people")
