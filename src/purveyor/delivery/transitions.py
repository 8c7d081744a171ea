"""Transitions of pull: functions from a delivery state to a `Transition`, and the types of requests and results.

A state writer commits them. They use its buffer and its prefetcher, which are in memory.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, assert_never

from purveyor.delivery import lease_rules
from purveyor.delivery.after_ack import PrefetchedLease
from purveyor.delivery.lease_types import AckTarget, LeaseDecision, LeaseLimit, LeasePolicy, LeaseRequest
from purveyor.delivery.message_buffer import dead_letter_id, position_of
from purveyor.delivery.state_writer import StateWriter, Transition
from purveyor.jetstream.headers import Headers
from purveyor.jetstream.streams import StoredMessage
from purveyor.model import metrics
from purveyor.model.delivery_state import DeliveryState, Lease, SubjectKind
from purveyor.model.errors import InvalidInput, UnknownMessage, WindowFull

_MAX_INSTANCE_CHARACTERS: Final = 200
MAX_LEASE_BYTES: Final = 32 << 20
"""The messages of a lease are in memory at the same time. One message may exceed this."""
MAX_EXPIRED_PER_TRANSITION: Final = 500
"""The messages were read to find out that they expired, so their number is limited."""


class DeliveredMessage(NamedTuple):
    """A message as a consumer gets it."""

    sequence: int
    position: int | None
    kind: SubjectKind
    data: bytes
    headers: Headers
    num_delivered: int
    lease: str | None
    """None if it was acknowledged with the delivery."""
    until: datetime | None
    stored: datetime | None = None
    """When the server stored it in the queue of the subscription."""


class PullRequest(NamedTuple):
    """The request of a consumer."""

    instance: str
    max_messages: int = 1
    lease_seconds: float | None = None
    pop: bool = False
    """Whether to acknowledge the messages with the delivery."""
    checked: bool = False
    """Whether the caller has just asked without waiting and got nothing."""


class PullResult(NamedTuple):
    """The answer to a pull request, without waiting."""

    messages: list[DeliveredMessage]
    next_check_at: int | None = None
    """When time alone may change the answer, if that is known."""
    truncated: bool = False
    """Whether there are more messages that did not fit into the lease."""
    limit: LeaseLimit | None = None
    """Why no message is leased, regardless of what the queue contains."""


class LeaseResult(NamedTuple):
    """The value of the transition `lease_messages`."""

    decision: LeaseDecision
    messages: Sequence[StoredMessage | None] = ()
    """The leased messages; None for a message that is not in memory."""
    popped: bool = False
    expired: int = 0
    """How many messages exceeded their retention time."""


def lease_messages(
    writer: StateWriter, state: DeliveryState, request: PullRequest, now: int
) -> Transition[LeaseResult]:
    """Lease messages to an instance, or acknowledge them at once. Expired messages are acknowledged, not leased."""
    policy = lease_policy(writer)
    for lease in state.leases:
        if lease.prefetched and writer.prefetcher.was_delivered(lease):
            state = lease_rules.mark_prefetch_delivered(state, lease)
    state, expired = expire_old(writer, state, now, request.instance)
    count = len(expired)
    if count == MAX_EXPIRED_PER_TRANSITION:
        return Transition(value=LeaseResult(LeaseDecision(state=state), expired=count), state=state, acked=expired)
    duration = to_milliseconds(request.lease_seconds or writer.definition.lease_seconds)
    lease_request = LeaseRequest(request.instance, now, duration, request.max_messages, MAX_LEASE_BYTES)
    decision = lease_rules.lease_pending(state, writer.buffer.pending(state), lease_request, policy)
    shortfall = request.max_messages if decision.wants_more else 0
    if decision.lease is None:
        return Transition(
            value=LeaseResult(decision, expired=count),
            state=decision.state if expired or decision.state is not state else None,
            acked=expired,
            shortfall=shortfall,
            needs_fresh_state=not decision.exhausted,
        )
    lease = decision.lease
    messages = [writer.buffer.message(sequence) for sequence in lease.sequences]
    shortfall = max(shortfall - len(messages), 0)
    if request.pop:
        popped = [buffered_target(writer, sequence) for sequence in lease.sequences]
        return Transition(
            value=LeaseResult(decision, messages, popped=True, expired=count),
            state=lease_rules.ack(decision.state, popped, writer.buffer.seen()),
            acked=[*expired, *popped],
            shortfall=shortfall,
        )
    return Transition(
        value=LeaseResult(decision, messages, expired=count),
        state=decision.state,
        acked=expired,
        shortfall=shortfall,
        undo=lambda later: lease_rules.cancel_lease(later, lease.id),
    )


def expire_old(
    writer: StateWriter, state: DeliveryState, now: int, instance: str | None = None
) -> tuple[DeliveryState, list[AckTarget]]:
    """Acknowledge messages that exceeded the retention time; return the state and these messages.

    A leased message may still be acknowledged by its consumer: it stays until its lease is over.
    """
    retention = writer.definition.retention_seconds
    if retention is None:
        return state, []
    current = lease_rules.expire_leases(state, now)
    leased = lease_rules.leased_sequences(current, instance, lease_policy(writer))
    before = now - to_milliseconds(retention)
    found = writer.buffer.find_expired(current, before, leased, MAX_EXPIRED_PER_TRANSITION)
    return (lease_rules.expire_messages(current, found, now, writer.buffer.seen()), found) if found else (state, [])


def ack(writer: StateWriter, state: DeliveryState, messages: Sequence[AckTarget]) -> Transition[None]:
    """Acknowledge messages; `UnknownMessage` if one of them is acknowledged already."""
    for message in messages:
        if message.sequence in state.acked(message.kind):
            raise unknown_message(writer.name, message.sequence)
    return Transition(value=None, state=lease_rules.ack(state, messages, writer.buffer.seen()), acked=messages)


def ack_and_prefetch(
    writer: StateWriter, state: DeliveryState, message: AckTarget, instance: str | None, now: int
) -> Transition[PrefetchedLease | None]:
    """Acknowledge a message, and lease the next one to the same instance if that is worthwhile."""
    acked = ack(writer, state, (message,))
    assert acked.state is not None
    lease = state.lease_of(message.sequence)
    is_single = lease is not None and lease.instance == instance and len(lease.sequences) == 1
    found = _prefetch_next(writer, acked.state, instance, now) if instance is not None and is_single else None
    if found is None:
        return Transition(value=None, state=acked.state, acked=acked.acked)
    return Transition(value=found[1], state=found[0], acked=acked.acked)


def _prefetch_next(
    writer: StateWriter, state: DeliveryState, instance: str, now: int
) -> tuple[DeliveryState, PrefetchedLease] | None:
    definition = writer.definition
    if definition.retention_seconds is not None or not writer.prefetcher.is_worthwhile(instance):
        return None
    request = LeaseRequest(instance=instance, now=now, duration=to_milliseconds(definition.lease_seconds))
    found = lease_rules.lease_next(state, writer.buffer.pending(state), request, lease_policy(writer))
    if found is None or writer.buffer.message(found[1].sequences[0]) is None:
        return None
    after, lease = found
    return after, PrefetchedLease(lease, after.delivery_counts.get(lease.sequences[0], 0) + 1)


def take_prefetched(writer: StateWriter, request: PullRequest) -> LeaseResult | None:
    """Return the lease that was prefetched for an instance, if the request is for one message with the defaults."""
    prefetched = writer.prefetcher.take(request.instance)
    is_default = request.max_messages == 1 and not request.pop and request.lease_seconds is None
    if prefetched is None or not is_default or writer.is_stale:
        return None
    message = writer.buffer.message(prefetched.lease.sequences[0])
    if message is None:
        return None
    writer.prefetcher.mark_delivered(prefetched)
    state = DeliveryState(incarnation=writer.incarnation)
    decision = LeaseDecision(state=state, lease=prefetched.lease, deliveries=(prefetched.deliveries,))
    return LeaseResult(decision, [message])


def buffered_target(writer: StateWriter, sequence: int) -> AckTarget:
    """Return the target for the acknowledgement of a message that is in the buffer."""
    found = writer.buffer.find(sequence)
    assert found is not None
    return found


def subject_kind_in(lease: Lease, sequence: int) -> SubjectKind:
    """Return the kind of subject that a leased message is on."""
    if sequence in lease.retry:
        return SubjectKind.RETRY
    return SubjectKind.PREFILL if sequence in lease.prefill else SubjectKind.MAIN


def to_delivered(message: StoredMessage, lease: Lease, count: int, *, popped: bool) -> DeliveredMessage:
    """Convert a leased message to what the consumer gets."""
    return DeliveredMessage(
        sequence=message.sequence,
        position=position_of(message.headers),
        kind=subject_kind_in(lease, message.sequence),
        data=message.data,
        headers=message.headers,
        num_delivered=count,
        lease=None if popped else lease.id,
        until=None if popped else to_datetime(lease.until),
        stored=message.timestamp,
    )


def to_ack_target(message: DeliveredMessage) -> AckTarget:
    """Convert a delivered message to a target for an acknowledgement."""
    letter = dead_letter_id(message.headers) if message.kind is SubjectKind.RETRY else 0
    return AckTarget(message.sequence, message.kind, message.position or 0, letter)


def record_deliveries(name: str, messages: Sequence[DeliveredMessage], *, popped: bool) -> None:
    """Add deliveries to the metrics."""
    if not messages:
        return
    metrics.DELIVERED.add(name, by=len(messages))
    redelivered = sum(1 for message in messages if message.num_delivered > 1)
    if redelivered:
        metrics.REDELIVERED.add(name, by=redelivered)
    if popped:
        metrics.ACKNOWLEDGED.add(name, by=len(messages))


def lease_policy(writer: StateWriter) -> LeasePolicy:
    """Return the lease policy of a subscription."""
    definition = writer.definition
    return LeasePolicy(definition.order_by, definition.retry.max_attempts, writer.max_state_bytes)


def check_instance(instance: str) -> str:
    """Check the name of a consumer instance, and return it."""
    if not 0 < len(instance) <= _MAX_INSTANCE_CHARACTERS or not instance.isprintable():
        raise InvalidInput(f"invalid instance {instance[:40]!r}", fix=f"use 1 to {_MAX_INSTANCE_CHARACTERS} characters")
    return instance


def unknown_message(name: str, sequence: int) -> UnknownMessage:
    """Return the error for a message that does not exist (any more)."""
    return UnknownMessage(
        f"subscription {name!r} has no message {sequence}", fix="it is acknowledged already, or was never delivered"
    )


def limit_error(name: str, limit: LeaseLimit) -> WindowFull:
    """Return the error for a subscription that reached a limit."""
    match limit:
        case LeaseLimit.MESSAGES:
            cause = f"{lease_rules.MAX_IN_FLIGHT_MESSAGES:,} messages are leased or delayed, which is the maximum"
        case LeaseLimit.BYTES:
            cause = "its delivery state is nearly as large as the server accepts"
        case _:
            assert_never(limit)
    return WindowFull(
        f"subscription {name!r} delivers no more messages: {cause}",
        fix="acknowledge, reject or retry leased messages, or wait until their leases and delays are over",
    )


def to_milliseconds(seconds: float) -> int:
    """Convert seconds to the unit of the delivery state."""
    return round(seconds * 1000)


def to_datetime(milliseconds: int) -> datetime:
    """Convert a time of the delivery state."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
