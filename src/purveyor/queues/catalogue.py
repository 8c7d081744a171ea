"""The queue catalogue: every queue of Purveyor declared as data, with who writes it and who reads it.

Names are a promise: a deployment that has these streams is taken over in place. Both sides of a queue give its entry to
`ensure` when they start, so that neither has to start first.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum

from purveyor.jetstream.config import (
    INCARNATION,
    AckPolicy,
    ConsumerConfig,
    Deliver,
    Retention,
    StreamConfig,
)
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.model.errors import InvalidName
from purveyor.model.event import LDIF_SUBJECT
from purveyor.model.name_rules import check_name, check_subscription_name

DEFAULT_GROUP = "dispatcher"
RECEIPTS = "transform-receipts"
"""Keeps the newest event of the transform in `incoming`, so that the transform can see how far it has written."""
_STAGE_PREFIX = "stage-"


class Order(Enum):
    """What a reader of the queue can rely on."""

    POSITION = "by position"
    KEY = "by key"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A durable consumer of a queue.

    `max_ack_pending=1` is a lock with a timeout: a second instance stands by. -1 is no limit.
    """

    durable: str
    who: str
    ack_wait: timedelta = timedelta(seconds=30)
    max_ack_pending: int = 1
    filter_subjects: tuple[str, ...] = ()
    keeps_newest: bool = False
    """It is there to hold its newest message in the queue, and never lets go of it."""

    def consumer(self) -> ConsumerConfig:
        """Its settings on the server."""
        return ConsumerConfig(
            durable_name=check_name(self.durable, "consumer"),
            deliver_policy=Deliver.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self.ack_wait,
            max_ack_pending=self.max_ack_pending,
            filter_subjects=self.filter_subjects or None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A stream with the durables that read it."""

    name: str
    purpose: str
    subjects: tuple[str, ...]
    retention: Retention
    writer: str
    readers: tuple[Reader, ...] = ()
    people: str = ""
    """Who reads it without a durable."""
    order: Order = Order.POSITION
    incarnation: str | None = None
    """Which of all subscriptions that ever had its name it belongs to; noted in the stream's metadata."""

    @property
    def stream(self) -> str:
        """The name of its stream."""
        return f"{STREAM_PREFIX}{self.name}"

    def config(self, *, replicas: int = 1) -> StreamConfig:
        """The settings of its stream. No size limits: a queue that drops messages is not one."""
        return StreamConfig(
            name=self.stream,
            subjects=self.subjects,
            retention=self.retention,
            num_replicas=replicas,
            allow_direct=True,
            allow_atomic=True,
            metadata={INCARNATION: self.incarnation} if self.incarnation is not None else None,
        )


LDIF = Queue(
    name="ldif",
    purpose="Raw records of a directory, as they were read.",
    subjects=("ldif.>",),
    retention=Retention.INTEREST,
    writer="intake",
    readers=(Reader(durable="transformer", who="pipeline: transform"),),
)

PREFILL = Queue(
    name="prefill",
    purpose="Requests to fill a new subscription with the current state.",
    subjects=("prefill",),
    retention=Retention.WORK_QUEUE,
    writer="delivery: subscriptions",
    # No limit: a job that waits for another job of its subscription is not acknowledged, and must not stop the jobs of
    # other subscriptions. A worker takes one job at a time for each job that it can run, so this is no limit of memory.
    readers=(Reader(durable="prefill", who="pipeline: prefill", ack_wait=timedelta(seconds=60), max_ack_pending=-1),),
    order=Order.NONE,
)

PREFILL_FAILURES = Queue(
    name="prefill-failures",
    purpose="Prefill requests that failed for good, with the reason.",
    subjects=("prefill-failures",),
    retention=Retention.WORK_QUEUE,
    writer="pipeline: prefill",
    people="operators",
    order=Order.NONE,
)

DEAD_LETTERS = Queue(
    name="dead-letters",
    purpose="Whatever could not be processed, with its reason and the way back.",
    subjects=("dead-letters.>",),
    retention=Retention.LIMITS,
    writer="every part",
    people="operators, retry",
    order=Order.NONE,
)


def incoming(groups: Iterable[str] = (DEFAULT_GROUP,)) -> Queue:
    """Events in the order of their positions. Each dispatcher group (a primary, a backup) gets all of them."""
    return Queue(
        name="incoming",
        purpose="Every event of every source, in the one order that counts.",
        subjects=("incoming", "incoming.>"),
        retention=Retention.INTEREST,
        writer="pipeline: transform, the API, the outbox relay",
        readers=(
            *(Reader(durable=group, who="pipeline: dispatch") for group in groups),
            Reader(durable="archive", who="pipeline: archive"),
            Reader(
                durable=RECEIPTS,
                who="pipeline: transform, keeps its newest event",
                filter_subjects=(LDIF_SUBJECT,),
                keeps_newest=True,
            ),
        ),
    )


def subscription_queue(name: str, incarnation: str | None = None) -> Queue:
    """The queue of one subscription. A message is deleted when it is acknowledged, so it has no durable."""
    check_subscription_name(name, reserved_names())
    if name.startswith(_STAGE_PREFIX):
        raise InvalidName(f"the name {name!r} is reserved: {_STAGE_PREFIX}... are stages", fix="choose another name")
    return Queue(
        name=name,
        purpose=f"What subscription {name} has not acknowledged yet.",
        subjects=(f"{name}.main", f"{name}.prefill", f"{name}.retry"),
        retention=Retention.LIMITS,
        writer="pipeline: dispatch, prefill, replay; whoever puts back a dead letter",
        people="the API, push",
        incarnation=incarnation,
    )


def stage_queue(endpoint: str, stages: int = 1) -> Queue:
    """The queue of a transactional endpoint, with one durable for each of its stages."""
    name = f"{_STAGE_PREFIX}{endpoint.replace('.', '_')}"
    check_name(name, "stage")
    return Queue(
        name=name,
        purpose=f"Messages on their way through the stages of {endpoint}.",
        subjects=tuple(f"stage.{endpoint}.{number}" for number in range(stages)),
        retention=Retention.WORK_QUEUE,
        writer="stages, the outbox relay",
        readers=tuple(
            Reader(
                durable=f"stage-{number}",
                who=f"stage {number} of {endpoint}",
                max_ack_pending=256,
                filter_subjects=(f"stage.{endpoint}.{number}",),
            )
            for number in range(stages)
        ),
        order=Order.KEY,
    )


def internal_queues(groups: Iterable[str] = (DEFAULT_GROUP,)) -> tuple[Queue, ...]:
    """The queues that every deployment has."""
    return (LDIF, incoming(groups), PREFILL, PREFILL_FAILURES, DEAD_LETTERS)


def reserved_names() -> frozenset[str]:
    """Names that a subscription cannot take."""
    return frozenset(queue.name for queue in internal_queues())
