"""What a process has read of a subscription's queue: the messages that are not acknowledged, from the oldest on.

Messages are read a page at a time and kept until they are acknowledged or memory is needed for others; nothing here is
state that would be missed. Prefill comes first: the live subject is looked at only when the leader of the stream has
said that there is no more of the prefill, because a replica that lags could not know. Dead letters that were put back
come before both, the oldest position first; that there are any, and up to which sequence, is told by the book.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from purveyor.delivery.done import Seen
from purveyor.delivery.words import Acked, Book, Kind, Pending
from purveyor.model import jsontext
from purveyor.model.errors import InvalidInput, UnknownMessage
from purveyor.model.event import event_key
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.direct import Wanted, read_page
from purveyor.queues.headers import CAME_ON, LETTER, POSITION, Headers, first
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
        self._letter_of: dict[int, int] = {}
        self._stored_at: dict[int, int] = {}
        self._bodies: dict[int, StoredMessage] = {}
        self._leftover: dict[Kind, set[int]] = {kind: set() for kind in Kind}
        self.size = 0

    def pending(self, book: Book) -> Iterator[Pending]:
        """All that is known and not acknowledged in a book, in the order of delivery."""
        for kind, sequences in self._there.items():
            done = book.done(kind)
            for sequence in self._by_position(sequences) if kind is Kind.RETRY else sequences:
                if sequence not in done:
                    yield Pending(sequence, kind, self._key_of.get(sequence))

    def _by_position(self, sequences: list[int]) -> list[int]:
        return sorted(sequences, key=lambda sequence: (self._position_of[sequence], sequence))

    def lapsed(self, book: Book, before: int, in_hand: Collection[int], most: int) -> list[Acked]:
        """Messages at hand that were stored before a time, in milliseconds, and that nobody has; so many at most."""
        found: list[Acked] = []
        for kind, sequences in self._there.items():
            done = book.done(kind)
            for sequence in sequences:
                if self._stored_at.get(sequence, before) >= before or len(found) == most:
                    break
                if sequence not in in_hand and sequence not in done:
                    found.append(self._acked(sequence, kind))
        return found

    def seen(self) -> dict[Kind, Seen]:
        """How far each subject was looked at, and what is there."""
        return {kind: Seen(self._there[kind], self._read_to[kind]) for kind in Kind}

    def body(self, sequence: int) -> StoredMessage | None:
        """The message, if it is at hand."""
        return self._bodies.get(sequence)

    def find(self, sequence: int) -> Acked | None:
        """A message that is known, as one to acknowledge."""
        if sequence not in self._position_of:
            return None
        kinds = (kind for kind in (Kind.RETRY, Kind.PREFILL) if sequence in self._there[kind])
        return self._acked(sequence, next(kinds, Kind.MAIN))

    def _acked(self, sequence: int, kind: Kind) -> Acked:
        return Acked(sequence, kind, self._position_of[sequence], self._letter_of.get(sequence, 0))

    def is_behind(self, book: Book) -> bool:
        """Whether dead letters were put back that were not looked at."""
        return book.retry_to > max(self._read_to[Kind.RETRY], book.retry.floor)

    async def catch_up(self, book: Book) -> None:
        """Read what was put back."""
        while self.is_behind(book) and len(self._position_of) < _MOST:
            if await self._read(book, Kind.RETRY, _PAGE) or not self.is_behind(book):
                continue
            try:  # acknowledged and gone, or a replica that lags was asked: the leader knows
                found = await self._queues.streams.get_next(
                    self._stream, self._begin(book, Kind.RETRY), f"{self._name}.{Kind.RETRY.value}"
                )
            except UnknownMessage:
                self._read_to[Kind.RETRY] = book.retry_to
            else:
                self._add(book, Kind.RETRY, [found])

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
            self._position_of[message.sequence] = place_of(kind, message.headers)
            if message.timestamp is not None:
                self._stored_at[message.sequence] = int(message.timestamp.timestamp() * 1000)
            if kind is Kind.RETRY:
                self._letter_of[message.sequence] = letter_of(message.headers)
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
        there = self._there[kind]
        for sequence in sequences:
            at = bisect_left(there, sequence)
            if at < len(there) and there[at] == sequence:
                del there[at]
        self.drop_bodies(sequences)
        for sequence in sequences:
            for known in (self._position_of, self._letter_of, self._stored_at):
                known.pop(sequence, None)
            self._key_of.pop(sequence, None)

    def clear(self) -> None:
        """Forget all; it is read again when it is needed."""
        self._there = {kind: [] for kind in Kind}
        self._read_to = dict.fromkeys(Kind, 0)
        self._prefill_over = False
        self._key_of.clear()
        for known in (self._position_of, self._letter_of, self._stored_at):
            known.clear()
        self._bodies.clear()
        self._grow(-self.size)

    def _grow(self, size: int) -> None:
        self.size += size
        self._memory.used += size


def position_of(headers: Headers) -> int | None:
    """The position that a message in a queue carries."""
    text = first(headers, POSITION)
    return int(text) if text is not None and text.isdecimal() else None


def place_of(kind: Kind, headers: Headers) -> int:
    """By what messages of a subject are ordered: their position. What was prefilled comes before what is live."""
    put_back = kind is Kind.RETRY and first(headers, CAME_ON) == Kind.PREFILL.value
    return 0 if put_back else position_of(headers) or 0


def kind_of(message: StoredMessage) -> Kind:
    """The subject that a message lies on."""
    last = message.subject.rpartition(".")[2]
    return next((kind for kind in (Kind.RETRY, Kind.PREFILL) if kind.value == last), Kind.MAIN)


def letter_of(headers: Headers) -> int:
    """The dead letter that a message was before it was put back; 0 if that is not said."""
    text = first(headers, LETTER)
    return int(text) if text is not None and text.isdecimal() else 0


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
