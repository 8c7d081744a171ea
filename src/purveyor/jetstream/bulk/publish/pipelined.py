"""Pipelined publishing: single messages, thousands in flight, each reply matched to its message.

Consecutive messages on one subject share a reply subject, which saves server and client a fifth of the work. A single
server replies in the order of the messages, so the n-th reply belongs to the n-th message. Where that does not hold
(several subjects go to several streams; a cluster may refuse a message before it has stored the one before it), each
message has its own reply subject.

Order: messages are sent in the given order, on one connection. After a break all messages without a reply are sent
again in that order. After a refusal no further messages are sent, the replies to messages in flight are collected, and
the error names the index of the refused message; later messages that were in flight may be stored.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.api import TOO_MANY_REQUESTS, ErrorReply
from purveyor.jetstream.bulk.arrow_columns import Mask, Positions, bytes_and_offsets, join
from purveyor.jetstream.bulk.net.connection import ConnectionLost
from purveyor.jetstream.bulk.publish.frame_builder import PreparedRows, build_frames, index_digits
from purveyor.jetstream.bulk.publish.session import SILENCE_SECONDS, PublishSession, UnansweredMessage
from purveyor.jetstream.bulk.replies import ParsedReplies, parse_replies
from purveyor.model.errors import NoAnswer, ServerUnavailable, Unavailable

_MAX_BATCH_ROWS: Final = 1250
_MAX_BATCH_BYTES: Final = 1 << 20
_CLUSTER_WINDOW_MESSAGES: Final = 1000
"""A clustered stream queues 10,000 messages of all publishers that it has not stored yet, and refuses more."""
_BATCHES_PER_WINDOW: Final = 4  # in a small window: while replies to one batch arrive, the next are in flight
_PUMP_SECONDS: Final = 1.0
_GATHER_REPLY_BYTES: Final = 64 << 10  # of replies, about a thousand, before they are parsed
_GATHER_SECONDS: Final = 0.05
_BUFFERED_WAIT_SECONDS: Final = 0.002


@dataclass(slots=True, eq=False)
class _InFlight:
    """Consecutive messages sent together, kept until every reply has arrived."""

    rows: PreparedRows
    encoded: memoryview
    in_order: bool
    """Whether the server replies in order, on the reply subject of the first message."""
    replies_seen: int = 0
    sent_at: float = 0.0
    sent: bool = True

    @property
    def first(self) -> int:
        return self.rows.first_index

    @property
    def end(self) -> int:
        return self.rows.first_index + len(self.rows)


class PipelinedPublisher:
    """Publishes single messages. `send` returns when they are in flight, `finish` when all replies have arrived."""

    def __init__(self, session: PublishSession) -> None:
        self._session = session
        window = session.options.window
        self._window = min(window, _CLUSTER_WINDOW_MESSAGES) if session.connection.info.clustered else window
        self._in_flight: deque[_InFlight] = deque()
        self._bytes = 0
        # Whether message i has no reply yet, at slot i modulo the window: no two messages in flight share a slot.
        self._open: Mask = np.zeros(self._window, np.bool_)
        self._refusals: dict[int, ErrorReply] = {}
        self._in_doubt: set[int] = set()
        """Messages sent on a connection that broke: only their stream knows whether they are stored."""
        self._last_reply = self._last_parsed = time.monotonic()

    def send(self, rows: PreparedRows) -> None:
        """Send messages; wait while too many are in flight."""
        most = min(-(-self._window // _BATCHES_PER_WINDOW), _MAX_BATCH_ROWS)
        for part in split_rows(rows, most, min(self._session.options.window_bytes, _MAX_BATCH_BYTES)):
            one_subject = part.subject is not None or len(pc.unique(part.subjects)) == 1
            in_order = one_subject and not self._session.connection.info.clustered
            batch = _InFlight(part, as_bytes(self._frames(part, in_order=in_order)), in_order)
            while not self._has_room(batch):
                self._pump(_PUMP_SECONDS)
            batch.sent_at = time.monotonic()
            self._open[self._window_slots(batch)] = True
            self._in_flight.append(batch)
            self._bytes += len(batch.encoded)
            self._session.connection.queue(batch.encoded)
            self._pump(0.0)

    def finish(self) -> None:
        """Wait until every message has its reply."""
        while self._in_flight:
            self._pump(_PUMP_SECONDS)

    def _frames(self, rows: PreparedRows, *, in_order: bool) -> Any:
        inbox = f" {self._session.inbox}.".encode()
        return build_frames(
            rows, replies=inbox + b"%d" % rows.first_index if in_order else join(inbox, index_digits(rows))
        )

    def _has_room(self, batch: _InFlight) -> bool:
        if not self._in_flight:
            return True
        fits = self._bytes + len(batch.encoded) <= self._session.options.window_bytes
        return fits and batch.end - self._in_flight[0].first <= self._window

    def _window_slots(self, batch: _InFlight) -> Positions:
        return np.arange(batch.first, batch.end) % self._window

    def _pump(self, timeout: float) -> None:
        """Send and receive once, and handle failures."""
        try:
            self._receive(timeout)
        except ConnectionLost as error:
            self._resend_on_new_connection(error)
        if self._refusals:
            self._handle_refusals()

    def _receive(self, timeout: float) -> None:
        connection = self._session.connection
        backlog = connection.backlog
        now = time.monotonic()
        if timeout:
            # Replies that an earlier pump left unparsed may be the last ones: do not wait for more.
            connection.fill(
                _GATHER_REPLY_BYTES, min(timeout, _BUFFERED_WAIT_SECONDS) if connection.buffered else timeout
            )
        else:
            self._last_reply = now  # the caller was busy elsewhere: count silence from here
            connection.pump(0.0)
            if connection.buffered < _GATHER_REPLY_BYTES and now - self._last_parsed < _GATHER_SECONDS:
                return  # parsing a few replies costs nearly as much as a thousand
        self._last_parsed = now
        found = connection.receive()
        if len(found):
            prefix_size = len(self._session.inbox) + 1
            replies = parse_replies(
                found, sid=self._session.sid, prefix_size=prefix_size, to_indices=self._answered_messages
            )
            self._apply_replies(replies)
        elif connection.backlog != backlog:
            self._last_reply = time.monotonic()
        elif timeout and time.monotonic() - self._last_reply > SILENCE_SECONDS:
            raise ConnectionLost(f"no message was acknowledged for {SILENCE_SECONDS:g} s")

    def _answered_messages(self, numbers: Positions) -> Positions:
        """Return the indices of the messages for the numbers of reply subjects, in the order of the replies."""
        result = numbers.copy()
        for batch in self._in_flight:
            if batch.in_order:
                which = np.flatnonzero(numbers == batch.first)
                places = batch.replies_seen + np.arange(len(which))
                result[which] = np.where(places < len(batch.rows), batch.first + places, -1)
                batch.replies_seen += len(which)
        return result

    def _apply_replies(self, replies: ParsedReplies) -> None:
        tally = self._session.tally
        before = tally.acknowledged
        for ack in replies.acks:
            closed = self._mark_answered(ack.indices)
            duplicates = min(ack.duplicates, closed)
            tally.stored += closed - duplicates
            tally.duplicates += duplicates
            tally.record(ack.stream, ack.last_sequence, int(ack.indices.max()))
        for index, refusal in replies.refusals.items():
            if self._mark_answered(np.array([index], np.int64)):
                self._refusals[index] = refusal
        self._last_reply = time.monotonic()
        self._forget_answered()
        if tally.acknowledged > before:
            self._session.progress()
            if self._session.options.on_progress is not None:
                self._session.options.on_progress(tally.acknowledged)

    def _mark_answered(self, answered: Positions) -> int:
        """Mark messages as answered; return how many were not before (after a break a reply may come twice)."""
        if not self._in_flight:
            return 0
        inside = (answered >= self._in_flight[0].first) & (answered < self._in_flight[-1].end)
        before = np.count_nonzero(self._open)
        self._open[answered[inside] % self._window] = False
        return int(before - np.count_nonzero(self._open))

    def _forget_answered(self) -> None:
        while self._in_flight and not self._refusals and not self._open[self._window_slots(self._in_flight[0])].any():
            self._bytes -= len(self._in_flight.popleft().encoded)

    def _resend_on_new_connection(self, error: Unavailable) -> None:
        for batch in self._in_flight:
            if batch.sent:
                self._in_doubt.update((batch.first + np.flatnonzero(self._open[self._window_slots(batch)])).tolist())
        self._session.reconnect(error, self._unanswered())
        self._resend_unanswered()

    def _resend_unanswered(self) -> None:
        """Send all messages without a reply again, in order. `sent_at` stays the time of the first attempt."""
        for batch in self._in_flight:
            open_ = self._open[self._window_slots(batch)]
            batch.in_order = False
            batch.encoded = as_bytes(self._frames(batch.rows, in_order=False).filter(pa.array(open_)))
            batch.sent = True
            self._session.connection.queue(batch.encoded)
        self._bytes = sum(len(batch.encoded) for batch in self._in_flight)
        self._last_reply = time.monotonic()

    def _unanswered(self) -> Iterator[UnansweredMessage]:
        """Yield the oldest message without a reply on each subject."""
        seen: set[bytes] = set()
        for batch in self._in_flight:
            rows = np.flatnonzero(self._open[self._window_slots(batch)])
            subjects = batch.rows.subjects.take(pa.array(rows))
            for subject in pc.unique(subjects).to_pylist():
                if subject not in seen:
                    seen.add(subject)
                    row = int(rows[pc.index(subjects, subject).as_py()])
                    yield UnansweredMessage(batch.first + row, subject.decode(), batch.sent_at)

    def _handle_refusals(self) -> None:
        """Collect the remaining replies, then raise the first permanent refusal, or wait and send again."""
        lost = self._collect_remaining_replies()
        refusals, self._refusals = self._refusals, {}
        sealed = {
            subject: self._session.will_reopen(subject, self._in_flight_count())
            for subject in {self._subject(index) for index, refusal in refusals.items() if refusal.is_sealed}
        }
        for index in sorted(refusals):
            refusal = refusals[index]
            if refusal.is_sealed and sealed[self._subject(index)]:
                if index in self._in_doubt:
                    raise self._session.outcome_unknown_error(index)
            elif not (refusal.has_no_responders or refusal.is_temporary):
                raise self._session.refusal_error(refusal, index, f"message {index}")
        waiting: Unavailable = lost or ServerUnavailable("JetStream was not ready")
        checked: set[str] = set()
        for index in sorted(refusals):
            subject = self._subject(index)
            if subject not in checked:
                checked.add(subject)
                waiting = self._check_stream(index, subject, refusals[index]) or waiting
        self._open[np.array(list(refusals), np.int64) % self._window] = True
        if isinstance(waiting, ConnectionLost):
            self._resend_on_new_connection(waiting)
        else:
            for batch in self._in_flight if lost is None else ():
                batch.sent, batch.sent_at = False, time.monotonic()  # all replies are in: no message is in doubt
            for subject in sealed:
                self._session.wait_for_migration(subject)
            if not sealed:
                self._session.pause_before_retry(waiting)
            self._resend_unanswered()

    def _check_stream(self, index: int, subject: str, refusal: ErrorReply) -> Unavailable | None:
        """Return why the stream of a refused message is not ready; raise if it is missing or order would be lost."""
        try:
            stream = self._session.stream_of(subject)
        except (ConnectionLost, NoAnswer) as error:
            return ConnectionLost(error.message)
        except ServerUnavailable as error:
            return error
        if stream is None:
            return self._session.check_missing_stream(subject, index, self._in_flight_count())
        if self._session.tally.last_indices.get(stream, -1) > index and not refusal.is_in_process:
            raise self._session.refusal_error(
                ErrorReply(refusal.code, refusal.err_code, f"{refusal.reason}; stream {stream!r} stored later ones"),
                index,
                f"message {index}",
            )
        if refusal.is_sealed:
            return ServerUnavailable(f"stream {stream!r} is sealed for migration", fix="try again later")
        if refusal.code == TOO_MANY_REQUESTS:
            return ServerUnavailable(
                f"stream {stream!r} has too many messages to store", fix="publish from fewer clients at the same time"
            )
        return ServerUnavailable(f"stream {stream!r} has no leader", fix="is its server up?")

    def _in_flight_count(self) -> int:
        """Return the number of messages from the oldest one in flight on."""
        return self._in_flight[-1].end - self._in_flight[0].first if self._in_flight else 0

    def _subject(self, index: int) -> str:
        batch = next(batch for batch in self._in_flight if batch.first <= index < batch.end)
        subject: str = batch.rows.subjects[index - batch.first].as_py().decode()
        return subject

    def _collect_remaining_replies(self) -> ConnectionLost | None:
        """Send no more messages and wait for the replies to those in flight."""
        try:
            for encoded in self._session.connection.withdraw():
                batch = self._batch_of(encoded)
                if batch is None:
                    self._session.connection.queue(encoded)
                else:
                    batch.sent = False
            while any(f.sent and self._open[self._window_slots(f)].any() for f in self._in_flight):
                self._receive(_PUMP_SECONDS)
        except ConnectionLost as error:
            return error
        return None

    def _batch_of(self, encoded: memoryview) -> _InFlight | None:
        return next((batch for batch in self._in_flight if batch.encoded is encoded), None)


def split_rows(rows: PreparedRows, max_rows: int, max_bytes: int) -> Iterator[PreparedRows]:
    """Split messages into parts of at most `max_rows` rows and about `max_bytes` bytes, each at least one message."""
    sums = np.cumsum(rows.sizes())
    start = 0
    while start < len(rows):
        before = int(sums[start - 1]) if start else 0
        end = int(np.searchsorted(sums, before + max_bytes, side="right"))
        end = min(max(end, start + 1), start + max_rows, len(rows))
        yield rows.slice(start, end - start)
        start = end


def as_bytes(built: Any) -> memoryview:
    """Return the frames of an array as one block of bytes, without copying."""
    return bytes_and_offsets(built)[0].data
