"""A subscriber of the demo that is a transactional stage: every event changes a table of people, or nothing happened.

The one place of the application that speaks SQL: it is what a user of `purveyor.stages` writes.
"""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from purveyor.app.demo.delivery_check import Ledger
from purveyor.app.subscription_source import SubscriptionSource
from purveyor.jetstream.address import Address
from purveyor.model.event import Event
from purveyor.queues.client import connect
from purveyor.stages import Context, Retry, SqlStore, Stages


async def fill_table(address: Address, database: Path, ledger: Ledger) -> None:
    """A transactional stage: every event changes a table of people, in the transaction that notes it as received."""
    store = SqlStore(f"sqlite:///{database}")
    async with store.engine.begin() as connection:
        await connection.execute(text("CREATE TABLE people (key TEXT PRIMARY KEY, uid TEXT, dn TEXT)"))
        await connection.execute(text("CREATE TABLE changes (position INTEGER, key TEXT)"))
    async with connect(address, name="purveyor-demo-stage") as queues:
        stages = Stages(queues, store=store, app="demo")
        source = SubscriptionSource(queues, ledger.name)
        people = stages.terminator("people.keep", message=Event, source=source)

        @people.last_stage(exactly_once=True, retry=Retry.in_order())
        async def keep(ctx: Context[None], event: Event, db: AsyncSession) -> None:
            position = int(ctx.message_id.rsplit(":", 1)[1])
            key = str(event.object_key)
            if event.new:
                row = {"key": key, "uid": event.new.get("uid"), "dn": event.new["dn"]}
                await db.execute(text("INSERT OR REPLACE INTO people VALUES (:key, :uid, :dn)"), row)
            else:
                await db.execute(text("DELETE FROM people WHERE key = :key"), {"key": key})
            await db.execute(text("INSERT INTO changes VALUES (:position, :key)"), {"position": position, "key": key})
            told = {"ts": event.ts.isoformat(), "body": {"old": dict(event.old), "new": dict(event.new)}}

            async def committed() -> None:
                ledger.take(told, position, datetime.now(UTC))

            ctx.after_commit(committed)

        async with stages:
            await asyncio.Event().wait()


async def table_differs(database: Path, ledger: Ledger) -> str | None:
    """Whether the table is what the stage was told; the table is the truth, and has no event twice."""
    store = SqlStore(f"sqlite:///{database}")
    async with store.engine.connect() as connection:
        people = (await connection.execute(text("SELECT key, uid, dn FROM people"))).all()
        noted = (await connection.execute(text("SELECT count(*), count(DISTINCT position) FROM changes"))).one()
    await store.engine.dispose()
    told = {(key, value.get("uid"), value["dn"]) for key, value in ledger.objects.items()}
    if {tuple(row) for row in people} != told:
        return f"{ledger.name}: the table has other people than the stage was told of"
    if tuple(noted) != (ledger.got, ledger.got):
        return f"{ledger.name}: the table notes {noted[0]:,} changes, the stage made {ledger.got:,}"
    return None
