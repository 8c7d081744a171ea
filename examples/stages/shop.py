"""A shop with three endpoints: an order reserves items, is confirmed, and gets an entry in the books. Once each.

    PURVEYOR_NATS_URL=nats://... python examples/stages/shop.py

It uses SQLite in `shop.db`. For PostgreSQL set PURVEYOR_DATABASE_URL and run the output of `purveyor stages ddl` there.
"""

import asyncio
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import Column, Integer, MetaData, Table, Text, insert
from sqlalchemy.ext.asyncio import AsyncSession

from purveyor import Event
from purveyor.queues import connect
from purveyor.stages import Context, Endpoint, Refuse, Request, Retry, SqlStore, Stages

metadata = MetaData()
orders_table = Table("orders", metadata, Column("item", Text), Column("count", Integer))
books_table = Table("books", metadata, Column("entry", Text))


@dataclass(frozen=True)
class PlaceOrder:
    """The request of a customer."""

    item: str
    count: int = 1


@dataclass(frozen=True)
class Reserve:
    """The request to the inventory."""

    item: str
    count: int


@dataclass(frozen=True)
class Reserved:
    """The reply of the inventory."""

    shelf: int


@dataclass(frozen=True)
class Placed:
    """The reply to the customer."""

    text: str


@dataclass
class OrderState:
    """The state of an order between its stages."""

    item: str = ""
    count: int = 0


def sold(identity: str, order: OrderState) -> Event:
    """Return the event for all subscribers of `shop:orders/order`."""
    new = {"id": identity, "item": order.item, "count": order.count}
    return Event(publisher_name="shop", ts=datetime.now(UTC), realm="shop", topic="orders/order", new=new)


def declare(stages: Stages) -> Endpoint[PlaceOrder, Placed, OrderState]:
    """Declare all endpoints of the shop; return the one for orders."""
    books = stages.terminator("books.entry", message=Placed)
    inventory = stages.endpoint("inventory.reserve", request=Reserve, reply=Reserved)
    orders = stages.endpoint("orders.place", request=PlaceOrder, reply=Placed, state=OrderState)

    @inventory.last_stage(exactly_once=True, concurrency=4)
    async def reserve_items(ctx: Context[None], msg: Reserve) -> Reserved:
        if msg.item == "unicorn":
            raise Refuse("we never had unicorns")
        return Reserved(shelf=len(msg.item))

    @orders.stage(exactly_once=True, retry=Retry.in_order(attempts=7), concurrency=4)
    async def reserve(ctx: Context[OrderState], msg: PlaceOrder, db: AsyncSession) -> Request[Reserved]:
        ctx.state.item, ctx.state.count = msg.item, msg.count
        await db.execute(insert(orders_table).values(item=msg.item, count=msg.count))
        return Request(inventory, Reserve(msg.item, msg.count))

    @orders.last_stage(exactly_once=True)
    async def confirm(ctx: Context[OrderState], msg: Reserved, db: AsyncSession) -> Placed:
        placed = Placed(f"{ctx.state.count} x {ctx.state.item} from shelf {msg.shelf}")
        ctx.send(books, placed)
        await ctx.publish(sold(ctx.message_id, ctx.state))
        return placed

    @books.last_stage(exactly_once=True, retry=Retry.parallel(first_delay=timedelta(seconds=1)))
    async def enter(ctx: Context[None], msg: Placed, db: AsyncSession) -> None:
        await db.execute(insert(books_table).values(entry=msg.text))

    return orders


async def main() -> None:
    """Place an order and print the reply."""
    url = os.environ.get("PURVEYOR_DATABASE_URL", "sqlite:///shop.db")
    async with connect(os.environ.get("PURVEYOR_NATS_URL", "nats://127.0.0.1:4222")) as queues:
        store = SqlStore(url, metadata=metadata)
        async with store.engine.begin() as connection:
            await connection.run_sync(lambda sync: metadata.create_all(sync, tables=[orders_table, books_table]))
        stages = Stages(queues, store=store, app="shop")
        orders = declare(stages)
        async with stages:
            print((await stages.ask(orders, PlaceOrder("book", 2), key="customer-7")).text)


if __name__ == "__main__":
    asyncio.run(main())
