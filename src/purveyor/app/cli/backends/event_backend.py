"""Publishing events, as `purveyor publish` does."""

import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, TYPE_CHECKING, Final, Protocol

from purveyor.app.cli.backends.api_access import ApiRoutes
from purveyor.app.cli.output import write_note
from purveyor.app.cli.parsers import utc_now
from purveyor.app.settings import Settings
from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.event import SUBJECT, check_event_size
from purveyor.model.json_fields import Json
from purveyor.queues.catalogue import incoming
from purveyor.queues.client import Queues
from purveyor.sources.http_events import (
    MAX_EVENTS_PER_BATCH,
    NO_LOGIN,
    EventPublisher,
    IncomingEvent,
    event_trace,
    new_id,
)
from purveyor.sources.schemas.registry import SchemaCache

if TYPE_CHECKING:
    from purveyor.jetstream import bulk

_MAX_LINE_BYTES: Final = 64 << 20
_MAX_BATCH_BYTES: Final = 4 << 20
"""Of the lines in one request; the API accepts 32 MiB."""


@dataclass(slots=True)
class Tally:
    """The result of publishing lines."""

    stored: int = 0
    duplicates: int = 0
    broken: int = 0
    position: int | None = None
    topics: set[tuple[str, str]] = field(default_factory=set)
    """The realms and topics of the accepted events."""

    def refuse(self, number: int, error: InvalidInput) -> None:
        """Count and report a line that is no event, or does not fit its schema."""
        self.broken += 1
        write_note(f"line {number}: {error.message}")


class Events(Protocol):
    """Where events are published."""

    async def publish(self, event: Json) -> Json:
        """Publish an event; return its position and id, and whether it was stored before."""
        ...

    async def publish_lines(self, lines: IO[bytes], publisher: str) -> Tally:
        """Publish the event of each line, and report invalid lines."""
        ...


def with_defaults(fields: Json, publisher: str) -> Json:
    """Return the fields of an event with a publisher, a time and an id, which a repetition of the request repeats."""
    given = {"publisher_name": publisher, "ts": utc_now().isoformat(), **fields}
    return given if given.get("id") is not None else {**given, "id": new_id()}


@dataclass(frozen=True, slots=True)
class DirectEvents:
    """Events published to the queue on the NATS server."""

    queues: Queues
    replicas: int

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, queues: Queues, settings: Settings) -> AsyncIterator[Events]:
        """Use the connection."""
        yield cls(queues, settings.replicas)

    async def publish(self, event: Json) -> Json:
        """Publish an event."""
        schema_cache = SchemaCache(self.queues, replicas=self.replicas)
        async with schema_cache.following():
            given = IncomingEvent.read(event, schema_cache.validator)
            receipt = await EventPublisher(self.queues, replicas=self.replicas).publish(given, NO_LOGIN)
            await schema_cache.record_topics({given.realm_topic})
        return {"position": receipt.sequence, "id": given.id, "duplicate": receipt.duplicate}

    async def publish_lines(self, lines: IO[bytes], publisher: str) -> Tally:
        """Publish lines over a connection for bulk data."""
        from purveyor.jetstream import bulk  # noqa: PLC0415 - a slow import that only this method needs

        (await self.queues.ensure(incoming(), replicas=self.replicas)).require_usable()
        tally, stop = Tally(), threading.Event()
        schema_cache = SchemaCache(self.queues, replicas=self.replicas)
        async with schema_cache.following():
            read = partial(_read_line, publisher=publisher, schema_cache=schema_cache)
            try:
                report = await self.queues.publish_many(
                    _messages(lines, read, self.queues.connection.max_payload, tally, stop),
                    bulk.PublishOptions(expected_stream=incoming().stream),
                )
            finally:
                stop.set()  # after Ctrl-C the thread that reads would otherwise read everything
            await schema_cache.record_topics(tally.topics)
        tally.stored, tally.duplicates = report.stored, report.duplicates
        tally.position = report.last_sequences.get(incoming().stream)
        return tally


def _read_line(line: bytes, publisher: str, schema_cache: SchemaCache) -> IncomingEvent:
    return IncomingEvent.read(with_defaults(json_fields.parse(line, "line"), publisher), schema_cache.validator)


def _messages(
    lines: IO[bytes],
    read: Callable[[bytes], IncomingEvent],
    max_payload: int,
    tally: Tally,
    stop: threading.Event,
) -> "Iterator[bulk.Outgoing]":
    for number, line in _numbered(lines):
        if stop.is_set():
            return
        try:
            given = read(line)
            check_event_size(given.data, max_payload)
        except InvalidInput as error:
            tally.refuse(number, error)
            continue
        tally.topics.add(given.realm_topic)
        yield SUBJECT, given.data, given.headers(NO_LOGIN, event_trace(given)), given.message_id(NO_LOGIN)


def _numbered(lines: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers."""
    for number, line in enumerate(iter(lambda: lines.readline(_MAX_LINE_BYTES), b""), start=1):
        if line.strip():
            yield number, line


@dataclass(slots=True)
class _Batch:
    """Lines for one request: events, and errors of lines that are no JSON, in their order."""

    lines: list[tuple[int, Json | InvalidInput]] = field(default_factory=list)
    ids: set[object] = field(default_factory=set)
    size: int = 0

    def add(self, number: int, line: bytes, publisher: str) -> bool:
        """Add a line; return False if it belongs in the next request."""
        try:
            event: Json | InvalidInput = with_defaults(json_fields.parse(line, "line"), publisher)
        except InvalidInput as error:
            event = error
        is_full = len(self.lines) == MAX_EVENTS_PER_BATCH or self.size + len(line) > _MAX_BATCH_BYTES
        identity = repr(event["id"]) if isinstance(event, dict) else None
        if self.lines and (is_full or identity in self.ids):  # one request with the same id twice is refused
            return False
        self.lines.append((number, event))
        self.size += len(line)
        if identity is not None:
            self.ids.add(identity)
        return True


@dataclass(frozen=True, slots=True)
class RemoteEvents:
    """Events published over the HTTP API."""

    routes: ApiRoutes

    async def publish(self, event: Json) -> Json:
        """Publish an event."""
        found: Json = (await self.routes.request("POST", "messages", body=event)).body
        return found

    async def publish_lines(self, lines: IO[bytes], publisher: str) -> Tally:
        """Publish lines, many with each request: the API stores all events of a request or none."""
        tally, numbered = Tally(), _numbered(lines)
        waiting: tuple[int, bytes] | None = None
        while True:
            with _ended_by_ctrl_c():  # nothing else runs on the event loop meanwhile
                batch, waiting = _next_batch(numbered, waiting, publisher)
            if not batch.lines:
                return tally
            await self._send(batch.lines, tally)

    async def _send(self, lines: Sequence[tuple[int, Json | InvalidInput]], tally: Tally) -> None:
        """Send the events of some lines; if the API refuses one of them, send each half separately."""
        from purveyor.client.api_client import RequestRefused  # noqa: PLC0415 - it loads aiohttp

        events = [event for _, event in lines if not isinstance(event, InvalidInput)]
        try:
            if len(events) == 1:
                receipt = await self.publish(events[0])
                tally.stored += not receipt["duplicate"]
                tally.duplicates += receipt["duplicate"]
                tally.position = receipt["position"]
            elif events:
                report: Json = (await self.routes.request("POST", "messages", body=events)).body
                tally.stored += report["stored"]
                tally.duplicates += report["duplicates"]
                tally.position = report["position"]
        except RequestRefused as error:
            if len(events) > 1:
                middle = len(lines) // 2
                await self._send(lines[:middle], tally)
                await self._send(lines[middle:], tally)
                return
            refused: InvalidInput | None = error
        else:
            refused = None
        for number, event in lines:
            if isinstance(event, InvalidInput):
                tally.refuse(number, event)
            elif refused is not None:
                tally.refuse(number, refused)


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end a blocking read. The handler of asyncio would wait for the next line."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _next_batch(
    lines: Iterator[tuple[int, bytes]], waiting: tuple[int, bytes] | None, publisher: str
) -> tuple[_Batch, tuple[int, bytes] | None]:
    """Return the next lines for a request, and the first line that belongs in the one after it."""
    batch = _Batch()
    if waiting is not None:
        batch.add(*waiting, publisher)
    for number, line in lines:
        if not batch.add(number, line, publisher):
            return batch, (number, line)
    return batch, None
