"""The lease rules: which instance may have which message of a subscription now. Pure; the caller passes the time.

Each function takes a delivery state and returns the next one. So several decisions can be made in a row, and a state
writer stores the result with one compare-and-set. The result counts only if the stored state is still the first one.
What holds for every state:

    a message is in one lease at most, and in none once it is acknowledged
    ordered: one instance has all leased messages, and they are the oldest messages
    by key: at most one message per key is leased, the oldest

Times are whole milliseconds since 1970, because several processes share the state. If a clock is set back, no lease and
no delay becomes longer than its duration, counted from the next decision.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, assert_never

from purveyor.delivery.lease_types import (
    AckTarget,
    LeaseDecision,
    LeaseLimit,
    LeasePolicy,
    LeaseRequest,
    NackRequest,
    Pending,
)
from purveyor.model import delivery_state
from purveyor.model.ack_ranges import Expired, SeenMessages
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.delivery_state import (
    Delay,
    DeliveryState,
    FailedDelivery,
    FailureCause,
    Failures,
    Lease,
    SubjectKind,
    without_sequences,
)
from purveyor.model.errors import LeaseLost

MAX_IN_FLIGHT_MESSAGES: Final = 5000
"""How many messages of a subscription may be leased or delayed at a time, if its state has room for them."""
MAX_FAILURES_PER_MESSAGE: Final = 20
MAX_FAILURES_PER_SUBSCRIPTION: Final = 1000
_MAX_EXHAUSTED_MESSAGES: Final = 100
_MAX_INSTANCE_CHARACTERS: Final = 60
_LATER_BYTES: Final = 40
"""The bytes that a delay adds to the state: the attempts and the time of a message, less its part of the lease."""


def expire_leases(state: DeliveryState, now: int) -> DeliveryState:
    """End the leases and delays whose time is over, and shorten those that exceed their duration."""
    over = [lease for lease in state.leases if lease.until <= now]
    if not over and not _is_clock_set_back(state, now) and all(delay.until > now for delay in state.delayed.values()):
        return state
    kept = tuple(
        lease._replace(until=min(lease.until, now + lease.duration)) for lease in state.leases if lease.until > now
    )
    delayed = {
        sequence: Delay(min(delay.until, now + delay.duration), delay.duration)
        for sequence, delay in state.delayed.items()
        if delay.until > now
    }
    failed = [
        (lease.sequences, FailedDelivery(lease.until, FailureCause.LEASE_EXPIRED, lease.instance)) for lease in over
    ]
    return _count_deliveries(state, failed)._replace(leases=kept, delayed=delayed)


def _is_clock_set_back(state: DeliveryState, now: int) -> bool:
    """Return whether the clock was set back since a lease or a delay was granted."""
    return any(lease.until > now + lease.duration for lease in state.leases) or any(
        delay.until > now + delay.duration for delay in state.delayed.values()
    )


def lease_pending(
    state: DeliveryState, pending: Iterable[Pending], request: LeaseRequest, policy: LeasePolicy
) -> LeaseDecision:
    """Lease messages to an instance. `pending` is all that is not acknowledged, in the order of delivery.

    Without a lease, the decision has the given state, except after the clock was set back: then it has the shortened
    leases. They must be stored once; else each request would shorten them again, and they would never end.
    """
    now = expire_leases(state, request.now)
    match policy.order_by:
        case OrderBy.POSITION:
            decision = _lease_oldest(now, pending, request, policy)
        case OrderBy.KEY | None:
            decision = _lease_any(now, pending, request, policy)
        case _:
            assert_never(policy.order_by)
    if decision.lease is not None or _is_clock_set_back(state, request.now):
        return decision
    return decision._replace(state=state)


def _lease_oldest(
    state: DeliveryState, pending: Iterable[Pending], request: LeaseRequest, policy: LeasePolicy
) -> LeaseDecision:
    """Lease the oldest messages. An instance that asks again gives up its earlier lease and gets the same messages."""
    others = [lease.until for lease in state.leases if lease.instance != request.instance]
    if others:
        return LeaseDecision(state=state, next_check_at=max(others))
    free = _release_earlier(state, request) if state.leases else state
    most = 1 if request.max_messages == 1 else max(min(request.max_messages, _room(free, request, policy)), 1)
    granted: list[Pending] = []
    size = 0
    for message in pending:
        if message.sequence in state.delayed:
            if not granted:
                return LeaseDecision(state=state, next_check_at=state.delayed[message.sequence].until)
            break
        if _is_exhausted(free, message, policy):
            if not granted:
                return LeaseDecision(state=state, exhausted=(message,), failures=free.failures)
            break
        size += message.size
        if granted and size > request.max_bytes:
            return _grant(free, granted, request)._replace(truncated=True)
        granted.append(message)
        if len(granted) == most:
            break
    else:
        if not granted:
            return LeaseDecision(state=state, wants_more=True)
        return _grant(free, granted, request, wants_more=True)
    return _grant(free, granted, request)


def _release_earlier(state: DeliveryState, request: LeaseRequest) -> DeliveryState:
    """End the leases of the requesting instance. A prefetched lease was not delivered and does not count."""
    failure = FailedDelivery(request.now, FailureCause.REQUESTED_AGAIN, request.instance)
    failed = [(lease.sequences, failure) for lease in state.leases if not lease.prefetched]
    return _count_deliveries(state, failed)._replace(leases=())


def _lease_any(
    state: DeliveryState, pending: Iterable[Pending], request: LeaseRequest, policy: LeasePolicy
) -> LeaseDecision:
    """Lease free messages; by key, only the oldest message of each key."""
    leased = {sequence for lease in state.leases for sequence in lease.sequences}
    left = MAX_IN_FLIGHT_MESSAGES - len(leased) - len(state.delayed)
    most = min(request.max_messages, left, _room(state, request, policy))
    granted: list[Pending] = []
    exhausted: list[Pending] = []
    by_key = policy.order_by is OrderBy.KEY
    busy = {key for lease in state.leases for key in lease.keys.values()}
    enough = truncated = False
    limit: LeaseLimit | None = None
    size = 0
    for message in pending:
        if message.sequence in leased or (by_key and message.key in busy):
            continue
        if by_key and message.key is not None:
            busy.add(message.key)
        if message.sequence in state.delayed:
            continue
        if _is_exhausted(state, message, policy):
            exhausted.append(message)
            enough = len(exhausted) == _MAX_EXHAUSTED_MESSAGES
        elif most <= 0:
            limit = LeaseLimit.MESSAGES if left <= 0 else LeaseLimit.BYTES
            enough = True
        else:
            size += message.size
            truncated = bool(granted) and size > request.max_bytes
            if not truncated:
                granted.append(message)
            enough = truncated or len(granted) == most
        if enough:
            break
    if granted:
        keys = {message.sequence: message.key for message in granted if by_key and message.key is not None}
        decision = _grant(state, granted, request, keys, wants_more=not enough)._replace(truncated=truncated)
        if exhausted:
            return decision._replace(exhausted=tuple(exhausted), failures=state.failures)
        return decision
    times = [*(lease.until for lease in state.leases), *(delay.until for delay in state.delayed.values())]
    return LeaseDecision(
        state=state,
        exhausted=tuple(exhausted),
        failures=state.failures,
        next_check_at=min(times, default=None),
        wants_more=not enough,
        limit=limit,
    )


def _grant(
    state: DeliveryState,
    granted: Sequence[Pending],
    request: LeaseRequest,
    keys: Mapping[int, str] | None = None,
    *,
    wants_more: bool = False,
) -> LeaseDecision:
    number = state.lease_counter + 1
    lease = Lease(
        id=str(number),
        instance=request.instance,
        until=request.now + request.duration,
        duration=request.duration,
        retry=tuple(message.sequence for message in granted if message.kind is SubjectKind.RETRY),
        prefill=tuple(message.sequence for message in granted if message.kind is SubjectKind.PREFILL),
        main=tuple(message.sequence for message in granted if message.kind is SubjectKind.MAIN),
        keys=keys or {},
    )
    return LeaseDecision(
        state=state._replace(leases=(*state.leases, lease), lease_counter=number),
        lease=lease,
        deliveries=tuple(state.delivery_counts.get(sequence, 0) + 1 for sequence in lease.sequences),
        wants_more=wants_more,
    )


def _room(state: DeliveryState, request: LeaseRequest, policy: LeasePolicy) -> int:
    """Return how many messages may be leased before the stored state is too large.

    An acknowledgement or a delay has to fit at any time, so leases stop before the state is full. The count is an upper
    bound: each leased message counts with what it may take later, when it is delayed or when its neighbours are
    acknowledged before it.

    If nothing is leased, one message may exceed the limit: perhaps it closes a gap between acknowledged ranges, and
    without the gap the state is smaller. A tenth of the limit is reserved for that.
    """
    digits = delivery_state.sequence_digits(state)
    leased = sum(len(lease.sequences) for lease in state.leases)
    delayed_later = max(len(state.delivery_counts) - len(state.delayed), 0)
    used = delivery_state.max_encoded_bytes(state) + delivery_state.LEASE_BYTES
    used += delivery_state.text_bytes(request.instance)
    used += leased * _LATER_BYTES + delayed_later * delivery_state.delay_bytes(digits)
    each = delivery_state.run_bytes(digits) + _LATER_BYTES
    if policy.order_by is OrderBy.KEY:
        each += digits + 4 + delivery_state.MAX_COMPACT_KEY_BYTES
    found = (policy.max_state_bytes - used) // each
    if found <= 0 and not leased and used + each <= policy.max_state_bytes * 11 // 10:
        return 1
    return max(found, 0)


def ack(
    state: DeliveryState, messages: Iterable[AckTarget], seen: Mapping[SubjectKind, SeenMessages] | None = None
) -> DeliveryState:
    """Acknowledge messages, whichever instance has them. `seen` allows to join acknowledged ranges."""
    acked = list(messages)
    sequences = frozenset(message.sequence for message in acked)
    known = seen or {}
    for kind in {message.kind for message in acked}:
        ranges = state.acked(kind).plus((each.sequence for each in acked if each.kind is kind), known.get(kind))
        state = state.with_acked(kind, ranges)
    return state._replace(
        leases=_without_messages(state.leases, sequences),
        position=max([state.position, *(message.position for message in acked if message.kind is SubjectKind.MAIN)]),
        redriving=_mark_redriven_acked(state.redriving, acked),
        delivery_counts=without_sequences(state.delivery_counts, sequences),
        delayed=without_sequences(state.delayed, sequences),
        failures=without_sequences(state.failures, sequences) if state.failures else state.failures,
    )


def lease_next(
    state: DeliveryState, pending: Iterable[Pending], request: LeaseRequest, policy: LeasePolicy
) -> tuple[DeliveryState, Lease] | None:
    """Lease the oldest message to an instance that will ask for it soon; None if that is not possible."""
    if policy.order_by is not OrderBy.POSITION or state.leases:
        return None
    decision = lease_pending(state, pending, request, policy)
    if decision.lease is None:
        return None
    lease = decision.lease._replace(prefetched=True)
    return decision.state._replace(leases=(lease,)), lease


def mark_prefetch_delivered(state: DeliveryState, lease: Lease) -> DeliveryState:
    """Record that a prefetched lease was delivered."""
    delivered = lease._replace(prefetched=False)
    return state._replace(leases=tuple(delivered if each is lease else each for each in state.leases))


def expire_messages(
    state: DeliveryState,
    messages: Sequence[AckTarget],
    now: int,
    seen: Mapping[SubjectKind, SeenMessages] | None = None,
) -> DeliveryState:
    """Acknowledge messages that exceeded the retention time of the subscription, and count them."""
    before = state.expired
    position = max([before.position, *(message.position for message in messages if message.kind is SubjectKind.MAIN)])
    return ack(state, messages, seen)._replace(expired=Expired(before.count + len(messages), position, now))


def leased_sequences(state: DeliveryState, instance: str | None, policy: LeasePolicy) -> frozenset[int]:
    """Return the leased messages. In ordered delivery, a requesting `instance` gives up its own leases."""
    given_up = instance if policy.order_by is OrderBy.POSITION else None
    return frozenset(
        sequence
        for lease in state.leases
        if given_up is None or lease.instance != given_up
        for sequence in lease.sequences
    )


def leased_up_to(
    state: DeliveryState, pending: Iterable[Pending], last: int, instance: str, policy: LeasePolicy
) -> list[Pending]:
    """Return the messages that an instance has up to one of them, in the order of delivery.

    In ordered delivery this includes messages whose lease expired, if no other instance has leased them since.
    `LeaseLost` if the instance does not have the last message, or another instance has one of them.
    """
    owner = {sequence: lease for lease in state.leases for sequence in lease.sequences}
    ordered = policy.order_by is OrderBy.POSITION
    found: list[Pending] = []
    for message in pending:
        lease = owner.get(message.sequence)
        if lease is not None and lease.instance != instance and (ordered or message.sequence == last):
            raise _leased_elsewhere(message.sequence, lease)
        had = lease is None and ordered and message.sequence in state.delivery_counts
        if had or (lease is not None and lease.instance == instance):
            found.append(message)
        if message.sequence == last:
            break
    if not found or found[-1].sequence != last:
        raise LeaseLost(f"message {last} is in no lease of {instance!r}", fix="ask for messages again")
    return found


def nack(state: DeliveryState, sequence: int, request: NackRequest, policy: LeasePolicy) -> DeliveryState:
    """Release a message for another delivery, after a delay. `LeaseLost` if another instance has it.

    A free message that waits for the end of a delay gets the new delay instead: with 0 it is delivered at once.
    In ordered delivery no later message overtakes it: the later messages of the same lease are released too, without
    counting a delivery.
    """
    state = expire_leases(state, request.now)
    check_may_settle(state, sequence, request.instance)
    lease = state.lease_of(sequence)
    if lease is not None:
        failure = FailedDelivery(request.now, FailureCause.NACKED, request.instance)
        state = _count_deliveries(state, [((sequence,), failure)], record=request.record_failure)
        later = lease.sequences[lease.sequences.index(sequence) :]
        released = frozenset(later if policy.order_by is OrderBy.POSITION else (sequence,))
        state = state._replace(leases=_without_messages(state.leases, released))
    if request.delay <= 0:
        return state._replace(delayed={each: state.delayed[each] for each in state.delayed if each != sequence})
    return state._replace(delayed={**state.delayed, sequence: Delay(request.now + request.delay, request.delay)})


def extend_lease(
    state: DeliveryState, sequence: int, instance: str, now: int, duration: int
) -> tuple[DeliveryState, Lease]:
    """Restart the lease of a message, with all its messages. `LeaseLost` if the instance no longer has it."""
    state = expire_leases(state, now)
    lease = require_lease(state, sequence, instance)
    longer = lease._replace(until=now + duration, duration=duration)
    return state._replace(leases=tuple(longer if each is lease else each for each in state.leases)), longer


def cancel_lease(state: DeliveryState, lease_id: str) -> DeliveryState:
    """Cancel a lease without counting a delivery."""
    return state._replace(leases=tuple(lease for lease in state.leases if lease.id != lease_id))


def require_lease(state: DeliveryState, sequence: int, instance: str) -> Lease:
    """Return the lease of an instance on a message; `LeaseLost` if it has none."""
    lease = state.lease_of(sequence)
    if lease is None:
        raise LeaseLost(
            f"message {sequence} is not leased: the lease of {instance!r} has expired", fix="ask for it again"
        )
    if lease.instance != instance:
        raise _leased_elsewhere(sequence, lease)
    return lease


def check_may_settle(state: DeliveryState, sequence: int, instance: str) -> None:
    """Raise `LeaseLost` unless the instance has the message, or the message was delivered and is free now."""
    lease = state.lease_of(sequence)
    if lease is None and sequence not in state.delivery_counts:
        raise LeaseLost(f"message {sequence} was not delivered", fix="ask for messages first")
    if lease is not None and lease.instance != instance:
        raise _leased_elsewhere(sequence, lease)


def append_failures(failures: Failures, failed: Iterable[tuple[Iterable[int], FailedDelivery]]) -> Failures:
    """Record failed deliveries, each of some messages. They are for people; `delivery_counts` counts attempts.

    The record is bounded: the more messages have failures, the fewer each keeps, and the oldest messages keep none.
    """
    after = dict(failures)
    for sequences, failure in failed:
        short = failure._replace(instance=failure.instance[:_MAX_INSTANCE_CHARACTERS])
        for sequence in sequences:
            after[sequence] = (*after.pop(sequence, ()), short)
    each = min(max(MAX_FAILURES_PER_SUBSCRIPTION // max(len(after), 1), 1), MAX_FAILURES_PER_MESSAGE)
    last = [*after.items()][-MAX_FAILURES_PER_SUBSCRIPTION:]
    return {sequence: found[-each:] for sequence, found in last}


def _leased_elsewhere(sequence: int, lease: Lease) -> LeaseLost:
    return LeaseLost(f"message {sequence} is leased to instance {lease.instance!r}", fix="leave it to that instance")


def _is_exhausted(state: DeliveryState, message: Pending, policy: LeasePolicy) -> bool:
    return policy.max_attempts is not None and state.delivery_counts.get(message.sequence, 0) >= policy.max_attempts


def _count_deliveries(
    state: DeliveryState, failed: Sequence[tuple[Sequence[int], FailedDelivery]], *, record: bool = True
) -> DeliveryState:
    """Count failed deliveries, each of some messages, and record them."""
    if not failed:
        return state
    counts = dict(state.delivery_counts)
    for sequences, _ in failed:
        for sequence in sequences:
            counts[sequence] = counts.get(sequence, 0) + 1
    failures = append_failures(state.failures, failed) if record else state.failures
    return state._replace(delivery_counts=counts, failures=failures)


def _without_messages(leases: Sequence[Lease], sequences: frozenset[int]) -> tuple[Lease, ...]:
    """Remove messages from leases, and leases without messages."""
    return tuple(
        lease.without(sequences) if sequences.intersection(lease.sequences) else lease
        for lease in leases
        if not sequences.issuperset(lease.sequences)
    )


def _mark_redriven_acked(redriving: Mapping[int, bool], acked: Iterable[AckTarget]) -> Mapping[int, bool]:
    letters = {message.dead_letter_id for message in acked if message.dead_letter_id in redriving} if redriving else ()
    return {letter: done or letter in letters for letter, done in redriving.items()} if letters else redriving
