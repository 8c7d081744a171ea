"""How many pushes may be under way to an endpoint: more while they succeed, fewer when they fail or are slow. Pure.

As in TCP: slow start doubles the window with every round until a threshold, from there on it grows by one per round. A
failure halves it, once per round: what was sent before the window shrank says nothing about the smaller one.
"""

from dataclasses import dataclass
from typing import Final

FIRST: Final = 4.0
SMALLEST: Final = 1.0
LARGEST: Final = 256.0
_SLOW_SHARE: Final = 0.5
_SHRINK: Final = 0.5


@dataclass(frozen=True, slots=True)
class Flow:
    """The window. `round` counts how often it shrank."""

    size: float = FIRST
    threshold: float = LARGEST
    round: int = 0

    @property
    def window(self) -> int:
        """How many may be under way."""
        return int(self.size)

    def succeeded(self, under_way: int) -> "Flow":
        """One was acknowledged while so many were under way: a window that is not used is not too small.

        >>> Flow(4, 8).succeeded(4), Flow(8, 8).succeeded(8), Flow(8, 8).succeeded(2).size
        (Flow(size=5, threshold=8, round=0), Flow(size=8.125, threshold=8, round=0), 8)
        """
        if under_way * 2 < self.size or self.size >= LARGEST:
            return self
        grown = self.size + (1 if self.size < self.threshold else 1 / self.size)
        return Flow(min(grown, LARGEST), self.threshold, self.round)

    def failed(self, sent_in: int) -> "Flow":
        """One that was sent in a round was not acknowledged, or slowly.

        >>> Flow(20, 256).failed(0)
        Flow(size=10.0, threshold=10.0, round=1)
        >>> Flow(20, 256).failed(0).failed(0)
        Flow(size=10.0, threshold=10.0, round=1)
        """
        if sent_in < self.round:
            return self
        smaller = max(self.size * _SHRINK, SMALLEST)
        return Flow(smaller, smaller, self.round + 1)


def is_slow(seconds: float, deadline_seconds: float) -> bool:
    """Whether an acknowledgement came so late that more pushes at a time would miss the deadline."""
    return seconds > deadline_seconds * _SLOW_SHARE
