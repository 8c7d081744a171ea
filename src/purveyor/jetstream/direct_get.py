"""Read a few hundred messages of a stream in one question, on the connection for control traffic.

Between `Streams.get`, which asks the leader for one message, and `bulk.read_range`, which has a link and Arrow for
millions: a page of messages with their bytes, for a program with an event loop.
"""

import asyncio
import json
import time
from dataclasses import dataclass

from purveyor.jetstream.api import PREFIX
from purveyor.jetstream.client import JetStream
from purveyor.jetstream.codec import parse_time
from purveyor.jetstream.connection import Answer, Connection
from purveyor.jetstream.headers import first
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.errors import NoAnswer, Refused, Unavailable
from purveyor.model.name_rules import check_name, check_subject

_ABOUT = frozenset(
    ("Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp", "Nats-Num-Pending", "Nats-Last-Sequence")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Messages in order, and whether there were more when they were read."""

    messages: tuple[StoredMessage, ...]
    more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Up to `count` messages of a subject from a sequence on, about `max_bytes` at most, but one at least if any is."""

    subject: str
    from_sequence: int = 1
    count: int = 100
    max_bytes: int = 4 << 20


async def read_page(jetstream: JetStream, stream: str, wanted: Wanted) -> Page:
    """A page of a stream.

    Any replica may answer: one that lags behind gives fewer, never others. Fails with `UnknownStream`, or with an
    `Unavailable` at the end of the connection's patience. The stream must have `allow_direct`.
    """
    check_name(stream)
    body = json.dumps(
        {
            "seq": max(wanted.from_sequence, 1),
            "batch": wanted.count,
            "max_bytes": wanted.max_bytes,
            "next_by_subj": check_subject(wanted.subject, wildcards=True),
        }
    ).encode()
    connection = jetstream.connection
    give_up = time.monotonic() + connection.patience_seconds
    pause = 0.02
    while True:
        try:
            await connection.wait_connected(max(give_up - time.monotonic(), 0.1))
            page = await _ask(connection, stream, body)
            if page is not None:
                return page
            await jetstream.streams.info(stream)  # nobody answered: an unknown stream is an error here
            if time.monotonic() > give_up:
                raise NoAnswer(f"stream {stream!r} does not answer to direct gets", fix="has it `allow_direct`?")
        except Unavailable:
            if time.monotonic() > give_up:
                raise
        await asyncio.sleep(pause)
        pause = min(pause * 2, 1.0)


async def _ask(connection: Connection, stream: str, body: bytes) -> Page | None:
    """One page; None when nobody is there to answer."""
    answers = await connection.request_many(f"{PREFIX}DIRECT.GET.{stream}", body, lambda answer: answer.status != 0)
    last = answers.pop()
    match last.status:
        case 503:
            return None
        case 404:
            return Page(messages=(), more=False)
        case 204:
            more = first(last.headers, "Nats-Num-Pending") not in (None, "0")
            return Page(messages=tuple(_message(each, stream) for each in answers), more=more)
        case status:
            raise Refused(f"a direct get from stream {stream!r} was refused: {last.block.description}", code=status)


def _message(answer: Answer, stream: str) -> StoredMessage:
    about = answer.headers
    return StoredMessage(
        stream=stream,
        sequence=int(about["Nats-Sequence"][-1]),
        timestamp=parse_time(about["Nats-Time-Stamp"][-1]),
        subject=about["Nats-Subject"][-1],
        headers={name: values for name, values in about.items() if name not in _ABOUT},
        data=answer.data,
    )
