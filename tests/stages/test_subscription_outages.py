"""A stage with a subscription as its source continues after any outage, and after a restore of an older store."""

import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from purveyor.delivery.pull import open_pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.jetstream.headers import POSITION
from purveyor.model.delivery_policy import Delivery, OrderBy
from purveyor.model.event import Event
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import Queues, connect
from purveyor.stages import Context, Retry, SqlStore, Stages, SubscriptionSource
from purveyor.stages.source import Incoming
from purveyor.stages.sql_store import now_ms
from tests.support.nats_servers import OwnServer
from tests.support.proxy import TcpProxy
from tests.support.stages import QUICK, effects, event
from tests.support.waiting import until

PATIENCE_SECONDS = 0.5


class WatchedSource(SubscriptionSource):
    """Counts the acknowledgements and retries that have ended, with or without success."""

    answers = 0

    async def ack(self, messages: Sequence[Incoming]) -> None:
        try:
            await super().ack(messages)
        finally:
            self.answers += len(messages)

    async def retry(self, message: Incoming, delay: timedelta) -> None:
        try:
            await super().retry(message, delay)
        finally:
            self.answers += 1


async def add(queues: Queues, name: str, delivery: Delivery = Delivery.ORDERED) -> None:
    order_by = OrderBy.POSITION if delivery is Delivery.ORDERED else None
    interest = (RealmTopic("udm", "users/user"),)
    await Subscriptions(queues).add(
        Subscription(name=name, realms_topics=interest, delivery=delivery, order_by=order_by)
    )


async def publish(queues: Queues, name: str, numbers: Sequence[int], first_position: int = 2) -> None:
    for position, number in enumerate(numbers, first_position):
        await queues.publish(f"{name}.main", event(number, f"user-{number % 2}"), headers={POSITION: str(position)})


async def is_empty(queues: Queues, name: str) -> bool:
    return (await queues.streams.info(f"stream:{name}")).state.messages == 0


@pytest.mark.parametrize("exactly_once", [False, True])
@pytest.mark.parametrize("retry", ["in order", "parallel"])
async def test_the_stage_continues_after_an_outage_longer_than_the_patience(  # noqa: PLR0917 - fixtures
    address: Address, queues: Queues, database: str, unique: str, tcp_proxy: TcpProxy, retry: str, exactly_once: bool
) -> None:
    name = unique[-24:]
    await add(queues, name, Delivery.ORDERED if retry == "in order" else Delivery.PARALLEL)
    await publish(queues, name, range(6))
    calls: list[int] = []
    async with (
        connect(tcp_proxy.address(address), patience_seconds=PATIENCE_SECONDS) as behind,
        open_pull(behind) as pull,
    ):
        stages = Stages(behind, store=SqlStore(database), app="test", timing=QUICK)
        source = WatchedSource(behind, name, pull, lease=timedelta(seconds=2))
        accounts = stages.terminator(f"{name}.accounts", message=Event, source=source)
        again = Retry.in_order() if retry == "in order" else Retry.parallel()

        @accounts.last_stage(exactly_once=exactly_once, retry=again)
        async def provision(ctx: Context[None], message: Event, db: AsyncSession) -> None:
            number: Any = message.new["number"]
            await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": number})
            calls.append(number)
            if number == 3 and calls.count(3) == 1:
                tcp_proxy.refuse()

        async with stages:
            await until(lambda: tcp_proxy.open == 0 and 3 in calls)
            answered = source.answers
            await until(lambda: source.answers > answered)
            tcp_proxy.restore()
            await until(lambda: is_empty(queues, name))
            await publish(queues, name, range(6, 9), 100)
            await until(lambda: is_empty(queues, name))
    assert await effects(database) == list(range(9))
    assert sorted(calls) == list(range(9))


async def test_a_lost_acknowledgement_is_repeated_after_an_outage(  # noqa: PLR0917 - fixtures
    address: Address,
    queues: Queues,
    database: str,
    unique: str,
    tcp_proxy: TcpProxy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The `retry` of a failed message, and a long poll that breaks."""
    name = unique[-24:]
    await add(queues, name, Delivery.PARALLEL)
    await publish(queues, name, range(4))
    calls: list[int] = []
    async with (
        connect(tcp_proxy.address(address), patience_seconds=PATIENCE_SECONDS) as behind,
        open_pull(behind) as pull,
    ):
        stages = Stages(behind, store=SqlStore(database), app="test", timing=QUICK)
        source = WatchedSource(behind, name, pull, lease=timedelta(seconds=2))
        accounts = stages.terminator(f"{name}.accounts", message=Event, source=source)

        @accounts.last_stage(exactly_once=True, retry=Retry.parallel(first_delay=timedelta(milliseconds=10)))
        async def provision(ctx: Context[None], message: Event, db: AsyncSession) -> None:
            number: Any = message.new["number"]
            calls.append(number)
            await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": number})
            if number == 2 and calls.count(2) == 1:
                tcp_proxy.refuse()
                raise ValueError("not yet")

        async with stages:
            await until(lambda: tcp_proxy.open == 0 and 2 in calls)
            answered = source.answers
            await until(lambda: source.answers > answered)
            tcp_proxy.restore()
            await until(lambda: is_empty(queues, name))
            caplog.clear()
            tcp_proxy.refuse()  # now nothing is out, and it waits for more
            await until(lambda: caplog.records)  # until it has lost its patience, and says so
            tcp_proxy.restore()
            await publish(queues, name, range(4, 6), 100)
            await until(lambda: is_empty(queues, name))
    assert await effects(database) == list(range(6))


async def test_an_acknowledgement_from_before_an_outage_does_not_hit_another_event(
    own_server: OwnServer, database: str, tmp_path: Path, unique: str
) -> None:
    """An older store is restored before the acknowledgement of an event is confirmed."""
    name = unique[-24:]
    directory, older = tmp_path / "nats", tmp_path / "older"
    server = own_server(directory=directory)
    async with connect(server.address) as queues:
        await add(queues, name, Delivery.PARALLEL)
    server.stop()
    shutil.copytree(directory, older)
    server = own_server(directory=directory)  # it takes its last port again
    calls: list[int] = []
    with TcpProxy(*server.address.hosts()[0]) as proxy:
        async with (
            connect(proxy.address(server.address), patience_seconds=PATIENCE_SECONDS) as behind,
            open_pull(behind) as pull,
        ):
            stages = Stages(behind, store=SqlStore(database), app="test", timing=QUICK)
            source = WatchedSource(behind, name, pull, instance="a", lease=timedelta(seconds=1))
            accounts = stages.terminator(f"{name}.accounts", message=Event, source=source)

            @accounts.last_stage(exactly_once=True)
            async def provision(ctx: Context[None], message: Event) -> None:
                number: Any = message.new["number"]
                if number == 0:
                    proxy.refuse()
                calls.append(number)

            async with stages:
                async with connect(server.address) as queues:
                    await publish(queues, name, [0])
                    await until(lambda: source.answers)  # its acknowledgement has failed
                server.stop()
                shutil.rmtree(directory)
                shutil.copytree(older, directory)
                server = own_server(directory=directory)
                async with connect(server.address) as queues, open_pull(queues) as other:
                    await publish(queues, name, [1])
                    [taken] = await other.lease(name, "b", lease_seconds=1)  # handed out, and given up
                    assert taken.sequence == 1
                    proxy.restore()
                    await until(lambda: is_empty(queues, name))
    assert calls == [0, 1]


async def test_new_events_are_processed_after_an_older_store_of_the_broker_is_put_back(
    own_server: OwnServer, database: str, tmp_path: Path, unique: str
) -> None:
    name = unique[-24:]
    directory, older = tmp_path / "nats", tmp_path / "older"

    async def run(address: Address, numbers: Sequence[int], first_position: int) -> None:
        async with connect(address) as queues, open_pull(queues) as pull:
            await publish(queues, name, numbers, first_position)
            stages = Stages(queues, store=SqlStore(database), app="test", timing=QUICK)
            source = SubscriptionSource(queues, name, pull)
            declare(stages, name, source)
            async with stages:
                await until(lambda: is_empty(queues, name))

    server = own_server(directory=directory)
    async with connect(server.address) as queues:
        await add(queues, name)
    await run(server.address, range(3), 2)
    async with connect(server.address) as queues:
        await publish(queues, name, [3], 5)  # in the older store it waits, and will have been processed
    server.stop()
    shutil.copytree(directory, older)
    server = own_server(directory=directory)
    await run(server.address, range(4, 7), 6)
    server.stop()
    shutil.rmtree(directory)
    shutil.copytree(older, directory)
    server = own_server(directory=directory)
    await run(server.address, range(14, 17), 6)  # other events at the same sequences and positions
    assert await effects(database) == [*range(7), *range(14, 17)]


async def test_events_that_an_older_version_processed_are_known(queues: Queues, database: str, unique: str) -> None:
    """It identified a message by its sequence and position alone: its rows stand for messages stored before them."""
    name = unique[-24:]
    await add(queues, name)
    await publish(queues, name, range(4))
    stages = Stages(queues, store=SqlStore(database), app="test", timing=QUICK)
    hour = 3_600_000
    await stages.store.open()
    async with stages.store.engine.begin() as connection:
        for sequence, done_ms in ((1, now_ms()), (2, now_ms() - hour), (3, now_ms() - 60_000)):
            await connection.exec_driver_sql(
                "INSERT INTO purveyor_inbox (stage, message_id, sequence, done_ms) "
                f"VALUES ('{name}.accounts.0', '{name}:{sequence}:{sequence + 1}', {sequence}, {done_ms})"
            )
    async with open_pull(queues) as pull:
        declare(stages, name, SubscriptionSource(queues, name, pull))
        async with stages:
            await until(lambda: is_empty(queues, name))
    # Message 1 was processed; so was 3, by a clock that is a minute behind. The row of 2 is of an earlier message.
    assert await effects(database) == [1, 3]


def declare(stages: Stages, name: str, source: SubscriptionSource) -> None:
    accounts = stages.terminator(f"{name}.accounts", message=Event, source=source)

    @accounts.last_stage(exactly_once=True, retry=Retry.in_order())
    async def provision(ctx: Context[None], message: Event, db: AsyncSession) -> None:
        number: Any = message.new["number"]
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": number})
