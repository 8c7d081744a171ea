"""Many consumers on several processes: each message is leased to one instance, and waiting consumers are woken."""

import asyncio
import contextlib
from typing import Any

import pytest

from purveyor.delivery.after_ack import AckedCleanup
from purveyor.delivery.pull import PullService, open_pull
from purveyor.delivery.state_writer import StateWriter
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.errors import (
    LeaseLost,
    Unavailable,
    UnknownMessage,
)
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import Queues, connect
from tests.support.delivery import OX, Clock, definition, is_empty, parallel, texts, write
from tests.support.killing import kill_server
from tests.support.nats_servers import OwnServer
from tests.support.waiting import PATIENCE_SECONDS, until


async def test_a_standby_takes_over_when_the_lease_has_expired(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, clock: Clock
) -> None:
    await subscriptions.add(definition())
    await write(queues, "one")
    first = await pull.next("ox", "a")
    assert first is not None
    assert await pull.next("ox", "b") is None
    clock.now += 29
    assert await pull.extend("ox", first.sequence, instance="a") > first.until  # type: ignore[operator]
    clock.now += 29
    assert await pull.next("ox", "b") is None
    clock.now += 2
    taken_over = await pull.next("ox", "b")
    assert taken_over is not None
    assert taken_over.num_delivered == 2
    for late in (pull.extend, pull.retry):
        with pytest.raises(LeaseLost, match="'b'"):
            await late("ox", first.sequence, instance="a")
    await pull.acknowledge("ox", first.sequence)  # a late acknowledgement counts
    assert await pull.next("ox", "b") is None


async def test_a_waiting_standby_is_woken_by_the_end_of_a_lease(queues: Queues, subscriptions: Subscriptions) -> None:
    short = Subscription(name="ox", realms_topics=(RealmTopic("udm", "a"),), lease_seconds=1)
    await subscriptions.add(short)
    await write(queues, "one")
    async with open_pull(queues) as pull:
        assert await pull.next("ox", "a") is not None
        assert await pull.next("ox", "b", timeout=30) is not None


async def test_five_hundred_waiting_consumers_send_no_requests_and_are_woken_by_messages(
    queues: Queues, subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscriptions.add(parallel(lease_seconds=600))
    async with open_pull(queues) as pull:
        waiting = [
            asyncio.create_task(pull.next("ox", f"i{number}", timeout=PATIENCE_SECONDS)) for number in range(500)
        ]
        listeners = pull._shared.notifier._listeners
        await until(lambda: listeners and listeners["ox"].waiters == 500 and len(listeners["ox"]._listening) == 3)
        asked = 0
        request = queues.connection.request

        async def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal asked
            asked += 1
            return await request(*args, **kwargs)

        async def is_quiet() -> bool:
            nonlocal asked
            asked = 0
            await asyncio.sleep(1)
            return asked < 10  # the periodic polls of all waiters come together

        monkeypatch.setattr(queues.connection, "request", counted)
        await until(is_quiet)  # when each waiter has polled
        monkeypatch.undo()
        await asyncio.gather(*(queues.publish("ox.main", str(number).encode()) for number in range(500)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            got = [message for message in await asyncio.gather(*waiting) if message is not None]
        assert sorted(texts(got), key=int) == [str(number) for number in range(500)]
        assert not listeners


async def test_a_caller_that_has_gone_keeps_no_lease(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscriptions.add(definition())
    await write(queues, "one")
    writing, go_on = asyncio.Event(), asyncio.Event()
    put = StateWriter._write

    async def slow(self: StateWriter, state: Any) -> bool:
        writing.set()
        await go_on.wait()
        return await put(self, state)

    monkeypatch.setattr(StateWriter, "_write", slow)
    left = asyncio.create_task(pull.next("ox", "a"))
    await writing.wait()
    left.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await left
    go_on.set()
    message = await pull.next("ox", "b", timeout=60)
    assert message is not None
    assert message.num_delivered == 1


@pytest.mark.parametrize("order_by", [OrderBy.POSITION, None])
async def test_many_consumers_of_several_processes_get_each_message_once(
    address: Address, queues: Queues, subscriptions: Subscriptions, order_by: OrderBy | None
) -> None:
    await subscriptions.add(definition() if order_by else parallel())
    count = 120
    got: list[int] = []
    await write(queues, *(str(number) for number in range(count)))

    async def consume(pull: PullService, instance: str) -> None:
        while len(got) < count:
            for message in await pull.lease("ox", instance, max=3, timeout=0.2):
                got.append(int(message.data))
                await pull.acknowledge("ox", message.sequence)

    async with (
        connect(address) as other,
        open_pull(queues) as one,
        open_pull(other) as two,
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        await asyncio.gather(*(consume(pull, f"i{number}") for number, pull in enumerate([one, two] * 3)))
    assert sorted(got) == list(range(count))
    if order_by is OrderBy.POSITION:
        assert got == sorted(got)
    await until(lambda: is_empty(queues))


async def test_a_consumer_may_answer_to_another_process_than_it_asked(
    address: Address, queues: Queues, subscriptions: Subscriptions
) -> None:
    await subscriptions.add(parallel())
    await write(queues, *"abcdef")
    async with connect(address) as other, open_pull(queues) as one, open_pull(other) as two:
        (known,) = await two.lease(
            "ox", "z", max=1
        )  # it has its own copy of the state, which the next line makes stale
        leased = [message.sequence for message in await one.lease("ox", "i")]
        await two.extend("ox", leased[0], instance="i")
        await two.acknowledge("ox", leased[0])
        await two.retry("ox", leased[1], delay=60, instance="i")
        await one.extend("ox", leased[2], instance="i")
        await two.reject("ox", leased[2], "no", instance="i")
        assert await two.acknowledge_up_to("ox", leased[4], instance="i") == 2
        for process in (one, two):
            for sequence in (leased[0], leased[2], leased[3]):
                with pytest.raises(UnknownMessage):
                    await process.acknowledge("ox", sequence)
        await one.acknowledge("ox", known.sequence)
        await one.acknowledge("ox", leased[1])
    await until(lambda: is_empty(queues))


async def test_an_acknowledgement_in_another_process_wakes_a_standby(
    address: Address, queues: Queues, subscriptions: Subscriptions
) -> None:
    await subscriptions.add(definition())
    await write(queues, "one", "two")
    async with connect(address) as other, open_pull(queues) as one, open_pull(other) as two:
        message = await one.next("ox", "a")
        assert message is not None
        waiting = asyncio.create_task(two.next("ox", "b", timeout=25))  # shorter than the lease
        listeners = two._shared.notifier._listeners
        await until(lambda: "ox" in listeners and len(listeners["ox"]._listening) == 3)
        await one.acknowledge("ox", message.sequence)
        second = await waiting
        assert second is not None
        assert second.data == b"two"


async def test_messages_acknowledged_before_a_crash_are_not_delivered_again_and_deleted_later(
    address: Address, queues: Queues, subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscriptions.add(parallel())
    await write(queues, *"abcd")
    async with connect(address) as doomed:
        monkeypatch.setattr(AckedCleanup, "schedule", lambda _: None)  # it ends before it deletes anything
        async with open_pull(doomed) as pull:
            leased = await pull.lease("ox", "a")
            for number in (0, 2):
                await pull.acknowledge("ox", leased[number].sequence)
        monkeypatch.undo()
    assert (await queues.streams.info(OX)).state.messages == 4
    async with open_pull(queues, clock=lambda: 2_000_000_000.0) as survivor:
        rest = await survivor.lease("ox", "b")
        assert (texts(rest), [message.num_delivered for message in rest]) == (["b", "d"], [2, 2])

        async def two_left() -> bool:
            return (await queues.streams.info(OX)).state.messages == 2

        await until(two_left)
        with pytest.raises(UnknownMessage):
            await survivor.acknowledge("ox", leased[0].sequence)


async def test_a_request_after_close_starts_no_new_watch(queues: Queues, subscriptions: Subscriptions) -> None:
    await subscriptions.add(definition())
    await write(queues, "one")
    async with open_pull(queues) as pull:
        assert await pull.next("ox") is not None
    registrations = pull._shared.registrations
    assert await registrations.refresh("ox") is not None
    assert registrations._watching is not None
    assert registrations._watching.done()


@pytest.mark.chaos
async def test_a_server_restart_loses_nothing_and_duplicates_no_lease(
    own_server: OwnServer,
) -> None:
    server = own_server()
    async with connect(server.address, patience_seconds=30) as queues:
        subscriptions = Subscriptions(queues)
        await subscriptions.add(definition())
        count = 60
        got: list[int] = []
        await write(queues, *(str(number) for number in range(count)))

        async def consume(pull: PullService) -> None:
            while len(set(got)) < count:
                try:
                    message = await pull.next("ox", timeout=1)
                    if message is None:
                        continue
                    got.append(int(message.data))
                    await pull.acknowledge("ox", message.sequence)
                except (Unavailable, UnknownMessage):  # repeat the request, as a client would
                    continue

        async with open_pull(queues) as pull, asyncio.timeout(PATIENCE_SECONDS):
            consuming = asyncio.create_task(consume(pull))
            try:
                for begun in (10, 30):
                    await until(lambda begun=begun: len(got) >= begun)  # type: ignore[misc]
                    await asyncio.to_thread(kill_server, server)  # the supervisor starts it again
                await consuming
            finally:
                consuming.cancel()
            assert list(dict.fromkeys(got)) == list(range(count))
            assert await pull.next("ox") is None
