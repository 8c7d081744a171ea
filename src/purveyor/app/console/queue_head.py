"""The head of a subscription's queue: which instance has which message, its attempts, and the time of the next one.

Read from the book of deliveries and the queue itself; nothing is taken, leased or changed by looking.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from purveyor.delivery.dead_letters.park import Attempt, as_attempt_log, parse_attempt
from purveyor.delivery.push.attempt_log import AttemptLog
from purveyor.jetstream.direct_get import PageRequest, read_page
from purveyor.jetstream.streams import StoredMessage
from purveyor.model import delivery_state
from purveyor.model.delivery_state import DeliveryState, SubjectKind
from purveyor.model.errors import UnknownKey, UnknownStream, UnreadableRecord
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.registry import ACKNOWLEDGED, Registered

MAX_SHOWN_MESSAGES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingMessage:
    """A waiting message and the state of its delivery."""

    message: StoredMessage
    kind: SubjectKind
    deliveries: int
    instance: str | None = None
    until: datetime | None = None
    """When the lease ends, or the delay before the next attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueHead:
    """The first messages of a queue, and numbers from the delivery state."""

    messages: tuple[WaitingMessage, ...] = ()
    acknowledged: int = 0
    """The last acknowledged position; 0: none."""
    leased: int = 0
    failed: int = 0
    """The number of waiting messages with failed attempts."""


async def read_queue_head(queues: Queues, found: Registered) -> QueueHead:
    """Read the head of a subscription's queue."""
    state = await _read_state(queues, found)
    queue = subscription_queue(found.name)
    messages: list[WaitingMessage] = []
    for kind in SubjectKind:
        done = state.acked(kind)
        wanted = PageRequest(
            subject=f"{found.name}.{kind.value}", from_sequence=done.floor + 1, count=MAX_SHOWN_MESSAGES
        )
        try:
            page = await read_page(queues, queue.stream, wanted)
        except UnknownStream:
            break
        messages += [_to_waiting(state, each, kind) for each in page.messages if each.sequence not in done]
    return QueueHead(
        messages=tuple(messages[:MAX_SHOWN_MESSAGES]),
        acknowledged=state.position,
        leased=sum(len(lease.sequences) for lease in state.leases),
        failed=len(state.delivery_counts),
    )


async def _read_state(queues: Queues, found: Registered) -> DeliveryState:
    try:
        entry = await (await queues.bucket(ACKNOWLEDGED)).get(found.name)
        state = delivery_state.decode(entry.value)
    except (UnknownKey, UnreadableRecord):  # the page reports an unreadable record itself
        return DeliveryState(incarnation=found.incarnation)
    return state if state.incarnation == found.incarnation else DeliveryState(incarnation=found.incarnation)


def _to_waiting(state: DeliveryState, message: StoredMessage, kind: SubjectKind) -> WaitingMessage:
    lease, wait = state.lease_of(message.sequence), state.delayed.get(message.sequence)
    until = lease.until if lease is not None else wait.until if wait is not None else None
    return WaitingMessage(
        message=message,
        kind=kind,
        deliveries=state.deliveries(message.sequence),
        instance=None if lease is None else lease.instance,
        until=None if until is None else datetime.fromtimestamp(until / 1000, UTC),
    )


async def failed_attempts(queues: Queues, found: Registered, sequence: int) -> list[Attempt]:
    """Return the last failed deliveries of a message, from the delivery state and the attempt log of push."""
    entries = as_attempt_log((await _read_state(queues, found)).failures.get(sequence, ()))
    if found.record.definition.push is not None:
        entries += await AttemptLog(queues).read(found.name, found.incarnation, sequence)
    return [parse_attempt(each) for each in sorted(entries, key=lambda each: str(each.get("time")))]
