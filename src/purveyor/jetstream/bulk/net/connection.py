"""One synchronous connection to a NATS server: an output queue, a receive buffer, and small requests. No threads.

The owner of a connection drives it. `pump` writes what the socket takes and reads what has arrived, in one step, so
that neither side's buffers fill up while the other waits. `receive` returns the frames that have arrived. The output
queue holds whole frames, so a PONG goes between two frames, never into one.

A broken connection raises `ConnectionLost` and cannot be used again; `pool.connect` makes the next one.
"""

import json
import select
import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import numpy as np

from purveyor.jetstream.address import DEFAULT_INBOX
from purveyor.jetstream.api import API_PREFIX, NO_RESPONDERS, Resource, encode_request, parse_api_reply
from purveyor.jetstream.bulk.net.frame_parser import (
    Frames,
    MalformedFrames,
    ReceiveBuffer,
    header_block,
    parse_frames,
    parse_message_lines,
    parse_status,
)
from purveyor.model.errors import (
    AuthenticationFailed,
    NoAnswer,
    PermissionDenied,
    PurveyorError,
    ServerUnavailable,
)

_PING_AFTER_SECONDS: Final = 5.0
_LOST_AFTER_SECONDS: Final = 15.0
REPLY_TIMEOUT_SECONDS: Final = 5.0
_GATHER_PAUSE_SECONDS: Final = 0.002
_MAX_IO_BYTES: Final = 1 << 20
_REQUESTS_SID: Final = 1


class ConnectionLost(ServerUnavailable):
    """This connection broke; a new one may work."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The report of the server about itself."""

    name: str
    version: str
    max_payload: int
    others: tuple[str, ...]
    """`host:port` of further servers of the cluster."""
    clustered: bool = False

    @classmethod
    def parse(cls, info: dict[str, Any]) -> "ServerInfo":
        """Parse the INFO line."""
        return cls(
            str(info.get("server_name", "")),
            str(info.get("version", "")),
            int(info.get("max_payload", 1 << 20)),
            tuple(map(str, info.get("connect_urls") or ())),
            bool(info.get("cluster")),
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request; the status of an ordinary reply is 0."""

    status: int
    status_text: str
    data: bytes


class BulkConnection:
    """An established and authenticated connection."""

    def __init__(
        self, sock: socket.socket, info: ServerInfo, initial_bytes: bytes = b"", *, inbox: str = DEFAULT_INBOX
    ) -> None:
        self.info = info
        self._socket = sock
        self._buffer = ReceiveBuffer()
        if initial_bytes:
            self._buffer.writable(len(initial_bytes))[: len(initial_bytes)] = initial_bytes
            self._buffer.mark_received(len(initial_bytes))
        self._outgoing: deque[memoryview] = deque()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._polls_for_writing = False
        self._closed = False
        self._needed_bytes = 0
        self._gather_bytes = 0
        self._server_errors: dict[str, PurveyorError] = {}
        self._silent_seconds = 0.0
        self._sid = _REQUESTS_SID
        self._request_count = 0
        self._inbox_prefix = inbox
        self._inbox = self.new_inbox()
        sock.setblocking(False)
        self.queue(f"SUB {self._inbox}.* {_REQUESTS_SID}\r\n".encode())

    @property
    def is_usable(self) -> bool:
        """Whether the connection is neither broken nor closed."""
        return not self._closed

    @property
    def buffered(self) -> int:
        """The number of received bytes that are not parsed yet."""
        return len(self._buffer)

    @property
    def backlog(self) -> int:
        """The number of queued bytes that the socket has not taken, without PING and PONG.

        A caller that waits for replies treats a shrinking backlog as a sign of life; our own PING is not such a sign.
        """
        return sum(len(piece) for piece in self._outgoing if len(piece) > len(b"PING\r\n"))

    def queue(self, data: bytes | memoryview) -> None:
        """Append whole frames to the output queue."""
        self._outgoing.append(data if isinstance(data, memoryview) else memoryview(data))

    def withdraw(self) -> list[memoryview]:
        """Remove and return the queued data that the socket has not begun to send."""
        withdrawn = list(self._outgoing)[1:]
        while len(self._outgoing) > 1:
            self._outgoing.pop()
        return withdrawn

    def new_inbox(self) -> str:
        """Return a new unique subject for replies."""
        return f"{self._inbox_prefix}.{uuid4().hex}"

    def subscribe(self, subject: str) -> int:
        """Subscribe to a subject; return the subscription id that its frames carry."""
        self._sid += 1
        self.queue(f"SUB {subject} {self._sid}\r\n".encode())
        return self._sid

    def unsubscribe(self, sid: int, *, after_messages: int = 0) -> None:
        """End a subscription, at once or after a number of messages; frames that the server has sent still arrive."""
        limit = f" {after_messages}" if after_messages else ""
        self.queue(f"UNSUB {sid}{limit}\r\n".encode())

    def publish(self, subject: str, data: bytes = b"", reply: str = "") -> None:
        """Send one small message."""
        self.queue(f"PUB {subject} {reply} {len(data)}\r\n".encode() + data + b"\r\n")

    def pump(self, timeout: float) -> int:
        """Write and read what is possible, waiting at most `timeout` seconds; return the number of bytes read."""
        began = time.monotonic()
        if bool(self._outgoing) != self._polls_for_writing:
            self._polls_for_writing = not self._polls_for_writing
            self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._polls_for_writing else 0))
        try:
            if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
                timeout = 0.0
            events = self._poll.poll(timeout * 1000)
            mask = events[0][1] if events else 0
            if mask & select.POLLOUT:
                self._write()
            count = self._read() if mask & ~select.POLLOUT or not timeout else 0
        except ConnectionLost:
            self._closed = True
            raise
        except (OSError, ValueError) as error:
            self._closed = True
            raise ConnectionLost(f"the connection to {self.info.name} broke: {error}") from error
        self._check_alive(count, time.monotonic() - began)
        return count

    def fill(self, min_bytes: int, timeout: float) -> int:
        """Pump until `min_bytes` bytes are received or no more arrive at once; return the number of bytes read.

        Parsing has a cost per call, so it pays to parse many frames at a time.
        """
        self._gather_bytes = min_bytes
        deadline = time.monotonic() + timeout
        total = self.pump(timeout)
        while not total and (left := deadline - time.monotonic()) > 0:
            total = self.pump(left)  # that pump only wrote
        while total and len(self._buffer) < min_bytes:
            count = self.pump(_GATHER_PAUSE_SECONDS)
            if not count:
                break
            total += count
        return total

    def receive(self) -> Frames:
        """Return the complete message frames; they are valid until the next `pump`.

        Raise the errors that the server sent, one per call, after the frames that came before them.
        """
        self._raise_server_error()
        whole = self._buffer.filled()
        if len(whole) < self._needed_bytes:
            whole = whole[:0]
        try:
            found = parse_frames(whole)
        except MalformedFrames as error:
            raise ConnectionLost(f"{self.info.name} sends invalid NATS frames: {error}") from error
        for line in found.controls:
            self._handle_control_line(line)
        self._buffer.drop(found.consumed)
        if len(whole):
            self._needed_bytes = found.needed_bytes
        if not len(found.frames):
            self._raise_server_error()
        return found.frames

    def flush(self, timeout: float = REPLY_TIMEOUT_SECONDS) -> None:
        """Write everything that is queued; received frames are kept."""
        deadline = time.monotonic() + timeout
        while self._outgoing:
            if time.monotonic() > deadline:
                raise ConnectionLost(f"{self.info.name} does not read from the connection")
            self.pump(0.1)

    def request(self, subject: str, data: bytes = b"", *, timeout: float = REPLY_TIMEOUT_SECONDS) -> Reply:
        """Send a request and wait for the reply. Other frames that arrive meanwhile are dropped."""
        self._request_count += 1
        inbox = f"{self._inbox}.{self._request_count}"
        self.publish(subject, data, inbox)
        deadline = time.monotonic() + timeout
        while True:
            frames = self.receive()
            if len(frames):
                reply = self._find_reply(frames, inbox.encode())
                if reply is not None:
                    return reply
            left = deadline - time.monotonic()
            if left <= 0:
                raise NoAnswer(f"no reply on {subject} within {timeout:g} s", fix="try again")
            self.pump(left)

    def request_api(
        self, subject: str, body: dict[str, Any] | None = None, *, timeout: float = REPLY_TIMEOUT_SECONDS
    ) -> dict[str, Any]:
        """Send a request to the JetStream API; raise the server's error as an error of our tree."""
        reply = self.request(API_PREFIX + subject, encode_request(body), timeout=timeout)
        if reply.status == NO_RESPONDERS:
            raise ServerUnavailable(
                f"JetStream does not answer on {self.info.name}", fix="is JetStream enabled, for this account too?"
            )
        return parse_api_reply(reply.data, Resource.from_api_subject(subject))

    def close(self) -> None:
        """Close the connection; queued bytes are not sent."""
        self._closed = True
        self._outgoing.clear()
        self._socket.close()

    def _write(self) -> None:
        while self._outgoing:
            head = self._outgoing[0]
            try:
                sent = self._socket.send(head[:_MAX_IO_BYTES])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            if sent == len(head):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = head[sent:]

    def _read(self) -> int:
        total = 0
        while True:
            writable = self._buffer.writable(max(self._needed_bytes, self._gather_bytes))
            try:
                count = self._socket.recv_into(writable)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return total
            if not count:
                if total:
                    return total  # return what came before the end; the next read meets the end again
                raise ConnectionLost(f"the connection to {self.info.name} was closed")
            self._buffer.mark_received(count)
            total += count
            # TLS returns 16 kB at a time and buffers the rest where poll does not see it.
            if not isinstance(self._socket, ssl.SSLSocket) or total >= _MAX_IO_BYTES or not self._socket.pending():
                return total

    def _check_alive(self, count: int, elapsed: float) -> None:
        """Detect a server that vanished without closing. Only the time spent in `pump` counts."""
        if count:
            self._silent_seconds = 0.0
            return
        before, self._silent_seconds = self._silent_seconds, self._silent_seconds + elapsed
        if self._silent_seconds > _LOST_AFTER_SECONDS:
            raise ConnectionLost(f"{self.info.name} has been silent for {_LOST_AFTER_SECONDS:g} s")
        if before <= _PING_AFTER_SECONDS < self._silent_seconds:
            self._queue_between_frames(b"PING\r\n")

    def _queue_between_frames(self, line: bytes) -> None:
        # The first element may be half sent (or half encrypted), so it stays the first.
        self._outgoing.insert(min(1, len(self._outgoing)), memoryview(line))

    def _raise_server_error(self) -> None:
        if self._server_errors:
            raise self._server_errors.pop(next(iter(self._server_errors)))

    def _handle_control_line(self, line: bytes) -> None:
        if line.startswith(b"PING"):
            self._queue_between_frames(b"PONG\r\n")
        elif line.startswith(b"-ERR"):
            # The server sends one error per message of a refused batch, all with the same text: keep one.
            text = line[4:].decode("utf-8", "replace").strip().strip("'")
            self._server_errors.setdefault(text, parse_server_error(text))
        elif line.startswith(b"INFO"):
            self.info = ServerInfo.parse(json.loads(line[4:]))

    def _find_reply(self, frames: Frames, inbox: bytes) -> Reply | None:
        lines = parse_message_lines(frames)
        for row in np.flatnonzero(lines.sids == _REQUESTS_SID).tolist():
            if lines.text[lines.subject_starts[row] : lines.subject_ends[row]].tobytes() == inbox:
                status, status_text = parse_status(header_block(frames, row))
                return Reply(status, status_text, frames.data[frames.payloads[row] : frames.ends[row]].tobytes())
        return None


def parse_server_error(text: str) -> PurveyorError:
    """Return an error line of the server as an error of our tree."""
    lowered = text.lower()
    if "permissions violation" in lowered:
        return PermissionDenied(f"the server reports: {text}", fix="the user needs this permission", code=403)
    if "authorization" in lowered or "authentication" in lowered:
        return AuthenticationFailed(
            f"the server reports: {text}", fix="check user, password, token or credentials file"
        )
    return ConnectionLost(f"the server ended the connection: {text}")
