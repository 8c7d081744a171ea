"""One connection to a NATS server: bytes out of a queue, frames in from a buffer, and small requests. No threads.

Whoever owns a link drives it: `pump` writes what the socket takes and reads what has come, in one turn, so that neither
side's buffers can fill up while the other waits; `receive` hands over the frames of that turn. What is queued are whole
frames, and a PONG goes between two of them, never into one.

A link that breaks raises `LinkLost` and is of no more use; `pool.connect` makes the next one.
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
from purveyor.jetstream.api_errors import Subject, translate
from purveyor.jetstream.bulk.net.frame_parser import BrokenFrames, Frames, cut, split_lines
from purveyor.jetstream.bulk.net.receive_buffer import ReceiveBuffer
from purveyor.jetstream.bulk.publish.acks import NO_RESPONDERS, header_block, status_of
from purveyor.model.errors import (
    AuthenticationFailed,
    NoAnswer,
    PermissionDenied,
    PurveyorError,
    ServerUnavailable,
)

_QUIET_SECONDS: Final = 5.0
_DEAD_SECONDS: Final = 15.0
ANSWER_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.002
_PIECE: Final = 1 << 20
_REQUESTS_SID: Final = 1


class LinkLost(ServerUnavailable):
    """This connection broke; another one may work."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server said about itself."""

    name: str
    version: str
    max_payload: int
    others: tuple[str, ...]
    """`host:port` of further servers of the cluster."""
    clustered: bool = False

    @classmethod
    def parse(cls, info: dict[str, Any]) -> "ServerInfo":
        """From the INFO line."""
        return cls(
            str(info.get("server_name", "")),
            str(info.get("version", "")),
            int(info.get("max_payload", 1 << 20)),
            tuple(map(str, info.get("connect_urls") or ())),
            bool(info.get("cluster")),
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request. A status of 0 is an ordinary answer."""

    status: int
    status_text: str
    data: bytes


class Link:
    """A connection that has been made and accepted."""

    def __init__(
        self, sock: socket.socket, info: ServerInfo, received: bytes = b"", *, inbox: str = DEFAULT_INBOX
    ) -> None:
        self.info = info
        self._socket = sock
        self._buffer = ReceiveBuffer()
        if received:
            self._buffer.room(len(received))[: len(received)] = received
            self._buffer.received(len(received))
        self._out: deque[memoryview] = deque()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._polls_for_writing = False
        self._gone = False
        self._wanted = 0
        self._gathers = 0
        self._faults: dict[str, PurveyorError] = {}
        self._waited = 0.0
        self._sid = _REQUESTS_SID
        self._requests = 0
        self._inboxes = inbox
        self._inbox = self.new_inbox()
        sock.setblocking(False)
        self.queue(f"SUB {self._inbox}.* {_REQUESTS_SID}\r\n".encode())

    @property
    def usable(self) -> bool:
        """Whether it has neither broken nor been closed."""
        return not self._gone

    @property
    def buffered(self) -> int:
        """How many received bytes wait to be cut into frames."""
        return len(self._buffer)

    @property
    def backlog(self) -> int:
        """How many bytes are queued and not yet taken by the socket, PING and PONG left out.

        Who waits for answers takes a shrinking backlog for life; our own PING going out is no sign of it.
        """
        return sum(len(piece) for piece in self._out if len(piece) > len(b"PING\r\n"))

    def queue(self, data: bytes | memoryview) -> None:
        """Send whole frames after all that is queued already."""
        self._out.append(data if isinstance(data, memoryview) else memoryview(data))

    def withdraw(self) -> list[memoryview]:
        """Take back what is queued and not begun; what remains is at most the piece half sent."""
        withdrawn = list(self._out)[1:]
        while len(self._out) > 1:
            self._out.pop()
        return withdrawn

    def new_inbox(self) -> str:
        """A subject that nobody else listens on."""
        return f"{self._inboxes}.{uuid4().hex}"

    def subscribe(self, subject: str) -> int:
        """Begin to receive what comes on a subject; the number tells its frames from others."""
        self._sid += 1
        self.queue(f"SUB {subject} {self._sid}\r\n".encode())
        return self._sid

    def unsubscribe(self, sid: int) -> None:
        """Receive no more of it (frames under way still come)."""
        self.queue(f"UNSUB {sid}\r\n".encode())

    def publish(self, subject: str, data: bytes = b"", reply: str = "") -> None:
        """Send one small message."""
        self.queue(f"PUB {subject} {reply} {len(data)}\r\n".encode() + data + b"\r\n")

    def pump(self, timeout: float) -> int:
        """One turn: write and read what is possible, waiting at most so long for anything; the bytes read."""
        began = time.monotonic()
        if bool(self._out) != self._polls_for_writing:
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
        except LinkLost:
            self._gone = True
            raise
        except (OSError, ValueError) as error:
            self._gone = True
            raise LinkLost(f"the connection to {self.info.name} broke: {error}") from error
        self._watch(count, time.monotonic() - began)
        return count

    def fill(self, wanted: int, timeout: float) -> int:
        """Turns until so many bytes wait to be cut, or nothing more comes at once; the bytes read.

        Cutting has a price per call, so it pays to cut much at a time.
        """
        self._gathers = wanted
        deadline = time.monotonic() + timeout
        total = self.pump(timeout)
        while not total and (left := deadline - time.monotonic()) > 0:
            total = self.pump(left)  # that turn only wrote
        while total and len(self._buffer) < wanted:
            count = self.pump(_PAUSE_SECONDS)
            if not count:
                break
            total += count
        return total

    def receive(self) -> Frames:
        """The message frames that have come whole. They are valid until the next `pump`.

        Errors that the server sent are raised here, one at a time, after the frames that came before were handed over.
        """
        self._raise_fault()
        whole = self._buffer.filled()
        if len(whole) < self._wanted:
            whole = whole[:0]
        try:
            found = cut(whole)
        except BrokenFrames as error:
            raise LinkLost(f"what {self.info.name} sends is not understood: {error}") from error
        for line in found.controls:
            self._control(line)
        self._buffer.drop(found.consumed)
        if len(whole):
            self._wanted = found.wanted
        if not len(found.frames):
            self._raise_fault()
        return found.frames

    def flush(self, timeout: float = ANSWER_SECONDS) -> None:
        """Write all that is queued, dropping nothing that comes meanwhile."""
        deadline = time.monotonic() + timeout
        while self._out:
            if time.monotonic() > deadline:
                raise LinkLost(f"{self.info.name} does not take what is sent")
            self.pump(0.1)

    def request(self, subject: str, data: bytes = b"", *, timeout: float = ANSWER_SECONDS) -> Reply:
        """Ask and wait for the answer. Frames for others that come meanwhile are dropped."""
        self._requests += 1
        inbox = f"{self._inbox}.{self._requests}"
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
                raise NoAnswer(f"no answer on {subject} within {timeout:g} s", fix="try again")
            self.pump(left)

    def api(
        self, subject: str, body: dict[str, Any] | None = None, *, timeout: float = ANSWER_SECONDS
    ) -> dict[str, Any]:
        """Ask JetStream; what it refuses is an error of our tree."""
        data = json.dumps(body).encode() if body is not None else b""
        reply = self.request(f"$JS.API.{subject}", data, timeout=timeout)
        if reply.status == NO_RESPONDERS:
            raise ServerUnavailable(
                f"JetStream does not answer on {self.info.name}", fix="is JetStream enabled, for this account too?"
            )
        answer: dict[str, Any] = json.loads(reply.data)
        if "error" in answer:
            raise translate(answer["error"], Subject.of_question(subject))
        return answer

    def close(self) -> None:
        """End it. Queued bytes are not sent."""
        self._gone = True
        self._out.clear()
        self._socket.close()

    def _write(self) -> None:
        while self._out:
            head = self._out[0]
            try:
                sent = self._socket.send(head[:_PIECE])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            if sent == len(head):
                self._out.popleft()
            else:
                self._out[0] = head[sent:]

    def _read(self) -> int:
        total = 0
        while True:
            room = self._buffer.room(max(self._wanted, self._gathers))
            try:
                count = self._socket.recv_into(room)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return total
            if not count:
                if total:
                    return total  # hand over what came before the end; the next turn meets the end again
                raise LinkLost(f"the connection to {self.info.name} was closed")
            self._buffer.received(count)
            total += count
            # TLS gives 16 kB at a time and keeps the rest where poll does not see it.
            if not isinstance(self._socket, ssl.SSLSocket) or total >= _PIECE or not self._socket.pending():
                return total

    def _watch(self, count: int, elapsed: float) -> None:
        """Notice a server that is gone without a word. Only time spent waiting here counts."""
        if count:
            self._waited = 0.0
            return
        before, self._waited = self._waited, self._waited + elapsed
        if self._waited > _DEAD_SECONDS:
            raise LinkLost(f"{self.info.name} has been silent for {_DEAD_SECONDS:g} s")
        if before <= _QUIET_SECONDS < self._waited:
            self._between_frames(b"PING\r\n")

    def _between_frames(self, line: bytes) -> None:
        # The head may be half sent (or half encrypted), so it always stays the head.
        self._out.insert(min(1, len(self._out)), memoryview(line))

    def _raise_fault(self) -> None:
        if self._faults:
            raise self._faults.pop(next(iter(self._faults)))

    def _control(self, line: bytes) -> None:
        if line.startswith(b"PING"):
            self._between_frames(b"PONG\r\n")
        elif line.startswith(b"-ERR"):
            # A refused batch is refused message by message, in the same words: say it once.
            said = line[4:].decode("utf-8", "replace").strip().strip("'")
            self._faults.setdefault(said, explain(said))
        elif line.startswith(b"INFO"):
            self.info = ServerInfo.parse(json.loads(line[4:]))

    def _find_reply(self, frames: Frames, inbox: bytes) -> Reply | None:
        lines = split_lines(frames)
        for row in np.flatnonzero(lines.sids == _REQUESTS_SID).tolist():
            if lines.text[lines.subject_starts[row] : lines.subject_ends[row]].tobytes() == inbox:
                status, status_text = status_of(header_block(frames, row))
                return Reply(status, status_text, frames.data[frames.payloads[row] : frames.ends[row]].tobytes())
        return None


def explain(said: str) -> PurveyorError:
    """An error line of the server as an error of our tree."""
    lowered = said.lower()
    if "permissions violation" in lowered:
        return PermissionDenied(f"the server says: {said}", fix="the user needs this permission", code=403)
    if "authorization" in lowered or "authentication" in lowered:
        return AuthenticationFailed(f"the server says: {said}", fix="check user, password, token or credentials file")
    return LinkLost(f"the server ended the connection: {said}")
