"""Many answers of an instance at once, as one change of a book. Pure: what `leases` says of one message, for many."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from purveyor.delivery import lease_rules
from purveyor.delivery.done import Seen
from purveyor.delivery.state import Acked, Again, Book, Kind, Lease, Rules, Wait
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.errors import LeaseLost


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What became of messages that an instance has."""

    instance: str
    acknowledged: Sequence[Acked] = ()
    again: Mapping[int, int] = field(default_factory=dict)
    """To be given again after so many milliseconds: an attempt was made."""
    unused: Sequence[int] = ()
    """To be given again as if they never had been given."""
    renew: int | None = None
    """All its leases begin anew, for so long."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The next book, and what of the answers was news in it."""

    book: Book
    acknowledged: tuple[Acked, ...] = ()


def settle(book: Book, answers: Answers, now: int, rules: Rules, seen: Mapping[Kind, Seen] | None = None) -> Settled:
    """Apply what is still true: a message that was acknowledged, or that another instance has by now, is left alone.

    What was acknowledged counts whoever has the message, as everywhere.
    """
    after = lease_rules.expire(book, now)
    acked = tuple(each for each in answers.acknowledged if each.sequence not in after.done(each.kind))
    if acked:
        after = lease_rules.acknowledge(after, acked, seen)
    if answers.again:
        after = _put_off(after, answers, now, rules)
    if answers.unused:
        mine = frozenset(answers.unused)
        after = after._replace(leases=tuple(_less(lease, mine, answers.instance) for lease in after.leases))
        after = after._replace(leases=tuple(lease for lease in after.leases if lease.sequences))
    if answers.renew is not None:
        until = now + answers.renew
        after = after._replace(
            leases=tuple(
                lease._replace(until=until, length=answers.renew) if lease.instance == answers.instance else lease
                for lease in after.leases
            ),
        )
    return Settled(after, acked)


def _put_off(book: Book, answers: Answers, now: int, rules: Rules) -> Book:
    if rules.order_by is OrderBy.POSITION:
        for sequence, delay in answers.again.items():
            try:
                again = Again(instance=answers.instance, now=now, delay=delay, noted=False)
                book = lease_rules.retry(book, sequence, again, rules)
            except LeaseLost:
                continue
        return book
    owner = {sequence: lease for lease in book.leases for sequence in lease.sequences}
    tries, waits, ended = dict(book.tries), dict(book.waits), set()
    for sequence, delay in answers.again.items():
        lease = owner.get(sequence)
        if lease is None and sequence not in tries:
            continue  # acknowledged, or never given
        if lease is not None:
            if lease.instance != answers.instance:
                continue
            tries[sequence] = tries.get(sequence, 0) + 1
            ended.add(sequence)
        if delay > 0:
            waits[sequence] = Wait(now + delay, delay)
    gone = frozenset(ended)
    kept = (_less(lease, gone, answers.instance) for lease in book.leases)
    return book._replace(tries=tries, waits=waits, leases=tuple(lease for lease in kept if lease.sequences))


def _less(lease: Lease, sequences: frozenset[int], instance: str) -> Lease:
    if lease.instance != instance or sequences.isdisjoint(lease.sequences):
        return lease
    return lease.without(sequences)
