"""The words of delivery: what lies in a queue, what is leased, and the book that both are kept in. Pure.

The rules about them are in `leases`, the book as JSON in `book`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from purveyor.delivery.done import Done
from purveyor.model.done import Expired
from purveyor.model.policy import OrderBy

_V = TypeVar("_V")


class Kind(Enum):
    """The subjects of a queue, in the order in which they are delivered."""

    RETRY = "retry"
    """Dead letters that were put back."""
    PREFILL = "prefill"
    MAIN = "main"

    __hash__ = object.__hash__  # there is one of each; by its name, as enums do it, takes a call in Python


@dataclass(frozen=True, slots=True)
class Pending:
    """A message that lies in the queue and is not acknowledged."""

    sequence: int
    kind: Kind
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Acked:
    """A message to acknowledge; the position of a live one is noted."""

    sequence: int
    kind: Kind
    position: int = 0
    letter: int = 0
    """The dead letter that it was, if it was put back."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Messages in the hands of an instance until a time. `length` is for how long it was given."""

    id: str
    instance: str
    until: int
    length: int
    retry: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    main: tuple[int, ...] = ()
    keys: Mapping[int, str] = field(default_factory=dict)
    """The keys of its messages, where the order is kept by key."""
    ahead: bool = False
    """Whether it was given before it was asked for (see `ahead`), so that it is perhaps not handed out."""

    @property
    def sequences(self) -> tuple[int, ...]:
        """All its messages, in the order of delivery."""
        return self.retry + self.prefill + self.main

    def without(self, sequences: frozenset[int]) -> "Lease":
        """With some of its messages taken out."""
        return replace(
            self,
            retry=tuple(sequence for sequence in self.retry if sequence not in sequences),
            prefill=tuple(sequence for sequence in self.prefill if sequence not in sequences),
            main=tuple(sequence for sequence in self.main if sequence not in sequences),
            keys=less(self.keys, sequences),
        )


@dataclass(frozen=True, slots=True)
class Wait:
    """A message is not handed out before `until`; `length` is for how long it was put off."""

    until: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """All that is known about the delivery of one subscription."""

    incarnation: str
    position: int = 0
    """The highest position acknowledged; 0 if none was. Everything up to it was written to the queue once."""
    retry: Done = field(default_factory=Done)
    prefill: Done = field(default_factory=Done)
    main: Done = field(default_factory=Done)
    leases: tuple[Lease, ...] = ()
    tries: Mapping[int, int] = field(default_factory=dict)
    """How often a message was delivered before the lease it is in; one that was never is not in it."""
    waits: Mapping[int, Wait] = field(default_factory=dict)
    granted: int = 0
    """How many leases were given; their ids are these numbers."""
    retry_to: int = 0
    """Up to this sequence dead letters were put back: who has not looked so far must, before anything is given out."""
    putting: Mapping[int, bool] = field(default_factory=dict)
    """Dead letters that are being put back, and whether that was acknowledged before it was known to be complete."""
    expired: Expired = field(default_factory=Expired)

    def done(self, kind: Kind) -> Done:
        """What is acknowledged of a subject."""
        match kind:
            case Kind.MAIN:
                return self.main
            case Kind.PREFILL:
                return self.prefill
            case Kind.RETRY:
                return self.retry

    def lease_of(self, sequence: int) -> Lease | None:
        """The lease that a message is in."""
        return next((lease for lease in self.leases if sequence in lease.sequences), None)

    def deliveries(self, sequence: int) -> int:
        """How often a message was delivered."""
        return self.tries.get(sequence, 0) + (self.lease_of(sequence) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a subscription asked for."""

    order_by: OrderBy | None = OrderBy.POSITION
    max_attempts: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """An instance asks for messages."""

    instance: str
    now: int
    length: int
    most: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """An instance wants a message to be given again, after a delay."""

    instance: str
    now: int
    delay: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The answer: what it got, or when to look again."""

    book: Book
    lease: Lease | None = None
    deliveries: tuple[int, ...] = ()
    """Of each message of the lease, this one counted."""
    exhausted: tuple[Pending, ...] = ()
    """Messages that were delivered too often; they become dead letters, then asking again goes on behind them."""
    again_at: int | None = None
    """When time alone may change a refusal."""
    wants_more: bool = False
    """Whether more messages of the queue, if there are any, could have been given."""


def less(found: Mapping[int, _V], sequences: frozenset[int]) -> Mapping[int, _V]:
    """Without some messages; the same if it has none of them."""
    if sequences.isdisjoint(found):
        return found
    return {sequence: value for sequence, value in found.items() if sequence not in sequences}
