"""How large the next micro-batch should be, so that it takes about as long as wanted. Pure: the time is given.

To begin a batch costs the same however large it is, so with much to do large ones pay. But how long a row takes is
known only when some are done: it is the query's affair, and a dispatcher with a thousand subscriptions may spend on one
event what another spends on a thousand. So batches begin small, and each that was full says how large the next may be.
"""

from typing import Final

FIRST: Final = 20_000
LEAST: Final = 1000
_STEP: Final = 4
"""By so much at most batches grow or shrink from one to the next."""


class Pace:
    """The batches of one query: `seconds` each, and never more than `most` rows."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._limit = min(FIRST, most)
        self._began: float | None = None

    def limit(self, now: float) -> int:
        """The most rows of the batch that is planned now: the one before is done.

        >>> pace = Pace(5.0, most=400_000)
        >>> pace.limit(0.0), pace.begin(20_000, 0.0), pace.limit(2.0)
        (20000, None, 50000)
        """
        if self._began is not None:
            wanted = self._limit * self._seconds / max(now - self._began, 0.001)
            wanted = min(max(wanted, self._limit / _STEP, LEAST), self._limit * _STEP, self._most)
            self._limit, self._began = int(wanted), None
        return self._limit

    def begin(self, rows: int, now: float) -> None:
        """A batch of so many rows begins. One that is not full says nothing of how long a full one takes."""
        self._began = now if rows >= self._limit else None
