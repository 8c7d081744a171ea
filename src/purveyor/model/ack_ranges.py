"""Ranges of acknowledged sequences, and the count of expired messages: parts of the delivery state. Pure.

The queue deletes an acknowledged message a moment later, and a replica later still. So the delivery state, not the
queue, decides whether a message is acknowledged: every sequence up to a floor, and above it the ranges that were
acknowledged out of order.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from purveyor.model.errors import InvalidInput


class SeenMessages(NamedTuple):
    """The sequences of a subject that a process has read and that are not acknowledged, ascending.

    Up to `up_to` the subject has no other message, except acknowledged ones.
    """

    sequences: Sequence[int] = ()
    up_to: int = 0

    def has_none_between(self, low: int, high: int) -> bool:
        """Return whether no unacknowledged message lies between two sequences."""
        at = bisect_right(self.sequences, low)
        return self.sequences[at] >= high if at < len(self.sequences) else high <= self.up_to


@dataclass(frozen=True, slots=True)
class AckRanges:
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
        """The highest acknowledged sequence; 0 if there is none."""
        return self.ranges[-1][1] if self.ranges else self.floor

    def plus(self, sequences: Iterable[int], seen: SeenMessages | None = None) -> "AckRanges":
        """Add sequences. Join two ranges if no unacknowledged message lies between them.

        >>> AckRanges(3).plus([8, 5], SeenMessages([5, 8, 9], 9))
        AckRanges(floor=8, ranges=())
        >>> AckRanges(3).plus([8], SeenMessages([5, 8, 9], 9))
        AckRanges(floor=3, ranges=((8, 8),))
        """
        known = seen or SeenMessages()
        more = {sequence for sequence in sequences if sequence not in self}
        if not more:
            return self
        joined = [(0, self.floor)]
        for begin, end in sorted([*self.ranges, *((sequence, sequence) for sequence in more)]):
            last = joined[-1]
            if begin <= last[1] + 1 or known.has_none_between(last[1], begin):
                joined[-1] = (last[0], max(end, last[1]))
            else:
                joined.append((begin, end))
        return AckRanges(joined[0][1], tuple(joined[1:]))

    def to_json(self) -> list[Any]:
        """Return `[floor, [begin, end], ...]`."""
        return [self.floor, *map(list, self.ranges)]

    @classmethod
    def from_json(cls, data: object) -> "AckRanges":
        """Read what `to_json` returns; None means that nothing is acknowledged."""
        given = [0] if data is None else data
        try:
            if not isinstance(given, list):
                raise TypeError("not a list")
            return cls(int(given[0]), tuple((int(begin), int(end)) for begin, end in given[1:]))
        except (TypeError, ValueError, IndexError) as error:
            raise InvalidInput(f"{data!r} is not a list of acknowledged ranges: {error}") from None


@dataclass(frozen=True, slots=True)
class Expired:
    """The messages that exceeded the retention time of their subscription: their total, and the last of them."""

    count: int = 0
    position: int = 0
    """The highest position of an expired live message; 0 if there is none."""
    at: int = 0
    """When the last message expired, in milliseconds since 1970; 0 if none did."""

    @classmethod
    def from_json(cls, data: object) -> "Expired":
        """Read `[count, position, at]`; None means that no message expired."""
        if data is None:
            return cls()
        try:
            if not isinstance(data, list):
                raise TypeError("not a list")
            count, position, at = map(int, data)
            return cls(count, position, at)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{data!r} is not a record of expired messages: {error}") from None

    def to_json(self) -> list[int]:
        """Return `[count, position, at]`."""
        return [self.count, self.position, self.at]


def to_runs(sequences: Iterable[int]) -> list[list[int]]:
    """Compress ascending sequences to runs of neighbours.

    >>> to_runs([1, 2, 3, 7])
    [[1, 3], [7, 7]]
    """
    found: list[list[int]] = []
    for sequence in sequences:
        if found and sequence == found[-1][1] + 1:
            found[-1][1] = sequence
        else:
            found.append([sequence, sequence])
    return found


def from_runs(found: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Expand what `to_runs` returns."""
    return tuple(sequence for begin, end in found for sequence in range(begin, end + 1))


def _begin(item: tuple[int, int]) -> int:
    return item[0]
