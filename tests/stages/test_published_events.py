"""Stages publish events: in the handler's transaction, checked like others, into `incoming` once and in order."""

import asyncio
import contextlib
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from purveyor.jetstream.headers import MSG_ID, first
from purveyor.model.errors import InvalidInput
from purveyor.model.event import OUTBOX_SUBJECT, SUBJECT, Event
from purveyor.model.message_headers import EVENT_ID
from purveyor.queues.backlog import unread_since
from purveyor.queues.catalogue import DEFAULT_GROUP, incoming, outbox_receipts
from purveyor.queues.client import Queues, connect
from purveyor.stages import Context, Refuse, Retry, SqlStore, Stages
from purveyor.stages.crash_points import CrashPoint
from tests.stages.program import Job, Plan, job_event, start
from tests.support.forgetting import forget_ids
from tests.support.nats_servers import OwnServer
from tests.support.stages import QUICK, MakeStages, Order, effects, is_empty, letters, make_database, published, rows
from tests.support.waiting import until

STREAM = incoming().stream


def shop_event(number: int, topic: str = "orders", **fields: Any) -> Event:
    given = {"publisher_name": "shop", "ts": datetime(2026, 11, 18, tzinfo=UTC), "realm": "shop", "topic": topic}
    return Event(**{**given, "new": {"id": f"o-{number}", "number": number}, **fields})


async def test_a_handler_publishes_events_with_its_transaction_or_not_at_all(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    orders = stages.terminator(unique, message=Order)
    given: dict[int, list[str]] = {}

    @orders.last_stage(exactly_once=True, retry=Retry.parallel(attempts=3, first_delay=timedelta(milliseconds=10)))
    async def place(ctx: Context[None], order: Order, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})
        ids = [await ctx.publish(shop_event(order.number, unique)) for _ in range(2)]
        given.setdefault(order.number, []).extend(ids)
        if order.number == 1 and ctx.attempt == 1 and len(given[1]) == 2:
            raise ValueError("not yet")
        if order.number == 2:
            raise Refuse("never")

    async with stages:
        for number in range(4):
            await stages.send(orders, Order(number), id=f"{unique}-{number}")
        await until(lambda: is_empty(queues, unique))
    events = [each for each in await published(queues) if each.topic == unique]
    assert sorted(each.new["number"] for each in events) == [0, 0, 1, 1, 3, 3]
    assert await effects(database) == [0, 1, 3]
    assert len(given[1]) == 4
    assert given[1][:2] == given[1][2:]  # the same ids at the next attempt
    ids = {first(each.headers, EVENT_ID) for each in await messages_of(queues, unique)}
    assert ids == {each for number in (0, 1, 3) for each in given[number]}


async def messages_of(queues: Queues, topic: str) -> list[Any]:
    last = (await queues.streams.info(STREAM)).state.last_seq
    found = [await queues.streams.get(STREAM, sequence) async for sequence in _sequences(queues, last)]
    return [each for each in found if Event.decode(each.data).topic == topic]


async def _sequences(queues: Queues, last: int) -> Any:
    async for batch in queues.read_range(STREAM, 1, last):
        for row in batch.to_pylist():
            if row["subject"] == SUBJECT or row["subject"].startswith(OUTBOX_SUBJECT):
                yield row["sequence"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"realm": ""}, "'realm'"),
        ({"topic": "x" * 1025}, "topic is 1025 bytes long"),
        ({"new": {}}, "neither an old nor a new"),
        ({"new": {"when": datetime(2026, 1, 1, tzinfo=UTC)}}, "body.new.when is a datetime"),
        ({"new": {"a": {7: 1}}}, "body.new.a has 7"),
        ({"new": {"a": [float("nan")]}}, "body.new.a[0]"),
        ({"new": [1]}, "new object"),
        ({"ts": "yesterday"}, "'ts'"),
        ({"key": "a\nb"}, "key holds"),
        ({"attributes": {"a": 1}}, "attribute 'a'"),
        ({"new": {"a": "x" * (1 << 20)}}, "the server takes"),
    ],
)
async def test_an_invalid_event_is_refused_at_publish_and_named(fields: dict[str, Any], named: str) -> None:
    ctx: Context[None] = Context(None, "orders", 0, "m-1", "m-1")
    with pytest.raises(Refuse) as refused:
        await ctx.publish(shop_event(1, **fields))
    assert named in refused.value.message
    assert not ctx.events
    with pytest.raises(Refuse, match="an object"):
        await ctx.publish({"realm": "shop"})  # type: ignore[arg-type]


async def test_a_handler_that_publishes_an_invalid_event_leaves_a_dead_letter_and_no_effect(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    orders = stages.terminator(unique, message=Order)

    @orders.last_stage(exactly_once=True)
    async def place(ctx: Context[None], order: Order, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})
        await ctx.publish(shop_event(order.number, unique, realm="r" * 300 if order.number else "shop"))

    async with stages:
        for number in range(2):
            await stages.send(orders, Order(number))
        await until(lambda: is_empty(queues, unique))
    [letter] = await letters(queues, unique)
    assert letter.reason == "the event cannot be published: realm is 300 bytes long"
    assert letter.attempts == 1
    assert await effects(database) == [0]


async def test_a_stage_without_exactly_once_publishes_after_its_commit(
    stages: Stages, queues: Queues, unique: str
) -> None:
    orders = stages.terminator(unique, message=Order)

    @orders.last_stage
    async def place(ctx: Context[None], order: Order) -> None:
        await ctx.publish(shop_event(order.number, unique))

    async with stages:
        await stages.send(orders, Order(7), id=f"{unique}-7")
        await until(lambda: is_empty(queues, unique))
    [message] = await messages_of(queues, unique)
    assert message.subject == SUBJECT
    assert first(message.headers, MSG_ID) == f"stage-event:{first(message.headers, EVENT_ID)}"


async def test_events_of_many_writers_keep_the_order_of_commits_and_the_queue_keeps_only_the_newest(
    make_stages: MakeStages, queues: Queues, unique: str
) -> None:
    """Three instances; `Stages.publish` puts an event into the transaction of any program."""
    applications = [make_stages() for _ in range(3)]
    committed: list[int] = []

    async def write(stages: Stages, writer: int) -> None:
        for turn in range(10):
            number = writer * 100 + turn
            async with stages.store.transaction() as transaction:
                await stages.publish(shop_event(number, unique, key=f"k-{writer}"), db=transaction.connection)
                committed.append(number)  # the writer has the lock of events
        with pytest.raises(InvalidInput, match="id is empty"):
            async with stages.store.transaction() as transaction:
                await stages.publish(shop_event(0, unique), db=transaction.connection, id="")

    async with applications[0], applications[1], applications[2]:
        await asyncio.gather(*(write(applications[writer % 3], writer) for writer in range(6)))
        await until(lambda: _count(queues, unique, 60))
        [outbox] = await rows_of_outbox(applications[0])
        info = await until_held(queues, outbox)
    assert [each.new["number"] for each in await published(queues) if each.topic == unique] == committed
    newest = await queues.streams.get_last(STREAM, f"{OUTBOX_SUBJECT}.{outbox}.*")
    assert info.ack_floor.stream_seq == newest.sequence - 1
    assert (await queues.streams.subjects(STREAM, f"{OUTBOX_SUBJECT}.{outbox}.*")).keys() == {newest.subject}


async def test_a_program_that_ends_has_sent_what_it_committed(
    stages: Stages, queues: Queues, unique: str, database: str
) -> None:
    """A short program ends right after its commit; nothing else may ever run on its database."""
    async with stages, stages.store.transaction() as transaction:
        for number in range(3):
            await stages.publish(shop_event(number, unique), db=transaction.connection)
    assert [each.new["number"] for each in await published(queues) if each.topic == unique] == [0, 1, 2]
    assert await rows(database, "SELECT count(*) FROM purveyor_outbox WHERE sent_ms IS NULL") == [(0,)]


async def rows_of_outbox(stages: Stages) -> list[str]:
    async with stages.store.engine.connect() as connection:
        found = await connection.exec_driver_sql("SELECT owner FROM purveyor_owners WHERE stage = 'outbox'")
        return [row[0] for row in found.all()]


async def until_held(queues: Queues, outbox: str) -> Any:
    """Wait until the durable of the outbox holds one event."""

    async def held() -> Any:
        info = await queues.consumers.info(STREAM, outbox_receipts(outbox))
        return info if info.num_pending == 1 else None

    return await until(held)


async def _count(queues: Queues, topic: str, count: int) -> bool:
    return len([each for each in await published(queues) if each.topic == topic]) >= count


async def read_everything(queues: Queues) -> None:
    """Process all events as dispatch and archive do."""
    last = (await queues.streams.info(STREAM)).state.last_seq
    for durable in (DEFAULT_GROUP, "archive"):
        await queues.consumers.reset(STREAM, durable, last + 1)


@pytest.mark.parametrize("point", [CrashPoint.MID_PUBLISH, CrashPoint.EVENTS_STORED, CrashPoint.PUBLISHED])
async def test_an_event_is_stored_once_after_a_crash_and_an_outage_longer_than_the_window_of_deduplication(
    own_server: OwnServer, tmp_path: Path, request: pytest.FixtureRequest, point: CrashPoint
) -> None:
    """The readers have processed the event meanwhile, so that only the durable of the outbox still holds it."""
    database = make_database("sqlite", request, tmp_path)
    server = own_server(directory=tmp_path / "nats")
    plan = Plan(server.address, database, "crash", ordered=False)
    store = SqlStore(database)
    async with connect(server.address) as queues, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        await queues.ensure(incoming())
        stages = Stages(queues, store=store, app="crash")

        async def publish(numbers: range) -> None:
            async with store.transaction() as transaction:
                for number in numbers:
                    await stages.publish(job_event(Job(number), "t", "k"), db=transaction.connection, id=f"e-{number}")

        await publish(range(3))
        dying = start(replace(plan, die_at=point.value))
        await asyncio.to_thread(dying.join, 60)
        assert dying.exitcode is not None
        assert dying.exitcode < 0
        count = len(await published(queues))
        assert count == 3 or (count and point is CrashPoint.MID_PUBLISH)
        await read_everything(queues)
        probes = await forget_ids(queues, STREAM, "incoming.probe")
        assert await rows(database, "SELECT count(*) FROM purveyor_outbox WHERE sent_ms IS NULL") == [(3,)]
        running = start(plan)
        try:
            await until(lambda: _is_sent(database))
            await publish(range(3, 4))
            await until(lambda: _is_sent(database))
        finally:
            running.kill()
            await asyncio.to_thread(running.join, 60)
        assert (await queues.streams.info(STREAM)).state.last_seq == 4 + probes
        assert [each.new["number"] for each in await published(queues)][-1] == 3
        await read_everything(queues)
        assert (await queues.streams.info(STREAM)).state.messages == 1
        assert await unread_since(queues, await queues.streams.usage()) == {}


async def _is_sent(database: str) -> bool:
    return await rows(database, "SELECT count(*) FROM purveyor_outbox WHERE sent_ms IS NULL") == [(0,)]


async def test_a_database_restored_from_an_older_copy_loses_no_event(own_server: OwnServer, tmp_path: Path) -> None:
    """Its rows get numbers that events in the queue have already."""
    data = tmp_path / "data"
    data.mkdir()
    server, url = own_server(directory=tmp_path / "nats"), f"sqlite:///{data / 'shop.db'}"

    async def publish(queues: Queues, numbers: range) -> None:
        stages = Stages(queues, store=SqlStore(url), app="test", timing=QUICK)
        async with stages:
            async with stages.store.transaction() as transaction:
                for number in numbers:
                    await stages.publish(shop_event(number, "orders"), db=transaction.connection)
            await until(lambda: _is_sent(url))

    async with connect(server.address) as queues:
        await publish(queues, range(2))
        shutil.copytree(data, tmp_path / "older")
        await publish(queues, range(2, 5))
        shutil.rmtree(data)
        shutil.copytree(tmp_path / "older", data)
        await publish(queues, range(10, 12))
        await publish(queues, range(12, 20))
        assert [each.new["number"] for each in await published(queues)] == [*range(5), *range(10, 20)]


async def test_events_wait_in_the_outbox_while_the_queue_needs_a_migration(
    own_server: OwnServer, tmp_path: Path, unique: str
) -> None:
    """They block no other message."""
    server, url = own_server(directory=tmp_path / "nats"), f"sqlite:///{tmp_path / 'shop.db'}"
    async with connect(server.address) as queues:
        wanted = incoming().config()
        await queues.streams.add(replace(wanted, retention=type(wanted.retention).WORK_QUEUE))
        stages = Stages(queues, store=SqlStore(url), app="test", timing=QUICK)
        orders = stages.terminator("orders", message=Order)
        seen: list[int] = []

        @orders.last_stage(exactly_once=True)
        async def place(ctx: Context[None], order: Order) -> None:
            await ctx.publish(shop_event(order.number, unique))
            if order.number < 2:
                ctx.send(orders, Order(order.number + 1))
            seen.append(order.number)

        async with stages:
            await stages.send(orders, Order(0))
            await until(lambda: is_empty(queues, "orders") if len(set(seen)) == 3 else _false())
            assert not await published(queues)
            await queues.streams.remove(STREAM)
            await until(lambda: _is_sent(url))
        assert [each.new["number"] for each in await published(queues)] == [0, 1, 2]


async def _false() -> bool:
    return False
