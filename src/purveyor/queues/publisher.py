"""Publish one message and know that it is stored."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from purveyor.model.errors import (
    NoAnswer,
    OutcomeUnknown,
    PublishRefused,
    ServerUnavailable,
    Unavailable,
    UnknownStream,
)
from purveyor.model.names import check_subject
from purveyor.queues import headers as header_names
from purveyor.queues.connection import Connection
from purveyor.queues.headers import HeadersIn, normalise
from purveyor.queues.refusals import Subject, translate
from purveyor.queues.streams import Streams


@dataclass(frozen=True, slots=True)
class Receipt:
    """The server's word that a message is stored, and where; a duplicate was stored before, at that sequence."""

    stream: str
    sequence: int
    duplicate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """What must be true for a message to be stored; WrongRevision or PublishRefused otherwise."""

    stream: str | None = None
    last_sequence: int | None = None
    last_subject_sequence: int | None = None
    last_msg_id: str | None = None

    def headers(self) -> dict[str, tuple[str, ...]]:
        """As headers."""
        pairs: tuple[tuple[str, Any], ...] = (
            (header_names.EXPECTED_STREAM, self.stream),
            (header_names.EXPECTED_LAST_SEQUENCE, self.last_sequence),
            (header_names.EXPECTED_LAST_SUBJECT_SEQUENCE, self.last_subject_sequence),
            (header_names.EXPECTED_LAST_MSG_ID, self.last_msg_id),
        )
        return {name: (str(value),) for name, value in pairs if value is not None}


class Publisher:
    """Single publishes over a control connection."""

    def __init__(self, connection: Connection, streams: Streams) -> None:
        self._connection = connection
        self._streams = streams

    async def publish(
        self,
        subject: str,
        data: bytes = b"",
        *,
        headers: HeadersIn | None = None,
        msg_id: str | None = None,
        expect: Expect | None = None,
    ) -> Receipt:
        """Store a message and return where.

        With a `msg_id` a lost server is waited for and the message sent again: the server recognises the second.
        Without one, an answer that got lost raises OutcomeUnknown: sending again could store the message twice.
        """
        block = normalise(headers)
        if msg_id is not None:
            block |= normalise({header_names.MSG_ID: msg_id})
        if expect is not None:
            block |= expect.headers()
        check_subject(subject)
        size = len(data) + (len(header_names.encode(block)) if block else 0)
        if size > self._connection.max_payload:
            raise PublishRefused(
                f"a message of {size} bytes for {subject!r} is above the server's limit of "
                f"{self._connection.max_payload} bytes",
                fix="send less, or raise max_payload on the server",
                code=400,
            )
        give_up = time.monotonic() + self._connection.patience_seconds
        pause = 0.05
        while True:
            await self._connection.wait_connected(max(give_up - time.monotonic(), 0.1))
            try:
                answer = await self._connection.request(subject, data, headers=block)
            except NoAnswer as error:
                if msg_id is None and expect is None:
                    raise OutcomeUnknown(
                        f"the answer for a message on {subject!r} got lost: it may be stored or not",
                        fix="look at the stream; give messages an id, and they are sent again safely",
                    ) from error
                if time.monotonic() > give_up:
                    raise
                continue
            if answer.status != 503:
                return _receipt(answer.data, subject)
            await self._explain_silence(subject, give_up)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    async def _explain_silence(self, subject: str, give_up: float) -> None:
        """No stream listens on the subject: none takes it (an error), or its leader is away (wait)."""
        try:
            if not await self._streams.names(subject=subject):
                raise UnknownStream(f"no stream takes the subject {subject!r}", fix="`purveyor stream add` makes one")
        except Unavailable:
            if time.monotonic() > give_up:
                raise
        if time.monotonic() > give_up:
            raise ServerUnavailable(f"the stream for {subject!r} does not answer", fix="is its cluster complete?")


def _receipt(payload: bytes, subject: str) -> Receipt:
    try:
        parsed: Any = json.loads(payload)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict) and "error" in parsed:
        raise translate(parsed["error"], Subject(stream=str(parsed.get("stream") or subject)), publishing=True)
    if not isinstance(parsed, dict) or "seq" not in parsed:
        raise UnknownStream(
            f"somebody answered on {subject!r}, and it was not a stream", fix="is another service using this subject?"
        )
    return Receipt(parsed["stream"], parsed["seq"], bool(parsed.get("duplicate")))
