"""How a live queue differs from its declaration, and what it takes to change that. Pure.

The answer is nothing, an update in place, or a migration by one of two strategies. Draining lets the readers empty the
sealed stream, and creates it again. It needs readers, and a retention that removes acknowledged messages. A snapshot
copies everything unchanged, also the positions of readers; it needs space on disk.
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
    StreamConfig,
    StreamInfo,
)
from purveyor.model.errors import InvalidInput
from purveyor.model.name_rules import subject_matches
from purveyor.queues.catalogue import Queue, find_keepers

# The settings that the catalogue decides. Limits and other settings of an operator on the live stream stay.
_STREAM_FIELDS = ("subjects", "retention", "storage", "num_replicas", "allow_direct", "allow_atomic")
_CONSUMER_FIELDS = ("deliver_policy", "ack_policy", "ack_wait", "max_ack_pending", "filters")
_FIXED_CONSUMER_FIELDS = ("deliver_policy", "ack_policy")


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that differs from its declaration, and whether it can change in place."""

    what: str
    field: str
    actual: object
    wanted: object
    in_place: bool

    def __str__(self) -> str:
        return f"{self.what} {self.field}: {_show(self.actual)} -> {_show(self.wanted)}"


def stream_differences(actual: StreamConfig, wanted: StreamConfig) -> tuple[Difference, ...]:
    """Return how a live stream differs from its declaration.

    The retention can change in place between limits and interest, not to or from a work queue. The storage cannot.
    """
    found = []
    for field in _STREAM_FIELDS:
        have, want = getattr(actual, field), getattr(wanted, field)
        if field == "subjects":
            have, want = tuple(sorted(have)), tuple(sorted(want))
        if have != want:
            in_place = field != "storage" and not (field == "retention" and Retention.WORK_QUEUE in (have, want))
            found.append(Difference("stream", field, have, want, in_place))
    return tuple(found)


def consumer_differences(actual: ConsumerConfig, wanted: ConsumerConfig) -> tuple[Difference, ...]:
    """Return how a live durable differs from its declaration."""
    name = f"consumer {wanted.durable_name}"
    return tuple(
        Difference(name, field, getattr(actual, field), getattr(wanted, field), field not in _FIXED_CONSUMER_FIELDS)
        for field in _CONSUMER_FIELDS
        if getattr(actual, field) != getattr(wanted, field)
    )


def _show(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


class Strategy(Enum):
    """How to migrate a queue."""

    DRAIN = "drain"
    SNAPSHOT = "snapshot"


class Change(Enum):
    """The ways of `apply` to change a queue."""

    NOTHING = "nothing"
    CREATE = "create"
    UPDATE = "update in place"
    DRAIN = "migrate by drain"
    SNAPSHOT = "migrate by snapshot"
    BLOCKED = "cannot be done"


@dataclass(frozen=True, slots=True)
class LiveQueue:
    """A queue on the server. `raw` is the configuration of its stream, with settings that our types do not have."""

    info: StreamInfo
    consumers: tuple[ConsumerInfo, ...]
    raw: dict[str, object]
    created: str = ""
    """When the stream was created, in nanoseconds: distinguishes it from another stream of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The change that `apply` would make to a queue, the reasons, and the risks."""

    queue: Queue
    change: Change
    why: tuple[str, ...] = ()
    risks: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    messages: int = 0
    obstacles: tuple[tuple[Strategy, str], ...] = ()
    """Why a strategy is impossible."""

    @property
    def needs_migration(self) -> bool:
        """Whether the queue needs a migration."""
        return self.change in (Change.DRAIN, Change.SNAPSHOT, Change.BLOCKED)

    @property
    def strategy(self) -> Strategy | None:
        """The strategy that `apply` would choose."""
        return {Change.DRAIN: Strategy.DRAIN, Change.SNAPSHOT: Strategy.SNAPSHOT}.get(self.change)

    def obstacle(self, strategy: Strategy) -> str | None:
        """Return why a strategy is impossible; None if it is possible."""
        found = [why for affected, why in self.obstacles if affected is strategy]
        return "; ".join(found) or None

    def choose_strategy(self, strategy: Strategy | None) -> Strategy:
        """Return the requested strategy, or the best one; InvalidInput if it is impossible."""
        wanted = strategy or self.strategy or Strategy.DRAIN
        why = self.obstacle(wanted)
        if why is not None:
            other = Strategy.SNAPSHOT if wanted is Strategy.DRAIN else Strategy.DRAIN
            other_is_possible = self.obstacle(other) is None
            raise InvalidInput(
                f"queue {self.queue.name!r} cannot be migrated by {wanted.value}: {why}",
                fix=f"use --strategy {other.value}" if other_is_possible else "see docs/guides/migration.md",
            )
        return wanted


def plan_queue(queue: Queue, live: LiveQueue | None, *, replicas: int = 1) -> Plan:
    """Plan what `apply` would do to a queue."""
    if live is None:
        return Plan(queue=queue, change=Change.CREATE, why=("it does not exist",))
    config, wanted = live.info.config, queue.config(replicas=replicas)
    own_differences = stream_differences(config, wanted)
    durables = {consumer.name: consumer.config for consumer in live.consumers}
    reader_differences = [
        difference
        for reader in queue.readers
        if reader.durable in durables
        for difference in consumer_differences(durables[reader.durable], reader.consumer())
    ]
    differences = (*own_differences, *reader_differences)
    missing = [reader.durable for reader in queue.readers if reader.durable not in durables]
    why = (*map(str, differences), *(f"durable {name} is missing" for name in missing))
    if config.sealed:
        why = (*why, "the stream is sealed")
    messages = live.info.state.messages
    if not config.sealed and all(difference.in_place for difference in differences):
        change = Change.UPDATE if why else Change.NOTHING
        risks = _risks_in_place(config.retention, queue) if own_differences else ()
        return Plan(queue=queue, change=change, why=why, risks=risks, differences=differences, messages=messages)
    obstacles = (*_drain_obstacles(queue, live), *_snapshot_obstacles(queue, live, reader_differences))
    impossible = {strategy for strategy, _ in obstacles}
    change = (
        Change.DRAIN
        if Strategy.DRAIN not in impossible
        else Change.SNAPSHOT
        if Strategy.SNAPSHOT not in impossible
        else Change.BLOCKED
    )
    return Plan(
        queue=queue,
        change=change,
        why=why,
        risks=_risks_of(change, messages, obstacles),
        differences=differences,
        messages=messages,
        obstacles=obstacles,
    )


def _risks_in_place(before: Retention, queue: Queue) -> tuple[str, ...]:
    if before is Retention.LIMITS and queue.retention is Retention.INTEREST:
        return ("messages that all durables have acknowledged are removed",)
    return ()


def _risks_of(change: Change, messages: int, obstacles: Iterable[tuple[Strategy, str]]) -> tuple[str, ...]:
    if change is Change.DRAIN:
        if not messages:
            return ("publishers wait for a moment",)
        return (
            f"publishers wait until the readers have taken {messages} messages: the readers must be running",
            "messages that no reader can process are parked as dead letters",
        )
    if change is Change.SNAPSHOT:
        return (
            f"publishers and readers wait while {messages} messages are written to disk and back",
            "between the two, only the archive has them",
        )
    return tuple(why for _, why in obstacles)


def _drain_obstacles(queue: Queue, live: LiveQueue) -> list[tuple[Strategy, str]]:
    retention = live.info.config.retention
    found: list[str] = []
    if not queue.readers:
        found.append("no durable reads it, so no reader would drain it")
    if retention is Retention.LIMITS and queue.retention is Retention.LIMITS:
        found.append("its messages stay when they are acknowledged, so it never drains")
    names = {consumer.name for consumer in live.consumers}
    keepers = sorted(find_keepers(queue, names))
    if keepers and live.info.state.messages:
        found.append(f"durable {', '.join(keepers)} keeps the newest message for good")
    if live.raw.get("allow_msg_schedules"):
        found.append("scheduled messages would never become due in a sealed stream")
    return [(Strategy.DRAIN, why) for why in found]


def _snapshot_obstacles(
    queue: Queue, live: LiveQueue, reader_differences: Iterable[Difference]
) -> list[tuple[Strategy, str]]:
    found = [f"{each}: a durable is restored as it was" for each in reader_differences if not each.in_place]
    if queue.retention is Retention.WORK_QUEUE and live.info.config.retention is not Retention.WORK_QUEUE:
        kept = [consumer.config for consumer in live.consumers]
        found += [
            f"a work queue cannot have the consumer {consumer.durable_name or consumer.name} as it is"
            for consumer in kept
            if consumer.ack_policy is not AckPolicy.EXPLICIT or consumer.deliver_policy is not Deliver.ALL
        ]
        if any(filters_overlap(a, b) for number, a in enumerate(kept) for b in kept[:number]):
            found.append("a work queue takes one consumer per subject, and it has several")
    return [(Strategy.SNAPSHOT, why) for why in found]


def filters_overlap(one: ConsumerConfig, other: ConsumerConfig) -> bool:
    """Return whether two consumers may both receive the same message."""
    if not one.filters or not other.filters:
        return True
    return any(subject_matches(a, b) or subject_matches(b, a) for a in one.filters for b in other.filters)
