"""How often a login may fail before it has to wait. Pure; the time is given in.

Two counts, each over the last minute: for one user from one address, and for one address. Not for one user from
anywhere: then anybody could lock out anybody.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

WINDOW_SECONDS: Final = 60.0
MOST_PER_USER: Final = 10
MOST_PER_ADDRESS: Final = 100
_MOST_KEPT: Final = 10_000


@dataclass(slots=True)
class _Count:
    since: float
    attempts: int = 0


class FailedLogins:
    """The counts. What is old is forgotten, and there is an end to how much is kept."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[str, str | None], _Count] = OrderedDict()

    def wait_seconds(self, address: str, user: str, now: float) -> float:
        """How long a login from there has to wait; 0: not at all."""
        return max(
            self._wait((address, user), MOST_PER_USER, now),
            self._wait((address, None), MOST_PER_ADDRESS, now),
        )

    def begin(self, address: str, user: str, now: float) -> None:
        """Count an attempt of a user before it is known how it ends: a thousand at once are a thousand."""
        self._count((address, user), now)

    def failed(self, address: str, now: float) -> None:
        """It was wrong."""
        self._count((address, None), now)

    def succeeded(self, address: str, user: str) -> None:
        """It was right: what went wrong before is forgotten."""
        self._counts.pop((address, user), None)

    def undecided(self, address: str, user: str) -> None:
        """It could not be checked, and does not count."""
        count = self._counts.get((address, user))
        if count is not None:
            count.attempts = max(count.attempts - 1, 0)

    def _count(self, key: tuple[str, str | None], now: float) -> None:
        count = self._counts.get(key)
        if count is None or now - count.since >= WINDOW_SECONDS:
            count = self._counts[key] = _Count(now)
        count.attempts += 1
        self._counts.move_to_end(key)
        while len(self._counts) > _MOST_KEPT:
            self._counts.popitem(last=False)

    def _wait(self, key: tuple[str, str | None], most: int, now: float) -> float:
        count = self._counts.get(key)
        if count is None or count.attempts < most:
            return 0.0
        return max(count.since + WINDOW_SECONDS - now, 0.0)
