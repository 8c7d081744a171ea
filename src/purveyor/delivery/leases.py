"""Leases: requests to the lease rules and their decisions, what delivery reads from a stored message, and prefetch.

The stored state itself is `purveyor.model.delivery_state`. The types are named tuples for the same reason: delivery
makes several for each message.

Prefetch: the write that acknowledges a message also leases the next one to the same instance. A consumer in ordered
delivery loops: next, ok, next, ok. If it loops quickly, one write of the delivery state serves both of its requests:
the consumer gets the prefetched message without another write. If it does not ask soon, the lease is cancelled without
counting a delivery.

The state records that a lease was prefetched. If this process dies, or the consumer changes to another process, nothing
tells whether the message was delivered. Then an expired lease counts as a delivery, and a lease that its own instance
replaces by asking again does not. So at most one delivery of a message is not counted, the first.
"""

import asyncio
from collections.abc import Callable
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from purveyor.jetstream.headers import DEAD_LETTER_SEQUENCE, ORIGINAL_KIND, POSITION, Headers, first, number
from purveyor.jetstream.streams import StoredMessage
from purveyor.model import json_fields
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.delivery_state import DeliveryState, Failures, Lease, SubjectKind, compact_key
from purveyor.model.errors import InvalidInput
from purveyor.model.event import event_key

_NO_LIMIT: Final = 1 << 62
_NO_FAILURES: Final[Failures] = MappingProxyType({})
_CLAIM_SECONDS: Final = 0.1
"""How soon an instance asks after an acknowledgement to be worth a prefetch."""


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
    """What a subscription's definition and the server demand of leases."""

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
    """Why nothing can be leased, whatever the queue contains."""


def position_of(headers: Headers) -> int | None:
    """Return the position that a message in a queue carries."""
    return number(headers, POSITION)


def sort_position(kind: SubjectKind, headers: Headers) -> int:
    """Return the position that orders the messages of a subject. Redriven prefill messages come before live ones."""
    from_prefill = kind is SubjectKind.RETRY and first(headers, ORIGINAL_KIND) == SubjectKind.PREFILL.value
    return 0 if from_prefill else position_of(headers) or 0


def subject_kind_of(message: StoredMessage) -> SubjectKind:
    """Return the kind of subject that a message is on."""
    last = message.subject.rpartition(".")[2]
    return next((kind for kind in (SubjectKind.RETRY, SubjectKind.PREFILL) if kind.value == last), SubjectKind.MAIN)


def dead_letter_id(headers: Headers) -> int:
    """Return the dead letter that a message was redriven from; 0 if there is none."""
    return number(headers, DEAD_LETTER_SEQUENCE) or 0


def compact_key_of(message: StoredMessage) -> str | None:
    """Return the compact key of an event; None if it has no key, so that no order applies to it."""
    try:
        event = json_fields.parse(message.data, "event")
        body = json_fields.mapping(event.get("body"), "body")
        sides = {side: json_fields.mapping(body.get(side) or {}, side) for side in ("new", "old")}
    except InvalidInput:
        return None
    given = event.get("key")
    key = event_key(sides["new"], sides["old"], given=given if isinstance(given, str) else None)
    return None if key is None else compact_key(key)


class PrefetchedLease(NamedTuple):
    """A prefetched lease, and how often its message was delivered, this delivery included."""

    lease: Lease
    deliveries: int


class Prefetcher:
    """The prefetched lease of one state writer. `cancel` is called with the id of a lease that was not claimed."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._prefetched: PrefetchedLease | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._quick_instance: str | None = None
        self._last_ack: tuple[str, float] | None = None
        self._delivered_id: str | None = None

    def is_worthwhile(self, instance: str) -> bool:
        """Return whether an instance asks soon after it acknowledges."""
        return self._quick_instance == instance

    def record_ack(self, instance: str, prefetched: PrefetchedLease | None) -> None:
        """Record an acknowledgement of an instance, and the lease that was prefetched for it."""
        loop = asyncio.get_running_loop()
        self._last_ack = instance, loop.time()
        if prefetched is not None:
            self._clear()
            self._prefetched = prefetched
            self._timer = loop.call_later(_CLAIM_SECONDS, self._on_timeout)

    def take(self, instance: str) -> PrefetchedLease | None:
        """Take the lease that was prefetched for an instance. The prefetcher holds none afterwards."""
        last_ack, self._last_ack = self._last_ack, None
        if last_ack is not None and last_ack[0] == instance:
            is_soon = asyncio.get_running_loop().time() - last_ack[1] < _CLAIM_SECONDS
            self._quick_instance = instance if is_soon else None
        prefetched = self._prefetched
        if prefetched is None or prefetched.lease.instance != instance:
            return None
        self._clear()
        return prefetched

    def mark_delivered(self, prefetched: PrefetchedLease) -> None:
        """Record that a lease was delivered."""
        self._delivered_id = prefetched.lease.id

    def was_delivered(self, lease: Lease) -> bool:
        """Return whether this process delivered a prefetched lease; the stored state does not tell."""
        return lease.id == self._delivered_id

    def close(self) -> str | None:
        """Return the id of the lease to cancel, if there is one, and hold none."""
        prefetched = self._prefetched
        self._clear()
        return None if prefetched is None else prefetched.lease.id

    def _on_timeout(self) -> None:
        prefetched = self._prefetched
        self._clear()
        self._quick_instance = None
        if prefetched is not None:
            self._cancel(prefetched.lease.id)

    def _clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._prefetched = self._timer = None
