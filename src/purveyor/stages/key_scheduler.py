"""Which of the messages that a stage holds may be worked on now. Pure: no clock, no I/O.

In parallel, any: interactive ones first, then by age. In order, each key is a lane: its messages come out one group at
a time, in the order in which they came, and while the first of a lane waits for its next attempt all behind it wait.
Messages without a key share one lane.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from purveyor.stages.source import Incoming


@dataclass(slots=True)
class _Lane:
    waiting: deque[Incoming] = field(default_factory=deque)
    busy: bool = False
    queued: bool = False


class Lanes:
    """See the module."""

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._urgent: deque[Incoming] = deque()
        self._plain: deque[Incoming] = deque()
        self._lanes: dict[str | None, _Lane] = {}
        self._ready: deque[str | None] = deque()
        self._urgent_ready: deque[str | None] = deque()

    @property
    def available(self) -> bool:
        """Whether `take` would give something."""
        return bool(self._urgent or self._plain or self._ready or self._urgent_ready)

    def add(self, messages: Iterable[Incoming]) -> None:
        """They have arrived."""
        for message in messages:
            if self._ordered:
                self._lanes.setdefault(message.key, _Lane()).waiting.append(message)
                self._queue(message.key)
            else:
                (self._urgent if message.interactive else self._plain).append(message)

    def take(self, limit: int) -> list[Incoming]:
        """Up to so many, to be worked on one after the other; their lanes are busy until `release`."""
        taken: list[Incoming] = []
        while not self._ordered and len(taken) < limit and (self._urgent or self._plain):
            taken.append((self._urgent or self._plain).popleft())
        while len(taken) < limit and (self._urgent_ready or self._ready):
            key = (self._urgent_ready or self._ready).popleft()
            lane = self._lanes[key]
            lane.queued, lane.busy = False, True
            while lane.waiting and len(taken) < limit:
                taken.append(lane.waiting.popleft())
        return taken

    def put_back(self, messages: Sequence[Incoming]) -> None:
        """They were not worked on, or failed: they come first again."""
        for message in reversed(messages):
            if self._ordered:
                self._lanes.setdefault(message.key, _Lane()).waiting.appendleft(message)
            else:
                (self._urgent if message.interactive else self._plain).appendleft(message)

    def release(self, keys: Iterable[str | None]) -> None:
        """The lanes of these keys may go on."""
        for key in set(keys) if self._ordered else ():
            lane = self._lanes.get(key)
            if lane is None:
                continue
            lane.busy = False
            if lane.waiting:
                self._queue(key)
            else:
                del self._lanes[key]

    def drain(self) -> list[Incoming]:
        """All that waits, taken out."""
        left = [*self._urgent, *self._plain, *(item for lane in self._lanes.values() for item in lane.waiting)]
        self._urgent.clear()
        self._plain.clear()
        self._ready.clear()
        self._urgent_ready.clear()
        self._lanes.clear()
        return left

    def _queue(self, key: str | None) -> None:
        lane = self._lanes[key]
        if not lane.busy and not lane.queued and lane.waiting:
            lane.queued = True
            urgent = any(message.interactive for message in lane.waiting)
            (self._urgent_ready if urgent else self._ready).append(key)
