"""Which messages of one subject are acknowledged: the part of a subscription's book that forgets nothing. Pure.

A queue deletes what is acknowledged, but a moment later, and a replica later still. So it is not the queue that tells
whether a message was acknowledged but this: everything up to a floor, and above it the ranges acknowledged out of turn.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from purveyor.model.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Seen:
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


def runs(sequences: Iterable[int]) -> list[list[int]]:
    """Numbers as runs of neighbours, for a short text.

    >>> runs([1, 2, 3, 7])
    [[1, 3], [7, 7]]
    """
    found: list[list[int]] = []
    for sequence in sequences:
        if found and sequence == found[-1][1] + 1:
            found[-1][1] = sequence
        else:
            found.append([sequence, sequence])
    return found


def numbers(found: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """What `runs` made short."""
    return tuple(sequence for begin, end in found for sequence in range(begin, end + 1))


def _begin(item: tuple[int, int]) -> int:
    return item[0]
