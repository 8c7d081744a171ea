"""The queues of transactional endpoints, made when an endpoint is declared: how they are named and who reads them.

Each stage has a subject and a durable, and beside them one of each for interactive messages, which go before the
others. Replies that somebody waits for at the edge go through one queue of their own, where they are kept for an hour.
"""

import dataclasses
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from purveyor.jetstream.config import Retention, StreamConfig
from purveyor.model.errors import InvalidName
from purveyor.queues.catalogue import Order, Queue, Reader, stage_queue

STAGE_STREAMS: Final = "stream:stage-"
"""How the streams of endpoints begin."""
MAX_ACK_PENDING: Final = 1024
"""How many messages of a stage all its instances together hold at most."""
_ENDPOINT = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")
_LONGEST_NAME = 120
_REPLIES_KEPT = timedelta(hours=1)


def check_endpoint(name: str) -> str:
    """The name of an endpoint: words parted by dots. No underscore: it stands for the dot in the name of the stream."""
    if not _ENDPOINT.fullmatch(name) or len(name) > _LONGEST_NAME or name == "replies":
        raise InvalidName(
            f"invalid endpoint name {name!r}", fix="use letters, digits and '-', parted by dots: orders.place"
        )
    return name


def stage_subject(endpoint: str, stage: int = 0, *, interactive: bool = False) -> str:
    """Where the messages of a stage go.

    >>> stage_subject("orders.place", 1), stage_subject("orders.place", interactive=True)
    ('stage.orders.place.1', 'stage.orders.place.0.interactive')
    """
    return f"stage.{endpoint}.{stage}{'.interactive' if interactive else ''}"


def stage_durable(stage: int, *, interactive: bool = False) -> str:
    """The durable that reads them."""
    return f"stage-{stage}{'-interactive' if interactive else ''}"


def endpoint_queue(endpoint: str, stages: int, *, ack_wait: timedelta = timedelta(seconds=30)) -> Queue:
    """The queue of an endpoint with so many stages."""
    plain = stage_queue(check_endpoint(endpoint), stages)
    kinds = [(number, interactive) for number in range(stages) for interactive in (False, True)]
    return dataclasses.replace(
        plain,
        subjects=tuple(stage_subject(endpoint, number, interactive=interactive) for number, interactive in kinds),
        readers=tuple(
            Reader(
                durable=stage_durable(number, interactive=interactive),
                who=f"stage {number} of {endpoint}{', interactive messages' if interactive else ''}",
                ack_wait=ack_wait,
                max_ack_pending=MAX_ACK_PENDING,
                filter_subjects=(stage_subject(endpoint, number, interactive=interactive),),
            )
            for number, interactive in kinds
        ),
    )


def endpoint_of(stream: str, subjects: tuple[str, ...]) -> str | None:
    """The endpoint whose stream it is, told by its subjects; None for other streams.

    >>> endpoint_of("stream:stage-orders_place", ("stage.orders.place.0", "stage.orders.place.0.interactive"))
    'orders.place'
    """
    if not stream.startswith(STAGE_STREAMS) or not subjects or not subjects[0].startswith("stage."):
        return None
    plain = min(subjects, key=len)
    return plain.removeprefix("stage.").rpartition(".")[0] or None


@dataclass(frozen=True, slots=True, kw_only=True)
class RepliesQueue(Queue):
    """A queue whose messages go by themselves."""

    def config(self, *, replicas: int = 1) -> StreamConfig:
        """With an age at which messages go."""
        return dataclasses.replace(
            Queue.config(self, replicas=replicas), max_age=_REPLIES_KEPT, duplicate_window=timedelta(minutes=2)
        )


STAGE_REPLIES: Final = RepliesQueue(
    name="stage-replies",
    purpose="Replies for those who wait for one outside of a stage.",
    subjects=("stage-replies.>",),
    retention=Retention.LIMITS,
    writer="stages, the outbox relay",
    people="whoever asked",
    order=Order.NONE,
)
