"""Sequences of messages as they stand in a book: what is done (see the model), and runs of neighbours. Pure."""

from collections.abc import Iterable, Sequence

from purveyor.model.ack_ranges import Done, Seen

__all__ = ["Done", "Seen", "numbers", "runs"]


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
