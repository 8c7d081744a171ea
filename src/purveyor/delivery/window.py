"""What a process has read of a subscription's queue: the messages that are not acknowledged, from the oldest on.

Messages are read a page at a time and kept until they are acknowledged or memory is needed for others; nothing here is
state that would be missed. Prefill comes first: the live subject is looked at only when the leader of the stream has
said that there is no more of the prefill, because a replica that lags could not know.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from purveyor.delivery.done import Seen
from purveyor.delivery.leases import Book, Kind, Pending
from purveyor.model import jsontext
from purveyor.model.errors import InvalidInput, UnknownMessage
from purveyor.model.event import event_key
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.direct import Wanted, read_page
from purveyor.queues.headers import POSITION, Headers, first
from purveyor.queues.streams import StoredMessage

_PAGE: Final = 64
_PAGE_BYTES: Final = 4 << 20
_MOST: Final = 20_000
"""Messages that are looked at, at most: behind so many of busy keys nobody searches for a free one."""


@dataclass(slots=True)
class Memory:
    """How much all windows of a process hold."""

    used: int = 0


class Window:
    """See the module."""

    def __init__(self, queues: Queues, name: str, memory: Memory, *, keys: bool) -> None:
        self._queues = queues
        self._name = name
        self._stream = subscription_queue(name).stream
        self._keys = keys
        self._memory = memory
        self._prefill_over = False
        self._there: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        self._read_to = dict.fromkeys(Kind, 0)
        self._key_of: dict[int, str | None] = {}
        self._position_of: dict[int, int] = {}
        self._bodies: dict[int, StoredMessage] = {}
        self._leftover: dict[Kind, set[int]] = {kind: set() for kind in Kind}
        self.size = 0

    def pending(self, book: Book) -> Iterator[Pending]:
        """All that is known and not acknowledged in a book, in the order of delivery."""
        for kind, sequences in self._there.items():
            done = book.done(kind)
            for sequence in sequences:
                if sequence not in done:
                    yield Pending(sequence, kind, self._key_of.get(sequence))

    def seen(self) -> dict[Kind, Seen]:
        """How far each subject was looked at, and what is there."""
        return {kind: Seen(self._there[kind], self._read_to[kind]) for kind in Kind}

    def body(self, sequence: int) -> StoredMessage | None:
        """The message, if it is at hand."""
        return self._bodies.get(sequence)

    def find(self, sequence: int) -> tuple[Kind, int] | None:
        """The subject and the position of a message that is known."""
        if sequence not in self._position_of:
            return None
        kind = Kind.PREFILL if sequence in self._there[Kind.PREFILL] else Kind.MAIN
        return kind, self._position_of[sequence]

    async def read_on(self, book: Book, count: int) -> bool:
        """Read about so many more messages; whether there may be still more."""
        if len(self._position_of) >= _MOST:
            return False
        if not self._prefill_over:
            if await self._read(book, Kind.PREFILL, count):
                return True
            try:
                found = await self._queues.streams.get_next(
                    self._stream, self._begin(book, Kind.PREFILL), f"{self._name}.{Kind.PREFILL.value}"
                )
            except UnknownMessage:
                self._prefill_over = True
            else:
                self._add(book, Kind.PREFILL, [found])
                return True
        return await self._read(book, Kind.MAIN, count)

    async def _read(self, book: Book, kind: Kind, count: int) -> bool:
        wanted = Wanted(
            subject=f"{self._name}.{kind.value}",
            from_sequence=self._begin(book, kind),
            count=max(count, _PAGE),
            max_bytes=_PAGE_BYTES,
        )
        page = await read_page(self._queues, self._stream, wanted)
        self._add(book, kind, page.messages)
        return page.more

    def _begin(self, book: Book, kind: Kind) -> int:
        return max(self._read_to[kind], book.done(kind).floor) + 1

    def _add(self, book: Book, kind: Kind, messages: Iterable[StoredMessage]) -> None:
        done = book.done(kind)
        for message in messages:
            if message.sequence <= self._read_to[kind]:
                continue
            self._read_to[kind] = message.sequence
            if message.sequence in done:
                self._leftover[kind].add(message.sequence)
                continue
            self._there[kind].append(message.sequence)
            self._position_of[message.sequence] = position_of(message.headers) or 0
            if self._keys:
                self._key_of[message.sequence] = key_of(message)
            self._keep(message)

    def _keep(self, message: StoredMessage) -> None:
        self._bodies[message.sequence] = message
        self._grow(len(message.data) + 1000)

    def take_leftover(self) -> dict[Kind, set[int]]:
        """Messages that were met in the queue though they are acknowledged."""
        leftover, self._leftover = self._leftover, {kind: set() for kind in Kind}
        return leftover

    def drop_bodies(self, sequences: Iterable[int]) -> None:
        """Forget the bytes of messages that are in good hands."""
        for sequence in sequences:
            message = self._bodies.pop(sequence, None)
            if message is not None:
                self._grow(-len(message.data) - 1000)

    def trim(self, book: Book) -> None:
        """Forget what is acknowledged, by whomever."""
        for kind in Kind:
            done = book.done(kind)
            self.forget(kind, {sequence for sequence in self._there[kind] if sequence in done})

    def forget(self, kind: Kind, sequences: Collection[int]) -> None:
        """Forget messages of a subject."""
        if not sequences:
            return
        self._there[kind] = [sequence for sequence in self._there[kind] if sequence not in sequences]
        self.drop_bodies(sequences)
        for sequence in sequences:
            self._position_of.pop(sequence, None)
            self._key_of.pop(sequence, None)

    def clear(self) -> None:
        """Forget all; it is read again when it is needed."""
        self._there = {kind: [] for kind in Kind}
        self._read_to = dict.fromkeys(Kind, 0)
        self._prefill_over = False
        self._key_of.clear()
        self._position_of.clear()
        self._bodies.clear()
        self._grow(-self.size)

    def _grow(self, size: int) -> None:
        self.size += size
        self._memory.used += size


def position_of(headers: Headers) -> int | None:
    """The position that a message in a queue carries."""
    text = first(headers, POSITION)
    return int(text) if text is not None and text.isdecimal() else None


def kind_of(message: StoredMessage) -> Kind:
    """The subject that a message lies on."""
    return Kind.PREFILL if message.subject.endswith(f".{Kind.PREFILL.value}") else Kind.MAIN


def key_of(message: StoredMessage) -> str | None:
    """Which object a message is about; without a key there is nothing to keep an order by."""
    try:
        event = jsontext.parse(message.data, "event")
        body = jsontext.mapping(event.get("body"), "body")
        sides = {side: jsontext.mapping(body.get(side) or {}, side) for side in ("new", "old")}
    except InvalidInput:
        return None
    given = event.get("key")
    return event_key(sides["new"], sides["old"], given=given if isinstance(given, str) else None)
