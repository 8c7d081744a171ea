"""The unacknowledged messages of a subscription that a process has read from the queue, within a memory budget.

The buffer reads pages from the oldest message on. For each message it keeps what the lease rules need until the message
is acknowledged; it keeps the message itself only while the budget allows, the oldest first, and reads it again for
delivery. All of it can be read again.

The buffer reads prefill messages first. It reads live messages only when the leader of the stream has answered that
there are no more prefill messages: a lagging replica could not know. Redriven dead letters come before both, the lowest
position first; the delivery state says whether there are any, and up to which sequence.
"""

import asyncio
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from purveyor.delivery.lease_types import AckTarget, Pending
from purveyor.jetstream.headers import POSITION, Headers, first, number
from purveyor.jetstream.streams import PageRequest, StoredMessage, read_page
from purveyor.model import json_fields
from purveyor.model.ack_ranges import SeenMessages
from purveyor.model.delivery_state import DeliveryState, SubjectKind, compact_key
from purveyor.model.errors import InvalidInput, UnknownMessage, UnknownStream
from purveyor.model.event import event_key
from purveyor.model.message_headers import DEAD_LETTER_SEQUENCE, ORIGINAL_KIND
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues

MAX_BYTES_PER_SUBSCRIPTION: Final = 8 << 20
MAX_BYTES: Final = 64 << 20
"""For all subscriptions of a process."""
_OBJECT_BYTES: Final = 1000
"""The memory of the Python objects of a message, in addition to its bytes."""
_PAGE_MESSAGES: Final = 64
_PAGE_BYTES: Final = 4 << 20
_MAX_MESSAGES: Final = 20_000
"""The buffer does not search further for a message of a free key."""
_MAX_READ_GAP_MESSAGES: Final = 8
"""Messages with a smaller gap between them are read again in one request."""
_PARALLEL_READS: Final = 32
_SEQUENCE_LIMIT: Final = 2**63
"""All sequences are below it."""
_INFO_BYTES: Final = 300
"""The size of a `_MessageInfo` without its key."""


def position_of(headers: Headers) -> int | None:
    """Return the position that a message in a queue carries."""
    return number(headers, POSITION)


def sort_position(kind: SubjectKind, headers: Headers) -> int:
    """Return the position that orders the messages of a subject. Redriven prefill messages come before live ones."""
    from_prefill = kind is SubjectKind.RETRY and first(headers, ORIGINAL_KIND) == SubjectKind.PREFILL.value
    return 0 if from_prefill else position_of(headers) or 0


def subject_kind_of(message: StoredMessage) -> SubjectKind:
    """Return the kind of subject that a message is on."""
    last = message.subject.rpartition(".")[2]
    return next((kind for kind in (SubjectKind.RETRY, SubjectKind.PREFILL) if kind.value == last), SubjectKind.MAIN)


def dead_letter_id(headers: Headers) -> int:
    """Return the dead letter that a message was redriven from; 0 if there is none."""
    return number(headers, DEAD_LETTER_SEQUENCE) or 0


def compact_key_of(message: StoredMessage) -> str | None:
    """Return the compact key of an event; None if it has no key, so that no order applies to it."""
    try:
        event = json_fields.parse(message.data, "event")
        body = json_fields.mapping(event.get("body"), "body")
        sides = {side: json_fields.mapping(body.get(side) or {}, side) for side in ("new", "old")}
    except InvalidInput:
        return None
    given = event.get("key")
    key = event_key(sides["new"], sides["old"], given=given if isinstance(given, str) else None)
    return None if key is None else compact_key(key)


class MemoryBudget:
    """The memory that buffered messages of a process may take, per subscription and in total.

    When the total is exceeded, the least recently used subscriptions release their messages.
    """

    def __init__(self, each: int = MAX_BYTES_PER_SUBSCRIPTION, total: int = MAX_BYTES) -> None:
        self.each = each
        self.total = total
        self.used = 0
        self._holders: OrderedDict[HeldMessages, None] = OrderedDict()
        """Subscriptions that hold messages, the most recently used last."""

    @property
    def is_exceeded(self) -> bool:
        """Whether more is used than allowed. What is known about messages that are not held counts too."""
        return self.used > self.total

    def touch(self, held: "HeldMessages") -> None:
        """Record that the messages of a subscription are in use."""
        if held in self._holders:
            self._holders.move_to_end(held)

    def reserve(self, held: "HeldMessages", size: int) -> bool:
        """Reserve bytes for a subscription; return False if the budget does not allow it."""
        if held.held_bytes + size > self.each:
            return False
        while self.used + size > self.total:
            oldest = next((each for each in self._holders if each is not held), None)
            if oldest is None:
                return False
            oldest.clear()
        self.used += size
        if not held.held_bytes:
            self._holders[held] = None
        return True

    def give_back(self, held: "HeldMessages", size: int) -> None:
        """Return reserved bytes of a subscription."""
        self.used -= size
        if not held.held_bytes:
            self._holders.pop(held, None)


class HeldMessages:
    """The messages of one subscription that are in memory, by sequence."""

    def __init__(self, memory: MemoryBudget) -> None:
        self._memory = memory
        self._messages: dict[int, tuple[StoredMessage, int]] = {}
        self.held_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether messages may be read before they are needed."""
        return self.held_bytes < self._memory.each // 2

    def get(self, sequence: int) -> StoredMessage | None:
        """Return a message, if it is in memory."""
        found = self._messages.get(sequence)
        return None if found is None else found[0]

    def add(self, message: StoredMessage, size: int) -> None:
        """Hold a message, if the budget allows it."""
        if message.sequence not in self._messages and self._memory.reserve(self, size):
            self.held_bytes += size
            self._messages[message.sequence] = message, size

    def drop(self, sequences: Iterable[int]) -> None:
        """Release some messages."""
        size = 0
        for sequence in sequences:
            found = self._messages.pop(sequence, None)
            if found is not None:
                size += found[1]
        if size:
            self.held_bytes -= size
            self._memory.give_back(self, size)

    def clear(self) -> None:
        """Release all messages."""
        size, self.held_bytes = self.held_bytes, 0
        self._messages.clear()
        self._memory.give_back(self, size)


class _MessageInfo(NamedTuple):
    """The facts about a message that the lease rules need."""

    kind: SubjectKind
    position: int
    dead_letter_id: int
    stored_at: int | None
    """In milliseconds since 1970."""
    key: str | None
    size: int

    @property
    def info_bytes(self) -> int:
        """The memory that this object takes."""
        return _INFO_BYTES + (0 if self.key is None else len(self.key))


class MessageBuffer:
    """The buffer of one subscription. With `keys`, it extracts the key of each message."""

    def __init__(self, queues: Queues, name: str, memory: MemoryBudget, *, keys: bool) -> None:
        self._queues = queues
        self._name = name
        self._stream = subscription_queue(name).stream
        self._keys = keys
        self._memory = memory
        self._is_prefill_read = False
        self._sequences: dict[SubjectKind, list[int]] = {kind: [] for kind in SubjectKind}
        self._read_to = dict.fromkeys(SubjectKind, 0)
        self._infos: dict[int, _MessageInfo] = {}
        self._held = HeldMessages(memory)
        self._leftover: dict[SubjectKind, set[int]] = {kind: set() for kind in SubjectKind}

    def touch(self) -> None:
        """Record that the buffer is in use. Buffers that are not used release their messages first."""
        self._memory.touch(self._held)

    def pending(self, state: DeliveryState) -> Iterator[Pending]:
        """Yield the buffered messages that a state does not have as acknowledged, in the order of delivery."""
        for kind, sequences in self._sequences.items():
            acked = state.acked(kind)
            for sequence in self._by_position(sequences) if kind is SubjectKind.RETRY else sequences:
                if sequence not in acked:
                    info = self._infos[sequence]
                    yield Pending(sequence, kind, info.key, info.size)

    def _by_position(self, sequences: list[int]) -> list[int]:
        return sorted(sequences, key=lambda sequence: (self._infos[sequence].position, sequence))

    def find_expired(self, state: DeliveryState, before: int, leased: Collection[int], limit: int) -> list[AckTarget]:
        """Return up to `limit` buffered messages that were stored before a time and are not leased."""
        found: list[AckTarget] = []
        for kind, sequences in self._sequences.items():
            acked = state.acked(kind)
            for sequence in sequences:
                info = self._infos[sequence]
                if info.stored_at is None or info.stored_at >= before or len(found) == limit:
                    break
                if sequence not in leased and sequence not in acked:
                    found.append(AckTarget(sequence, kind, info.position, info.dead_letter_id))
        return found

    def seen(self) -> dict[SubjectKind, SeenMessages]:
        """Return what was read of each subject."""
        return {kind: SeenMessages(self._sequences[kind], self._read_to[kind]) for kind in SubjectKind}

    def message(self, sequence: int) -> StoredMessage | None:
        """Return a message, if it is in memory."""
        return self._held.get(sequence)

    async def read(self, sequence: int) -> StoredMessage | None:
        """Return a message from memory or from the queue; None if it does not exist."""
        message = self._held.get(sequence)
        return message if message is not None or not 0 < sequence < _SEQUENCE_LIMIT else await self._get(sequence)

    def find(self, sequence: int) -> AckTarget | None:
        """Return a buffered message as a target for an acknowledgement."""
        info = self._infos.get(sequence)
        return None if info is None else AckTarget(sequence, info.kind, info.position, info.dead_letter_id)

    async def fetch(self, sequences: Sequence[int]) -> dict[int, StoredMessage]:
        """Read messages again that are not in memory. Deleted messages are not in the result.

        Neighbours are read in one request from any replica, other messages from the leader. A request for one message
        also reads the messages behind it while the budget allows: the consumer asks for them next.
        """
        wanted = sorted(sequences)
        found: dict[int, StoredMessage] = {}
        for begin, end in _groups(wanted if len(wanted) > 1 else [*wanted, *self._next_after(wanted[0])]):
            if begin < end:
                await self._fetch_range(begin, end, found)
        missing = [sequence for sequence in wanted if sequence not in found]
        for at in range(0, len(missing), _PARALLEL_READS):
            answers = await asyncio.gather(*map(self._get, missing[at : at + _PARALLEL_READS]))
            found |= {message.sequence: message for message in answers if message is not None}
        for message in found.values():
            if (info := self._infos.get(message.sequence)) is not None:
                self._held.add(message, info.size)
        return found

    def _next_after(self, sequence: int) -> list[int]:
        info = self._infos.get(sequence)
        if info is None or not self._held.has_room:
            return []
        sequences = self._sequences[info.kind]
        at = bisect_right(sequences, sequence)
        return [each for each in sequences[at : at + _PAGE_MESSAGES] if self._held.get(each) is None]

    async def _fetch_range(self, begin: int, end: int, found: dict[int, StoredMessage]) -> None:
        more = True
        while more and begin <= end:
            count = end - begin + 1
            request = PageRequest(subject=f"{self._name}.>", from_sequence=begin, count=count, max_bytes=_PAGE_BYTES)
            try:
                page = await read_page(self._queues, self._stream, request)
            except UnknownStream:
                return
            found |= {message.sequence: message for message in page.messages if message.sequence <= end}
            more = page.has_more and bool(page.messages)
            begin = page.messages[-1].sequence + 1 if page.messages else begin

    async def _get(self, sequence: int) -> StoredMessage | None:
        try:
            return await self._queues.streams.get(self._stream, sequence)
        except (UnknownMessage, UnknownStream):
            return None

    def has_unread_redrives(self, state: DeliveryState) -> bool:
        """Return whether there are redriven messages that were not read."""
        return state.redriven_up_to > max(self._read_to[SubjectKind.RETRY], state.retry.floor)

    async def fetch_redriven(self, state: DeliveryState) -> None:
        """Read redriven messages."""
        while self.has_unread_redrives(state) and len(self._infos) < _MAX_MESSAGES:
            if await self._read(state, SubjectKind.RETRY, _PAGE_MESSAGES) or not self.has_unread_redrives(state):
                continue
            # They are acknowledged and deleted, or the answer came from a lagging replica: ask the leader.
            if not await self._read_next_from_leader(state, SubjectKind.RETRY):
                self._read_to[SubjectKind.RETRY] = state.redriven_up_to

    async def fetch_more(self, state: DeliveryState, count: int) -> bool:
        """Read about `count` more messages; return whether there may be still more."""
        if len(self._infos) >= _MAX_MESSAGES:
            return False
        if not self._is_prefill_read:
            if await self._read(state, SubjectKind.PREFILL, count):
                return True
            if await self._read_next_from_leader(state, SubjectKind.PREFILL):
                return True
            self._is_prefill_read = True
        return await self._read(state, SubjectKind.MAIN, count)

    async def _read(self, state: DeliveryState, kind: SubjectKind, count: int) -> bool:
        request = PageRequest(
            subject=f"{self._name}.{kind.value}",
            from_sequence=self._next_sequence(state, kind),
            count=max(count, _PAGE_MESSAGES),
            max_bytes=_PAGE_BYTES,
        )
        page = await read_page(self._queues, self._stream, request)
        self._add(state, kind, page.messages)
        return page.has_more

    async def _read_next_from_leader(self, state: DeliveryState, kind: SubjectKind) -> bool:
        """Read the next message of a subject; return False if there is none."""
        try:
            found = await self._queues.streams.get_next(
                self._stream, self._next_sequence(state, kind), f"{self._name}.{kind.value}"
            )
        except UnknownMessage:
            return False
        self._add(state, kind, [found])
        return True

    def _next_sequence(self, state: DeliveryState, kind: SubjectKind) -> int:
        return max(self._read_to[kind], state.acked(kind).floor) + 1

    def _add(self, state: DeliveryState, kind: SubjectKind, messages: Iterable[StoredMessage]) -> None:
        acked = state.acked(kind)
        for message in messages:
            if message.sequence <= self._read_to[kind]:
                continue
            self._read_to[kind] = message.sequence
            if message.sequence in acked:
                self._leftover[kind].add(message.sequence)
                continue
            self._sequences[kind].append(message.sequence)
            info = self._infos[message.sequence] = _MessageInfo(
                kind,
                sort_position(kind, message.headers),
                dead_letter_id(message.headers) if kind is SubjectKind.RETRY else 0,
                None if message.timestamp is None else int(message.timestamp.timestamp() * 1000),
                compact_key_of(message) if self._keys else None,
                memory_bytes(message),
            )
            self._memory.used += info.info_bytes
            self._held.add(message, info.size)

    def take_leftover(self) -> dict[SubjectKind, set[int]]:
        """Take the acknowledged messages that were still in the queue."""
        leftover, self._leftover = self._leftover, {kind: set() for kind in SubjectKind}
        return leftover

    def release(self, sequences: Iterable[int]) -> None:
        """Release delivered messages from memory."""
        self._held.drop(sequences)

    def drop_acked(self, state: DeliveryState) -> None:
        """Forget the messages that are acknowledged, by any process."""
        for kind in SubjectKind:
            acked = state.acked(kind)
            self.forget(kind, {sequence for sequence in self._sequences[kind] if sequence in acked})

    def forget(self, kind: SubjectKind, sequences: Collection[int]) -> None:
        """Forget messages of a subject."""
        if not sequences:
            return
        known = self._sequences[kind]
        for sequence in sequences:
            at = bisect_left(known, sequence)
            if at < len(known) and known[at] == sequence:
                del known[at]
        self._held.drop(sequences)
        for sequence in sequences:
            info = self._infos.pop(sequence, None)
            if info is not None:
                self._memory.used -= info.info_bytes

    def clear(self) -> None:
        """Forget all messages; they are read again when they are needed."""
        self._sequences = {kind: [] for kind in SubjectKind}
        self._read_to = dict.fromkeys(SubjectKind, 0)
        self._is_prefill_read = False
        self._memory.used -= sum(info.info_bytes for info in self._infos.values())
        self._infos.clear()
        self._held.clear()


def memory_bytes(message: StoredMessage) -> int:
    """Return the approximate size of a message in memory."""
    size = len(message.data) + _OBJECT_BYTES
    for name, values in message.headers.items():
        size += len(name)
        for value in values:
            size += len(value)
    return size


def _groups(sequences: Sequence[int]) -> list[tuple[int, int]]:
    """Group ascending sequences into ranges of near neighbours.

    >>> _groups([1, 2, 9, 50])
    [(1, 9), (50, 50)]
    """
    found: list[tuple[int, int]] = []
    for sequence in sequences:
        if found and sequence - found[-1][1] <= _MAX_READ_GAP_MESSAGES:
            found[-1] = found[-1][0], sequence
        else:
            found.append((sequence, sequence))
    return found
