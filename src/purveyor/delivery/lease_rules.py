"""The lease machine: who may have which message of a subscription now. Pure; time is given in.

Its state is the book of a subscription, kept by `desk` in one key of a bucket and changed there by compare-and-set: a
decision is made on a book, and counts only if the book is still that one. Every function takes a book and gives the
next one, so several decisions can be made in a row and written at once. What holds for every book:

    a message is in one lease at most, and in none once it is acknowledged
    ordered: all that is leased is leased to one instance, and is the oldest there is
    by key: of the messages about one object at most one is leased, the oldest

Times are whole milliseconds of the wall clock, because several processes share the book. A clock that is set back does
not make a lease or a pause longer than it was meant to be, counted from when somebody looks.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, assert_never

from purveyor.delivery import state_size
from purveyor.delivery.done import Seen
from purveyor.delivery.failure_history import noted
from purveyor.delivery.state import (
    Acked,
    Again,
    Ask,
    Book,
    End,
    Ended,
    Full,
    Kind,
    Lease,
    Pending,
    Rules,
    Taken,
    Wait,
    less,
)
from purveyor.model.ack_ranges import Expired
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.errors import LeaseLost

MOST_IN_FLIGHT: Final = 5000
"""How many messages of a subscription may be leased or put off at a time, where its state has room for them."""
_MOST_EXHAUSTED: Final = 100

__all__ = [
    "MOST_IN_FLIGHT",
    "Acked",
    "Again",
    "Ask",
    "Book",
    "Full",
    "Kind",
    "Lease",
    "Pending",
    "Rules",
    "Taken",
    "Wait",
    "acknowledge",
    "expire",
    "extend",
    "give_back",
    "handed_out",
    "held",
    "in_hand",
    "lapse",
    "may_give_up",
    "retry",
    "take",
]


def expire(book: Book, now: int) -> Book:
    """The book with what time did: leases that ran out, pauses that are over, none longer than it was meant to be."""
    over = [lease for lease in book.leases if lease.until <= now]
    if not over and not _too_long(book, now) and all(wait.until > now for wait in book.waits.values()):
        return book
    kept = tuple(
        lease._replace(until=min(lease.until, now + lease.length)) for lease in book.leases if lease.until > now
    )
    waits = {
        sequence: Wait(min(wait.until, now + wait.length), wait.length)
        for sequence, wait in book.waits.items()
        if wait.until > now
    }
    ended = [(lease.sequences, End(lease.until, Ended.RAN_OUT, lease.instance)) for lease in over]
    return _tried(book, ended)._replace(leases=kept, waits=waits)


def _too_long(book: Book, now: int) -> bool:
    """Whether the clock was set back since a lease or a pause was given."""
    return any(lease.until > now + lease.length for lease in book.leases) or any(
        wait.until > now + wait.length for wait in book.waits.values()
    )


def take(book: Book, pending: Iterable[Pending], ask: Ask, rules: Rules) -> Taken:
    """Lease messages to an instance. `pending` is all that is not acknowledged, in the order of delivery.

    If there is nothing to lease, the book of the answer is the one given, but for leases cut to their length when the
    clock was set back: that has to be written down once, or they would be cut anew each time and never end.
    """
    now = expire(book, ask.now)
    match rules.order_by:
        case OrderBy.POSITION:
            taken = _take_oldest(now, pending, ask, rules)
        case OrderBy.KEY | None:
            taken = _take_any(now, pending, ask, rules)
        case _:
            assert_never(rules.order_by)
    return taken if taken.lease is not None or _too_long(book, ask.now) else taken._replace(book=book)


def _take_oldest(book: Book, pending: Iterable[Pending], ask: Ask, rules: Rules) -> Taken:
    """The oldest messages. An instance that asks again has given up what it had, and gets it again."""
    theirs = [lease.until for lease in book.leases if lease.instance != ask.instance]
    if theirs:
        return Taken(book=book, again_at=max(theirs))
    free = _given_up(book, ask) if book.leases else book
    most = 1 if ask.most == 1 else max(min(ask.most, state_size.room(free, ask, rules)), 1)
    given: list[Pending] = []
    size = 0
    for message in pending:
        if message.sequence in book.waits:
            if not given:
                return Taken(book=book, again_at=book.waits[message.sequence].until)
            break
        if _exhausted(free, message, rules):
            if not given:
                return Taken(book=book, exhausted=(message,), ends=free.ends)
            break
        size += message.size
        if given and size > ask.most_bytes:
            return _grant(free, given, ask)._replace(cut=True)
        given.append(message)
        if len(given) == most:
            break
    else:
        if not given:
            return Taken(book=book, wants_more=True)
        return _grant(free, given, ask, wants_more=True)
    return _grant(free, given, ask)


def _given_up(book: Book, ask: Ask) -> Book:
    had = (lease for lease in book.leases if not lease.ahead)
    ended = [(lease.sequences, End(ask.now, Ended.ASKED_AGAIN, ask.instance)) for lease in had]
    return _tried(book, ended)._replace(leases=())


def _take_any(book: Book, pending: Iterable[Pending], ask: Ask, rules: Rules) -> Taken:
    """Messages that nobody has; by key, none about an object of which another is before it."""
    leased = {sequence for lease in book.leases for sequence in lease.sequences}
    left = MOST_IN_FLIGHT - len(leased) - len(book.waits)
    most = min(ask.most, left, state_size.room(book, ask, rules))
    given: list[Pending] = []
    exhausted: list[Pending] = []
    by_key = rules.order_by is OrderBy.KEY
    busy = {key for lease in book.leases for key in lease.keys.values()}
    enough = cut = False
    full: Full | None = None
    size = 0
    for message in pending:
        if message.sequence in leased or (by_key and message.key in busy):
            continue
        if by_key and message.key is not None:
            busy.add(message.key)
        if message.sequence in book.waits:
            continue
        if _exhausted(book, message, rules):
            exhausted.append(message)
            enough = len(exhausted) == _MOST_EXHAUSTED
        elif most <= 0:
            full = Full.MESSAGES if left <= 0 else Full.BYTES
            enough = True
        else:
            size += message.size
            cut = bool(given) and size > ask.most_bytes
            if not cut:
                given.append(message)
            enough = cut or len(given) == most
        if enough:
            break
    if given:
        keys = {message.sequence: message.key for message in given if by_key and message.key is not None}
        granted = _grant(book, given, ask, keys, wants_more=not enough)._replace(cut=cut)
        return granted._replace(exhausted=tuple(exhausted), ends=book.ends) if exhausted else granted
    times = [*(lease.until for lease in book.leases), *(wait.until for wait in book.waits.values())]
    return Taken(
        book=book,
        exhausted=tuple(exhausted),
        ends=book.ends,
        again_at=min(times, default=None),
        wants_more=not enough,
        full=full,
    )


def _grant(
    book: Book, given: Sequence[Pending], ask: Ask, keys: Mapping[int, str] | None = None, *, wants_more: bool = False
) -> Taken:
    number = book.granted + 1
    lease = Lease(
        id=str(number),
        instance=ask.instance,
        until=ask.now + ask.length,
        length=ask.length,
        retry=tuple(message.sequence for message in given if message.kind is Kind.RETRY),
        prefill=tuple(message.sequence for message in given if message.kind is Kind.PREFILL),
        main=tuple(message.sequence for message in given if message.kind is Kind.MAIN),
        keys=keys or {},
    )
    return Taken(
        book=book._replace(leases=(*book.leases, lease), granted=number),
        lease=lease,
        deliveries=tuple(book.tries.get(sequence, 0) + 1 for sequence in lease.sequences),
        wants_more=wants_more,
    )


def acknowledge(book: Book, messages: Iterable[Acked], seen: Mapping[Kind, Seen] | None = None) -> Book:
    """The messages are handled and never given again, whoever has them. What was seen of the queue keeps it short."""
    acked = list(messages)
    sequences = frozenset(message.sequence for message in acked)
    known = seen or {}
    for kind in {message.kind for message in acked}:
        done = book.done(kind).plus((each.sequence for each in acked if each.kind is kind), known.get(kind))
        book = book.with_done(kind, done)
    return book._replace(
        leases=_without(book.leases, sequences),
        position=max([book.position, *(message.position for message in acked if message.kind is Kind.MAIN)]),
        putting=_put(book.putting, acked),
        tries=less(book.tries, sequences),
        waits=less(book.waits, sequences),
        ends=less(book.ends, sequences) if book.ends else book.ends,
    )


def keep_next(book: Book, pending: Iterable[Pending], ask: Ask, rules: Rules) -> tuple[Book, Lease] | None:
    """Lease the oldest message to one who will ask for it in a moment; None if it cannot have it."""
    if rules.order_by is not OrderBy.POSITION or book.leases:
        return None
    taken = take(book, pending, ask, rules)
    if taken.lease is None:
        return None
    lease = taken.lease._replace(ahead=True)
    return taken.book._replace(leases=(lease,)), lease


def handed_over(book: Book, lease: Lease) -> Book:
    """A lease that was given ahead has been handed out."""
    told = lease._replace(ahead=False)
    return book._replace(leases=tuple(told if each is lease else each for each in book.leases))


def lapse(book: Book, messages: Sequence[Acked], now: int, seen: Mapping[Kind, Seen] | None = None) -> Book:
    """The messages waited for longer than the subscription keeps them: never given again, and counted."""
    before = book.expired
    position = max([before.position, *(message.position for message in messages if message.kind is Kind.MAIN)])
    counted = Expired(before.count + len(messages), position, now)
    return acknowledge(book, messages, seen)._replace(expired=counted)


def in_hand(book: Book, instance: str | None, rules: Rules) -> frozenset[int]:
    """What somebody has, and may still acknowledge. In ordered delivery, who asks again has given up what it had."""
    given_up = instance if rules.order_by is OrderBy.POSITION else None
    return frozenset(
        sequence
        for lease in book.leases
        if given_up is None or lease.instance != given_up
        for sequence in lease.sequences
    )


def handed_out(book: Book, pending: Iterable[Pending], last: int, instance: str, rules: Rules) -> list[Pending]:
    """What an instance means by all up to a message: what it has at hand, in the order of delivery.

    In ordered delivery, where all is in one hand, what it had and nobody took since counts as well. `LeaseLost` if it
    has the last one no more, or another instance has any of them.
    """
    owner = {sequence: lease for lease in book.leases for sequence in lease.sequences}
    ordered = rules.order_by is OrderBy.POSITION
    found: list[Pending] = []
    for message in pending:
        lease = owner.get(message.sequence)
        if lease is not None and lease.instance != instance and (ordered or message.sequence == last):
            raise _lost(message.sequence, lease)
        had = lease is None and ordered and message.sequence in book.tries
        if had or (lease is not None and lease.instance == instance):
            found.append(message)
        if message.sequence == last:
            break
    if not found or found[-1].sequence != last:
        raise LeaseLost(f"message {last} is in no lease of {instance!r}", fix="ask for messages again")
    return found


def retry(book: Book, sequence: int, again: Again, rules: Rules) -> Book:
    """The message was not handled: it is given again, after a pause. `LeaseLost` if somebody else has it.

    In ordered delivery nothing overtakes it: what the instance has behind it is given back too, unused.
    """
    book = expire(book, again.now)
    may_give_up(book, sequence, again.instance)
    lease = book.lease_of(sequence)
    if lease is not None:
        end = End(again.now, Ended.RETRY, again.instance)
        book = _tried(book, [((sequence,), end)], noting=again.noted)
        behind = lease.sequences[lease.sequences.index(sequence) :]
        book = _released(book, frozenset(behind if rules.order_by is OrderBy.POSITION else (sequence,)))
    if again.delay <= 0:
        return book
    return book._replace(waits={**book.waits, sequence: Wait(again.now + again.delay, again.delay)})


def extend(book: Book, sequence: int, instance: str, now: int, length: int) -> tuple[Book, Lease]:
    """The lease of a message, with all that is in it, begins anew. `LeaseLost` if the instance has it no more."""
    book = expire(book, now)
    lease = held(book, sequence, instance)
    longer = lease._replace(until=now + length, length=length)
    return book._replace(leases=tuple(longer if each is lease else each for each in book.leases)), longer


def give_back(book: Book, lease_id: str) -> Book:
    """A lease ends as if it had not been: nobody was there to take its messages."""
    return book._replace(leases=tuple(lease for lease in book.leases if lease.id != lease_id))


def held(book: Book, sequence: int, instance: str) -> Lease:
    """The lease by which an instance has a message; `LeaseLost` if it has not."""
    lease = book.lease_of(sequence)
    if lease is None:
        raise LeaseLost(
            f"message {sequence} is leased to nobody: the lease of {instance!r} has run out", fix="ask for it again"
        )
    if lease.instance != instance:
        raise _lost(sequence, lease)
    return lease


def may_give_up(book: Book, sequence: int, instance: str) -> None:
    """Let an instance give up only what it has, or had and nobody has now. Else `LeaseLost`."""
    lease = book.lease_of(sequence)
    if lease is None and sequence not in book.tries:
        raise LeaseLost(f"message {sequence} was not handed out", fix="ask for messages first")
    if lease is not None and lease.instance != instance:
        raise _lost(sequence, lease)


def _lost(sequence: int, lease: Lease) -> LeaseLost:
    return LeaseLost(f"message {sequence} is leased to instance {lease.instance!r}", fix="leave it to that one")


def _exhausted(book: Book, message: Pending, rules: Rules) -> bool:
    return rules.max_attempts is not None and book.tries.get(message.sequence, 0) >= rules.max_attempts


def _tried(book: Book, ended: Sequence[tuple[Sequence[int], End]], *, noting: bool = True) -> Book:
    """Deliveries are over, each of some messages, and count."""
    if not ended:
        return book
    tries = dict(book.tries)
    for sequences, _ in ended:
        for sequence in sequences:
            tries[sequence] = tries.get(sequence, 0) + 1
    return book._replace(tries=tries, ends=noted(book.ends, ended) if noting else book.ends)


def _released(book: Book, sequences: frozenset[int]) -> Book:
    return book._replace(leases=_without(book.leases, sequences))


def _without(leases: Sequence[Lease], sequences: frozenset[int]) -> tuple[Lease, ...]:
    """The leases less some messages; those that are empty then are over."""
    return tuple(
        lease.without(sequences) if sequences.intersection(lease.sequences) else lease
        for lease in leases
        if not sequences.issuperset(lease.sequences)
    )


def _put(putting: Mapping[int, bool], acked: Iterable[Acked]) -> Mapping[int, bool]:
    letters = {message.letter for message in acked if message.letter in putting} if putting else ()
    return {letter: done or letter in letters for letter, done in putting.items()} if letters else putting
