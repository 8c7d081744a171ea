"""Chained writes of `append_once`: single messages, thousands in flight, each bound to the one before it.

The first row of a chain is sent alone and expects the message that was read from the subject, as a batch does. Every
other row expects the row before it (`RowChain`), so the sender does not wait between them, and asks for a reply to one
row in some hundred. Chains need a single server, which takes the messages of a connection in the order they were sent.

Chains are used only on servers that store single messages fast. A server that syncs every write to disk
(`sync_interval: always`) stores one or two thousand single messages a second, but atomic batches nearly as fast as any
other server. Its API does not report that setting, so the sender times the first rows and remembers the result per
process. A machine under load may look the same; then rows go in batches for a while, which is correct and only slower.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

import numpy as np
import pyarrow as pa

from purveyor.jetstream.address import Address
from purveyor.jetstream.api import ErrorReply, Receipt
from purveyor.jetstream.bulk.append.encoded_table import EncodedBlock
from purveyor.jetstream.bulk.append.target_state import SentRows, TargetState
from purveyor.jetstream.bulk.net.connection import BulkConnection
from purveyor.jetstream.bulk.net.frame_parser import Frames
from purveyor.jetstream.bulk.options import AppendOptions
from purveyor.jetstream.bulk.publish.frame_builder import build_frame
from purveyor.jetstream.bulk.publish.pipelined import as_bytes
from purveyor.jetstream.bulk.publish.session import PublishSession
from purveyor.jetstream.bulk.replies import iterate_replies, parse_reply
from purveyor.jetstream.headers import EXPECTED_STREAM

PROBE_ROWS: Final = 200
"""Rows sent to measure an unknown speed."""
MIN_TIMED_ROWS: Final = 50
"""Fewer rows than this are too few for a measurement."""

_MIN_FAST_ROWS_PER_SECOND: Final = 6000.0
_SLOW_PROBES_NEEDED: Final = 2  # in a row: a single one may have met a busy moment
_REMEMBER_SECONDS: Final = 600.0
# A stream queues at most 10,000 messages that it has not stored yet, and all may go to one stream.
_MAX_ROWS_IN_FLIGHT: Final = 8000
_MAX_ROWS_PER_SEND: Final = 1000
_MAX_BYTES_PER_SEND: Final = 2 << 20
_ROWS_PER_REPLY: Final = 250
"""One row in this many asks for a reply."""


class WriteSpeed(Enum):
    """How fast a server stores single messages."""

    UNKNOWN = auto()
    FAST = auto()
    SLOW = auto()


@dataclass(frozen=True, slots=True)
class _Measured:
    speed: WriteSpeed
    until: float
    slow_probes: int = 0


class WriteSpeeds:
    """The measured speed of each server, valid for ten minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, ...], _Measured] = {}

    def of(self, urls: tuple[str, ...]) -> WriteSpeed:
        """Return the speed of the server at these addresses."""
        known = self._known.get(urls)
        return known.speed if known is not None and self._clock() < known.until else WriteSpeed.UNKNOWN

    def record(self, urls: tuple[str, ...], rows: int, seconds: float) -> None:
        """Record that a server acknowledged `rows` single messages within `seconds`."""
        if rows < MIN_TIMED_ROWS:
            return
        until = self._clock() + _REMEMBER_SECONDS
        if rows >= seconds * _MIN_FAST_ROWS_PER_SECOND:
            self._known[urls] = _Measured(WriteSpeed.FAST, until)
            return
        before = self._known.get(urls)
        slow = 1 + (before.slow_probes if before is not None and self._clock() < before.until else 0)
        self._known[urls] = _Measured(
            WriteSpeed.SLOW if slow >= _SLOW_PROBES_NEEDED else WriteSpeed.UNKNOWN, until, slow
        )


WRITE_SPEEDS: Final = WriteSpeeds()
"""The speeds that this process has measured."""


class ChainSender:
    """Sends the chains of all targets of one `append_once` and receives their replies."""

    def __init__(self, address: Address, session: PublishSession, options: AppendOptions) -> None:
        self._address = address
        self._session = session
        self._options = options
        self._in_flight: dict[int, tuple[TargetState, SentRows]] = {}
        self._rows = self._bytes = 0
        self._numbers = 0
        self._connection: BulkConnection | None = None
        self._inbox = ""
        self._sid = 0

    @property
    def speed(self) -> WriteSpeed:
        """The speed of the server."""
        return WRITE_SPEEDS.of(self._address.urls)

    @property
    def has_in_flight(self) -> bool:
        """Whether replies are outstanding."""
        return bool(self._in_flight)

    @property
    def states(self) -> list[TargetState]:
        """The targets that have rows in flight."""
        return list(dict.fromkeys(state for state, _ in self._in_flight.values()))

    def is_suitable(self, state: TargetState) -> bool:
        """Return whether a chain should write the remaining rows of a target."""
        if not state.may_chain or not state.encoded.has_ids or self._session.connection.info.clustered:
            return False
        speed, left = self.speed, len(state.positions) - state.next_row
        return speed is WriteSpeed.FAST or (speed is WriteSpeed.UNKNOWN and left >= MIN_TIMED_ROWS)

    def has_room(self) -> bool:
        """Return whether more rows may be sent. While the speed is measured, one group is in flight at a time."""
        if not self._in_flight:
            return True
        if self.speed is WriteSpeed.UNKNOWN:
            return False
        return self._rows < _MAX_ROWS_IN_FLIGHT and self._bytes < self._options.window_bytes

    def send(self, state: TargetState) -> None:
        """Send the next rows of a target; raise an error of our tree, before sending, if a row is invalid."""
        connection = self._session.connection
        start = state.chain.sent
        block = state.encoded.block(start, connection.info.max_payload)
        if connection is not self._connection:
            self._connection, self._inbox = connection, f"{self._session.inbox}c"  # separate from all other replies
            self._sid = connection.subscribe(f"{self._inbox}.*")
        if state.chain.begun:
            rows = self._count_rows(block, start)
            replies = [b""] * rows
            ends = [*range(_ROWS_PER_REPLY, rows, _ROWS_PER_REPLY), rows]
            for begin, end in zip((0, *ends), ends, strict=False):
                replies[end - 1] = self._register_sent(
                    state, start + begin, end - begin, block.size(start + begin, end - begin)
                )
            beginning = b"HPUB " + state.target.subject.encode()
            connection.queue(as_bytes(block.frames(beginning, pa.array(replies, pa.binary()), start, rows)))
        else:
            reply = self._register_sent(state, start, 1, block.size(start, 1))
            connection.queue(memoryview(_build_first_frame(block, start - block.start, state, reply)))
        connection.pump(0.0)

    def _register_sent(self, state: TargetState, start: int, rows: int, size: int) -> bytes:
        """Register rows as in flight; return the reply subject that the last of them carries."""
        sent = SentRows(self._numbers, start, rows, size, time.monotonic())
        self._numbers += 1
        self._in_flight[sent.reply_number] = state, sent
        self._rows += rows
        self._bytes += size
        state.chain.sent_rows.append(sent)
        state.chain.sent = start + rows
        return f" {self._inbox}.{sent.reply_number}".encode()

    def receive_replies(self, found: Frames) -> list[TargetState]:
        """Record replies; return the targets that they belong to."""
        touched: dict[TargetState, None] = {}
        for number, headers, payload in iterate_replies(found, sid=self._sid, prefix_size=len(self._inbox) + 1):
            if number not in self._in_flight:
                continue  # a late reply to rows that were abandoned
            state, sent = self._in_flight[number]
            reply = parse_reply(headers, payload)
            if isinstance(reply, Receipt) and reply.stream != state.target.stream:
                reply = ErrorReply(400, 0, f"stream {reply.stream!r} takes this subject")
            sent.record_reply(reply)
            self._remove(sent)
            touched[state] = None
            if self.speed is WriteSpeed.UNKNOWN:
                WRITE_SPEEDS.record(self._address.urls, sent.rows, time.monotonic() - sent.sent_at)
        return list(touched)

    def abandon(self, state: TargetState) -> None:
        """Stop waiting for replies to the rows of a target."""
        for sent in state.chain.sent_rows:
            if sent.reply_number in self._in_flight:
                self._remove(sent)
        state.chain.sent_rows.clear()

    def reset(self) -> None:
        """Forget everything in flight: the connection is lost, and all replies with it."""
        for state in self.states:
            self.abandon(state)
        self._connection = None

    def release(self) -> None:
        """Stop receiving replies on this connection."""
        if self._connection is not None:
            self._connection.unsubscribe(self._sid)
            self._connection = None

    def _count_rows(self, block: EncodedBlock, start: int) -> int:
        """Return how many rows are sent together, from a row of a block on."""
        offset = start - block.start
        before = int(block.ends[offset - 1]) if offset else 0
        max_bytes = min(self._options.window_bytes, _MAX_BYTES_PER_SEND)
        fitting = int(np.searchsorted(block.ends, before + max_bytes, side="right")) - offset
        max_rows = PROBE_ROWS if self.speed is WriteSpeed.UNKNOWN else _MAX_ROWS_PER_SEND
        return max(1, min(fitting, max_rows, len(block.rows) - offset))

    def _remove(self, sent: SentRows) -> None:
        del self._in_flight[sent.reply_number]
        self._rows -= sent.rows
        self._bytes -= sent.size


def _build_first_frame(block: EncodedBlock, offset: int, state: TargetState, reply: bytes) -> bytes:
    """Build the frame of the first row of a chain."""
    target = state.target
    lines = f"{EXPECTED_STREAM}: {target.stream}\r\n".encode() + state.expected_headers
    row = replace(block.rows.slice(offset, 1), subjects=pa.array([target.subject.encode()], pa.binary()))
    return build_frame(row, 0, reply=reply, extra_lines=lines)
