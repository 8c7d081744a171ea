"""The words of delivery: what lies in a queue, what is leased, and the book that both are kept in. Pure.

The rules about them are in `leases`, the book as JSON in `book`. They are tuples with names: several are made for every
message, and those cost a fraction of what frozen dataclasses do.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from purveyor.delivery.done import Done
from purveyor.model.ack_ranges import Expired
from purveyor.model.delivery_policy import OrderBy

_V = TypeVar("_V")
_NOTHING: Final[Mapping[int, Any]] = MappingProxyType({})
_NO_LIMIT: Final = 1 << 62


class Kind(Enum):
    """The subjects of a queue, in the order in which they are delivered."""

    RETRY = "retry"
    """Dead letters that were put back."""
    PREFILL = "prefill"
    MAIN = "main"

    __hash__ = object.__hash__  # there is one of each; by its name, as enums do it, takes a call in Python


class Pending(NamedTuple):
    """A message that lies in the queue and is not acknowledged."""

    sequence: int
    kind: Kind
    key: str | None = None
    """The mark of its key (see `keys`), where the order is kept by key."""
    size: int = 0
    """Its bytes."""


class Acked(NamedTuple):
    """A message to acknowledge; the position of a live one is noted."""

    sequence: int
    kind: Kind
    position: int = 0
    letter: int = 0
    """The dead letter that it was, if it was put back."""


class Lease(NamedTuple):
    """Messages in the hands of an instance until a time. `length` is for how long it was given."""

    id: str
    instance: str
    until: int
    length: int
    retry: tuple[int, ...] = ()
    prefill: tuple[int, ...] = ()
    main: tuple[int, ...] = ()
    keys: Mapping[int, str] = _NOTHING
    """The marks of the keys of its messages (see `keys`), where the order is kept by key."""
    ahead: bool = False
    """Whether it was given before it was asked for (see `ahead`), so that it is perhaps not handed out."""

    @property
    def sequences(self) -> tuple[int, ...]:
        """All its messages, in the order of delivery."""
        return self.retry + self.prefill + self.main

    def without(self, sequences: frozenset[int]) -> "Lease":
        """With some of its messages taken out."""
        return self._replace(
            retry=tuple(sequence for sequence in self.retry if sequence not in sequences),
            prefill=tuple(sequence for sequence in self.prefill if sequence not in sequences),
            main=tuple(sequence for sequence in self.main if sequence not in sequences),
            keys=less(self.keys, sequences),
        )


class Wait(NamedTuple):
    """A message is not handed out before `until`; `length` is for how long it was put off."""

    until: int
    length: int


class Ended(Enum):
    """How a delivery ended that did not end with an acknowledgement."""

    RAN_OUT = "ran out"
    """Its lease did."""
    ASKED_AGAIN = "asked again"
    """In ordered delivery, the one who had it asked for messages and had not answered for it."""
    RETRY = "retry"
    """The one who had it wants it to be delivered again."""


class End(NamedTuple):
    """When and how a delivery ended, and who had the message."""

    at: int
    how: Ended
    instance: str


class Book(NamedTuple):
    """All that is known about the delivery of one subscription."""

    incarnation: str
    position: int = 0
    """The highest position acknowledged; 0 if none was. Everything up to it was written to the queue once."""
    retry: Done = Done()
    prefill: Done = Done()
    main: Done = Done()
    leases: tuple[Lease, ...] = ()
    tries: Mapping[int, int] = _NOTHING
    """How often a message was delivered before the lease it is in; one that was never is not in it."""
    waits: Mapping[int, Wait] = _NOTHING
    granted: int = 0
    """How many leases were given; their ids are these numbers."""
    retry_to: int = 0
    """Up to this sequence dead letters were put back: who has not looked so far must, before anything is given out."""
    putting: Mapping[int, bool] = _NOTHING
    """Dead letters that are being put back, and whether that was acknowledged before it was known to be complete."""
    expired: Expired = Expired()
    ends: Mapping[int, tuple[End, ...]] = _NOTHING
    """How the earlier deliveries of a message ended, the last of them (see `ends`)."""

    def done(self, kind: Kind) -> Done:
        """What is acknowledged of a subject."""
        match kind:
            case Kind.MAIN:
                return self.main
            case Kind.PREFILL:
                return self.prefill
            case Kind.RETRY:
                return self.retry

    def with_done(self, kind: Kind, done: Done) -> "Book":
        """With something else acknowledged of a subject."""
        match kind:
            case Kind.MAIN:
                return self._replace(main=done)
            case Kind.PREFILL:
                return self._replace(prefill=done)
            case Kind.RETRY:
                return self._replace(retry=done)

    def lease_of(self, sequence: int) -> Lease | None:
        """The lease that a message is in."""
        return next((lease for lease in self.leases if sequence in lease.sequences), None)

    def deliveries(self, sequence: int) -> int:
        """How often a message was delivered."""
        return self.tries.get(sequence, 0) + (self.lease_of(sequence) is not None)


class Rules(NamedTuple):
    """What a subscription asked for."""

    order_by: OrderBy | None = OrderBy.POSITION
    max_attempts: int | None = None
    state_bytes: int = _NO_LIMIT
    """How large the stored state may become by leases."""


class Full(Enum):
    """Why nothing more is leased, though there may be messages."""

    MESSAGES = "messages"
    """As many are leased or put off as may be."""
    BYTES = "bytes"
    """The stored state is nearly as large as the server takes."""


class Ask(NamedTuple):
    """An instance asks for messages: at most so many, with so many bytes, but one at least."""

    instance: str
    now: int
    length: int
    most: int = 1
    most_bytes: int = _NO_LIMIT


class Again(NamedTuple):
    """An instance wants a message to be given again, after a delay."""

    instance: str
    now: int
    delay: int = 0
    noted: bool = True
    """Whether the book is to tell it; push keeps notes of its own."""


class Taken(NamedTuple):
    """The answer: what it got, or when to look again."""

    book: Book
    lease: Lease | None = None
    deliveries: tuple[int, ...] = ()
    """Of each message of the lease, this one counted."""
    exhausted: tuple[Pending, ...] = ()
    """Messages that were delivered too often; they become dead letters, then asking again goes on behind them."""
    ends: Mapping[int, tuple[End, ...]] = _NOTHING
    """How the deliveries of those ended."""
    again_at: int | None = None
    """When time alone may change a refusal."""
    wants_more: bool = False
    """Whether more messages of the queue, if there are any, could have been given."""
    cut: bool = False
    """Whether there are fewer than were asked for because of their bytes."""
    full: Full | None = None
    """Why nothing could be given, whatever is in the queue."""


def less(found: Mapping[int, _V], sequences: frozenset[int]) -> Mapping[int, _V]:
    """Without some messages; the same if it has none of them."""
    if sequences.isdisjoint(found):
        return found
    return {sequence: value for sequence, value in found.items() if sequence not in sequences}
