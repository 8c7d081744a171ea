"""What passes between `pull` and a consumer: what was asked for, what is handed over, and the decisions behind it.

Decisions are functions from a book to a `Step`; a desk makes them count.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple, assert_never

from purveyor.delivery import lease_rules
from purveyor.delivery.message_buffer import letter_of, position_of
from purveyor.delivery.prefetch import Kept
from purveyor.delivery.state import Acked, Ask, Book, Full, Kind, Lease, Rules, Taken
from purveyor.delivery.state_writer import Desk, Step
from purveyor.jetstream.headers import Headers
from purveyor.jetstream.streams import StoredMessage
from purveyor.model import metrics
from purveyor.model.errors import InvalidInput, UnknownMessage, WindowFull

_LONGEST_INSTANCE: Final = 200
MOST_BYTES: Final = 32 << 20
"""A lease takes no more than this, but one message at least: its messages are in memory all at once."""
MOST_LAPSED: Final = 500
"""So many messages expire in one decision: their bytes were read to find that out."""


class Delivered(NamedTuple):
    """A message in the hands of a consumer."""

    sequence: int
    position: int | None
    kind: Kind
    data: bytes
    headers: Headers
    num_delivered: int
    lease: str | None
    """None when it was acknowledged as it was given."""
    until: datetime | None
    stored: datetime | None = None
    """When the server stored it in the queue of the subscription."""


class Order(NamedTuple):
    """What a consumer asked for."""

    instance: str
    most: int = 1
    seconds: float | None = None
    pop: bool = False
    looked: bool = False


class Look(NamedTuple):
    """What a look for messages came to."""

    found: list[Delivered]
    again_at: int | None = None
    """When time alone may change it, if that is known."""
    cut: bool = False
    """Whether there are more, that one lease did not take because of their bytes."""
    full: Full | None = None
    """Why nothing is handed out, whatever is in the queue."""


class Hand(NamedTuple):
    """What a consumer gets, with the messages as far as they were at hand."""

    taken: Taken
    bodies: Sequence[StoredMessage | None] = ()
    popped: bool = False
    lapsed: int = 0
    """How many messages expired when it was looked for."""


def hand_over(desk: Desk, book: Book, order: Order, now: int) -> Step[Hand]:
    """Lease messages to the one who asks, or acknowledge them at once. What has expired is given to nobody."""
    rules = rules_of(desk)
    for lease in book.leases:
        if lease.ahead and desk.ahead.was_handed_out(lease):
            book = lease_rules.handed_over(book, lease)
    book, lapsed = lapse(desk, book, now, order.instance)
    if len(lapsed) == MOST_LAPSED:
        return Step(value=Hand(Taken(book=book), lapsed=len(lapsed)), book=book, acked=lapsed)
    seconds = order.seconds or desk.definition.lease_seconds
    length = milliseconds(seconds)
    ask = Ask(instance=order.instance, now=now, length=length, most=order.most, most_bytes=MOST_BYTES)
    taken = lease_rules.take(book, desk.window.pending(book), ask, rules)
    missing = order.most if taken.wants_more else 0
    if taken.lease is None:
        changed = taken.book if lapsed or taken.book is not book else None
        hand = Hand(taken, lapsed=len(lapsed))
        return Step(value=hand, book=changed, acked=lapsed, missing=missing, empty=not taken.exhausted)
    lease = taken.lease
    bodies = [desk.window.body(sequence) for sequence in lease.sequences]
    missing = max(missing - len(bodies), 0)
    if order.pop:
        acked = [known(desk, sequence) for sequence in lease.sequences]
        done = lease_rules.acknowledge(taken.book, acked, desk.window.seen())
        hand = Hand(taken, bodies, popped=True, lapsed=len(lapsed))
        return Step(value=hand, book=done, acked=[*lapsed, *acked], missing=missing)
    return Step(
        value=Hand(taken, bodies, lapsed=len(lapsed)),
        book=taken.book,
        acked=lapsed,
        missing=missing,
        undo=lambda now: lease_rules.give_back(now, lease.id),
    )


def lapse(desk: Desk, book: Book, now: int, instance: str | None = None) -> tuple[Book, list[Acked]]:
    """The book without the messages that waited for longer than the subscription keeps them, and which those are.

    One that somebody has may still be acknowledged: it stays until its lease is over.
    """
    keeps = desk.definition.retention_seconds
    if keeps is None:
        return book, []
    current = lease_rules.expire(book, now)
    in_hand = lease_rules.in_hand(current, instance, rules_of(desk))
    found = desk.window.lapsed(current, now - milliseconds(keeps), in_hand, MOST_LAPSED)
    return (lease_rules.lapse(current, found, now, desk.window.seen()), found) if found else (book, [])


def acknowledged(desk: Desk, book: Book, messages: Sequence[Acked]) -> Step[None]:
    """They are handled; `UnknownMessage` if one of them was before."""
    for message in messages:
        if message.sequence in book.done(message.kind):
            raise gone(desk.name, message.sequence)
    return Step(value=None, book=lease_rules.acknowledge(book, messages, desk.window.seen()), acked=messages)


def acknowledged_for(desk: Desk, book: Book, message: Acked, instance: str | None, now: int) -> Step[Kept | None]:
    """It is handled; and if it is worth it, the next one is kept for the instance that says so (see `ahead`)."""
    if message.sequence in book.done(message.kind):
        raise gone(desk.name, message.sequence)
    after = lease_rules.acknowledge(book, (message,), desk.window.seen())
    lease = book.lease_of(message.sequence)
    quick = lease is not None and lease.instance == instance and len(lease.sequences) == 1
    kept = _keep_next(desk, after, instance, now) if instance is not None and quick else None
    if kept is None:
        return Step(value=None, book=after, acked=(message,))
    return Step(value=kept[1], book=kept[0], acked=(message,))


def _keep_next(desk: Desk, after: Book, instance: str, now: int) -> tuple[Book, Kept] | None:
    definition = desk.definition
    if definition.retention_seconds is not None or not desk.ahead.pays(instance):
        return None
    ask = Ask(instance=instance, now=now, length=milliseconds(definition.lease_seconds))
    found = lease_rules.keep_next(after, desk.window.pending(after), ask, rules_of(desk))
    if found is None or desk.window.body(found[1].sequences[0]) is None:
        return None
    with_next, kept = found
    return with_next, Kept(kept, with_next.tries.get(kept.sequences[0], 0) + 1)


def claimed(desk: Desk, order: Order) -> Hand | None:
    """What was kept for the one who asks, if it asks for one message in the usual way."""
    kept = desk.ahead.claim(order.instance)
    if kept is None or order.most != 1 or order.pop or order.seconds is not None or desk.in_doubt:
        return None
    body = desk.window.body(kept.lease.sequences[0])
    if body is None:
        return None
    desk.ahead.hand_out(kept)
    taken = Taken(book=Book(incarnation=desk.incarnation), lease=kept.lease, deliveries=(kept.deliveries,))
    return Hand(taken, [body])


def known(desk: Desk, sequence: int) -> Acked:
    """A message that was just handed out."""
    found = desk.window.find(sequence)
    assert found is not None
    return found


def kind_in(lease: Lease, sequence: int) -> Kind:
    """The subject that a leased message lies on."""
    if sequence in lease.retry:
        return Kind.RETRY
    return Kind.PREFILL if sequence in lease.prefill else Kind.MAIN


def delivered(message: StoredMessage, lease: Lease, count: int, *, popped: bool) -> Delivered:
    """A message as a consumer gets it."""
    return Delivered(
        sequence=message.sequence,
        position=position_of(message.headers),
        kind=kind_in(lease, message.sequence),
        data=message.data,
        headers=message.headers,
        num_delivered=count,
        lease=None if popped else lease.id,
        until=None if popped else moment(lease.until),
        stored=message.timestamp,
    )


def acked(message: Delivered) -> Acked:
    """A message that was handed out, as one to acknowledge."""
    letter = letter_of(message.headers) if message.kind is Kind.RETRY else 0
    return Acked(message.sequence, message.kind, message.position or 0, letter)


def count_delivered(name: str, found: Sequence[Delivered], *, popped: bool) -> None:
    """Add to the figures what was handed out."""
    if not found:
        return
    metrics.DELIVERED.add(name, by=len(found))
    again = sum(1 for message in found if message.num_delivered > 1)
    if again:
        metrics.REDELIVERED.add(name, by=again)
    if popped:
        metrics.ACKNOWLEDGED.add(name, by=len(found))


def rules_of(desk: Desk) -> Rules:
    """What its subscription asked for."""
    definition = desk.definition
    return Rules(definition.order_by, definition.retry.max_attempts, desk.most_state_bytes)


def check_instance(instance: str) -> str:
    """The name of a consumer instance."""
    if not 0 < len(instance) <= _LONGEST_INSTANCE or not instance.isprintable():
        raise InvalidInput(f"invalid instance {instance[:40]!r}", fix=f"use 1 to {_LONGEST_INSTANCE} characters")
    return instance


def gone(name: str, sequence: int) -> UnknownMessage:
    """There is no such message, or there is no more."""
    return UnknownMessage(
        f"subscription {name!r} has no message {sequence}", fix="it was acknowledged already, or never handed out"
    )


def refused(name: str, full: Full) -> WindowFull:
    """Nothing more is handed out."""
    match full:
        case Full.MESSAGES:
            what = f"{lease_rules.MOST_IN_FLIGHT:,} messages are leased or wait for a retry, and more may not be"
        case Full.BYTES:
            what = "its delivery state is nearly as large as the server takes"
        case _:
            assert_never(full)
    return WindowFull(
        f"subscription {name!r} hands out nothing more: {what}",
        fix="acknowledge, reject or give back messages that are out, or wait until their leases and delays are over",
    )


def milliseconds(seconds: float) -> int:
    """As the book counts."""
    return round(seconds * 1000)


def moment(milliseconds: int) -> datetime:
    """A time of the book."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
