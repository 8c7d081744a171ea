"""The queue catalogue: every queue of Purveyor declared as data, with its writer and its readers.

Names are a promise: a deployment that has these streams is taken over in place. The writer and the readers of a queue
pass its entry to `ensure` when they start, so neither has to start first.

Each stage of a transactional endpoint has a subject and a durable, and one more of each for interactive messages, which
go before the others. Replies to callers outside of a stage go through the queue `stage-replies`, which keeps them for
an hour.
"""

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Final

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
from purveyor.model.event import LDIF_SUBJECT, OUTBOX_SUBJECT
from purveyor.model.name_rules import check_name, check_subscription_name

DEFAULT_GROUP = "dispatcher"
RECEIPTS = "transform-receipts"
"""The durable that holds the newest event of the transform in `incoming`, so that the transform finds its position."""
_OUTBOX_RECEIPTS: Final = "outbox-receipts-"
"""The durables that hold the newest event of an outbox in `incoming`, so that its relay finds its position."""
_STAGE_PREFIX = "stage-"


class Order(Enum):
    """The order that a reader of the queue can rely on."""

    POSITION = "by position"
    KEY = "by key"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A durable consumer of a queue.

    `max_ack_pending=1` is a lock with a timeout: a second instance waits. -1 is no limit.
    """

    durable: str
    used_by: str
    ack_wait: timedelta = timedelta(seconds=30)
    max_ack_pending: int = 1
    filter_subjects: tuple[str, ...] = ()
    keeps_newest: bool = False
    """It holds its newest message in the queue, and never acknowledges it."""

    def consumer(self) -> ConsumerConfig:
        """Return its settings on the server."""
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
    other_readers: str = ""
    """The readers without a durable."""
    order: Order = Order.POSITION
    incarnation: str | None = None
    """The incarnation of the subscription that it belongs to; in the metadata of the stream."""

    @property
    def stream(self) -> str:
        """The name of its stream."""
        return f"{STREAM_PREFIX}{self.name}"

    def config(self, *, replicas: int = 1) -> StreamConfig:
        """Return the settings of its stream. It has no size limits: a queue must not drop messages."""
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
    writer="sources",
    readers=(Reader(durable="transformer", used_by="pipeline: transform"),),
)

PREFILL = Queue(
    name="prefill",
    purpose="Requests to fill a new subscription with the current state.",
    subjects=("prefill",),
    retention=Retention.WORK_QUEUE,
    writer="delivery: subscriptions",
    # No limit: a job that waits for another job of its subscription is not acknowledged, and must not stop the jobs of
    # other subscriptions. A worker fetches only as many jobs as it can run, so memory is bounded anyway.
    readers=(
        Reader(durable="prefill", used_by="pipeline: prefill", ack_wait=timedelta(seconds=60), max_ack_pending=-1),
    ),
    order=Order.NONE,
)

PREFILL_FAILURES = Queue(
    name="prefill-failures",
    purpose="Prefill requests that failed for good, with the reason.",
    subjects=("prefill-failures",),
    retention=Retention.WORK_QUEUE,
    writer="pipeline: prefill",
    other_readers="operators",
    order=Order.NONE,
)

DEAD_LETTERS = Queue(
    name="dead-letters",
    purpose="Messages that could not be processed, with the reason and their origin.",
    subjects=("dead-letters.>",),
    retention=Retention.LIMITS,
    writer="every part",
    other_readers="operators, retry",
    order=Order.NONE,
)


def incoming(groups: Iterable[str] = (DEFAULT_GROUP,), outboxes: Iterable[str] = ()) -> Queue:
    """Return the queue of all events, in the order of their positions. Each dispatcher group receives all of them.

    `outboxes` are the databases of stages that publish events.
    """
    return Queue(
        name="incoming",
        purpose="Every event of every source, in the order of positions.",
        subjects=("incoming", "incoming.>"),
        retention=Retention.INTEREST,
        writer="pipeline: transform, the API, the outbox relay",
        readers=(
            *(Reader(durable=group, used_by="pipeline: dispatch") for group in groups),
            Reader(durable="archive", used_by="pipeline: archive"),
            Reader(
                durable=RECEIPTS,
                used_by="pipeline: transform, keeps its newest event",
                filter_subjects=(LDIF_SUBJECT,),
                keeps_newest=True,
            ),
            *(
                Reader(
                    durable=outbox_receipts(outbox),
                    used_by="stages: the outbox relay, keeps its newest event",
                    filter_subjects=(f"{OUTBOX_SUBJECT}.{outbox}.*",),
                    keeps_newest=True,
                )
                for outbox in outboxes
            ),
        ),
    )


def outbox_receipts(outbox: str) -> str:
    """Return the durable that holds the newest event of an outbox."""
    return f"{_OUTBOX_RECEIPTS}{outbox}"


def keeps_newest(durable: str) -> bool:
    """Return whether a durable of `incoming` holds its newest event and reads none.

    >>> keeps_newest("transform-receipts"), keeps_newest("outbox-receipts-4f0c"), keeps_newest("archive")
    (True, True, False)
    """
    return durable == RECEIPTS or durable.startswith(_OUTBOX_RECEIPTS)


def find_keepers(queue: Queue, durables: Iterable[str]) -> tuple[str, ...]:
    """Return which durables of a queue hold its newest message for good: declared ones and those of outboxes."""
    declared = {reader.durable for reader in queue.readers if reader.keeps_newest}
    is_incoming = queue.name == incoming().name
    return tuple(each for each in durables if each in declared or (is_incoming and keeps_newest(each)))


def subscription_queue(name: str, incarnation: str | None = None) -> Queue:
    """Return the queue of one subscription. It has no durable: delivery deletes acknowledged messages."""
    check_subscription_name(name, reserved_names())
    if name.startswith(_STAGE_PREFIX):
        raise InvalidName(f"the name {name!r} is reserved: {_STAGE_PREFIX}... are stages", fix="choose another name")
    return Queue(
        name=name,
        purpose=f"Messages that subscription {name} has not acknowledged yet.",
        subjects=(f"{name}.main", f"{name}.prefill", f"{name}.retry"),
        retention=Retention.LIMITS,
        writer="pipeline: dispatch, prefill, replay; the redrive of dead letters",
        other_readers="the API, push",
        incarnation=incarnation,
    )


def stage_queue(endpoint: str, stages: int = 1) -> Queue:
    """Return the queue of a transactional endpoint, with one durable for each of its stages."""
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
                used_by=f"stage {number} of {endpoint}",
                max_ack_pending=256,
                filter_subjects=(f"stage.{endpoint}.{number}",),
            )
            for number in range(stages)
        ),
        order=Order.KEY,
    )


def internal_queues(groups: Iterable[str] = (DEFAULT_GROUP,)) -> tuple[Queue, ...]:
    """Return the queues that every deployment has."""
    return (LDIF, incoming(groups), PREFILL, PREFILL_FAILURES, DEAD_LETTERS)


def reserved_names() -> frozenset[str]:
    """Return the names that a subscription cannot have."""
    return frozenset(queue.name for queue in internal_queues())


STAGE_STREAMS: Final = "stream:stage-"
"""The prefix of the names of endpoint streams."""
MAX_ACK_PENDING: Final = 1024
"""The largest number of messages that all instances of a stage together have in progress."""
_ENDPOINT = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")
_MAX_ENDPOINT_CHARACTERS = 120
_REPLY_AGE = timedelta(hours=1)


def check_endpoint(name: str) -> str:
    """Return the name of an endpoint, or raise InvalidName. No underscore: the stream name has one for each dot."""
    if not _ENDPOINT.fullmatch(name) or len(name) > _MAX_ENDPOINT_CHARACTERS or name == "replies":
        raise InvalidName(
            f"invalid endpoint name {name!r}", fix="use letters, digits and '-', separated by dots: orders.place"
        )
    return name


def stage_subject(endpoint: str, stage: int = 0, *, interactive: bool = False) -> str:
    """Return the subject of the messages of a stage.

    >>> stage_subject("orders.place", 1), stage_subject("orders.place", interactive=True)
    ('stage.orders.place.1', 'stage.orders.place.0.interactive')
    """
    return f"stage.{endpoint}.{stage}{'.interactive' if interactive else ''}"


def stage_durable(stage: int, *, interactive: bool = False) -> str:
    """Return the durable that reads the messages of a stage."""
    return f"stage-{stage}{'-interactive' if interactive else ''}"


def endpoint_queue(endpoint: str, stages: int, *, ack_wait: timedelta = timedelta(seconds=30)) -> Queue:
    """Return the queue of an endpoint with this number of stages."""
    plain = stage_queue(check_endpoint(endpoint), stages)
    kinds = [(number, interactive) for number in range(stages) for interactive in (False, True)]
    return dataclasses.replace(
        plain,
        subjects=tuple(stage_subject(endpoint, number, interactive=interactive) for number, interactive in kinds),
        readers=tuple(
            Reader(
                durable=stage_durable(number, interactive=interactive),
                used_by=f"stage {number} of {endpoint}{', interactive messages' if interactive else ''}",
                ack_wait=ack_wait,
                max_ack_pending=MAX_ACK_PENDING,
                filter_subjects=(stage_subject(endpoint, number, interactive=interactive),),
            )
            for number, interactive in kinds
        ),
    )


def endpoint_of(stream: str, subjects: tuple[str, ...]) -> str | None:
    """Return the endpoint that a stream belongs to, by its subjects; None for other streams.

    >>> endpoint_of("stream:stage-orders_place", ("stage.orders.place.0", "stage.orders.place.0.interactive"))
    'orders.place'
    """
    if not stream.startswith(STAGE_STREAMS) or not subjects or not subjects[0].startswith("stage."):
        return None
    plain = min(subjects, key=len)
    return plain.removeprefix("stage.").rpartition(".")[0] or None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepliesQueue(Queue):
    """A queue whose messages expire."""

    def config(self, *, replicas: int = 1) -> StreamConfig:
        """Return the settings of its stream, with a maximum age of messages."""
        return dataclasses.replace(
            Queue.config(self, replicas=replicas), max_age=_REPLY_AGE, duplicate_window=timedelta(minutes=2)
        )


STAGE_REPLIES: Final = RepliesQueue(
    name="stage-replies",
    purpose="Replies to callers outside of a stage.",
    subjects=("stage-replies.>",),
    retention=Retention.LIMITS,
    writer="stages, the outbox relay",
    other_readers="the caller",
    order=Order.NONE,
)
