"""Subscribers of the demo: consumers of the API, an endpoint for pushes, a transactional stage that fills a table.

Each records its messages in a `DeliveryCheck`, which finds what was lost, delivered twice or out of order, and works
until it is cancelled. The stage is the one place of the application with SQL: it is what a user of `purveyor.stages`
writes.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from purveyor.app.demo.system import Step
from purveyor.client import Consumer, ConsumerOptions, Message
from purveyor.delivery.pull import open_pull
from purveyor.jetstream.address import Address
from purveyor.model.event import Event
from purveyor.queues.client import connect
from purveyor.stages import Context, Retry, SqlStore, Stages, SubscriptionSource


@dataclass(slots=True)
class MeasuredPeriod:
    """A period in which changes stream in; `until` is None while it lasts."""

    since: datetime
    calm: bool
    """Whether nothing else happens: no part is down or starts, and no subscriber is prefilled."""
    until: datetime | None = None

    def contains(self, moment: datetime) -> bool:
        """Return whether a moment lies in the period."""
        return self.since <= moment and (self.until is None or moment < self.until)


@dataclass(slots=True)
class DeliveryCheck:
    """Counts the messages of one subscriber, and finds duplicates, losses and disorder. Pure."""

    name: str
    served_by: str
    by_key: bool = False
    """Whether order is guaranteed for each object only; else for all messages."""
    expected: int = 0
    got: int = 0
    retried: int = 0
    """Deliveries of messages that had failed before."""
    duplicates: int = 0
    out_of_order: int = 0
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The objects by key, as the events describe them."""
    latencies: list[tuple[MeasuredPeriod, float]] = field(default_factory=list)
    """Seconds from the record in the source to this subscriber, of events in one of the `periods`."""
    periods: list[MeasuredPeriod] = field(default_factory=list)
    newest: datetime | None = None
    """The time of the newest record whose event the subscriber has."""
    _began: float | None = None
    _ended: float = 0.0
    _last: dict[str, int] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    def record(self, event: Mapping[str, Any], position: int, now: datetime) -> None:
        """Record an accepted message. A prefill message has the position of the event that made its object."""
        self._ended = time.monotonic()
        self._began = self._began or self._ended
        self.got += 1
        self.duplicates += position in self._seen
        self._seen.add(position)
        old, new = event["body"]["old"], event["body"]["new"]
        key = str((new or old).get("uuid") or (new or old)["dn"])
        scope = key if self.by_key else ""
        self.out_of_order += position <= self._last.get(scope, 0)
        self._last[scope] = position
        if new:
            self.objects[key] = new
        else:
            self.objects.pop(key, None)
        stored = datetime.fromisoformat(event["ts"])
        self.newest = max(self.newest or stored, stored)
        period = next((each for each in self.periods if each.contains(stored)), None)
        if period is not None:
            self.latencies.append((period, (now - stored).total_seconds()))

    @property
    def rate(self) -> float:
        """Return the messages per second between the first and the last message."""
        seconds = self._ended - (self._began or 0.0)
        return (self.got - 1) / seconds if self.got > 1 and seconds > 0 else 0.0

    def latency(self, share: float, *, calm: bool = True) -> float | None:
        """Return a percentile of the latency in seconds, of calm periods or of the others."""
        found = sorted(seconds for period, seconds in self.latencies if period.calm is calm)
        return found[min(int(len(found) * share), len(found) - 1)] if found else None

    def find_problems(self, final: Step) -> Iterator[str]:
        """Yield the problems: wrong counts, and objects that differ from the final directory."""
        if self.got != self.expected:
            yield f"{self.name} got {self.got:,} messages instead of {self.expected:,}"
        if self.duplicates or self.out_of_order:
            yield f"{self.name}: {self.duplicates:,} messages twice, {self.out_of_order:,} out of order"
        known = {key: (_username(each), each["dn"]) for key, each in self.objects.items() if "uid=" in each["dn"]}
        if known != {person.uuid: (person.uid, person.dn) for person in final.people}:
            yield f"{self.name} knows other people than the directory has"


def _username(found: Mapping[str, Any]) -> object:
    """Return the name of a user, as the mapping `udm` shows it."""
    return found.get("properties", {}).get("username")


_FAIL_EVERY_REQUESTS: Final = 10
"""The endpoint answers every tenth request with an error."""


async def consume(url: str, password: str, check: DeliveryCheck, *, instance: str = "one", handlers: int = 1) -> None:
    """Pull the messages of a subscription from the API, one by one, or several at once if order is by key."""
    options = ConsumerOptions(instance=instance, wait_seconds=5.0)
    async with Consumer(url, check.name, password=password, options=options) as consumer:
        if handlers == 1:
            async for batch in consumer.batches():
                for message in batch:
                    _record(check, message)
                await batch.ack()
            return

        async def handle(message: Message) -> None:
            _record(check, message)

        await consumer.run(handle, concurrency=handlers)


def _record(check: DeliveryCheck, message: Message) -> None:
    check.retried += message.num_delivered > 1
    check.record(message.data, message.position or 0, datetime.now(UTC))


@contextlib.asynccontextmanager
async def endpoint(check: DeliveryCheck) -> AsyncIterator[str]:
    """Run a web server that receives pushes and fails at times; yield its URL."""
    requests = 0

    async def post(request: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        event = json.loads(await request.read())
        if requests % _FAIL_EVERY_REQUESTS == 0:
            check.retried += 1
            return web.Response(status=503, text="busy, try again")
        check.record(event, int(request.headers["x-purveyor-position"]), datetime.now(UTC))
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/in", post)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}/in"
    finally:
        await runner.cleanup()


async def fill_table(address: Address, database: Path, check: DeliveryCheck) -> None:
    """Run a transactional stage that changes a table of people in the transaction of each event."""
    store = SqlStore(f"sqlite:///{database}")
    async with store.engine.begin() as connection:
        await connection.execute(text("CREATE TABLE people (key TEXT PRIMARY KEY, uid TEXT, dn TEXT)"))
        await connection.execute(text("CREATE TABLE changes (position INTEGER, key TEXT)"))
    async with connect(address, name="purveyor-demo-stage") as queues, open_pull(queues) as pull:
        stages = Stages(queues, store=store, app="demo")
        source = SubscriptionSource(queues, check.name, pull)
        people = stages.terminator("people.keep", message=Event, source=source)

        @people.last_stage(exactly_once=True, retry=Retry.in_order())
        async def keep(ctx: Context[None], event: Event, db: AsyncSession) -> None:
            position = int(ctx.message_id.rsplit(":", 1)[1])
            key = str(event.object_key)
            if event.new:
                row = {"key": key, "uid": _username(event.new), "dn": event.new["dn"]}
                await db.execute(text("INSERT OR REPLACE INTO people VALUES (:key, :uid, :dn)"), row)
            else:
                await db.execute(text("DELETE FROM people WHERE key = :key"), {"key": key})
            await db.execute(text("INSERT INTO changes VALUES (:position, :key)"), {"position": position, "key": key})
            message = {"ts": event.ts.isoformat(), "body": {"old": dict(event.old), "new": dict(event.new)}}

            async def record_committed() -> None:
                check.record(message, position, datetime.now(UTC))

            ctx.after_commit(record_committed)

        async with stages:
            await asyncio.Event().wait()


async def find_table_difference(database: Path, check: DeliveryCheck) -> str | None:
    """Describe how the table differs from the events of the stage; None if it does not, and no event is there twice."""
    store = SqlStore(f"sqlite:///{database}")
    async with store.engine.connect() as connection:
        people = (await connection.execute(text("SELECT key, uid, dn FROM people"))).all()
        noted = (await connection.execute(text("SELECT count(*), count(DISTINCT position) FROM changes"))).one()
    await store.engine.dispose()
    expected = {(key, _username(each), each["dn"]) for key, each in check.objects.items()}
    if {tuple(row) for row in people} != expected:
        return f"{check.name}: the table has other people than the events of the stage"
    if tuple(noted) != (check.got, check.got):
        return f"{check.name}: the table has {noted[0]:,} changes, the stage made {check.got:,}"
    return None
