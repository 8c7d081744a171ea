"""The types of the lease rules: requests, decisions, and what the rules know of a message and of a subscription.

The stored state itself is `purveyor.model.delivery_state`. The types are named tuples for the same reason: delivery
makes several for each message.
"""

from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from purveyor.model.delivery_policy import OrderBy
from purveyor.model.delivery_state import DeliveryState, Failures, Lease, SubjectKind

_NO_LIMIT: Final = 1 << 62
_NO_FAILURES: Final[Failures] = MappingProxyType({})


class Pending(NamedTuple):
    """A message in the queue that is not acknowledged."""

    sequence: int
    kind: SubjectKind
    key: str | None = None
    """Its compact key, with order by key."""
    size: int = 0
    """In bytes."""


class AckTarget(NamedTuple):
    """A message to acknowledge, with what the state records about it."""

    sequence: int
    kind: SubjectKind
    position: int = 0
    dead_letter_id: int = 0
    """The dead letter that it was redriven from; 0 for other messages."""


class LeasePolicy(NamedTuple):
    """The limits of leases that the definition of a subscription and the server set."""

    order_by: OrderBy | None = OrderBy.POSITION
    max_attempts: int | None = None
    max_state_bytes: int = _NO_LIMIT
    """How large leases may make the stored state."""


class LeaseLimit(Enum):
    """Why no message is leased although there may be some."""

    MESSAGES = "messages"
    """The maximum number of messages is leased or delayed."""
    BYTES = "bytes"
    """The stored state is nearly as large as the server accepts."""


class LeaseRequest(NamedTuple):
    """An instance asks for messages. One message is granted even if it exceeds `max_bytes`."""

    instance: str
    now: int
    duration: int
    max_messages: int = 1
    max_bytes: int = _NO_LIMIT


class NackRequest(NamedTuple):
    """An instance gives a message back for another delivery after a delay."""

    instance: str
    now: int
    delay: int = 0
    record_failure: bool = True
    """Whether the state records the failure; push has its own attempt log."""


class LeaseDecision(NamedTuple):
    """The answer to a `LeaseRequest`: a lease, or when to ask again."""

    state: DeliveryState
    lease: Lease | None = None
    deliveries: tuple[int, ...] = ()
    """Of each message of the lease, this delivery included."""
    exhausted: tuple[Pending, ...] = ()
    """Messages that reached the maximum of attempts. They become dead letters, then the request is repeated."""
    failures: Failures = _NO_FAILURES
    """The failed deliveries of the exhausted messages."""
    next_check_at: int | None = None
    """When time alone may allow a lease."""
    wants_more: bool = False
    """Whether more messages of the queue could have been leased."""
    truncated: bool = False
    """Whether `max_bytes` cut the lease short."""
    limit: LeaseLimit | None = None
    """Why no message can be leased, regardless of what the queue contains."""
