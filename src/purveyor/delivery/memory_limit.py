"""How much memory the messages take that this process holds: of each subscription, and of all together.

When all together take too much, the subscriptions that were not used for the longest time give up their messages. What
is given up is read from the queue again when it is needed.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from purveyor.jetstream.streams import StoredMessage

PER_SUBSCRIPTION: Final = 8 << 20
ALL_SUBSCRIPTIONS: Final = 64 << 20
_OBJECTS: Final = 1000
"""What the objects of a message take beside its bytes."""


class Memory:
    """The limits, in bytes, and what is used of them."""

    def __init__(self, each: int = PER_SUBSCRIPTION, total: int = ALL_SUBSCRIPTIONS) -> None:
        self.each = each
        self.total = total
        self.used = 0
        self._bodies: OrderedDict[Bodies, None] = OrderedDict()
        """Those that hold messages, the one that was used last at the end."""

    @property
    def is_short(self) -> bool:
        """Whether more is used than may be. What is known of messages that are not held counts too."""
        return self.used > self.total

    def touch(self, bodies: "Bodies") -> None:
        """Note that messages of a subscription are used."""
        if bodies in self._bodies:
            self._bodies.move_to_end(bodies)

    def take(self, bodies: "Bodies", size: int) -> bool:
        """Whether a subscription may hold so many bytes more; then they are used."""
        if bodies.held + size > self.each:
            return False
        while self.used + size > self.total:
            oldest = next((each for each in self._bodies if each is not bodies), None)
            if oldest is None:
                return False
            oldest.clear()
        self.used += size
        if not bodies.held:
            self._bodies[bodies] = None
        return True

    def give_back(self, bodies: "Bodies", size: int) -> None:
        """A subscription holds so many bytes less."""
        self.used -= size
        if not bodies.held:
            self._bodies.pop(bodies, None)


class Bodies:
    """The messages of one subscription that are held, by sequence."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._messages: dict[int, tuple[StoredMessage, int]] = {}
        self.held = 0
        """Their bytes."""

    @property
    def has_room(self) -> bool:
        """Whether it is worth to read messages that are not needed yet."""
        return self.held < self._memory.each // 2

    def get(self, sequence: int) -> StoredMessage | None:
        """A message, if it is held."""
        found = self._messages.get(sequence)
        return None if found is None else found[0]

    def keep(self, message: StoredMessage, size: int) -> None:
        """Hold a message of so many bytes, if there is room for it."""
        if message.sequence not in self._messages and self._memory.take(self, size):
            self.held += size
            self._messages[message.sequence] = message, size

    def drop(self, sequences: Iterable[int]) -> None:
        """Give up some messages."""
        size = 0
        for sequence in sequences:
            found = self._messages.pop(sequence, None)
            if found is not None:
                size += found[1]
        if size:
            self.held -= size
            self._memory.give_back(self, size)

    def clear(self) -> None:
        """Give up all messages."""
        size, self.held = self.held, 0
        self._messages.clear()
        self._memory.give_back(self, size)


def bytes_of(message: StoredMessage) -> int:
    """What a message takes in memory, about."""
    size = len(message.data) + _OBJECTS
    for name, values in message.headers.items():
        size += len(name)
        for value in values:
            size += len(value)
    return size
