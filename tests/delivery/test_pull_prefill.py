"""A consumer gets the messages of the current subscription only: its prefill first, nothing of an earlier one."""

import asyncio
from typing import Any

import pytest

from purveyor.delivery.pull import PullService, open_pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.errors import (
    PrefillFailed,
    UnknownMessage,
    UnknownSubscription,
)
from purveyor.model.registration import PrefillState, PrefillStatus
from purveyor.queues.client import Queues, connect
from tests.support.delivery import definition, drain, is_empty, write
from tests.support.waiting import until


async def test_nothing_is_delivered_before_the_prefill_is_done_and_then_it_comes_first(
    queues: Queues, subscriptions: Subscriptions, pull: PullService
) -> None:
    record, _ = await subscriptions.add(definition(prefill=True))
    await write(queues, "live 1")
    await write(queues, "object 1", "object 2", kind="prefill", first=1)
    await write(queues, "live 2", first=3)
    assert await pull.next("ox") is None
    registry = await subscriptions.registry()

    async def say(status: PrefillStatus, reason: str | None = None) -> None:
        found = await subscriptions.get("ox")
        state = PrefillState(incarnation=record.incarnation, status=status, position=1, reason=reason)
        await registry.put_prefill("ox", state, found.prefill_revision)
        pull.invalidate("ox")

    await say(PrefillStatus.RUNNING)
    assert await pull.lease("ox") == []
    await say(PrefillStatus.FAILED, "no archive")
    with pytest.raises(PrefillFailed, match="no archive"):
        await pull.next("ox", timeout=60)
    await say(PrefillStatus.PENDING)
    waiting = asyncio.create_task(pull.next("ox", timeout=30))
    await asyncio.sleep(0)
    found = await subscriptions.get("ox")
    done = PrefillState(incarnation=record.incarnation, status=PrefillStatus.DONE, position=1)
    await registry.put_prefill("ox", done, found.prefill_revision)  # this process gets no notification
    first = await waiting
    assert first is not None
    assert (first.data, first.kind) == (b"object 1", SubjectKind.PREFILL)
    assert await drain(pull) == ["object 1", "object 2", "live 1", "live 2"]
    await until(lambda: is_empty(queues))


async def test_a_subscription_deleted_and_added_again_waits_for_its_own_prefill(
    queues: Queues, subscriptions: Subscriptions, pull: PullService
) -> None:
    """The prefill of the earlier subscription was done, and a late worker reports it again."""
    record, _ = await subscriptions.add(definition(prefill=True))
    registry = await subscriptions.registry()
    done = PrefillState(incarnation=record.incarnation, status=PrefillStatus.DONE, position=1)

    async def say_done() -> None:
        found = await subscriptions.get("ox")
        await registry.put_prefill("ox", done, found.prefill_revision)
        pull.invalidate("ox")

    await say_done()
    await write(queues, "old 1", "old 2")
    old = await pull.next("ox")
    assert old is not None
    await subscriptions.delete("ox")
    await subscriptions.add(definition(prefill=True))
    await write(queues, "new")
    assert await pull.next("ox") is None
    await say_done()
    assert await pull.next("ox") is None
    await subscriptions.delete("ox")
    pull.invalidate("ox")
    with pytest.raises(UnknownSubscription):
        await pull.next("ox")
    await subscriptions.add(definition())
    await write(queues, "newest")
    message = await pull.next("ox")
    assert message is not None
    assert (message.data, message.num_delivered) == (b"newest", 1)


@pytest.mark.parametrize("served_before", [True, False])
async def test_a_process_with_a_stale_registration_delivers_nothing_of_the_new_subscription(
    address: Address,
    queues: Queues,
    subscriptions: Subscriptions,
    monkeypatch: pytest.MonkeyPatch,
    served_before: bool,
) -> None:
    await subscriptions.add(definition())
    async with connect(address) as other, open_pull(other) as late:
        if served_before:
            await write(queues, "old")
            assert await late.next("ox") is not None
        registrations, get = late._shared.registrations, late._shared.registrations.get
        stale = [await get("ox")]

        async def get_stale(name: str) -> Any:
            return stale.pop() if stale else await get(name)

        await subscriptions.delete("ox")
        await subscriptions.add(definition(prefill=True))
        await write(queues, "live")
        monkeypatch.setattr(registrations, "get", get_stale)
        late._shared.state_writers._writers["ox"].buffer.clear() if served_before else None
        assert await late.next("ox") is None
        assert not stale


async def test_a_late_acknowledgement_does_not_affect_the_next_subscription_of_that_name(
    queues: Queues, subscriptions: Subscriptions, pull: PullService
) -> None:
    await subscriptions.add(definition())
    await write(queues, "old")
    old = await pull.next("ox")
    assert old is not None
    await subscriptions.delete("ox")
    await subscriptions.add(definition())
    pull.invalidate("ox")
    [new] = await write(queues, "new")
    assert new > old.sequence
    assert await pull.next("ox") is not None  # delivered: only its sequence differs from the old message
    with pytest.raises(UnknownMessage):
        await pull.acknowledge("ox", old.sequence)
    assert await drain(pull) == ["new"]
