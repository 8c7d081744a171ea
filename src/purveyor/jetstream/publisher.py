"""Publish one message and know that it is stored.

A queue that is being migrated takes none for a while: then the publisher waits, as for a server that is away.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from purveyor.jetstream import headers as header_names
from purveyor.jetstream.api_errors import (
    FIXES,
    ID_IN_PROCESS,
    STREAM_SEALED,
    TOO_MANY_REQUESTS,
    Subject,
    translate,
)
from purveyor.jetstream.connection import Connection
from purveyor.jetstream.headers import HeadersIn, normalise
from purveyor.jetstream.maintenance import (
    STREAM_PREFIX,
    find_stream_under_maintenance,
    is_under_maintenance,
)
from purveyor.jetstream.streams import Streams
from purveyor.model.errors import (
    NoAnswer,
    OutcomeUnknown,
    PublishRefused,
    QueueMigrating,
    ServerUnavailable,
    Unavailable,
    UnknownMessage,
    UnknownStream,
)
from purveyor.model.metrics import MIGRATION_WAITS
from purveyor.model.name_rules import check_header, check_subject

_SEALED_PAUSE_SECONDS = 0.2
_NOT_STORED = (503, TOO_MANY_REQUESTS)


class Receipt(NamedTuple):
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
        given = normalise(headers)
        if msg_id is not None:
            check_header(header_names.MSG_ID, msg_id)
            given[header_names.MSG_ID] = (msg_id,)
        if expect is not None:
            given |= expect.headers()
        check_subject(subject)
        block = header_names.encode(given) if given else b""
        return await self.send(Letter(subject, data, block, msg_id, expect))

    async def send(self, letter: "Letter") -> Receipt:
        """The same, for a message that is known to be right."""
        size = len(letter.data) + len(letter.headers)
        if size > self._connection.max_payload:
            raise PublishRefused(
                f"a message of {size} bytes for {letter.subject!r} is above the server's limit of "
                f"{self._connection.max_payload} bytes",
                fix="send less, or raise max_payload on the server",
                code=400,
            )
        waiting = _Waiting()
        try:
            return await self._store(letter, waiting)
        finally:
            waiting.end()

    async def _store(self, letter: "Letter", waiting: "_Waiting") -> Receipt:
        subject, msg_id, expect = letter.subject, letter.msg_id, letter.expect
        give_up = time.monotonic() + self._connection.patience_seconds
        pause = 0.05
        in_doubt = False
        while True:
            await self._connection.wait_connected(max(give_up - time.monotonic(), 0.1))
            try:
                answer = await self._connection.request(subject, letter.data, headers=letter.headers)
            except NoAnswer as error:
                if msg_id is None and expect is None:
                    raise OutcomeUnknown(
                        f"the answer for a message on {subject!r} got lost: it may be stored or not",
                        fix="look at the stream; give messages an id, and they are sent again safely",
                    ) from error
                if time.monotonic() > give_up:
                    raise
                in_doubt = True
                continue
            if answer.status not in _NOT_STORED:
                try:
                    return _receipt(answer.data, subject)
                except PublishRefused as error:
                    if _for_now(error) and time.monotonic() < give_up:
                        stream = None
                    elif error.err_code == STREAM_SEALED:
                        stream = await self._sealed(subject, expect, error, give_up)
                    else:
                        raise
                longest = _SEALED_PAUSE_SECONDS  # soon over, as a rule
                if stream is not None and in_doubt:
                    return await self._stored_before(stream, subject, msg_id)
                if stream is not None:
                    waiting.begin(stream)
            else:
                await self._explain(answer.status, subject, give_up)
                longest = 1.0
            await asyncio.sleep(min(pause, longest))
            pause = min(pause * 2, 1.0)

    @property
    def max_payload(self) -> int:
        """The largest message that the server takes."""
        return self._connection.max_payload

    async def _sealed(self, subject: str, expect: Expect | None, error: PublishRefused, give_up: float) -> str:
        """The stream that is sealed for a migration, which is waited for; any other refusal stands."""
        stream = expect.stream if expect is not None else None
        names = [stream] if stream is not None else await self._streams.names(subject=subject)
        if names and not await is_under_maintenance(self._streams, names[0]):
            if (await self._streams.info(names[0])).config.sealed:
                raise error
        elif time.monotonic() > give_up:
            raise QueueMigrating(
                f"the queue for {subject!r} is being migrated, and took nothing", fix="try again later"
            )
        return names[0] if names else ""

    async def _stored_before(self, stream: str, subject: str, msg_id: str | None) -> Receipt:
        """A message whose first answer got lost before the stream was sealed: the new one would not know its id."""
        try:
            newest = await self._streams.get_last(stream, subject)
        except UnknownMessage:
            newest = None
        if (
            newest is not None
            and msg_id is not None
            and header_names.first(newest.headers, header_names.MSG_ID) == msg_id
        ):
            return Receipt(stream, newest.sequence, duplicate=True)
        raise OutcomeUnknown(
            f"the answer for a message on {subject!r} got lost, and then its queue was sealed for migration: it may be "
            "stored or not",
            fix="look whether it arrived before sending it again",
        )

    async def _explain(self, status: int, subject: str, give_up: float) -> None:
        """Its stream has too much to store, or none listens on the subject.

        None takes it (an error), or it is away: without leader, or migrated.
        """
        if status == TOO_MANY_REQUESTS:
            if time.monotonic() > give_up:
                raise NoAnswer(f"the stream for {subject!r} has too much to store", fix=FIXES[TOO_MANY_REQUESTS])
            return
        try:
            if not await self._streams.names(subject=subject):
                migrated = await find_stream_under_maintenance(self._streams, subject) is not None
                if not migrated and not await self._streams.names(subject=subject):
                    raise UnknownStream(
                        f"no stream takes the subject {subject!r}", fix="`purveyor stream add` makes one"
                    )
                if time.monotonic() > give_up:
                    raise QueueMigrating(f"the queue for {subject!r} is being migrated", fix="try again later")
        except Unavailable:
            if time.monotonic() > give_up:
                raise
        if time.monotonic() > give_up:
            raise ServerUnavailable(f"the stream for {subject!r} does not answer", fix="is its cluster complete?")


def _for_now(error: PublishRefused) -> bool:
    """Sent before and on its way (sent again, it is found there, or stored); or its stream has too much to store."""
    return error.err_code == ID_IN_PROCESS or error.code == TOO_MANY_REQUESTS


class Letter(NamedTuple):
    """A message as it goes out: its headers are those of its id and of what is expected, and all others."""

    subject: str
    data: bytes
    headers: bytes
    msg_id: str | None
    expect: Expect | None


class _Waiting:
    """Whether this publisher waits for a queue that is being migrated, for those who watch."""

    __slots__ = ("_number",)

    def __init__(self) -> None:
        self._number: int | None = None

    def begin(self, stream: str) -> None:
        if self._number is None:
            self._number = MIGRATION_WAITS.begin(stream.removeprefix(STREAM_PREFIX))

    def end(self) -> None:
        if self._number is not None:
            MIGRATION_WAITS.end(self._number)
            self._number = None


def _receipt(payload: bytes, subject: str) -> Receipt:
    try:
        parsed: Any = json.loads(payload.decode())
    except ValueError:
        parsed = None
    if isinstance(parsed, dict) and "error" in parsed:
        raise translate(parsed["error"], Subject(stream=str(parsed.get("stream") or subject)), publishing=True)
    if not isinstance(parsed, dict) or "seq" not in parsed:
        raise UnknownStream(
            f"somebody answered on {subject!r}, and it was not a stream", fix="is another service using this subject?"
        )
    return Receipt(parsed["stream"], parsed["seq"], bool(parsed.get("duplicate")))
