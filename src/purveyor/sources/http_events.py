"""Events that programs send: into `incoming`, and told as accepted only when they are stored there.

One by one on the connection of the process; many as one atomic batch, all of them or none. Each carries the login that
sent it, beside the `publisher_name` that it gave itself.

The id of an event belongs to the login that sent it: the server recognises a repetition by a digest of both, the
message id. The id itself goes along in a header, for consumers and the archive.
"""

import asyncio
import hashlib
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

from purveyor.jetstream.headers import EVENT_ID
from purveyor.jetstream.publisher import Expect, Receipt
from purveyor.model import json_fields, tracing
from purveyor.model.errors import InvalidInput, UnknownStream
from purveyor.model.event import SUBJECT, Event
from purveyor.model.event_limits import check_event_id
from purveyor.model.json_fields import Json
from purveyor.model.metrics import PUBLISHED
from purveyor.model.tracing import Carrier
from purveyor.queues.catalogue import incoming
from purveyor.queues.client import Queues
from purveyor.sources.schemas.event_validator import Rules

LOGIN: Final = "Purveyor-Login"
"""The header with the login that sent an event."""
NO_LOGIN: Final = ""
"""In place of a login, for who needs none: the command line."""
MOST_AT_ONCE: Final = 1000
HEADER_ROOM_BYTES: Final = 2048
"""Left for the headers of an event: its ids, its login, its trace."""
_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Incoming:
    """An event that the edge accepted, the id that a repetition of it has, and the body of its message."""

    event: Event
    id: str
    data: bytes

    @classmethod
    def read(cls, fields: Json, rules: Rules, default_id: str | None = None) -> Self:
        """Accept an event by the rules; InvalidInput names what is wrong with it.

        `id` is one of the fields, or missing; then it has the default, or a new one.
        """
        rest = dict(json_fields.mapping(fields, "event"))
        identity = rest.pop("id", None)
        event, data = rules.read(rest)
        return cls(event, check_event_id((default_id or new_id()) if identity is None else identity), data)

    @property
    def place(self) -> tuple[str, str]:
        """Its realm and topic."""
        return self.event.realm, self.event.topic

    def message_id(self, login: str) -> str:
        """The id by which the server recognises a repetition by the same login.

        No other writer of the queue has ids of this form, so that a publisher cannot suppress their messages.
        """
        digest = hashlib.blake2b(f"{login}\0{self.id}".encode(), digest_size=20)  # an id holds no NUL
        return f"event:{digest.hexdigest()}"

    def headers(self, login: str, trace: Carrier) -> dict[str, str]:
        """The headers of its message; without a login those of the command line."""
        return {EVENT_ID: self.id, **({LOGIN: login} if login else {}), **trace}


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of many events: stored now or before (`duplicates`), up to which position."""

    stored: int
    duplicates: int
    position: int


class TooLarge(InvalidInput):
    """An event that the server does not take because of its size."""


class EventIntake:
    """See the module. Every method raises an `Unavailable` when the server is away: then the same may be sent again."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._ready_on = 0
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="purveyor-intake")

    async def store(self, given: Incoming, login: str, trace: Carrier = tracing.NONE) -> Receipt:
        """Store one event; where it is. It carries the trace on, or the one among its attributes."""
        check_size(given, self._queues.connection.max_payload)
        identity, headers = given.message_id(login), given.headers(login, trace or trace_of(given))
        await self.ensure()
        try:
            receipt = await self._publish(identity, given.data, headers)
        except UnknownStream:  # somebody removed the queue: it is made again, with its readers
            self._ready_on = 0
            await self.ensure()
            receipt = await self._publish(identity, given.data, headers)
        PUBLISHED.add("duplicate" if receipt.duplicate else "stored")
        return receipt

    async def store_all(self, given: Sequence[Incoming], login: str, trace: Carrier = tracing.NONE) -> Stored:
        """Store up to 1000 events behind one another, all or none.

        If some of them were stored before, a repetition say, the rest follow one by one; cut off in the middle, the
        same sent again completes them.
        """
        if not 1 <= len(given) <= MOST_AT_ONCE:
            raise InvalidInput(f"{len(given)} events at once", fix=f"send 1 to {MOST_AT_ONCE}")
        if len({each.id for each in given}) < len(given):
            raise InvalidInput("two of the events have the same id", fix="give each its own")
        if len(given) == 1:
            receipt = await self.store(given[0], login, trace_of(given[0]) or trace)
            return Stored(int(not receipt.duplicate), int(receipt.duplicate), receipt.sequence)
        for each in given:
            check_size(each, self._queues.connection.max_payload)
        messages = [
            (SUBJECT, each.data, each.headers(login, trace_of(each) or trace), each.message_id(login)) for each in given
        ]
        await self.ensure()
        loop = asyncio.get_running_loop()
        stored = await loop.run_in_executor(self._threads, self._publish_all, messages)
        PUBLISHED.add("stored", by=stored.stored)
        PUBLISHED.add("duplicate", by=stored.duplicates)
        return stored

    async def ensure(self) -> None:
        """The queue and its readers are there: one without readers would keep nothing."""
        generation = self._queues.connection.generation
        if self._ready_on != generation:
            (await self._queues.ensure(incoming(), replicas=self._replicas)).require_usable()
            self._ready_on = generation

    def close(self) -> None:
        """End its threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _publish(self, identity: str, data: bytes, headers: dict[str, str]) -> Receipt:
        expect = Expect(stream=incoming().stream)
        return await self._queues.publish(SUBJECT, data, headers=headers, msg_id=identity, expect=expect)

    def _publish_all(self, messages: "list[tuple[str, bytes, dict[str, str], str]]") -> Stored:
        from purveyor.jetstream import bulk  # noqa: PLC0415 - Arrow, for those who send many

        stream = incoming().stream
        size = sum(len(data) for _, data, _, _ in messages) + 1
        options = bulk.PublishOptions(
            mode=bulk.PublishMode.ATOMIC,
            window_bytes=size * 2 + (len(messages) * HEADER_ROOM_BYTES),  # one batch, whatever its size
            expected_stream=stream,
            patience_seconds=self._queues.connection.patience_seconds,
        )
        report = bulk.publish_many(
            self._queues.address, bulk.outgoing(messages, rows=MOST_AT_ONCE, size=size + 1), options
        )
        return Stored(report.stored, report.duplicates, report.last_sequences.get(stream, 0))


def trace_of(given: Incoming) -> Carrier:
    """The trace that an event says it belongs to."""
    return tracing.carrier(given.event.attributes.get) if given.event.attributes else tracing.NONE


def check_size(given: Incoming, max_payload: int) -> None:
    """`TooLarge` if the server does not take an event because of its size."""
    largest = max_payload - HEADER_ROOM_BYTES
    if len(given.data) > largest:
        raise TooLarge(f"an event of {len(given.data)} bytes; the server takes {largest}", fix="send less")


def new_id() -> str:
    """An id for an event that came without one."""
    return str(uuid.uuid4())
