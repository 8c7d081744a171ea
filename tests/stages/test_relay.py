"""The outbox relay: sends all rows in the order of commits for each key, at a constant cost."""

import asyncio
import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from purveyor.jetstream.address import Address
from purveyor.queues.catalogue import endpoint_queue
from purveyor.queues.client import Queues, connect
from purveyor.stages import Context, Retry, SqlStore, Stages
from purveyor.stages.endpoint import Timing
from purveyor.stages.flow import Outgoing
from purveyor.stages.source import QueueSource
from purveyor.stages.sql_store import Cleanup
from tests.support.nats_servers import OwnServer
from tests.support.proxy import TcpProxy
from tests.support.stages import QUICK, MakeStages, Order, effects, is_empty, rows, sink, stored, waiting
from tests.support.waiting import until


async def out(queues: Queues, name: str) -> list[dict[str, Any]]:
    return [
        json.loads(message["data"])
        for message in await stored(queues, endpoint_queue(name, 1).stream, f"stage.{name}.0")
    ]


async def test_many_writers_and_three_relays_keep_the_order_of_commits_for_each_key(
    make_stages: MakeStages, queues: Queues, database: str, unique: str
) -> None:
    applications = [make_stages() for _ in range(3)]
    to = await sink(queues, applications[0], unique)
    committed: dict[str, list[int]] = {"a": [], "b": []}

    async def write(stages: Stages, writer: int) -> None:
        for turn in range(8):
            for key in ("a", "b") if writer % 2 else ("b", "a"):
                number = writer * 100 + turn
                async with stages.store.transaction() as transaction:
                    await stages.send(to, Order(number, key), db=transaction.connection, key=key)
                    # Whoever has the key's lock commits next: so this is the order of the commits.
                    committed[key].append(number)

    async with applications[0], applications[1], applications[2]:
        await asyncio.gather(*(write(applications[writer % 3], writer) for writer in range(6)))
        await until(lambda: _count(queues, f"{unique}-sink", 96))
    sent = await out(queues, f"{unique}-sink")
    for key, numbers in committed.items():
        assert [message["number"] for message in sent if message["note"] == key] == numbers


async def test_a_row_numbered_before_and_committed_after_another_is_sent(
    queues: Queues, postgres_url: str, unique: str
) -> None:
    stages = Stages(queues, store=SqlStore(postgres_url, create_tables=True), app="test")
    to = await sink(queues, stages, unique)
    async with stages:
        async with stages.store.engine.begin() as slow:
            await stages.send(to, Order(1), db=slow)
            async with stages.store.engine.begin() as quick:
                await stages.send(to, Order(2), db=quick)
            await until(lambda: _count(queues, f"{unique}-sink", 1))
        await until(lambda: _count(queues, f"{unique}-sink", 2))
    assert [message["number"] for message in await out(queues, f"{unique}-sink")] == [2, 1]


async def test_notify_wakes_the_relay_for_commits_of_other_processes(
    queues: Queues, postgres_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("purveyor.stages.relay._POLL_INTERVAL_SECONDS", 3600)
    stages = Stages(queues, store=SqlStore(postgres_url, create_tables=True), app="test")
    other = Stages(queues, store=SqlStore(postgres_url), app="test")
    to = await sink(queues, stages, unique)
    async with stages:
        await until(lambda: _listens(postgres_url))
        async with other.store.engine.begin() as connection:
            await other.send(to, Order(1), db=connection)  # its relay does not run
        await until(lambda: _count(queues, f"{unique}-sink", 1))
    await other.store.close()


async def test_an_idle_relay_polls_once_a_second(stages: Stages) -> None:
    async with stages:
        await until(lambda: stages.relay.polls)
        before, began = stages.relay.polls, asyncio.get_running_loop().time()
        await until(lambda: stages.relay.polls >= before + 2)
        assert stages.relay.polls - before <= asyncio.get_running_loop().time() - began + 1


async def test_the_cost_of_a_poll_does_not_grow_with_the_table(postgres_url: str) -> None:
    store = SqlStore(postgres_url, create_tables=True)
    await store.open()
    messages = [Outgoing(f"id-{number}", "stage.x.0", b"{}", {}) for number in range(20_000)]
    async with store.transaction() as transaction:
        await transaction.put(messages)
    async with store.engine.begin() as connection:
        await connection.exec_driver_sql("UPDATE purveyor_outbox SET sent_ms = 1 WHERE id <= 19990")
        await connection.exec_driver_sql("ANALYZE purveyor_outbox")
    asked_for = (store.statements._unsent, store.statements._waiting, store.statements._newest)
    for statement in asked_for:
        asked = statement.replace("%s", "0", 1).replace("%s", "1000000")
        plan = "\n".join(line for (line,) in await rows(postgres_url, f"EXPLAIN {asked}"))
        assert "purveyor_outbox_unsent" in plan
        assert "Seq Scan on purveyor_outbox" not in plan
    await store.close()


async def test_the_cleanup_removes_old_processed_rows_only(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    to = await sink(queues, stages, unique)
    endpoint = stages.terminator(unique, message=Order)

    @endpoint.last_stage(exactly_once=True)
    async def handle(ctx: Context[None], order: Order) -> None:
        ctx.send(to, order)

    async with stages:
        for number in range(5):
            await stages.send(endpoint, Order(number))
        await until(lambda: is_empty(queues, unique))
        await until(lambda: _floor(queues, unique, 5))
        source = QueueSource(queues, endpoint_queue(unique, 1).stream, "stage-0", QUICK.ack_wait)
        sources = {f"{unique}.0": source}
        kept = Timing()
        at_once = Timing(outbox_kept=timedelta(seconds=-1), inbox_kept=timedelta(seconds=-1))
        assert await Cleanup(stages.store, sources, kept).run_once() == (0, 0)
        async with stages.store.transaction() as transaction:
            await transaction.put([Outgoing("unsent", "stage.nobody.0", b"{}", {})])
        # One that the broker could deliver again: it lies above what is acknowledged.
        async with stages.store.engine.begin() as connection:
            await connection.exec_driver_sql(
                f"UPDATE purveyor_inbox SET sequence = 1000 WHERE message_id = "
                f"(SELECT min(message_id) FROM purveyor_inbox WHERE stage = '{unique}.0')"
            )
        assert await Cleanup(stages.store, sources, at_once).run_once() == (5, 4)
    assert await rows(database, "SELECT message_id FROM purveyor_outbox") == [("unsent",)]
    assert await rows(database, "SELECT sequence FROM purveyor_inbox") == [(1000,)]


async def test_the_relay_waits_for_an_unavailable_broker(
    address: Address, database: str, unique: str, tcp_proxy: TcpProxy
) -> None:
    async with connect(tcp_proxy.address(address)) as queues:
        stages = Stages(queues, store=SqlStore(database), app="test", timing=QUICK)
        endpoint = stages.terminator(unique, message=Order)

        @endpoint.last_stage(exactly_once=True, concurrency=2)
        async def handle(ctx: Context[None], order: Order, db: AsyncSession) -> None:
            await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})

        async with stages:
            for number in range(10):
                await stages.send(endpoint, Order(number))
            tcp_proxy.refuse()
            async with stages.store.engine.begin() as connection:
                for number in range(10, 20):
                    await stages.send(endpoint, Order(number), db=connection)
            await asyncio.sleep(0.5)
            tcp_proxy.restore()
            await until(lambda: _has(database, list(range(20))))


async def test_an_older_store_of_the_broker_put_back_under_a_running_database(
    own_server: OwnServer, database: str, tmp_path: Path, unique: str
) -> None:
    directory, older = tmp_path / "nats", tmp_path / "older"

    async def run(server_address: Address, numbers: range, *, through: bool, replay: datetime | None = None) -> None:
        async with connect(server_address) as queues:
            stages = Stages(queues, store=SqlStore(database), app="test", timing=QUICK)
            first = stages.terminator(f"{unique}.first", message=Order)
            second = stages.terminator(f"{unique}.second", message=Order) if through else None
            to = second or stages.remote(f"{unique}.second", request=Order, reply=type(None))
            await queues.ensure(endpoint_queue(f"{unique}.second", 1, ack_wait=QUICK.ack_wait))

            @first.last_stage(exactly_once=True, retry=Retry.in_order())
            async def pass_on(ctx: Context[None], order: Order, db: AsyncSession) -> None:
                await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})
                ctx.send(to, order)

            if second is not None:

                @second.last_stage(exactly_once=True)
                async def end(ctx: Context[None], order: Order, db: AsyncSession) -> None:
                    await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": 1000 + order.number})

            async with stages:
                if replay is not None:
                    assert await stages.replay(replay) > 0
                async with stages.store.engine.begin() as connection:
                    for number in numbers:
                        await stages.send(first, Order(number), db=connection, key="k")
                await until(lambda: _sent(database))
                await until(lambda: is_empty(queues, f"{unique}.first"))
                await until(lambda: _sent(database))
                if through:
                    await until(lambda: is_empty(queues, f"{unique}.second"))

    server = own_server(directory=directory)
    await run(server.address, range(10), through=False)  # ten messages wait for the second endpoint
    server.stop()
    shutil.copytree(directory, older)
    at = datetime.now(UTC) - timedelta(seconds=1)
    server = own_server(directory=directory)
    await run(server.address, range(10, 15), through=True)
    await run(server.address, range(15, 20), through=False)  # five more that only the broker knows of
    server.stop()
    shutil.rmtree(directory)
    shutil.copytree(older, directory)
    server = own_server(directory=directory)
    await run(server.address, range(20, 22), through=True, replay=at)
    assert await effects(database) == [*range(22), *range(1000, 1022)]


async def _count(queues: Queues, endpoint: str, count: int) -> bool:
    return await waiting(queues, endpoint) == count


async def _has(database: str, numbers: list[int]) -> bool:
    return await effects(database) == numbers


async def _sent(database: str) -> bool:
    return await rows(database, "SELECT 1 FROM purveyor_outbox WHERE sent_ms IS NULL LIMIT 1") == []


async def _listens(database: str) -> bool:
    return bool(await rows(database, "SELECT 1 FROM pg_stat_activity WHERE left(query, 6) = 'LISTEN'"))


async def _floor(queues: Queues, endpoint: str, floor: int) -> bool:
    return (await queues.consumers.info(endpoint_queue(endpoint, 1).stream, "stage-0")).ack_floor.stream_seq >= floor


async def test_connections_that_the_database_ends_cost_nothing_but_time(
    queues: Queues, postgres_url: str, unique: str
) -> None:
    store = SqlStore(postgres_url, create_tables=True)
    stages = Stages(queues, store=store, app="test", timing=QUICK)
    endpoint = stages.terminator(unique, message=Order)
    in_order = stages.terminator(f"{unique}.then", message=Order)
    ended = 0

    @endpoint.last_stage(exactly_once=True, concurrency=4)
    async def handle(ctx: Context[None], order: Order, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})
        ctx.send(in_order, order)

    @in_order.last_stage(exactly_once=True, retry=Retry.in_order())
    async def then(ctx: Context[None], order: Order, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": 1000 + order.number})

    async with stages:
        async with store.engine.begin() as connection:
            await connection.exec_driver_sql("CREATE TABLE effects (number INTEGER)")
        for number in range(60):
            await stages.send(endpoint, Order(number))
            if number % 20 == 10:
                ended += len(
                    await rows(
                        postgres_url,
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                        "WHERE datname = current_database() AND pid <> pg_backend_pid()",
                    )
                )
        await until(lambda: _has(postgres_url, [*range(60), *range(1000, 1060)]))
    assert ended > 3


async def test_a_callback_that_fails_keeps_no_other_from_being_called(stages: Stages) -> None:
    called: list[str] = []

    async def fail() -> None:
        called.append("failed")
        raise RuntimeError("on purpose")

    async def go_on() -> None:
        called.append("went on")

    async with stages:
        for callback in (fail, go_on):
            stages.relay.after_sending(callback)
        await until(lambda: len(called) == 2)
    assert called == ["failed", "went on"]
