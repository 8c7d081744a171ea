"""The result of an audit, as data. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Difference(Enum):
    """The kinds of differences at a position of a queue."""

    MISSING = "missing"
    """It should be there, and was neither acknowledged nor parked."""
    DOUBLED = "doubled"
    UNEXPECTED = "unexpected"
    """The archive has no event at this position that the subscription gets."""
    DISORDERED = "out of order"
    """It is behind a later one."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a difference was found: the position of the event and the sequence in the queue, as far as they exist."""

    position: int | None
    sequence: int | None

    def __str__(self) -> str:
        return "?" if self.position is None else str(self.position)


@dataclass(frozen=True, slots=True)
class Findings:
    """Differences of one kind: how many, and the first of them."""

    count: int = 0
    first: tuple[Location, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One subscription: which events it should have got, and where they are."""

    subscription: str
    begin: int
    reached: int
    """The position of its dispatcher; events behind it are pending."""
    expected: int = 0
    delivered: int = 0
    queued: int = 0
    dead_lettered: int = 0
    discarded: int = 0
    """Dead letters that an operator discarded."""
    expired: int = 0
    """Messages that were never acknowledged in time: the audit counts those of the range as delivered."""
    pending: int = 0
    written_twice: int | None = None
    """How many more messages its queue ever took than there are events; None if that is not known."""
    suspended: str | None = None
    differences: Mapping[Difference, Findings] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        """Whether nothing differs."""
        return not self.written_twice and not any(found.count for found in self.differences.values())

    def found(self, difference: Difference) -> Findings:
        """Return the differences of a kind."""
        return self.differences.get(difference, Findings())

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "subscription": self.subscription,
            "begin": self.begin,
            "reached": self.reached,
            "suspended": self.suspended,
            "expected": self.expected,
            "delivered": self.delivered,
            "queued": self.queued,
            "dead_lettered": self.dead_lettered,
            "discarded": self.discarded,
            "expired": self.expired,
            "pending": self.pending,
            "written_twice": self.written_twice,
            "clean": self.clean,
            **{
                kind.name.lower(): {
                    "count": self.found(kind).count,
                    "first": [{"position": p.position, "sequence": p.sequence} for p in self.found(kind).first],
                }
                for kind in Difference
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All audited subscriptions, for a range of positions, both ends included."""

    first: int
    last: int
    accounts: tuple[Account, ...] = ()
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Subscriptions that this program does not understand, and the reason: they were not audited."""

    @property
    def clean(self) -> bool:
        """Whether nothing differs anywhere, and every subscription was audited."""
        return not self.unreadable and all(account.clean for account in self.accounts)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "first": self.first,
            "last": self.last,
            "clean": self.clean,
            "subscriptions": [account.to_json() for account in self.accounts],
            **({"unreadable": dict(self.unreadable)} if self.unreadable else {}),
        }
