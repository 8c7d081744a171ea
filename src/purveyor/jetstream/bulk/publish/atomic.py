"""Publishing in atomic batches: each is stored as a whole or not at all, strictly one after the other.

The server stages a batch message by message and stores it with its last message, the commit. Further batches are staged
while one is being committed, but a commit is sent only when the batch before it is stored. So no batch is stored after
a failed one, and the stored messages are always a prefix of the given ones.

The server refuses a batch that contains a message id it knows. The messages are then published one by one, and the
server drops those it has. The same happens to a batch whose commit was in flight when a connection broke.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

import numpy as np
import pyarrow as pa

from purveyor.jetstream.address import Address
from purveyor.jetstream.api import ErrorReply, Receipt
from purveyor.jetstream.bulk.arrow_columns import join
from purveyor.jetstream.bulk.net.connection import ConnectionLost
from purveyor.jetstream.bulk.net.frame_parser import Frames
from purveyor.jetstream.bulk.publish.frame_builder import PreparedRows, build_frames, to_digits
from purveyor.jetstream.bulk.publish.pipelined import PipelinedPublisher, as_bytes, split_rows
from purveyor.jetstream.bulk.publish.session import SILENCE_SECONDS, PublishSession, UnansweredMessage
from purveyor.jetstream.bulk.replies import DUPLICATE_IN_BATCH, iterate_replies, parse_reply
from purveyor.model.errors import NoAnswer, ServerUnavailable, Unavailable

MAX_BATCH_MESSAGES: Final = 1000
BATCH_HEADER_BYTES: Final = 160
"""Bytes that the batch headers take of the maximum payload."""

_MAX_OPEN_BATCHES: Final = 3
_PUMP_SECONDS: Final = 1.0
_INCOMPLETE: Final = 10176
_TOO_MANY_OPEN: Final = 10210
_MAX_INCOMPLETE_ATTEMPTS: Final = 3


@dataclass(slots=True, eq=False)
class _Batch:
    """One batch that is not stored yet.

    Replies come on the reply subject 2 * attempt, the reply to the commit on that number plus 1.
    """

    rows: PreparedRows
    attempt: int = 0
    commit: memoryview | None = None
    committed_at: float | None = None
    refusal: ErrorReply | None = None
    incomplete: int = 0
    in_doubt: bool = False
    """Whether the commit was sent on a connection that broke."""

    @property
    def name(self) -> str:
        first = self.rows.first_index
        return f"the batch of messages {first} to {first + len(self.rows) - 1}"


class AtomicPublisher:
    """Publishes atomic batches. `send` returns when they are staged, `finish` when all are stored."""

    def __init__(self, address: Address, session: PublishSession) -> None:
        self._address = address
        self._session = session
        self._batches: deque[_Batch] = deque()
        self._attempts = 0
        self._last_reply = time.monotonic()

    def send(self, rows: PreparedRows) -> None:
        """Send messages in as many batches as necessary."""
        for part in split_rows(rows, MAX_BATCH_MESSAGES, self._session.options.window_bytes):
            while len(self._batches) >= _MAX_OPEN_BATCHES:
                self._pump(_PUMP_SECONDS)
            batch = _Batch(part)
            self._batches.append(batch)
            self._stage(batch)
            self._pump(0.0)

    def finish(self) -> None:
        """Wait until every batch is stored."""
        while self._batches:
            self._pump(_PUMP_SECONDS)

    def _stage(self, batch: _Batch) -> None:
        """Send a batch without its commit, under a new batch id."""
        self._attempts += 1
        batch.attempt, batch.refusal = self._attempts, None
        count = len(batch.rows)
        replies = [b""] * count
        replies[0] = f" {self._session.inbox}.{2 * batch.attempt}".encode()
        replies[-1] = f" {self._session.inbox}.{2 * batch.attempt + 1}".encode()
        endings = [b"\r\n"] * (count - 1) + [b"\r\nNats-Batch-Commit: 1\r\n"]
        lines = join(
            f"Nats-Batch-Id: {uuid4().hex}\r\nNats-Batch-Sequence: ".encode(),
            to_digits(pa.array(np.arange(1, count + 1))),
            pa.array(endings, pa.binary()),
        )
        built = build_frames(batch.rows, replies=pa.array(replies, pa.binary()), extra_lines=lines)
        if count > 1:
            self._session.connection.queue(as_bytes(built.slice(0, count - 1)))
        batch.commit = as_bytes(built.slice(count - 1, 1))
        self._commit_first()

    def _commit_first(self) -> None:
        """Send the commit of the oldest batch, unless it is in flight."""
        batch = self._batches[0] if self._batches else None
        if batch is not None and batch.commit is not None and batch.refusal is None:
            batch.committed_at = batch.committed_at or time.monotonic()
            self._session.connection.queue(batch.commit)
            batch.commit = None

    def _pump(self, timeout: float) -> None:
        try:
            self._receive(timeout)
            refusal = self._batches[0].refusal if self._batches else None
            if refusal is not None:
                self._handle_refusal(self._batches[0], refusal)
        except (ConnectionLost, NoAnswer) as error:
            self._restart_on_new_connection(error)

    def _receive(self, timeout: float) -> None:
        connection = self._session.connection
        backlog = connection.backlog
        if not timeout:
            self._last_reply = time.monotonic()
        connection.pump(timeout)
        found = connection.receive()
        if len(found):
            self._handle_replies(found)
        if len(found) or connection.backlog != backlog:
            self._last_reply = time.monotonic()
        elif timeout and time.monotonic() - self._last_reply > SILENCE_SECONDS:
            raise ConnectionLost(f"no batch was acknowledged for {SILENCE_SECONDS:g} s")

    def _handle_replies(self, found: Frames) -> None:
        session = self._session
        for number, headers, payload in iterate_replies(found, sid=session.sid, prefix_size=len(session.inbox) + 1):
            batch = next((batch for batch in self._batches if batch.attempt == number // 2), None)
            begun = not number % 2 and not payload and not headers
            if batch is None or batch.refusal is not None or begun:
                continue  # a reply to an earlier attempt, or the server has staged the first message of a batch
            reply = parse_reply(headers, payload)
            if isinstance(reply, Receipt):
                self._mark_stored(batch, reply)
            else:
                batch.refusal = reply

    def _mark_stored(self, batch: _Batch, ack: Receipt) -> None:
        tally = self._session.tally
        self._batches.remove(batch)
        tally.stored += len(batch.rows)
        tally.record(ack.stream, ack.sequence, batch.rows.first_index + len(batch.rows) - 1)
        self._session.progress()
        if self._session.options.on_progress is not None:
            self._session.options.on_progress(tally.acknowledged)
        self._commit_first()

    def _handle_refusal(self, batch: _Batch, refusal: ErrorReply) -> None:
        """Send the refused oldest batch message by message, or again, or raise. No later batch is committed."""
        if refusal.err_code == DUPLICATE_IN_BATCH:
            self._send_one_by_one(batch)
            return
        batch.incomplete += refusal.err_code == _INCOMPLETE
        again = refusal.is_temporary or refusal.has_no_responders or refusal.err_code == _TOO_MANY_OPEN
        if refusal.is_sealed and self._session.will_reopen(
            batch.rows.subjects[0].as_py().decode(), self._in_flight_count()
        ):
            if batch.in_doubt:
                raise self._session.outcome_unknown_error(batch.rows.first_index)
            again = True
        if not again and not 0 < batch.incomplete < _MAX_INCOMPLETE_ATTEMPTS:
            raise self._session.refusal_error(refusal, batch.rows.first_index, batch.name)
        waiting: Unavailable = ServerUnavailable(f"{batch.name} could not be stored: {refusal.reason}")
        if refusal.has_no_responders:
            waiting = self._check_stream(batch) or waiting
        batch.committed_at = None  # refused, so its outcome is known
        self._session.pause_before_retry(waiting)
        self._stage_all()

    def _check_stream(self, batch: _Batch) -> Unavailable | None:
        subject = batch.rows.subjects[0].as_py().decode()
        try:
            stream = self._session.stream_of(subject)
        except ConnectionLost:
            raise
        except ServerUnavailable as error:
            return error
        if stream is None:
            return self._session.check_missing_stream(subject, batch.rows.first_index, self._in_flight_count())
        return None

    def _in_flight_count(self) -> int:
        return sum(len(batch.rows) for batch in self._batches)

    def _send_one_by_one(self, batch: _Batch) -> None:
        session = self._session
        single = PublishSession(self._address, session.options, session.tally)
        pipeline = PipelinedPublisher(single)
        try:
            pipeline.send(batch.rows)
            pipeline.finish()
            single.release()
        finally:
            single.close()
        self._batches.remove(batch)
        session.progress()
        self._last_reply = time.monotonic()
        self._commit_first()

    def _restart_on_new_connection(self, error: Unavailable) -> None:
        # A batch without a sent commit cannot be stored; only the oldest batch can have been committed.
        unknown = [
            UnansweredMessage(batch.rows.first_index, batch.rows.subjects[0].as_py().decode(), batch.committed_at)
            for batch in self._batches
            if batch.committed_at is not None
        ]
        for batch in self._batches:
            batch.in_doubt |= batch.committed_at is not None
        self._session.reconnect(error, unknown)
        self._stage_all()

    def _stage_all(self) -> None:
        self._last_reply = time.monotonic()
        for batch in self._batches:
            self._stage(batch)
