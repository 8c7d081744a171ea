"""The registry is one truth for writers with an event loop and for drivers without one."""

import asyncio
import dataclasses
import threading
import uuid
from datetime import UTC, datetime

import pytest

from purveyor.jetstream.address import Address
from purveyor.model.errors import AlreadyExists, UnknownSubscription, WrongRevision
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import Queues, connect
from purveyor.queues.registry import (
    ACKNOWLEDGED,
    SUBSCRIPTIONS,
    DispatchState,
    PrefillState,
    PrefillStatus,
    Record,
    RecordState,
    Registry,
    Snapshot,
    Suspension,
    read_snapshot,
)
from purveyor.queues.sync_client import (
    read_subscriptions,
    settle_begin,
    update_definition,
    update_dispatch,
    update_prefill,
)
from tests.support.nats_servers import OwnServer

WHEN = datetime(2026, 11, 15, 12, tzinfo=UTC)


def new_record(name: str) -> Record:
    definition = Subscription(name=name, realms_topics=(RealmTopic("udm", "users/user"),))
    return Record(incarnation=str(uuid.uuid4()), definition=definition, created=WHEN)


@pytest.fixture
async def registry(queues: Queues) -> Registry:
    return await Registry.open(queues)


async def test_what_one_side_writes_the_other_reads(registry: Registry, address: Address, unique: str) -> None:
    record = new_record(unique)
    await registry.create(record)
    found = read_subscriptions(address).subscriptions[unique]
    assert (found.record, found.next, found.suspended, found.prefill) == (record, None, None, None)

    active = dataclasses.replace(record, begin=7, state=RecordState.ACTIVE)
    revision = update_definition(address, active, found.revision)
    full = DispatchState(
        incarnation=record.incarnation, next=9, suspended=Suspension(position=9, reason="full", at=WHEN)
    )
    update_dispatch(address, unique, full, found.dispatch_revision)
    prefill = PrefillState(incarnation=record.incarnation, status=PrefillStatus.RUNNING, position=7)
    update_prefill(address, unique, prefill, found.prefill_revision)

    seen = await registry.get(unique)
    assert (seen.record, seen.revision, seen.dispatch, seen.prefill) == (active, revision, full, prefill)
    assert (seen.next, seen.suspended) == (9, full.suspended)
    assert (await registry.list()).subscriptions[unique] == seen
    assert read_subscriptions(address).subscriptions[unique] == seen


async def test_a_repeated_snapshot_reads_only_the_changes(own_server: OwnServer) -> None:
    async with connect(own_server().address, patience_seconds=60) as queues:
        registry = await Registry.open(queues)

        async def looked(before: Snapshot) -> Snapshot:
            now = await read_snapshot(queues, before)
            assert now.subscriptions == (await registry.list()).subscriptions
            return now

        assert (await read_snapshot(queues)) == Snapshot()
        for number in range(700):  # more than a page
            await registry.create(new_record(f"s{number}"))
        first = await looked(Snapshot())
        assert len(first.subscriptions) == 700
        assert await looked(first) is first
        changed = dataclasses.replace(first.subscriptions["s5"].record, paused=True)
        await registry.put_record(changed, first.subscriptions["s5"].revision)
        await registry.remove(first.subscriptions["s6"])
        second = await looked(first)
        assert second.subscriptions["s5"].record.paused
        assert "s6" not in second.subscriptions
        assert second.subscriptions["s7"] is first.subscriptions["s7"]


async def test_a_write_on_an_old_revision_is_refused_on_both_sides(
    registry: Registry, address: Address, unique: str
) -> None:
    record = new_record(unique)
    await registry.create(record)
    with pytest.raises(AlreadyExists):
        await registry.create(new_record(unique))
    state = DispatchState(incarnation=record.incarnation, next=1)
    first = update_dispatch(address, unique, state, 0)
    with pytest.raises(WrongRevision, match="dispatch"):
        update_dispatch(address, unique, state, 0)
    with pytest.raises(WrongRevision):
        await registry.put_dispatch(unique, state, 0)
    assert await registry.put_dispatch(unique, state, first) > first
    with pytest.raises(WrongRevision):
        update_dispatch(address, unique, state, first)


async def test_a_name_is_free_again_and_what_its_last_owner_left_counts_as_absent(
    registry: Registry, address: Address, unique: str
) -> None:
    old, new = new_record(unique), new_record(unique)
    await registry.create(old)
    stale = PrefillState(incarnation=old.incarnation, status=PrefillStatus.DONE, position=1)
    await registry.put_prefill(unique, stale, 0)
    await registry.remove(await registry.get(unique))
    with pytest.raises(UnknownSubscription, match=unique):
        await registry.get(unique)
    gone = read_subscriptions(address)
    assert unique not in gone.subscriptions

    await registry.create(new)
    found = await registry.get(unique)
    assert found.prefill is None
    update_prefill(address, unique, stale, found.prefill_revision)  # a worker that has not heard of the end
    for seen in (await registry.get(unique), read_subscriptions(address, gone).subscriptions[unique]):
        assert (seen.incarnation, seen.prefill, seen.dispatch) == (new.incarnation, None, None)
        assert seen.prefill_revision > found.prefill_revision


async def test_removing_leaves_what_belongs_to_the_next_of_the_name(
    queues: Queues, registry: Registry, unique: str
) -> None:
    old, new = new_record(unique), new_record(unique)
    await registry.create(old)
    late = await registry.get(unique)
    acknowledged = await queues.bucket(ACKNOWLEDGED)
    await acknowledged.put(unique, f'{{"incarnation": "{old.incarnation}", "position": 3}}'.encode())
    assert await registry.last_acknowledged(late) == 3
    await registry.remove(late)
    await registry.create(new)
    current = await registry.get(unique)
    assert await registry.last_acknowledged(current) is None
    await acknowledged.put(unique, f'{{"incarnation": "{new.incarnation}", "position": 8}}'.encode())
    with pytest.raises(WrongRevision):
        await registry.remove(late)  # a second one who deletes, and is slow
    assert (await registry.get(unique)).incarnation == new.incarnation
    assert await registry.last_acknowledged(current) == 8


async def test_only_what_changed_is_read_again(registry: Registry, address: Address, unique: str) -> None:
    names = [f"{unique}-{number}" for number in range(3)]
    for name in names:
        await registry.create(new_record(name))
    first = read_subscriptions(address)
    assert set(names) <= set(first.subscriptions)
    assert read_subscriptions(address, first) is first
    await registry.remove(first.subscriptions[names[0]])
    await registry.create(new_record(unique))
    second = read_subscriptions(address, first)
    assert second == read_subscriptions(address)
    assert second.subscriptions[names[1]] is first.subscriptions[names[1]]
    assert set(second.subscriptions) == set(first.subscriptions) - {names[0]} | {unique}


async def test_an_unreadable_value_does_not_stop_other_subscriptions(
    queues: Queues, registry: Registry, address: Address, unique: str
) -> None:
    await registry.create(new_record(unique))
    bucket = await queues.bucket(SUBSCRIPTIONS)
    await bucket.put(f"{unique}x.definition", b"not a record")
    await bucket.put(f"{unique}y.definition", (await bucket.get(f"{unique}.definition")).value)
    await bucket.put(unique, b"no part")
    for snapshot in (read_subscriptions(address), await registry.list()):
        assert unique in snapshot.subscriptions
        assert {f"{unique}x", f"{unique}y"} <= set(snapshot.unreadable)
    await bucket.delete(f"{unique}x.definition")
    await bucket.delete(f"{unique}y.definition")
    assert f"{unique}x" not in read_subscriptions(address, snapshot).unreadable


async def test_a_server_without_a_registry_has_no_subscriptions(own_server: OwnServer) -> None:
    address = own_server().address
    assert read_subscriptions(address) == Snapshot()
    assert read_subscriptions(address, Snapshot(last_sequence=7)) == Snapshot()


async def test_a_snapshot_has_every_subscription_while_others_write(
    registry: Registry, address: Address, unique: str
) -> None:
    record = new_record(unique)
    await registry.create(record)
    stop = threading.Event()

    def overwrite() -> None:
        revision = 0
        while not stop.is_set():
            state = DispatchState(incarnation=record.incarnation, next=revision)
            revision = update_dispatch(address, unique, state, revision)

    writing = asyncio.create_task(asyncio.to_thread(overwrite))
    try:
        for _ in range(20):
            found = (await asyncio.to_thread(read_subscriptions, address)).subscriptions[unique]
            assert found.record == record
    finally:
        stop.set()
        await writing
    assert read_subscriptions(address).subscriptions[unique].dispatch is not None


async def test_the_first_write_of_the_beginning_is_final(registry: Registry, address: Address, unique: str) -> None:
    await registry.create(new_record(unique))
    found = await registry.get(unique)
    assert settle_begin(address, found, 5).begin == 5
    assert settle_begin(address, found, 9).begin == 5  # on an old revision
    assert (await registry.get(unique)).record.begin == 5
    assert (await registry.get(unique)).next == 6
    await registry.remove(await registry.get(unique))
    with pytest.raises(UnknownSubscription):
        settle_begin(address, found, 5)
