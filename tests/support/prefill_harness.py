"""Calls for tests of prefill, replay, catch-up and audit: publish events, add subscriptions, run jobs, read queues."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.headers import MSG_ID
from purveyor.model.control_events import Job, decode_job
from purveyor.model.delivery_policy import DEFAULT_HIDDEN_FIELDS
from purveyor.model.event import Event
from purveyor.model.registration import DispatchState, Record, Suspension
from purveyor.model.subscription import Filter, RealmTopic, Subscription
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.prefill.job_context import JobContext, JobResult
from purveyor.pipeline.prefill.jobs import run_job
from purveyor.queues.catalogue import PREFILL, PREFILL_FAILURES, internal_queues
from purveyor.queues.client import Queues
from purveyor.queues.registry import PrefillState, Registered, Registry


@dataclass(frozen=True, slots=True)
class Stored:
    """A message of a queue."""

    sequence: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def position(self) -> int:
        return int(self.headers["Purveyor-Position"])

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.data)["body"]
        return found


class PrefillHarness:
    """A server with the queues of the pipeline, and a realm for one test, so that tests do not share objects."""

    def __init__(self, queues: Queues, context: JobContext, realm: str) -> None:
        self.queues = queues
        self.context = context
        self.realm = realm
        self.subscriptions = Subscriptions(queues)

    @classmethod
    async def make(cls, queues: Queues, spark: SparkSession, directory: Path, realm: str) -> "PrefillHarness":
        for queue in internal_queues():
            await queues.ensure(queue)
        await queues.streams.purge(PREFILL.stream)
        await queues.streams.purge(PREFILL_FAILURES.stream)
        archive = ArchiveSource(queues.address, directory)
        registry = await Registry.open(queues)
        context = JobContext(spark=spark, archive=archive, queues=queues, registry=registry, progress_seconds=0.1)
        return cls(queues, context, realm)

    async def publish(
        self,
        topic: str,
        key: str,
        new: Mapping[str, Any] | None,
        old: Mapping[str, Any] | None = None,
        **attributes: str,
    ) -> int:
        """Publish an event about an object; return its position."""
        event = Event(
            publisher_name="test",
            ts=datetime.now(UTC),
            realm=self.realm,
            topic=topic,
            old=old or {},
            new=new or {},
            key=key,
            attributes=attributes,
        )
        return await self.publish_bytes(event.encode())

    async def publish_bytes(self, data: bytes, **headers: str) -> int:
        return (await self.queues.publish("incoming", data, headers=headers)).sequence

    async def publish_many(self, topic: str, count: int) -> None:
        """Publish new objects with the keys 1, 2, ..."""
        events = (
            Event(publisher_name="test", ts=datetime.now(UTC), realm=self.realm, topic=topic, new={"id": number})
            for number in range(1, count + 1)
        )
        await self.queues.publish_many(("incoming", event.encode(), None, None) for event in events)

    async def add(
        self, name: str, *topics: str, prefill: bool = True, filter_: Filter | None = None
    ) -> tuple[Record, list[Job]]:
        """Add a subscription; take its jobs from the queue and return them."""
        definition = Subscription(
            name=name,
            realms_topics=tuple(RealmTopic(self.realm, topic) for topic in topics),
            request_prefill=prefill,
            filter=filter_ or Filter(),
        )
        record, _ = await self.subscriptions.add(definition)
        return record, await self.jobs()

    async def jobs(self) -> list[Job]:
        """Take the jobs from the queue and return them."""
        taken = []
        for message in await self.queues.fetch(PREFILL.stream, "prefill", 10, wait_seconds=0):
            taken.append(decode_job(message.data))
            await message.ack(confirm=True)
        return taken

    async def run(self, job: Job) -> JobResult:
        return await run_job(self.context, job)

    async def registered(self, name: str) -> Registered:
        return await self.context.registry.get(name)

    async def state(self, name: str) -> PrefillState:
        state = (await self.registered(name)).prefill
        assert state is not None
        return state

    async def stored(self, name: str, kind: str = "prefill") -> list[Stored]:
        """Return the messages of a subscription on one of its subjects, in order."""
        return await self.messages(f"stream:{name}", f"{name}.{kind}")

    async def messages(self, stream: str, subject: str) -> list[Stored]:
        found = []
        async for batch in self.queues.read_range(stream, 1, 2**62):
            for row in batch.to_pylist():
                if row["subject"] == subject:
                    headers = {key: values[0] for key, values in row["headers"] or ()}
                    found.append(Stored(row["sequence"], headers, row["data"]))
        return found

    async def limit(self, name: str, messages: int) -> None:
        """Limit the messages of a queue, which then refuses more; -1 removes the limit."""
        await self.queues.streams.update(f"stream:{name}", {"max_msgs": messages, "discard": "new"})

    async def failures(self) -> list[Stored]:
        return await self.messages(PREFILL_FAILURES.stream, "prefill-failures")


def ids(messages: Iterable[Stored]) -> list[str]:
    return [message.headers[MSG_ID] for message in messages]


async def suspend(harness: PrefillHarness, record: Record, at: int, group: str | None = None) -> None:
    """Suspend a subscription as if its queue had refused a message, or a dispatcher group could not read its record."""
    found = await harness.registered(record.name)
    reason = Suspension(position=at, reason="full", at=datetime.now(UTC), group=group)
    state = DispatchState(incarnation=record.incarnation, next=at, suspended=reason)
    await harness.context.registry.put_dispatch(record.name, state, found.dispatch_revision)


def definition(
    harness: PrefillHarness, name: str, hidden: tuple[str, ...] = DEFAULT_HIDDEN_FIELDS, *, prefill: bool
) -> Subscription:
    topics = (RealmTopic(harness.realm, "a/x"),)
    return Subscription(name=name, realms_topics=topics, request_prefill=prefill, hidden_fields=hidden)
