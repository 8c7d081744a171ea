"""Read some hundred messages of a stream with one batched direct get, over the asynchronous connection.

`Streams.get` reads one message from the leader, and `bulk.read_range` reads millions as Arrow batches on its own
connection. This module is in between: it returns a page of messages to a program with an event loop.
"""

import asyncio
import time
from dataclasses import dataclass

from purveyor.jetstream.api_protocol import (
    API_PREFIX,
    DIRECT_GET_HEADERS,
    PageEnd,
    encode_page_request,
    parse_page_end,
)
from purveyor.jetstream.client import JetStream
from purveyor.jetstream.codec import parse_time
from purveyor.jetstream.connection import Connection, RawMessage
from purveyor.jetstream.headers import first
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.backoff import Backoff, RetryDelays
from purveyor.model.errors import NoAnswer, Unavailable
from purveyor.model.name_rules import check_name, check_subject

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


async def read_page(jetstream: JetStream, stream: str, request: PageRequest) -> Page:
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


async def _request_page(connection: Connection, stream: str, body: bytes) -> Page | None:
    """Request one page; return None if no replica answers."""
    replies = await connection.request_many(f"{API_PREFIX}DIRECT.GET.{stream}", body, lambda reply: reply.status != 0)
    last = replies.pop()
    has_pending = first(last.headers, "Nats-Num-Pending") not in (None, "0")
    end = parse_page_end(stream, last.status, last.block.description, has_pending=has_pending)
    if end is PageEnd.UNAVAILABLE:
        return None
    return Page(messages=tuple(_message(each, stream) for each in replies), has_more=end is PageEnd.HAS_MORE)


def _message(reply: RawMessage, stream: str) -> StoredMessage:
    headers = reply.headers
    return StoredMessage(
        stream=stream,
        sequence=int(headers["Nats-Sequence"][-1]),
        timestamp=parse_time(headers["Nats-Time-Stamp"][-1]),
        subject=headers["Nats-Subject"][-1],
        headers={name: values for name, values in headers.items() if name not in _SERVER_HEADERS},
        data=reply.data,
    )
