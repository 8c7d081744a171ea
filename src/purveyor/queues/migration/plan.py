"""What it takes to bring a queue to its declaration: nothing, an update in place, or a migration, and which. Pure.

Draining lets the readers empty the sealed stream, and makes it anew. It needs readers, and a retention under which what
is acknowledged goes. A snapshot carries everything over as it is, readers with their positions too; it needs a disk.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from purveyor.jetstream.config import (
    AckPolicy,
    ConsumerConfig,
    ConsumerInfo,
    Deliver,
    Retention,
    StreamInfo,
)
from purveyor.model.errors import InvalidInput
from purveyor.model.name_rules import subject_matches
from purveyor.queues.catalogue import Queue
from purveyor.queues.config_diff import Difference, consumer_differences, stream_differences


class Strategy(Enum):
    """A way to migrate."""

    DRAIN = "drain"
    SNAPSHOT = "snapshot"


class Change(Enum):
    """What applying would do."""

    NOTHING = "nothing"
    CREATE = "create"
    UPDATE = "update in place"
    DRAIN = "migrate by drain"
    SNAPSHOT = "migrate by snapshot"
    BLOCKED = "cannot be done"


@dataclass(frozen=True, slots=True)
class Live:
    """A queue as the server has it. `raw` is the stream's configuration with what our types do not know."""

    info: StreamInfo
    consumers: tuple[ConsumerInfo, ...]
    raw: dict[str, object]
    created: str = ""
    """When the stream was made, to the nanosecond: what tells it from another of its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What applying would do to a queue, why, and what to mind."""

    queue: Queue
    change: Change
    why: tuple[str, ...] = ()
    risks: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    messages: int = 0
    hindrances: tuple[tuple[Strategy, str], ...] = ()
    """Why a way of migrating is not open."""

    @property
    def migrates(self) -> bool:
        """Whether it takes a migration."""
        return self.change in (Change.DRAIN, Change.SNAPSHOT, Change.BLOCKED)

    @property
    def strategy(self) -> Strategy | None:
        """How it would migrate."""
        return {Change.DRAIN: Strategy.DRAIN, Change.SNAPSHOT: Strategy.SNAPSHOT}.get(self.change)

    def hindrance(self, strategy: Strategy) -> str | None:
        """Why it cannot go that way; None if it can."""
        found = [why for way, why in self.hindrances if way is strategy]
        return "; ".join(found) or None

    def by(self, strategy: Strategy | None) -> Strategy:
        """The way to go: the one asked for, or the best one; InvalidInput if it is not open."""
        wanted = strategy or self.strategy or Strategy.DRAIN
        why = self.hindrance(wanted)
        if why is not None:
            other = Strategy.SNAPSHOT if wanted is Strategy.DRAIN else Strategy.DRAIN
            open_ = self.hindrance(other) is None
            raise InvalidInput(
                f"queue {self.queue.name!r} cannot be migrated by {wanted.value}: {why}",
                fix=f"use --strategy {other.value}" if open_ else "see docs/guides/migration.md",
            )
        return wanted


def plan_queue(queue: Queue, live: Live | None, *, replicas: int = 1) -> Plan:
    """What applying would do. Pure."""
    if live is None:
        return Plan(queue=queue, change=Change.CREATE, why=("it is not there",))
    config, wanted = live.info.config, queue.config(replicas=replicas)
    of_stream = stream_differences(config, wanted)
    there = {consumer.name: consumer.config for consumer in live.consumers}
    of_readers = [
        difference
        for reader in queue.readers
        if reader.durable in there
        for difference in consumer_differences(there[reader.durable], reader.consumer())
    ]
    differences = (*of_stream, *of_readers)
    missing = [reader.durable for reader in queue.readers if reader.durable not in there]
    why = (*map(str, differences), *(f"durable {name} is missing" for name in missing))
    if config.sealed:
        why = (*why, "the stream is sealed")
    messages = live.info.state.messages
    if not config.sealed and all(difference.in_place for difference in differences):
        change = Change.UPDATE if why else Change.NOTHING
        risks = _risks_in_place(config.retention, queue) if of_stream else ()
        return Plan(queue=queue, change=change, why=why, risks=risks, differences=differences, messages=messages)
    hindrances = (*_against_drain(queue, live), *_against_snapshot(queue, live, of_readers))
    closed = {way for way, _ in hindrances}
    change = (
        Change.DRAIN
        if Strategy.DRAIN not in closed
        else Change.SNAPSHOT
        if Strategy.SNAPSHOT not in closed
        else Change.BLOCKED
    )
    return Plan(
        queue=queue,
        change=change,
        why=why,
        risks=_risks_of(change, messages, hindrances),
        differences=differences,
        messages=messages,
        hindrances=hindrances,
    )


def _risks_in_place(before: Retention, queue: Queue) -> tuple[str, ...]:
    if before is Retention.LIMITS and queue.retention is Retention.INTEREST:
        return ("what all durables have acknowledged is removed",)
    return ()


def _risks_of(change: Change, messages: int, hindrances: Iterable[tuple[Strategy, str]]) -> tuple[str, ...]:
    if change is Change.DRAIN:
        if not messages:
            return ("publishers wait for a moment",)
        return (
            f"publishers wait until the readers have taken {messages} messages: the readers must be running",
            "messages that nobody can process are parked as dead letters",
        )
    if change is Change.SNAPSHOT:
        return (
            f"publishers and readers wait while {messages} messages are written to disk and back",
            "between the two, the archive is the only place that has them",
        )
    return tuple(why for _, why in hindrances)


def _against_drain(queue: Queue, live: Live) -> list[tuple[Strategy, str]]:
    retention = live.info.config.retention
    found: list[str] = []
    if not queue.readers:
        found.append("nobody reads it by a durable, so nobody would drain it")
    if retention is Retention.LIMITS and queue.retention is Retention.LIMITS:
        found.append("its messages stay when they are acknowledged, so it never drains")
    names = {consumer.name for consumer in live.consumers}
    keepers = [reader.durable for reader in queue.readers if reader.keeps_newest and reader.durable in names]
    if keepers and live.info.state.messages:
        found.append(f"durable {', '.join(keepers)} keeps the newest message for good")
    if live.raw.get("allow_msg_schedules"):
        found.append("scheduled messages would never become due in a sealed stream")
    return [(Strategy.DRAIN, why) for why in found]


def _against_snapshot(queue: Queue, live: Live, of_readers: Iterable[Difference]) -> list[tuple[Strategy, str]]:
    found = [f"{each}: a durable is restored as it was" for each in of_readers if not each.in_place]
    if queue.retention is Retention.WORK_QUEUE and live.info.config.retention is not Retention.WORK_QUEUE:
        kept = [consumer.config for consumer in live.consumers]
        found += [
            f"a work queue cannot have the consumer {consumer.durable_name or consumer.name} as it is"
            for consumer in kept
            if consumer.ack_policy is not AckPolicy.EXPLICIT or consumer.deliver_policy is not Deliver.ALL
        ]
        if any(overlap(a, b) for number, a in enumerate(kept) for b in kept[:number]):
            found.append("a work queue takes one consumer per subject, and it has several")
    return [(Strategy.SNAPSHOT, why) for why in found]


def overlap(one: ConsumerConfig, other: ConsumerConfig) -> bool:
    """Whether two consumers may both be given the same message."""
    if not one.filters or not other.filters:
        return True
    return any(subject_matches(a, b) or subject_matches(b, a) for a in one.filters for b in other.filters)
