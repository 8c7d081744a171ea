"""Which messages of one subject are acknowledged: the part of a subscription's book that forgets nothing. Pure.

A queue deletes what is acknowledged, but a moment later, and a replica later still. So it is not the queue that tells
whether a message was acknowledged but this: everything up to a floor, and above it the ranges acknowledged out of turn.

Delivery writes the book; of what others read there `Acknowledged` is the shape.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.stored_record import Kind

DELIVERY_STATE: Final = Kind(
    "delivery state",
    (
        "incarnation",
        "position",
        "prefill",
        "main",
        "granted",
        "retry",
        "retry_to",
        "putting",
        "expired",
        "leases",
        "tries",
        "waits",
        "ends",
    ),
)
"""The value of a key in the bucket `acknowledged`: `delivery/state_codec.py` reads and writes all of it."""

_SUBJECTS: Final = ("retry", "prefill", "main")


class Seen(NamedTuple):
    """What a process has seen of a subject: the sequences that are not done, ascending, and how far it has looked.

    Up to there the subject holds nothing else, but what is done.
    """

    sequences: Sequence[int] = ()
    to: int = 0

    def nothing_between(self, low: int, high: int) -> bool:
        """Whether no message that is not done lies between two sequences."""
        at = bisect_right(self.sequences, low)
        return self.sequences[at] >= high if at < len(self.sequences) else high <= self.to


@dataclass(frozen=True, slots=True)
class Done:
    """All sequences up to `floor`, and above it those in `ranges`: ascending, both ends included."""

    floor: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, sequence: int) -> bool:
        if sequence <= self.floor:
            return True
        at = bisect_right(self.ranges, sequence, key=_begin) - 1
        return at >= 0 and sequence <= self.ranges[at][1]

    @property
    def last(self) -> int:
        """The highest of them; 0 if there is none."""
        return self.ranges[-1][1] if self.ranges else self.floor

    def plus(self, sequences: Iterable[int], seen: Seen | None = None) -> "Done":
        """With more of them; where nothing lies between two that are done, they become one range.

        >>> Done(3).plus([8, 5], Seen([5, 8, 9], 9))
        Done(floor=8, ranges=())
        >>> Done(3).plus([8], Seen([5, 8, 9], 9))
        Done(floor=3, ranges=((8, 8),))
        """
        known = seen or Seen()
        more = {sequence for sequence in sequences if sequence not in self}
        if not more:
            return self
        joined = [(0, self.floor)]
        for begin, end in sorted([*self.ranges, *((sequence, sequence) for sequence in more)]):
            last = joined[-1]
            if begin <= last[1] + 1 or known.nothing_between(last[1], begin):
                joined[-1] = (last[0], max(end, last[1]))
            else:
                joined.append((begin, end))
        return Done(joined[0][1], tuple(joined[1:]))

    def to_json(self) -> list[Any]:
        """As it lies in the book."""
        return [self.floor, *map(list, self.ranges)]

    @classmethod
    def from_json(cls, data: object) -> "Done":
        """Checked; nothing at all is nothing done."""
        given = [0] if data is None else data
        try:
            if not isinstance(given, list):
                raise TypeError("not a list")
            return cls(int(given[0]), tuple((int(begin), int(end)) for begin, end in given[1:]))
        except (TypeError, ValueError, IndexError) as error:
            raise InvalidInput(f"{data!r} does not tell what is acknowledged: {error}") from None


@dataclass(frozen=True, slots=True)
class Expired:
    """Messages that waited for longer than their subscription keeps them: how many ever, and the last of them."""

    count: int = 0
    position: int = 0
    """The highest position of a live one; 0 if none was."""
    at: int = 0
    """When the last of them went, in milliseconds of the wall clock; 0 if none did."""

    @classmethod
    def from_json(cls, data: object) -> "Expired":
        """From `[count, position, at]`; nothing at all is none."""
        if data is None:
            return cls()
        try:
            if not isinstance(data, list):
                raise TypeError("not a list")
            count, position, at = map(int, data)
            return cls(count, position, at)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{data!r} does not tell what has expired: {error}") from None

    def to_json(self) -> list[int]:
        """As it lies in the book."""
        return [self.count, self.position, self.at]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """What those who do not deliver need to know of a book: the value of a key in the bucket `acknowledged`."""

    incarnation: str
    position: int
    """The highest position acknowledged; 0 if none is."""
    main: Done | None = None
    """Which live messages are; None in a value that does not tell."""
    retry: Done = Done()
    """Which of the dead letters that were put back are."""
    retry_to: int = 0
    """The sequence up to which some were put back; 0 if none ever was."""
    expired: Expired = Expired()
    last_sequence: int = 0
    """The highest sequence that it speaks of: acknowledged, leased or put off."""

    @classmethod
    def from_json(cls, data: object) -> "Acknowledged":
        """Checked; InvalidInput tells what is wrong, UnreadableRecord that the version is not known."""
        given = json_fields.mapping(data, DELIVERY_STATE.what)
        DELIVERY_STATE.check_version(given)
        main, prefill, retry = (Done.from_json(given.get(part)) for part in ("main", "prefill", "retry"))
        try:
            named = [int(sequence) for part in ("tries", "waits") for sequence in given.get(part) or {}]
            leases = [lease for lease in given.get("leases") or () if isinstance(lease, Mapping)]
            runs = [run for lease in leases for part in _SUBJECTS for run in lease.get(part) or ()]
            named += [int(end) for _, end in runs]
            retry_to = int(given.get("retry_to") or 0)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"what is acknowledged cannot be read: {error}", fix="who else writes it?") from None
        return cls(
            incarnation=json_fields.text(given, "incarnation", DELIVERY_STATE.what),
            position=json_fields.whole(given, "position", DELIVERY_STATE.what),
            main=main if "main" in given else None,
            retry=retry,
            retry_to=retry_to,
            expired=Expired.from_json(given.get("expired")),
            last_sequence=max([main.last, prefill.last, retry.last, retry_to, *named]),
        )


def _begin(item: tuple[int, int]) -> int:
    return item[0]
