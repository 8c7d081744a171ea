"""One stage: its work, its database and its messages are one, or nothing of it happened."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from psycopg import AsyncConnection as Psycopg
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from purveyor.delivery.dead_letters.service import DeadLetterFilter, open_dead_letters
from purveyor.model.errors import InvalidConfig, SetupError
from purveyor.queues.catalogue import endpoint_queue
from purveyor.queues.client import Queues
from purveyor.stages import Context, Refuse, Retry, SqlStore, Stages, Target
from purveyor.stages.endpoint import Timing
from tests.support.stages import QUICK, QUICK_RETRY, MakeStages, Order, effects, is_empty, letters, rows, sink, waiting
from tests.support.waiting import until


async def is_stored(queues: Queues, endpoint: str, body: bytes) -> bool:
    """Whether the server stored a message with the first id, which it does not while it remembers that id."""
    return not (await queues.publish(f"stage.{endpoint}.0", body, msg_id=f"{endpoint}-1")).duplicate


@pytest.mark.parametrize("exactly_once", [False, True])
async def test_message_in_effect_and_messages_out(
    stages: Stages, queues: Queues, database: str, unique: str, exactly_once: bool
) -> None:
    to = await sink(queues, stages, unique)
    endpoint = stages.terminator(unique, message=Order)
    committed: list[int] = []

    @endpoint.last_stage(exactly_once=exactly_once, concurrency=4)
    async def handle(ctx: Context[None], order: Order, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})
        ctx.send(to, order)
        ctx.send(to, Order(order.number, "again"))
        ctx.after_commit(lambda: committed.append(order.number))

    async with stages:
        for number in range(20):
            await stages.send(endpoint, Order(number))
        await until(lambda: is_empty(queues, unique))
    assert await effects(database) == list(range(20))
    assert sorted(committed) == list(range(20))
    assert await waiting(queues, f"{unique}-sink") == 40


async def test_the_same_message_delivered_again_has_no_second_effect(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    endpoint = stages.terminator(unique, message=Order)

    @endpoint.last_stage(exactly_once=True)
    async def handle(ctx: Context[None], order: Order, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})

    async with stages:
        await stages.send(endpoint, Order(1), id=f"{unique}-1")
        await until(lambda: is_empty(queues, unique))
        # The server recognises ids for two minutes; a copy under another id of the server's, but ours, comes later.
        await queues.streams.update(endpoint_queue(unique, 1).stream, {"duplicate_window": timedelta(milliseconds=100)})
        await until(lambda: is_stored(queues, unique, b'{"number": 1}'))  # as soon as the server has forgotten the id
        await stages.send(endpoint, Order(2))
        await until(lambda: is_empty(queues, unique))
    assert await effects(database) == [1, 2]


@pytest.mark.parametrize("exactly_once", [False, True])
async def test_a_handler_that_raises_leaves_nothing_and_is_tried_again(
    stages: Stages, queues: Queues, database: str, unique: str, exactly_once: bool
) -> None:
    to = await sink(queues, stages, unique)
    endpoint = stages.terminator(unique, message=Order)
    attempts: list[int] = []

    @endpoint.last_stage(exactly_once=exactly_once, retry=QUICK_RETRY, concurrency=4)
    async def handle(ctx: Context[None], order: Order, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})
        ctx.send(to, order)
        if order.number == 3:
            attempts.append(ctx.attempt)
            if len(attempts) < 3:
                raise ValueError("not yet")

    async with stages:
        for number in range(6):
            await stages.send(endpoint, Order(number))
        await until(lambda: is_empty(queues, unique))
    assert len(attempts) >= 3
    assert await effects(database) == list(range(6))
    assert await waiting(queues, f"{unique}-sink") == 6
    assert await rows(database, "SELECT * FROM purveyor_failures") == []
    assert await letters(queues, unique) == []


@pytest.mark.parametrize("exactly_once", [False, True])
async def test_after_the_attempts_a_message_is_a_dead_letter_with_the_stack_trace(
    stages: Stages, queues: Queues, database: str, unique: str, exactly_once: bool
) -> None:
    endpoint = stages.terminator(unique, message=Order)

    @endpoint.last_stage(exactly_once=exactly_once, retry=QUICK_RETRY)
    async def handle(ctx: Context[None], order: Order, db: AsyncConnection) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})
        if order.number == 2:
            raise LookupError("no such customer")

    async with stages:
        for number in range(4):
            await stages.send(endpoint, Order(number), key="k")
        await until(lambda: is_empty(queues, unique))
        (letter,) = await letters(queues, unique)
    assert await effects(database) == [0, 1, 3]
    assert letter.attempts == 3
    assert letter.reason == "LookupError: no such customer"
    assert "raise LookupError" in str(letter.details["traceback"])
    assert letter.subject == f"stage.{unique}.0"
    assert letter.data == b'{"number":2,"note":""}'
    assert letter.headers["Purveyor-Key"] == ("k",)
    assert await rows(database, "SELECT * FROM purveyor_failures") == []


async def test_a_refused_message_and_one_that_is_no_message_are_dead_letters_at_once(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    endpoint = stages.terminator(unique, message=Order)
    calls: list[int] = []

    @endpoint.last_stage(exactly_once=True)
    async def handle(ctx: Context[None], order: Order, db: AsyncSession) -> None:
        calls.append(order.number)
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})
        raise Refuse("we do not sell that", fix="ask another shop")

    async with stages:
        await stages.send(endpoint, Order(1))
        for rubbish in (b"", b"{", b"[]", b'{"number": "one"}', b"\xff\xfe", b'{"note": "no number"}'):
            await queues.publish(f"stage.{unique}.0", rubbish, msg_id=None)
        await queues.publish(f"stage.{unique}.0", b'{"number": 7}', headers={"Purveyor-Flow": "{"})
        await until(lambda: is_empty(queues, unique))
        found = await letters(queues, unique)
    assert calls == [1]
    assert await effects(database) == []
    assert len(found) == 8
    assert found[0].reason == "we do not sell that"
    assert found[0].attempts == 1


async def test_a_dead_letter_that_is_put_back_is_processed_once(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    endpoint = stages.terminator(unique, message=Order)
    works = False

    @endpoint.last_stage(exactly_once=True)
    async def handle(ctx: Context[None], order: Order, db: AsyncSession) -> None:
        if not works:
            raise Refuse("closed today")
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})

    async with stages:
        await stages.send(endpoint, Order(1))
        await until(lambda: is_empty(queues, unique))
        (letter,) = await letters(queues, unique)
        works = True
        async with open_dead_letters(queues) as dead:
            chosen = DeadLetterFilter(origin=letter.origin)
            assert (await dead.retry(chosen)).targets == {f"stage.{unique}.0": 1}
            await until(lambda: is_empty(queues, unique))
            assert (await dead.retry(chosen)).chosen == 0
    assert await effects(database) == [1]


async def test_in_order_a_failing_message_blocks_its_key_and_no_other(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    endpoint = stages.terminator(unique, message=Order)
    seen: list[tuple[str | None, int]] = []
    others_done = asyncio.Event()

    @endpoint.last_stage(
        exactly_once=True, retry=Retry.in_order(attempts=50, first_delay=timedelta(milliseconds=5)), concurrency=4
    )
    async def handle(ctx: Context[None], order: Order) -> None:
        if order.number == 0 and ctx.key == "a" and not others_done.is_set():
            raise ValueError("not before the others")
        seen.append((ctx.key, order.number))
        if len([key for key, _ in seen if key != "a"]) >= 20:
            others_done.set()

    async with stages:
        for number in range(10):
            for key in ("a", "b", "c"):
                await stages.send(endpoint, Order(number), key=key)
        await until(lambda: is_empty(queues, unique))
    once = list(dict.fromkeys(seen))  # a neighbour's failure may run a handler again
    for key in ("a", "b", "c"):
        assert [number for its, number in once if its == key] == list(range(10))
    assert once.index(("a", 0)) >= 20


async def test_in_order_without_keys_the_stage_waits(stages: Stages, queues: Queues, unique: str) -> None:
    endpoint = stages.terminator(unique, message=Order)
    done: list[int] = []
    failures = 3

    @endpoint.last_stage(retry=Retry.in_order(first_delay=timedelta(milliseconds=5)), concurrency=8)
    async def handle(ctx: Context[None], order: Order) -> None:
        nonlocal failures
        if order.number == 2 and failures:
            failures -= 1
            raise ValueError("not yet")
        ctx.after_commit(lambda: done.append(order.number))

    async with stages:
        for number in range(8):
            await stages.send(endpoint, Order(number))
        await until(lambda: is_empty(queues, unique))
    assert done == list(range(8))


async def test_in_order_a_second_instance_waits_and_takes_over(
    make_stages: MakeStages, queues: Queues, database: str, unique: str
) -> None:
    seen: list[tuple[str, int]] = []

    def application(name: str) -> tuple[Stages, Target[Order, None]]:
        stages = make_stages()
        endpoint = stages.terminator(unique, message=Order)

        @endpoint.last_stage(exactly_once=True, retry=Retry.in_order(), concurrency=2)
        async def handle(ctx: Context[None], order: Order) -> None:
            ctx.after_commit(lambda: seen.append((name, order.number)))

        return stages, endpoint

    first, endpoint = application("first")
    second, _ = application("second")
    await first.start()
    await until(first.runners[0].ready.is_set)
    await second.start()
    try:
        for number in range(10):
            await first.send(endpoint, Order(number))
        await until(lambda: is_empty(queues, unique))
        await first.stop()
        for number in range(10, 20):
            await second.send(endpoint, Order(number))
        await until(lambda: is_empty(queues, unique))
    finally:
        await second.stop()
    assert [number for _, number in seen] == list(range(20))
    assert {name for name, number in seen if number < 10} == {"first"}
    assert {name for name, number in seen if number >= 10} == {"second"}


async def test_slow_handlers_run_beside_each_other_up_to_the_concurrency(
    stages: Stages, queues: Queues, unique: str
) -> None:
    endpoint = stages.terminator(unique, message=Order)
    running = most = 0
    everyone = asyncio.Event()

    @endpoint.last_stage(concurrency=3)
    async def handle(ctx: Context[None], order: Order) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            everyone.set()
        await everyone.wait()
        await asyncio.sleep(0.01)
        running -= 1

    async with stages:
        for number in range(9):
            await stages.send(endpoint, Order(number))
        await until(lambda: is_empty(queues, unique))
    assert most == 3


async def test_a_handler_longer_than_the_wait_for_its_acknowledgement_runs_once(
    make_stages: MakeStages, queues: Queues, unique: str
) -> None:
    stages = make_stages(Timing(ack_wait=timedelta(seconds=6)))
    endpoint = stages.terminator(unique, message=Order)
    calls = 0

    @endpoint.last_stage
    async def handle(ctx: Context[None], order: Order) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(8)  # longer than the wait; a busy machine may be late with its extension by seconds

    async with stages:
        await stages.send(endpoint, Order(1))
        await until(lambda: is_empty(queues, unique))
    assert calls == 1


async def test_a_handler_may_take_a_psycopg_connection(queues: Queues, postgres_url: str, unique: str) -> None:
    stages = Stages(queues, store=SqlStore(postgres_url, create_tables=True), app="test")
    endpoint = stages.terminator(unique, message=Order)

    @endpoint.last_stage(exactly_once=True, retry=QUICK_RETRY)
    async def handle(ctx: Context[None], order: Order, db: Psycopg[Any]) -> None:
        await db.execute("INSERT INTO effects VALUES (%s)", (order.number,))

    async with stages:
        async with stages.store.engine.begin() as connection:
            await connection.exec_driver_sql("CREATE TABLE effects (number INTEGER UNIQUE)")
        for number in (1, 2, 2, 3):
            await stages.send(endpoint, Order(number))
        await until(lambda: is_empty(queues, unique))
        assert await effects(postgres_url) == [1, 2, 3]
        assert "UniqueViolation" in (await letters(queues, unique))[0].reason


async def test_a_handler_that_commits_by_itself_breaks_nothing(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    endpoint = stages.terminator(unique, message=Order)

    @endpoint.last_stage(exactly_once=True, retry=QUICK_RETRY)
    async def handle(ctx: Context[None], order: Order, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})
        await db.commit()
        if order.number == 1:
            raise ValueError("after the commit")

    async with stages:
        for number in range(3):
            await stages.send(endpoint, Order(number))
        await until(lambda: is_empty(queues, unique))
    assert await effects(database) == [0, 2]


async def test_tables_are_not_created_on_postgresql_by_default(queues: Queues, postgres_url: str, unique: str) -> None:
    stages = Stages(queues, store=SqlStore(postgres_url), app="test")
    with pytest.raises(SetupError, match=r"purveyor_inbox.*stages ddl"):
        await stages.start()
    await stages.store.close()


async def test_mistakes_in_declarations_raise_at_once(stages: Stages, unique: str) -> None:
    endpoint = stages.endpoint(unique, request=Order, reply=Order)
    with pytest.raises(InvalidConfig, match="takes Order, and its first stage int"):

        @endpoint.last_stage
        async def wrong_type(ctx: Context[None], message: int) -> Order:
            return Order(message)

    with pytest.raises(InvalidConfig, match="wants a str"):

        @endpoint.last_stage
        async def wrong_database(ctx: Context[None], message: Order, db: str) -> Order:
            return message

    with pytest.raises(InvalidConfig, match="have no JSON form"):
        stages.terminator(f"{unique}-2", message=Stages)
    with pytest.raises(InvalidConfig, match="no last stage"):
        await stages.start()


async def test_best_effort_a_refused_message_makes_only_its_own_handler_run_again(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    to = await sink(queues, stages, unique)
    nobody = stages.remote(f"{unique}.nobody", request=Order, reply=type(None))
    endpoint = stages.terminator(unique, message=Order)

    @endpoint.last_stage(retry=QUICK_RETRY)
    async def handle(ctx: Context[None], order: Order, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})
        ctx.send(nobody if order.number == 20 else to, order)

    await queues.ensure(endpoint_queue(unique, 1, ack_wait=QUICK.ack_wait))
    for number in range(30):
        await stages.send(endpoint, Order(number))
    async with stages:
        await until(lambda: is_empty(queues, unique))
    found = await effects(database)
    assert [number for number in found if number != 20] == [number for number in range(30) if number != 20]
    assert 20 in found
    assert len(await letters(queues, unique)) == 1
