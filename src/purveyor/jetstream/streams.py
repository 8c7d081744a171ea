"""Streams: create, inspect, update, purge, seal and delete them; read single messages and pages of messages from them.

`Streams.get` reads one message from the leader. `read_page` reads some hundred with one batched direct get and returns
them to a program with an event loop. `bulk.read_range` reads millions as Arrow batches, on its own connection.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from purveyor.jetstream.api import (
    API_PREFIX,
    DIRECT_GET_HEADERS,
    Api,
    Json,
    PageEnd,
    Resource,
    decode_stored_data,
    decode_stored_headers,
    encode_page_request,
    parse_page_end,
    parse_time,
)
from purveyor.jetstream.config import StreamConfig, StreamInfo, from_wire, to_wire
from purveyor.jetstream.headers import Headers, first
from purveyor.model.errors import AlreadyExists, InvalidInput, NoAnswer, Unavailable
from purveyor.model.name_rules import check_name, check_subject
from purveyor.model.retries import Backoff, RetryDelays

if TYPE_CHECKING:  # the driver of a Spark query imports this module and must not load nats
    from purveyor.jetstream.client import JetStream
    from purveyor.jetstream.connection import Connection, RawMessage


class StoredMessage(NamedTuple):
    """A message stored in a stream."""

    stream: str
    sequence: int
    timestamp: datetime | None
    subject: str
    headers: Headers
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUsage:
    """How much a stream holds, for monitoring."""

    stream: str
    messages: int
    bytes: int
    first_sequence: int
    last_sequence: int
    oldest: datetime | None
    """When its oldest message was stored; None if the stream is empty."""
    sealed: bool
    consumers: int


class Streams:
    """The streams of one server or cluster."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def add(self, config: StreamConfig) -> StreamInfo:
        """Create a stream. An existing one with the same settings is returned; with others, raise AlreadyExists."""
        config.validated()
        reply = await self._api.request(
            f"STREAM.CREATE.{config.name}", to_wire(config), about=Resource(stream=config.name)
        )
        info = from_wire(StreamInfo, reply)
        if config.first_seq and info.state.last_seq + 1 < config.first_seq:  # pragma: no cover - the server refuses
            raise AlreadyExists(f"stream {config.name!r} begins below {config.first_seq}", fix="remove it first")
        return info

    async def info(self, name: str) -> StreamInfo:
        """Return settings and state of a stream."""
        return from_wire(StreamInfo, await self.raw_info(name))

    async def raw_info(self, name: str) -> Json:
        """Return the server's JSON, including fields that our types do not know."""
        check_name(name, "stream")
        return await self._api.request(f"STREAM.INFO.{name}", about=Resource(stream=name))

    async def holds(self, name: str, sequence: int) -> bool:
        """Return whether a stream holds a message. This needs no permission to read messages."""
        check_name(name, "stream")
        reply = await self._api.request(f"STREAM.INFO.{name}", {"deleted_details": True}, about=Resource(stream=name))
        state = reply["state"]
        return state["first_seq"] <= sequence <= state["last_seq"] and sequence not in (state.get("deleted") or ())

    async def subjects(self, name: str, pattern: str = ">") -> dict[str, int]:
        """Return the number of messages of each subject."""
        check_name(name, "stream")
        found: dict[str, int] = {}
        while True:
            reply = await self._api.request(
                f"STREAM.INFO.{name}",
                {"subjects_filter": check_subject(pattern, wildcards=True), "offset": len(found)},
                about=Resource(stream=name),
            )
            page = reply["state"].get("subjects") or {}
            found |= page
            if not page or len(found) >= int(reply.get("total", 0)):
                return found

    async def names(self, *, subject: str | None = None) -> list[str]:
        """Return all stream names, or those of the streams that take a subject."""
        body = {"subject": subject} if subject else None
        return sorted(await self._api.request_pages("STREAM.NAMES", "streams", body))

    async def list(self) -> "list[StreamInfo]":
        """Return all streams, sorted by name."""
        found = await self._api.request_pages("STREAM.LIST", "streams")
        return sorted((from_wire(StreamInfo, item) for item in found), key=lambda info: info.config.name)

    async def usage(self) -> Sequence[StreamUsage]:
        """Return the usage of each stream, in pages: a handful of requests for a thousand streams."""
        found = []
        for item in await self._api.request_pages("STREAM.LIST", "streams"):
            state = item["state"]
            found.append(
                StreamUsage(
                    stream=item["config"]["name"],
                    messages=state["messages"],
                    bytes=state["bytes"],
                    first_sequence=state["first_seq"],
                    last_sequence=state["last_seq"],
                    oldest=parse_time(state["first_ts"]) if state["messages"] else None,
                    sealed=bool(item["config"].get("sealed")),
                    consumers=state["consumer_count"],
                )
            )
        return found

    async def update(self, name: str, changes: Mapping[str, Any]) -> StreamInfo:
        """Update settings in place. `changes` has the field names of StreamConfig; other settings stay unchanged."""
        current = (await self.raw_info(name))["config"]
        wanted = current | {field: to_wire(value) for field, value in changes.items()}
        reply = await self._api.request(f"STREAM.UPDATE.{name}", wanted, about=Resource(stream=name))
        return from_wire(StreamInfo, reply)

    async def seal(self, name: str) -> StreamInfo:
        """Seal a stream for good: it takes no messages and deletes none; consumers continue. Idempotent."""
        info = await self.info(name)
        return info if info.config.sealed else await self.update(name, {"sealed": True})

    async def purge(
        self, name: str, *, subject: str | None = None, before_sequence: int | None = None, keep: int | None = None
    ) -> int:
        """Delete all messages, those of a subject, those below a sequence, or all but the newest `keep`.

        Return the number of deleted messages.
        """
        if before_sequence is not None and keep is not None:
            raise InvalidInput("purge: give a sequence or a number to keep, not both")
        body: Json = {}
        if subject is not None:
            body["filter"] = check_subject(subject, wildcards=True)
        if before_sequence is not None:
            body["seq"] = before_sequence
        if keep is not None:
            body["keep"] = keep
        check_name(name, "stream")
        reply = await self._api.request(f"STREAM.PURGE.{name}", body, about=Resource(stream=name))
        return int(reply.get("purged", 0))

    async def remove(self, name: str) -> None:
        """Delete the stream and its messages."""
        check_name(name, "stream")
        await self._api.request(f"STREAM.DELETE.{name}", about=Resource(stream=name))

    async def get(self, name: str, sequence: int) -> StoredMessage:
        """Return the message at a sequence. The leader answers, so it is never stale."""
        return await self._get(name, {"seq": sequence}, sequence)

    async def get_last(self, name: str, subject: str) -> StoredMessage:
        """Return the newest message of a subject. The leader answers, so it is never stale."""
        return await self._get(name, {"last_by_subj": check_subject(subject, wildcards=True)}, 0)

    async def get_next(self, name: str, sequence: int, subject: str = ">") -> StoredMessage:
        """Return the first message at or after a sequence."""
        return await self._get(name, {"seq": sequence, "next_by_subj": subject}, sequence)

    async def _get(self, name: str, body: Json, sequence: int) -> StoredMessage:
        check_name(name, "stream")
        reply = await self._api.request(f"STREAM.MSG.GET.{name}", body, about=Resource(stream=name, sequence=sequence))
        message = reply["message"]
        return StoredMessage(
            stream=name,
            sequence=message["seq"],
            timestamp=parse_time(message["time"]),
            subject=message["subject"],
            headers=decode_stored_headers(message),
            data=decode_stored_data(message),
        )

    async def delete_message(self, name: str, sequence: int, *, erase: bool = False) -> None:
        """Delete one message; with `erase` the server also overwrites its bytes."""
        check_name(name, "stream")
        await self._api.request(
            f"STREAM.MSG.DELETE.{name}",
            {"seq": sequence, "no_erase": not erase},
            about=Resource(stream=name, sequence=sequence),
        )


_RETRY_BACKOFF = Backoff(0.02, 1.0)
_SERVER_HEADERS = frozenset(DIRECT_GET_HEADERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Messages in order, and whether the stream had more when they were read."""

    messages: tuple[StoredMessage, ...]
    has_more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """Up to `count` messages of a subject from a sequence on.

    `max_bytes` limits their approximate size; if there is a message, at least one is returned.
    """

    subject: str
    from_sequence: int = 1
    count: int = 100
    max_bytes: int = 4 << 20


async def read_page(jetstream: "JetStream", stream: str, request: PageRequest) -> Page:
    """Read a page of a stream, which must have `allow_direct`.

    Any replica may answer: one that lags behind returns fewer messages, never other ones. Raise `UnknownStream`, or an
    `Unavailable` after the connection's `patience_seconds`.
    """
    check_name(stream)
    subject = check_subject(request.subject, wildcards=True)
    body = encode_page_request(request.from_sequence, count=request.count, max_bytes=request.max_bytes, subject=subject)
    connection = jetstream.connection
    give_up = time.monotonic() + connection.patience_seconds
    delays = RetryDelays(_RETRY_BACKOFF)
    while True:
        try:
            await connection.wait_until_connected(max(give_up - time.monotonic(), 0.1))
            page = await _request_page(connection, stream, body)
            if page is not None:
                return page
            await jetstream.streams.info(
                stream
            )  # no replica answered: raise UnknownStream if the stream does not exist
            if time.monotonic() > give_up:
                raise NoAnswer(f"stream {stream!r} does not answer to direct gets", fix="has it `allow_direct`?")
        except Unavailable:
            if time.monotonic() > give_up:
                raise
        await asyncio.sleep(delays.next_seconds())


async def _request_page(connection: "Connection", stream: str, body: bytes) -> Page | None:
    """Request one page; return None if no replica answers."""
    replies = await connection.request_many(f"{API_PREFIX}DIRECT.GET.{stream}", body, lambda reply: reply.status != 0)
    last = replies.pop()
    has_pending = first(last.headers, "Nats-Num-Pending") not in (None, "0")
    end = parse_page_end(stream, last.status, last.block.description, has_pending=has_pending)
    if end is PageEnd.UNAVAILABLE:
        return None
    return Page(messages=tuple(_page_message(each, stream) for each in replies), has_more=end is PageEnd.HAS_MORE)


def _page_message(reply: "RawMessage", stream: str) -> StoredMessage:
    headers = reply.headers
    return StoredMessage(
        stream=stream,
        sequence=int(headers["Nats-Sequence"][-1]),
        timestamp=parse_time(headers["Nats-Time-Stamp"][-1]),
        subject=headers["Nats-Subject"][-1],
        headers={name: values for name, values in headers.items() if name not in _SERVER_HEADERS},
        data=reply.data,
    )
