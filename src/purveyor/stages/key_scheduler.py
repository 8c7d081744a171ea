"""The order in which a stage works on the messages that it holds. Pure: no clock, no I/O.

In parallel, any message is ready: interactive ones first, then by age. In order, each key has a queue: the scheduler
gives out its messages one group at a time, in the order in which they came, and while the first of them waits for its
next attempt all behind it wait. Messages without a key share one queue.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from purveyor.stages.source import Incoming


@dataclass(slots=True)
class _KeyQueue:
    waiting: deque[Incoming] = field(default_factory=deque)
    busy: bool = False
    ready: bool = False


class KeyScheduler:
    """The waiting messages of one stage in one process."""

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._interactive: deque[Incoming] = deque()
        self._plain: deque[Incoming] = deque()
        self._queues: dict[str | None, _KeyQueue] = {}
        self._ready_keys: deque[str | None] = deque()
        self._ready_interactive_keys: deque[str | None] = deque()

    @property
    def has_ready(self) -> bool:
        """Whether `take` would return a message."""
        return bool(self._interactive or self._plain or self._ready_keys or self._ready_interactive_keys)

    def add(self, messages: Iterable[Incoming]) -> None:
        """Add messages that have arrived."""
        for message in messages:
            if self._ordered:
                self._queues.setdefault(message.key, _KeyQueue()).waiting.append(message)
                self._make_ready(message.key)
            else:
                (self._interactive if message.interactive else self._plain).append(message)

    def take(self, limit: int) -> list[Incoming]:
        """Take up to `limit` messages to process one after the other; their keys are busy until `release`."""
        taken: list[Incoming] = []
        while not self._ordered and len(taken) < limit and (self._interactive or self._plain):
            taken.append((self._interactive or self._plain).popleft())
        while len(taken) < limit and (self._ready_interactive_keys or self._ready_keys):
            key = (self._ready_interactive_keys or self._ready_keys).popleft()
            queue = self._queues[key]
            queue.ready, queue.busy = False, True
            while queue.waiting and len(taken) < limit:
                taken.append(queue.waiting.popleft())
        return taken

    def put_back(self, messages: Sequence[Incoming]) -> None:
        """Put messages that failed or were not processed back to the front."""
        for message in reversed(messages):
            if self._ordered:
                self._queues.setdefault(message.key, _KeyQueue()).waiting.appendleft(message)
            else:
                (self._interactive if message.interactive else self._plain).appendleft(message)

    def release(self, keys: Iterable[str | None]) -> None:
        """Make the next messages of these keys ready."""
        for key in set(keys) if self._ordered else ():
            queue = self._queues.get(key)
            if queue is None:
                continue
            queue.busy = False
            if queue.waiting:
                self._make_ready(key)
            else:
                del self._queues[key]

    def drain(self) -> list[Incoming]:
        """Take out all waiting messages."""
        left = [*self._interactive, *self._plain, *(item for queue in self._queues.values() for item in queue.waiting)]
        self._interactive.clear()
        self._plain.clear()
        self._ready_keys.clear()
        self._ready_interactive_keys.clear()
        self._queues.clear()
        return left

    def _make_ready(self, key: str | None) -> None:
        queue = self._queues[key]
        if not queue.busy and not queue.ready and queue.waiting:
            queue.ready = True
            interactive = any(message.interactive for message in queue.waiting)
            (self._ready_interactive_keys if interactive else self._ready_keys).append(key)
