"""Synchronous calls for tests of the dispatcher: add and delete subscriptions, publish, dispatch, read queues."""

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import outgoing, publish_many
from purveyor.model.control_events import CONTROL_SUBJECT, ControlEvent, ControlKind
from purveyor.model.event import Event
from purveyor.model.registration import DispatchState, Record, RecordState
from purveyor.model.subscription import Filter, RealmTopic, Subscription
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.dispatch import DispatchSettings, start_dispatch
from purveyor.queues.catalogue import internal_queues
from purveyor.queues.client import Queues, connect
from purveyor.queues.registry import Registered, Registry
from purveyor.queues.subscription_queues import remove_queue
from purveyor.queues.sync_client import read_subscriptions, restore_queue, update_definition, update_dispatch
from tests.support.broker import Broker
from tests.support.nats_servers import OwnServer
from tests.support.waiting import wait_until

INCOMING = "stream:incoming"


def event(number: int, topic: str = "users/user", **more: Any) -> bytes:
    """Return an event with a number."""
    fields = {"realm": "udm", "new": {"id": number, **more.pop("new", {})}, **more}
    return Event(publisher_name="test", ts=datetime(2026, 1, 1, tzinfo=UTC), topic=topic, **fields).encode()


class DispatchHarness:
    """One server with its queues and registry."""

    def __init__(self, address: Address, spark: SparkSession, directory: Path) -> None:
        self.address = address
        self.broker = Broker(address)
        self.spark = spark
        self.directory = directory
        self.queries: list[StreamingQuery] = []
        asyncio.run(self._ensure())

    async def _ensure(self) -> None:
        async with self.connected() as queues:
            for queue in internal_queues():
                (await queues.ensure(queue)).require_ready()
            await Registry.open(queues)

    def make_group(self, group: str) -> None:
        """Add another group of dispatchers."""
        self.broker.durable(INCOMING, group)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Queues]:
        async with connect(self.address) as queues:
            yield queues

    def settings(self, group: str = "dispatcher", **more: Any) -> DispatchSettings:
        return DispatchSettings(
            address=self.address,
            group=group,
            checkpoint=self.directory / f"checkpoint-{group}",
            archive=ArchiveSource(self.address, self.directory / "archive"),
            **more,
        )

    def start(self, group: str = "dispatcher", **more: Any) -> StreamingQuery:
        # A query that has ended keeps its name for a moment.
        wait_until(lambda: f"dispatch-{group}" not in {query.name for query in self.spark.streams.active})
        query = start_dispatch(self.spark, self.settings(group, **more))
        self.queries.append(query)
        return query

    def dispatch(self, group: str = "dispatcher", **more: Any) -> None:
        """Dispatch all present events, then stop."""
        query = self.start(group, **more)
        self.wait(group)
        query.stop()

    def wait(self, group: str = "dispatcher") -> None:
        """Wait until a group has dispatched all present events."""
        last = self.last()
        query = self.queries[-1]

        def done() -> bool:
            assert query.exception() is None, query.exception()
            return self.broker.floor(INCOMING, group) >= last

        wait_until(done)

    def stop(self) -> None:
        for query in self.queries:
            query.stop()

    def last(self) -> int:
        return int(self.broker.state(INCOMING)["last_seq"])

    def publish(self, bodies: Iterable[bytes], subject: str = "incoming", prefix: str | None = None) -> None:
        rows = enumerate(bodies)
        ids = "{}-{}".format if prefix else (lambda *_: None)
        publish_many(self.address, outgoing((subject, body, None, ids(prefix, number)) for number, body in rows))

    def events(self, first: int, last: int, topic: str = "users/user") -> None:
        self.publish([event(number, topic) for number in range(first, last + 1)])

    def add(self, name: str, *topics: str, wanted: Filter | None = None, noted: bool = True) -> Record:
        """Add a subscription as delivery does: record, queue, control event, and its position in the record."""
        definition = Subscription(
            name=name,
            realms_topics=tuple(RealmTopic("udm", topic) for topic in topics or ("users/user",)),
            filter=wanted or Filter(),
        )
        record = Record(incarnation=str(uuid.uuid4()), definition=definition, created=datetime.now(UTC))
        revision = self.register(record)
        position = self.control(ControlKind.ADDED, record)
        if noted:
            record = replace(record, begin=position, state=RecordState.ACTIVE)
            update_definition(self.address, record, revision)
        return record

    def register(self, record: Record) -> int:
        """Do the first steps of adding: the record and the queue."""
        revision = asyncio.run(self._create(record))
        restore_queue(self.address, record.name, record.incarnation)
        return revision

    async def _create(self, record: Record) -> int:
        async with self.connected() as queues:
            return await (await Registry.open(queues)).create(record)

    def control(self, kind: ControlKind, record: Record) -> int:
        reported = ControlEvent(
            kind=kind,
            name=record.name,
            incarnation=record.incarnation,
            definition=record.definition if kind is ControlKind.ADDED else None,
        )
        report = publish_many(self.address, outgoing([(CONTROL_SUBJECT, reported.encode(), None, reported.msg_id)]))
        return report.last_sequences[INCOMING]

    def begin_deletion(self, name: str) -> Registered:
        found = self.found(name)
        update_definition(self.address, replace(found.record, state=RecordState.DELETING), found.revision)
        self.control(ControlKind.DELETED, found.record)
        return self.found(name)

    def delete(self, name: str) -> None:
        found = self.begin_deletion(name)

        async def end() -> None:
            async with self.connected() as queues:
                await remove_queue(queues, name, found.incarnation)
                await (await Registry.open(queues)).remove(found)

        asyncio.run(end())

    def found(self, name: str) -> Registered:
        return read_subscriptions(self.address).subscriptions[name]

    def raw(self, name: str, part: str) -> dict[str, Any]:
        """Return a stored part of a subscription."""
        subject = f"$KV.subscriptions.{name}.{part}"
        message = self.broker.ask("STREAM.MSG.GET.KV_subscriptions", last_by_subj=subject)["message"]
        found: dict[str, Any] = json.loads(base64.b64decode(message["data"]))
        return found

    def put_raw(self, name: str, part: str, value: dict[str, Any] | bytes) -> None:
        """Write a part of a subscription, as another program would."""
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.broker.add("", [(f"$KV.subscriptions.{name}.{part}", data, None, None)])

    def resume(self, name: str) -> None:
        found = self.found(name)
        assert found.dispatch is not None
        state = DispatchState(incarnation=found.incarnation, next=found.dispatch.next)
        update_dispatch(self.address, name, state, found.dispatch_revision)

    def numbers(self, name: str) -> list[int]:
        """Return the numbers of the events in a queue, in order; assert that the positions ascend."""
        rows = self.broker.rows(f"stream:{name}")
        positions = [int(dict(row["headers"])["Purveyor-Position"][0]) for row in rows]
        assert positions == sorted(set(positions))
        return [json.loads(row["data"])["body"]["new"]["id"] for row in rows]

    def headers(self, name: str) -> list[dict[str, list[str]]]:
        return [dict(row["headers"]) for row in self.broker.rows(f"stream:{name}")]

    def letters(self) -> list[dict[str, Any]]:
        return self.broker.rows("stream:dead-letters")


@pytest.fixture
def harness(own_server: OwnServer, spark: SparkSession, tmp_path: Path) -> Iterator[DispatchHarness]:
    """Make a harness on a new server, because `stream:incoming` has a fixed name."""
    made = DispatchHarness(own_server().address, spark, tmp_path)
    yield made
    made.stop()
