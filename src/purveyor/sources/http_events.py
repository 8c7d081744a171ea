"""Events of publishers: checked, and stored in the queue `incoming` before they are reported as accepted.

A single event goes over the connection of the process; several go as one atomic batch, all of them or none. Each
carries the login that sent it, beside the `publisher_name` that the publisher gives itself.

The id of an event is unique within the login that sent it: the message id, by which the server recognises a repetition,
is a digest of both. A header carries the id itself, for consumers and the archive.
"""

import asyncio
import hashlib
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

from purveyor.jetstream.api import Receipt
from purveyor.jetstream.publisher import Expect
from purveyor.model import json_fields, tracing
from purveyor.model.errors import InvalidInput, UnknownStream
from purveyor.model.event import RESERVED_HEADER_BYTES, SUBJECT, Event, check_event_id, check_event_size
from purveyor.model.json_fields import Json
from purveyor.model.message_headers import EVENT_ID
from purveyor.model.metrics import PUBLISHED
from purveyor.model.tracing import Carrier
from purveyor.queues.catalogue import incoming
from purveyor.queues.client import Queues
from purveyor.sources.schemas.event_validator import EventValidator

LOGIN_HEADER: Final = "Purveyor-Login"
"""The header with the login that sent an event."""
NO_LOGIN: Final = ""
"""In place of a login, for the command line, which has none."""
MAX_EVENTS_PER_BATCH: Final = 1000
_MAX_CONCURRENT_BATCHES: Final = 8


@dataclass(frozen=True, slots=True)
class IncomingEvent:
    """A checked event, its id, which a repetition has as well, and the body of its message."""

    event: Event
    id: str
    data: bytes

    @classmethod
    def read(cls, fields: Json, validator: EventValidator, default_id: str | None = None) -> Self:
        """Check the fields of an event; InvalidInput names what is wrong.

        Without the field `id` the event gets the default id, or a new one.
        """
        rest = dict(json_fields.mapping(fields, "event"))
        identity = rest.pop("id", None)
        event, data = validator.read(rest)
        return cls(event, check_event_id((default_id or new_id()) if identity is None else identity), data)

    @property
    def realm_topic(self) -> tuple[str, str]:
        """The realm and topic."""
        return self.event.realm, self.event.topic

    def message_id(self, login: str) -> str:
        """Return the id by which the server recognises a repetition by the same login.

        No other writer of the queue has ids of this form, so that a publisher cannot suppress their messages.
        """
        digest = hashlib.blake2b(f"{login}\0{self.id}".encode(), digest_size=20)  # an id holds no NUL
        return f"event:{digest.hexdigest()}"

    def headers(self, login: str, trace: Carrier) -> dict[str, str]:
        """Return the headers of the message; without a login those of the command line."""
        return {EVENT_ID: self.id, **({LOGIN_HEADER: login} if login else {}), **trace}

    def header_lines(self, login: str, trace: Carrier) -> bytes:
        """Return the headers as encoded lines. The trace of its attributes takes precedence over the given one."""
        headers = self.headers(login, event_trace(self) or trace)
        return "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode()


@dataclass(frozen=True, slots=True)
class BatchReceipt:
    """The outcome of a batch: the events stored now and before (`duplicates`), and the last position."""

    stored: int
    duplicates: int
    position: int


class EventPublisher:
    """Publishes events to `incoming`. Methods raise `Unavailable` without a server; then a caller may try again."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._ready_on = 0
        self._threads = ThreadPoolExecutor(_MAX_CONCURRENT_BATCHES, thread_name_prefix="purveyor-publish")

    async def publish(self, event: IncomingEvent, login: str, trace: Carrier = tracing.NO_TRACE) -> Receipt:
        """Store one event; return its receipt. It carries this trace, or else the one in its attributes."""
        check_event_size(event.data, self._queues.connection.max_payload)
        message_id, headers = event.message_id(login), event.headers(login, trace or event_trace(event))
        await self.ensure()
        try:
            receipt = await self._publish(message_id, event.data, headers)
        except UnknownStream:  # the queue was deleted: create it again, with its readers
            self._ready_on = 0
            await self.ensure()
            receipt = await self._publish(message_id, event.data, headers)
        PUBLISHED.add("duplicate" if receipt.duplicate else "stored")
        return receipt

    async def publish_batch(
        self, events: Sequence[IncomingEvent], login: str, trace: Carrier = tracing.NO_TRACE
    ) -> BatchReceipt:
        """Store up to 1000 consecutive events, all or none.

        If some of them were stored before (a repetition), the others are stored one by one; after a failure in the
        middle of that, a repetition completes them.
        """
        if not 1 <= len(events) <= MAX_EVENTS_PER_BATCH:
            raise InvalidInput(f"{len(events)} events at once", fix=f"send 1 to {MAX_EVENTS_PER_BATCH}")
        if len({each.id for each in events}) < len(events):
            raise InvalidInput("two of the events have the same id", fix="give each its own")
        if len(events) == 1:
            receipt = await self.publish(events[0], login, event_trace(events[0]) or trace)
            return BatchReceipt(int(not receipt.duplicate), int(receipt.duplicate), receipt.sequence)
        check_event_size(max((each.data for each in events), key=len), self._queues.connection.max_payload)
        await self.ensure()
        loop = asyncio.get_running_loop()
        stored = await loop.run_in_executor(self._threads, self._publish_batch, events, login, trace)
        PUBLISHED.add("stored", by=stored.stored)
        PUBLISHED.add("duplicate", by=stored.duplicates)
        return stored

    async def ensure(self) -> None:
        """Ensure the queue and its readers, once per connection: a queue without readers keeps nothing."""
        generation = self._queues.connection.generation
        if self._ready_on != generation:
            (await self._queues.ensure(incoming(), replicas=self._replicas)).require_usable()
            self._ready_on = generation

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _publish(self, message_id: str, data: bytes, headers: dict[str, str]) -> Receipt:
        expect = Expect(stream=incoming().stream)
        return await self._queues.publish(SUBJECT, data, headers=headers, msg_id=message_id, expect=expect)

    def _publish_batch(self, events: Sequence[IncomingEvent], login: str, trace: Carrier) -> BatchReceipt:
        import pyarrow as pa  # noqa: PLC0415 - only batches need Arrow

        from purveyor.jetstream import bulk  # noqa: PLC0415 - it loads Arrow

        columns = {
            "subject": pa.array([SUBJECT] * len(events), pa.string()),
            "data": pa.array([each.data for each in events], pa.binary()),
            "header_lines": pa.array([each.header_lines(login, trace) for each in events], pa.binary()),
            "msg_id": pa.array([each.message_id(login) for each in events], pa.string()),
        }
        batch, stream = pa.record_batch(columns), incoming().stream
        options = bulk.PublishOptions(
            mode=bulk.PublishMode.ATOMIC,
            window_bytes=(batch.nbytes + len(events) * RESERVED_HEADER_BYTES) * 2,  # one batch of any size
            expected_stream=stream,
            patience_seconds=self._queues.connection.patience_seconds,
        )
        report = bulk.publish_many(self._queues.address, [batch], options)
        return BatchReceipt(report.stored, report.duplicates, report.last_sequences.get(stream, 0))


def event_trace(event: IncomingEvent) -> Carrier:
    """Return the trace in the attributes of an event."""
    return tracing.read_carrier(event.event.attributes.get) if event.event.attributes else tracing.NO_TRACE


def new_id() -> str:
    """Return an id for an event without one."""
    return str(uuid.uuid4())
