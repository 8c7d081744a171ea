"""What a process has read of a subscription's queue: the messages that are not acknowledged, from the oldest on.

Messages are read a page at a time. Of each, what decides about its delivery is known until it is acknowledged; the
message itself is held as far as there is memory for it (see `memory`), the oldest first, and read again when it is
delivered. Nothing here is state that would be missed. Prefill comes first: the live subject is looked at only when the
leader of the stream has said that there is no more of the prefill, because a replica that lags could not know. Dead
letters that were put back come before both, the oldest position first; that there are any, and up to which sequence, is
told by the book.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from purveyor.delivery.done import Seen
from purveyor.delivery.memory_limit import Bodies, Memory, bytes_of
from purveyor.delivery.message_keys import mark
from purveyor.delivery.state import Acked, Book, Kind, Pending
from purveyor.jetstream.direct_get import Wanted, read_page
from purveyor.jetstream.headers import CAME_ON, LETTER, POSITION, Headers, first, number
from purveyor.jetstream.streams import StoredMessage
from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput, UnknownMessage, UnknownStream
from purveyor.model.event import event_key
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues

_PAGE: Final = 64
_PAGE_BYTES: Final = 4 << 20
_MOST: Final = 20_000
"""Messages that are looked at, at most: behind so many of busy keys nobody searches for a free one."""
_NEAR: Final = 8
"""Messages so near to each other are read again in one question."""
_AT_ONCE: Final = 32
_KNOWN_BYTES: Final = 300
"""What is known of a message takes so much, beside its key."""


class _Known(NamedTuple):
    """What decides about the delivery of a message."""

    kind: Kind
    position: int
    letter: int
    stored_at: int | None
    """In milliseconds."""
    key: str | None
    size: int

    @property
    def takes(self) -> int:
        """The bytes that it takes itself."""
        return _KNOWN_BYTES + (0 if self.key is None else len(self.key))


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
        self._known: dict[int, _Known] = {}
        self._bodies = Bodies(memory)
        self._leftover: dict[Kind, set[int]] = {kind: set() for kind in Kind}

    def touch(self) -> None:
        """Note that it is used: of those that are not, the messages are given up first."""
        self._memory.touch(self._bodies)

    def pending(self, book: Book) -> Iterator[Pending]:
        """All that is known and not acknowledged in a book, in the order of delivery."""
        for kind, sequences in self._there.items():
            done = book.done(kind)
            for sequence in self._by_position(sequences) if kind is Kind.RETRY else sequences:
                if sequence not in done:
                    known = self._known[sequence]
                    yield Pending(sequence, kind, known.key, known.size)

    def _by_position(self, sequences: list[int]) -> list[int]:
        return sorted(sequences, key=lambda sequence: (self._known[sequence].position, sequence))

    def lapsed(self, book: Book, before: int, in_hand: Collection[int], most: int) -> list[Acked]:
        """Messages at hand that were stored before a time, in milliseconds, and that nobody has; so many at most."""
        found: list[Acked] = []
        for kind, sequences in self._there.items():
            done = book.done(kind)
            for sequence in sequences:
                known = self._known[sequence]
                if known.stored_at is None or known.stored_at >= before or len(found) == most:
                    break
                if sequence not in in_hand and sequence not in done:
                    found.append(Acked(sequence, kind, known.position, known.letter))
        return found

    def seen(self) -> dict[Kind, Seen]:
        """How far each subject was looked at, and what is there."""
        return {kind: Seen(self._there[kind], self._read_to[kind]) for kind in Kind}

    def body(self, sequence: int) -> StoredMessage | None:
        """The message, if it is at hand."""
        return self._bodies.get(sequence)

    def find(self, sequence: int) -> Acked | None:
        """A message that is known, as one to acknowledge."""
        known = self._known.get(sequence)
        return None if known is None else Acked(sequence, known.kind, known.position, known.letter)

    async def fetch(self, sequences: Sequence[int]) -> dict[int, StoredMessage]:
        """Read messages again that are not held; one that is gone is not among them.

        Neighbours are read in one question of any replica, the others of the leader. Where one is asked for, and there
        is memory, those behind it are read with it: they are asked for next.
        """
        wanted = sorted(sequences)
        found: dict[int, StoredMessage] = {}
        for begin, end in _groups(wanted if len(wanted) > 1 else [*wanted, *self._behind(wanted[0])]):
            if begin < end:
                await self._fetch_range(begin, end, found)
        missing = [sequence for sequence in wanted if sequence not in found]
        for at in range(0, len(missing), _AT_ONCE):
            answers = await asyncio.gather(*map(self._get, missing[at : at + _AT_ONCE]))
            found |= {message.sequence: message for message in answers if message is not None}
        for message in found.values():
            if (known := self._known.get(message.sequence)) is not None:
                self._bodies.keep(message, known.size)
        return found

    def _behind(self, sequence: int) -> list[int]:
        known = self._known.get(sequence)
        if known is None or not self._bodies.has_room:
            return []
        there = self._there[known.kind]
        at = bisect_right(there, sequence)
        return [each for each in there[at : at + _PAGE] if self._bodies.get(each) is None]

    async def _fetch_range(self, begin: int, end: int, found: dict[int, StoredMessage]) -> None:
        more = True
        while more and begin <= end:
            count = end - begin + 1
            wanted = Wanted(subject=f"{self._name}.>", from_sequence=begin, count=count, max_bytes=_PAGE_BYTES)
            try:
                page = await read_page(self._queues, self._stream, wanted)
            except UnknownStream:
                return
            found |= {message.sequence: message for message in page.messages if message.sequence <= end}
            more = page.more and bool(page.messages)
            begin = page.messages[-1].sequence + 1 if page.messages else begin

    async def _get(self, sequence: int) -> StoredMessage | None:
        try:
            return await self._queues.streams.get(self._stream, sequence)
        except (UnknownMessage, UnknownStream):
            return None

    def is_behind(self, book: Book) -> bool:
        """Whether dead letters were put back that were not looked at."""
        return book.retry_to > max(self._read_to[Kind.RETRY], book.retry.floor)

    async def catch_up(self, book: Book) -> None:
        """Read what was put back."""
        while self.is_behind(book) and len(self._known) < _MOST:
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
        if len(self._known) >= _MOST:
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
            known = self._known[message.sequence] = _Known(
                kind,
                place_of(kind, message.headers),
                letter_of(message.headers) if kind is Kind.RETRY else 0,
                None if message.timestamp is None else int(message.timestamp.timestamp() * 1000),
                key_of(message) if self._keys else None,
                bytes_of(message),
            )
            self._memory.used += known.takes
            self._bodies.keep(message, known.size)

    def take_leftover(self) -> dict[Kind, set[int]]:
        """Messages that were met in the queue though they are acknowledged."""
        leftover, self._leftover = self._leftover, {kind: set() for kind in Kind}
        return leftover

    def drop_bodies(self, sequences: Iterable[int]) -> None:
        """Give up messages that are delivered."""
        self._bodies.drop(sequences)

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
        self._bodies.drop(sequences)
        for sequence in sequences:
            known = self._known.pop(sequence, None)
            if known is not None:
                self._memory.used -= known.takes

    def clear(self) -> None:
        """Forget all; it is read again when it is needed."""
        self._there = {kind: [] for kind in Kind}
        self._read_to = dict.fromkeys(Kind, 0)
        self._prefill_over = False
        self._memory.used -= sum(known.takes for known in self._known.values())
        self._known.clear()
        self._bodies.clear()


def _groups(sequences: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending sequences as ranges of those that are near to each other.

    >>> _groups([1, 2, 9, 50])
    [(1, 9), (50, 50)]
    """
    found: list[tuple[int, int]] = []
    for sequence in sequences:
        if found and sequence - found[-1][1] <= _NEAR:
            found[-1] = found[-1][0], sequence
        else:
            found.append((sequence, sequence))
    return found


def position_of(headers: Headers) -> int | None:
    """The position that a message in a queue carries."""
    return number(headers, POSITION)


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
    return number(headers, LETTER) or 0


def key_of(message: StoredMessage) -> str | None:
    """The mark of the key of a message; without a key there is nothing to keep an order by."""
    try:
        event = json_fields.parse(message.data, "event")
        body = json_fields.mapping(event.get("body"), "body")
        sides = {side: json_fields.mapping(body.get(side) or {}, side) for side in ("new", "old")}
    except InvalidInput:
        return None
    given = event.get("key")
    key = event_key(sides["new"], sides["old"], given=given if isinstance(given, str) else None)
    return None if key is None else mark(key)
