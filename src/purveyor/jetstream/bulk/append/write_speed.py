"""Whether single messages pay on a server, as `append_once` found it: a memory per process, with no I/O of its own.

A server that syncs every write to disk (`sync_interval: always`) takes a thousand or two single messages a second, but
atomic batches nearly as fast as any other. It cannot be asked for that setting, so the first rows are timed. A machine
under load may look the same; then rows are written in batches for a while, which is right too, and only slower.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

PROBE_ROWS: Final = 200
"""So many rows are timed while the pace is unknown ..."""
LEAST_ROWS: Final = 50
"""... and from so many on the time says something."""

_FAST_ROWS_PER_SECOND: Final = 6000.0
_SLOW_PROBES: Final = 2  # in a row: one may have met a busy moment
_MEMORY_SECONDS: Final = 600.0


class Pace(Enum):
    """How a server takes single messages."""

    UNKNOWN = auto()
    FAST = auto()
    SLOW = auto()


@dataclass(frozen=True, slots=True)
class _Known:
    pace: Pace
    until: float
    slow_probes: int = 0


class Paces:
    """The pace of each server, for ten minutes after it was measured."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, ...], _Known] = {}

    def of(self, urls: tuple[str, ...]) -> Pace:
        """What is known of the server at these addresses."""
        known = self._known.get(urls)
        return known.pace if known is not None and self._clock() < known.until else Pace.UNKNOWN

    def note(self, urls: tuple[str, ...], rows: int, seconds: float) -> None:
        """So many single messages were answered within that time."""
        if rows < LEAST_ROWS:
            return
        until = self._clock() + _MEMORY_SECONDS
        if rows >= seconds * _FAST_ROWS_PER_SECOND:
            self._known[urls] = _Known(Pace.FAST, until)
            return
        before = self._known.get(urls)
        slow = 1 + (before.slow_probes if before is not None and self._clock() < before.until else 0)
        self._known[urls] = _Known(Pace.SLOW if slow >= _SLOW_PROBES else Pace.UNKNOWN, until, slow)


PACES: Final = Paces()
"""What this process knows."""
