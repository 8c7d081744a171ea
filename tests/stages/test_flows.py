"""Flows of several stages: requests, replies, their state, and their traces."""

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from purveyor.model.errors import AlreadyExists, InvalidConfig, InvalidInput, InvalidName, NoAnswer
from purveyor.queues.client import Queues
from purveyor.stages import Context, Goto, Next, Reply, Request, Retry, Stages
from tests.support.stages import MakeStages, effects, is_empty, rows, sink, waiting
from tests.support.stages import Order as Note
from tests.support.waiting import until


@dataclass(frozen=True)
class PlaceOrder:
    item: str
    count: int = 1


@dataclass(frozen=True)
class Reserve:
    item: str


@dataclass(frozen=True)
class Reserved:
    item: str
    shelf: int


@dataclass(frozen=True)
class Placed:
    text: str


@dataclass
class OrderState:
    item: str = ""
    seen: list[str] = field(default_factory=list)


@pytest.mark.parametrize("exactly_once", [False, True])
async def test_a_flow_over_two_endpoints_comes_back_with_its_state(
    stages: Stages, database: str, unique: str, exactly_once: bool
) -> None:
    inventory = stages.endpoint(f"{unique}.inventory", request=Reserve, reply=Reserved)
    orders = stages.endpoint(f"{unique}.orders", request=PlaceOrder, reply=Placed, state=OrderState)
    traces: list[str] = []
    once, in_order = exactly_once, Retry.in_order(attempts=7)

    @inventory.last_stage(exactly_once=once)
    async def reserve(ctx: Context[None], message: Reserve, db: AsyncSession) -> Reserved:
        traces.append(ctx.trace_id)
        assert ctx.key == "customer-1"
        await db.execute(text("INSERT INTO effects (number) VALUES (1)"))
        return Reserved(message.item, 7)

    @orders.stage(exactly_once=once, retry=in_order, concurrency=4)
    async def begin(ctx: Context[OrderState], message: PlaceOrder, db: AsyncSession) -> Request[Reserved]:
        traces.append(ctx.trace_id)
        ctx.state.item = message.item
        ctx.state.seen.append("begin")
        await db.execute(text("INSERT INTO effects (number) VALUES (0)"))
        return Request(inventory, Reserve(message.item))

    @orders.stage(exactly_once=once)
    async def between(ctx: Context[OrderState], message: Reserved) -> Next[Reserved]:
        ctx.state.seen.append("between")
        return Next(Reserved(message.item, message.shelf + 1))

    @orders.last_stage(exactly_once=once)
    async def confirm(ctx: Context[OrderState], message: Reserved, db: AsyncSession) -> Placed:
        traces.append(ctx.trace_id)
        await db.execute(text("INSERT INTO effects (number) VALUES (2)"))
        return Placed(f"{ctx.state.item} from {message.shelf} by {'+'.join(ctx.state.seen)}, {ctx.stage}")

    async with stages:
        placed = await stages.ask(orders, PlaceOrder("book"), key="customer-1", trace_id="trace-1")
    assert placed == Placed("book from 8 by begin+between, 2")
    assert traces == ["trace-1"] * 3
    assert await effects(database) == [0, 1, 2]


async def test_goto_continues_at_another_endpoint_and_reply_ends_early(stages: Stages, unique: str) -> None:
    orders = stages.endpoint(f"{unique}.orders", request=PlaceOrder, reply=Placed)
    archive = stages.endpoint(f"{unique}.archive", request=Reserve, reply=Placed)

    @archive.last_stage
    async def archived(ctx: Context[None], message: Reserve) -> Placed:
        return Placed(f"archive has {message.item}")

    @orders.stage
    async def decide(ctx: Context[None], message: PlaceOrder) -> Goto[Placed] | Reply[Placed] | Next[PlaceOrder]:
        if message.item == "old":
            return Goto(archive, Reserve(message.item))
        if message.item == "none":
            return Reply(Placed("sold out"))
        return Next(message)

    @orders.last_stage
    async def sell(ctx: Context[None], message: PlaceOrder) -> Placed:
        return Placed(f"sold {message.item}")

    async with stages:
        answers = [await stages.ask(orders, PlaceOrder(item)) for item in ("old", "none", "new")]
    assert [answer.text for answer in answers] == ["archive has old", "sold out", "sold new"]


async def test_a_terminator_gets_the_reply_with_the_state_that_was_given(
    stages: Stages, queues: Queues, unique: str
) -> None:
    upper = stages.endpoint(f"{unique}.upper", request=str, reply=str)
    done = stages.terminator(f"{unique}.done", message=str, state=OrderState)
    seen: list[tuple[str, str]] = []

    @upper.last_stage
    async def up(ctx: Context[None], message: str) -> str:
        return message.upper()

    @done.last_stage(exactly_once=True)
    async def end(ctx: Context[OrderState], message: str) -> None:
        ctx.after_commit(lambda: seen.append((message, ctx.state.item)))

    async with stages:
        await stages.send(upper, "hello", reply_to=done, state=OrderState("kept"))
        await until(lambda: seen)
    assert seen == [("HELLO", "kept")]


async def test_an_initiation_is_part_of_the_callers_transaction(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    endpoint = stages.terminator(unique, message=Note)

    @endpoint.last_stage(exactly_once=True)
    async def handle(ctx: Context[None], note: Note, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": note.number})

    async with stages:
        async with AsyncSession(stages.store.engine) as session, session.begin():
            await session.execute(text("INSERT INTO effects (number) VALUES (100)"))
            await stages.send(endpoint, Note(1), db=session)
            await stages.send(endpoint, Note(2), db=session)
        async with stages.store.engine.connect() as connection:
            await stages.send(endpoint, Note(3), db=connection)
            await connection.rollback()
        await until(lambda: _has(database, [1, 2, 100]))
        await until(lambda: is_empty(queues, unique))
    assert await effects(database) == [1, 2, 100]


async def test_messages_without_a_stream_are_held_in_order_and_block_no_others(
    make_stages: MakeStages, queues: Queues, database: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("purveyor.stages.relay._PROBE_INTERVAL_SECONDS", 0.2)
    stages = make_stages()
    missing = stages.remote(f"{unique}.missing", request=Note, reply=type(None))
    there = await sink(queues, stages, unique)
    async with stages:
        for number in range(5):
            async with stages.store.engine.begin() as connection:
                await stages.send(missing, Note(number), db=connection, key="k")
                await stages.send(there, Note(number), db=connection, key="k")
        await until(lambda: _count(queues, f"{unique}-sink", 5))
        await until(lambda: _unsent(database, 5))
        other = make_stages()
        late = other.terminator(f"{unique}.missing", message=Note)
        seen: list[int] = []

        @late.last_stage(retry=Retry.in_order())
        async def handle(ctx: Context[None], note: Note) -> None:
            seen.append(note.number)

        async with other:
            await until(lambda: len(seen) == 5)
    assert seen == list(range(5))


async def test_interactive_messages_go_before_the_others(stages: Stages, queues: Queues, unique: str) -> None:
    endpoint = stages.terminator(unique, message=Note)
    order: list[int] = []
    held, reached = asyncio.Event(), asyncio.Event()

    @endpoint.last_stage
    async def handle(ctx: Context[None], note: Note) -> None:
        if note.number == 0:
            reached.set()
            await held.wait()
        order.append(note.number)

    async with stages:
        await stages.send(endpoint, Note(0))
        await reached.wait()
        for number in range(1, 10):
            await stages.send(endpoint, Note(number))
        await stages.send(endpoint, Note(100), interactive=True)
        await until(lambda: len(stages.runners[0]._held) == 11)
        held.set()
        await until(lambda: is_empty(queues, unique))
    assert order[:2] == [0, 100]


async def test_a_missing_reply_is_an_error(stages: Stages, unique: str) -> None:
    endpoint = stages.endpoint(unique, request=str, reply=str)
    go_on = asyncio.Event()

    @endpoint.last_stage
    async def slow(ctx: Context[None], message: str) -> str:
        await go_on.wait()
        return message

    async with stages:
        with pytest.raises(NoAnswer, match=r"did not reply within 0\.2 s"):
            await stages.ask(endpoint, "hello", timeout=0.2)
        go_on.set()
        assert await stages.ask(endpoint, "again") == "again"


async def test_wrong_flows_are_refused_before_anything_is_sent(stages: Stages, queues: Queues, unique: str) -> None:
    endpoint = stages.endpoint(f"{unique}.a", request=PlaceOrder, reply=Placed)
    with pytest.raises(AlreadyExists):
        stages.endpoint(f"{unique}.a", request=PlaceOrder, reply=Placed)
    with pytest.raises(InvalidName):
        stages.endpoint("with_underscore", request=PlaceOrder, reply=Placed)

    @endpoint.stage
    async def first(ctx: Context[None], message: PlaceOrder) -> Request[Reserved]:
        raise AssertionError

    @endpoint.last_stage
    async def second(ctx: Context[None], message: Reserve) -> Placed:
        raise AssertionError

    with pytest.raises(InvalidInput, match="takes PlaceOrder, not str"):
        await stages.send(endpoint, "a book")  # type: ignore[misc]
    with pytest.raises(InvalidConfig, match=r"stage 0 of .* leads to Reserved, and stage 1 takes Reserve"):
        await stages.start()


async def test_a_message_too_large_to_send_makes_a_dead_letter_of_its_cause(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    to = await sink(queues, stages, unique)
    endpoint = stages.terminator(unique, message=Note)

    @endpoint.last_stage(exactly_once=True, retry=Retry.parallel(first_delay=timedelta(milliseconds=5)))
    async def handle(ctx: Context[None], note: Note, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": note.number})
        ctx.send(to, Note(1, "x" * queues.connection.max_payload))

    async with stages:
        await stages.send(endpoint, Note(1))
        await until(lambda: is_empty(queues, unique))
    assert await effects(database) == []
    assert await waiting(queues, f"{unique}-sink") == 0


async def _has(database: str, numbers: list[int]) -> bool:
    return await effects(database) == numbers


async def _count(queues: Queues, endpoint: str, count: int) -> bool:
    return await waiting(queues, endpoint) == count


async def _unsent(database: str, count: int) -> bool:
    return await rows(database, "SELECT count(*) FROM purveyor_outbox WHERE sent_ms IS NULL") == [(count,)]
