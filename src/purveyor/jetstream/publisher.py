"""Publish one message and wait until it is stored.

A queue that is being migrated takes no messages for a while: the publisher waits, as for an unavailable server.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from purveyor.jetstream import headers as header_names
from purveyor.jetstream.api import (
    FIXES,
    NO_RESPONDERS,
    NOT_A_STREAM_REPLY,
    STREAM_SEALED,
    TOO_MANY_REQUESTS,
    Receipt,
    Resource,
    is_temporary_error,
    parse_publish_reply,
    to_error,
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
from purveyor.model.retries import Backoff, RetryDelays

_SEALED_PAUSE_SECONDS = 0.2
_RETRY_BACKOFF = Backoff(0.05, 1.0)
_NOT_STORED_STATUSES = (NO_RESPONDERS, TOO_MANY_REQUESTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """Conditions under which the stream stores a message; if not met, WrongRevision or PublishRefused."""

    stream: str | None = None
    last_sequence: int | None = None
    last_subject_sequence: int | None = None
    last_msg_id: str | None = None

    def headers(self) -> dict[str, tuple[str, ...]]:
        """Return the conditions as headers."""
        pairs: tuple[tuple[str, Any], ...] = (
            (header_names.EXPECTED_STREAM, self.stream),
            (header_names.EXPECTED_LAST_SEQUENCE, self.last_sequence),
            (header_names.EXPECTED_LAST_SUBJECT_SEQUENCE, self.last_subject_sequence),
            (header_names.EXPECTED_LAST_MSG_ID, self.last_msg_id),
        )
        return {name: (str(value),) for name, value in pairs if value is not None}


class Publisher:
    """Publishes single messages over the asynchronous connection."""

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
        """Store a message and return its receipt.

        With a `msg_id` the publisher waits for a lost server and sends the message again: the server recognises the
        duplicate. Without one, a lost reply raises OutcomeUnknown: sending again could store the message twice.
        """
        given = normalise(headers)
        if msg_id is not None:
            check_header(header_names.MSG_ID, msg_id)
            given[header_names.MSG_ID] = (msg_id,)
        if expect is not None:
            given |= expect.headers()
        check_subject(subject)
        block = header_names.encode(given) if given else b""
        return await self.send(OutgoingMessage(subject, data, block, msg_id, expect))

    async def send(self, message: "OutgoingMessage") -> Receipt:
        """Store a message whose subject and headers are checked already."""
        size = len(message.data) + len(message.headers)
        if size > self._connection.max_payload:
            raise PublishRefused(
                f"a message of {size} bytes for {message.subject!r} is above the server's limit of "
                f"{self._connection.max_payload} bytes",
                fix="send less, or raise max_payload on the server",
                code=400,
            )
        waiting = _MigrationWait()
        try:
            return await self._store(message, waiting)
        finally:
            waiting.end()

    async def _store(self, message: "OutgoingMessage", waiting: "_MigrationWait") -> Receipt:
        subject, msg_id, expect = message.subject, message.msg_id, message.expect
        give_up = time.monotonic() + self._connection.patience_seconds
        delays = RetryDelays(_RETRY_BACKOFF)
        in_doubt = False
        while True:
            await self._connection.wait_until_connected(max(give_up - time.monotonic(), 0.1))
            try:
                reply = await self._connection.request(subject, message.data, headers=message.headers)
            except NoAnswer as error:
                if msg_id is None and expect is None:
                    raise OutcomeUnknown(
                        f"the reply to a message on {subject!r} was lost: it may be stored or not",
                        fix="look at the stream; a message with an id is sent again safely",
                    ) from error
                if time.monotonic() > give_up:
                    raise
                in_doubt = True
                continue
            if reply.status not in _NOT_STORED_STATUSES:
                try:
                    return _parse_receipt(reply.data, subject)
                except PublishRefused as error:
                    if is_temporary_error(error.code, error.err_code) and time.monotonic() < give_up:
                        stream = None
                    elif error.err_code == STREAM_SEALED:
                        stream = await self._find_sealed_stream(subject, expect, error, give_up)
                    else:
                        raise
                longest = _SEALED_PAUSE_SECONDS  # usually over soon
                if stream is not None and in_doubt:
                    return await self._find_stored(stream, subject, msg_id)
                if stream is not None:
                    waiting.begin(stream)
            else:
                await self._raise_if_permanent(reply.status, subject, give_up)
                longest = 1.0
            await asyncio.sleep(min(delays.next_seconds(), longest))

    @property
    def max_payload(self) -> int:
        """The maximum size of a message that the server takes."""
        return self._connection.max_payload

    async def _find_sealed_stream(
        self, subject: str, expect: Expect | None, error: PublishRefused, give_up: float
    ) -> str:
        """Return the stream that is sealed for a migration, to wait for; raise `error` for any other sealed stream."""
        stream = expect.stream if expect is not None else None
        names = [stream] if stream is not None else await self._streams.names(subject=subject)
        if names and not await is_under_maintenance(self._streams, names[0]):
            if (await self._streams.info(names[0])).config.sealed:
                raise error
        elif time.monotonic() > give_up:
            raise QueueMigrating(
                f"the queue for {subject!r} is being migrated and takes no messages", fix="try again later"
            )
        return names[0] if names else ""

    async def _find_stored(self, stream: str, subject: str, msg_id: str | None) -> Receipt:
        """Return the receipt of a message whose first reply was lost before the stream was sealed, if it is stored.

        The migrated stream does not know its message id, so it must not be sent again.
        """
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
            f"the reply to a message on {subject!r} was lost, and then its queue was sealed for migration: it may be "
            "stored or not",
            fix="check whether it arrived before you send it again",
        )

    async def _raise_if_permanent(self, status: int, subject: str, give_up: float) -> None:
        """Raise if no stream takes the subject, or after the deadline; return to retry.

        The stream has too many messages to store, or no server answers for it: it has no leader, or is being migrated.
        """
        if status == TOO_MANY_REQUESTS:
            if time.monotonic() > give_up:
                raise NoAnswer(
                    f"the stream for {subject!r} has too many messages to store", fix=FIXES[TOO_MANY_REQUESTS]
                )
            return
        try:
            if not await self._streams.names(subject=subject):
                migrated = await find_stream_under_maintenance(self._streams, subject) is not None
                if not migrated and not await self._streams.names(subject=subject):
                    raise UnknownStream(
                        f"no stream takes the subject {subject!r}", fix="`purveyor stream add` creates one"
                    )
                if time.monotonic() > give_up:
                    raise QueueMigrating(f"the queue for {subject!r} is being migrated", fix="try again later")
        except Unavailable:
            if time.monotonic() > give_up:
                raise
        if time.monotonic() > give_up:
            raise ServerUnavailable(f"the stream for {subject!r} does not answer", fix="is its cluster complete?")


class OutgoingMessage(NamedTuple):
    """A message to publish; `headers` is the encoded block with its id, its expectations and all other headers."""

    subject: str
    data: bytes
    headers: bytes
    msg_id: str | None
    expect: Expect | None


class _MigrationWait:
    """Counts this publisher in the metric of migration waits."""

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


def _parse_receipt(payload: bytes, subject: str) -> Receipt:
    """Return the receipt in a stream's reply; raise the error that it reports."""
    reply = parse_publish_reply(payload)
    if isinstance(reply, Receipt):
        return reply
    if reply is NOT_A_STREAM_REPLY:
        raise UnknownStream(
            f"the reply on {subject!r} is not from a stream", fix="does another service use this subject?"
        )
    raise to_error(reply, Resource(stream=reply.stream or subject), publishing=True)
