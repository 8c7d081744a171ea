"""Publishing in atomic batches: each stored whole or not at all, and strictly one after the other.

A batch is staged on the server message by message and takes effect with its last message, the commit. Following batches
are staged while one is being committed, but a commit is sent only when the batch before it is stored. So a batch that
fails leaves nothing behind it, and what is stored is always a beginning of what was given.

A batch with a message id that the stream already has is refused whole; its messages then go one by one, and the server
drops those it has. That is also how a batch is sent again whose commit was under way when a connection broke.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

import numpy as np
import pyarrow as pa

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.header_columns import join
from purveyor.jetstream.bulk.net.connection import LinkLost
from purveyor.jetstream.bulk.net.frame_parser import Frames
from purveyor.jetstream.bulk.publish.acks import (
    DUPLICATE_IN_BATCH,
    Ack,
    Refusal,
    one_by_one,
    parse_answer,
)
from purveyor.jetstream.bulk.publish.frame_builder import Rows, decimal, frames
from purveyor.jetstream.bulk.publish.pipelined import Pipeline, as_bytes, portions
from purveyor.jetstream.bulk.publish.session import SILENCE_SECONDS, Outlet, Sent
from purveyor.model.errors import NoAnswer, ServerUnavailable, Unavailable, UnknownStream

MOST_MESSAGES: Final = 1000
HEADER_ROOM: Final = 160
"""What the batch headers take of the largest payload."""

_OPEN_BATCHES: Final = 3
_TURN_SECONDS: Final = 1.0
_INCOMPLETE: Final = 10176
_TOO_MANY_OPEN: Final = 10210
_TRIES_WHEN_INCOMPLETE: Final = 3


@dataclass(slots=True, eq=False)
class _Batch:
    """One batch in the making. Answers come on reply subjects with the number 2 * attempt, the commit's plus 1."""

    rows: Rows
    attempt: int = 0
    commit: memoryview | None = None
    committed_at: float | None = None
    refusal: Refusal | None = None
    incomplete: int = 0
    doubtful: bool = False
    """Committed on a link that broke."""

    @property
    def name(self) -> str:
        first = self.rows.first_index
        return f"the batch of messages {first} to {first + len(self.rows) - 1}"


class AtomicPublisher:
    """Batches on their way. `send` returns when they are staged or better, `finish` when all are stored."""

    def __init__(self, address: Address, outlet: Outlet) -> None:
        self._address = address
        self._outlet = outlet
        self._batches: deque[_Batch] = deque()
        self._attempts = 0
        self._last_answer = time.monotonic()

    def send(self, rows: Rows) -> None:
        """Send messages, in as many batches as they need."""
        for part in portions(rows, MOST_MESSAGES, self._outlet.options.window_bytes):
            while len(self._batches) >= _OPEN_BATCHES:
                self._turn(_TURN_SECONDS)
            batch = _Batch(part)
            self._batches.append(batch)
            self._stage(batch)
            self._turn(0.0)

    def finish(self) -> None:
        """Wait until each batch is stored."""
        while self._batches:
            self._turn(_TURN_SECONDS)

    def _stage(self, batch: _Batch) -> None:
        """Send all of a batch but its commit, under a new name."""
        self._attempts += 1
        batch.attempt, batch.refusal = self._attempts, None
        count = len(batch.rows)
        replies = [b""] * count
        replies[0] = f" {self._outlet.inbox}.{2 * batch.attempt}".encode()
        replies[-1] = f" {self._outlet.inbox}.{2 * batch.attempt + 1}".encode()
        endings = [b"\r\n"] * (count - 1) + [b"\r\nNats-Batch-Commit: 1\r\n"]
        lines = join(
            f"Nats-Batch-Id: {uuid4().hex}\r\nNats-Batch-Sequence: ".encode(),
            decimal(pa.array(np.arange(1, count + 1))),
            pa.array(endings, pa.binary()),
        )
        built = frames(batch.rows, replies=pa.array(replies, pa.binary()), extra_lines=lines)
        if count > 1:
            self._outlet.link.queue(as_bytes(built.slice(0, count - 1)))
        batch.commit = as_bytes(built.slice(count - 1, 1))
        self._commit_first()

    def _commit_first(self) -> None:
        """Commit the oldest batch, if that is not under way."""
        batch = self._batches[0] if self._batches else None
        if batch is not None and batch.commit is not None and batch.refusal is None:
            batch.committed_at = batch.committed_at or time.monotonic()
            self._outlet.link.queue(batch.commit)
            batch.commit = None

    def _turn(self, timeout: float) -> None:
        try:
            self._listen(timeout)
            refusal = self._batches[0].refusal if self._batches else None
            if refusal is not None:
                self._judge(self._batches[0], refusal)
        except (LinkLost, NoAnswer) as error:
            self._start_again_on_new_link(error)

    def _listen(self, timeout: float) -> None:
        link = self._outlet.link
        backlog = link.backlog
        if not timeout:
            self._last_answer = time.monotonic()
        link.pump(timeout)
        found = link.receive()
        if len(found):
            self._hear(found)
        if len(found) or link.backlog != backlog:
            self._last_answer = time.monotonic()
        elif timeout and time.monotonic() - self._last_answer > SILENCE_SECONDS:
            raise LinkLost(f"no batch was acknowledged for {SILENCE_SECONDS:g} s")

    def _hear(self, found: Frames) -> None:
        outlet = self._outlet
        for number, headers, payload in one_by_one(found, sid=outlet.sid, prefix_size=len(outlet.inbox) + 1):
            batch = next((batch for batch in self._batches if batch.attempt == number // 2), None)
            begun = not number % 2 and not payload and not headers
            if batch is None or batch.refusal is not None or begun:
                continue  # an earlier attempt's, or all is well with the first message of a batch
            answer = parse_answer(headers, payload)
            if isinstance(answer, Ack):
                self._stored(batch, answer)
            else:
                batch.refusal = answer

    def _stored(self, batch: _Batch, ack: Ack) -> None:
        ledger = self._outlet.ledger
        self._batches.remove(batch)
        ledger.stored += len(batch.rows)
        ledger.note(ack.stream, ack.sequence, batch.rows.first_index + len(batch.rows) - 1)
        self._outlet.progress()
        if self._outlet.options.on_progress is not None:
            self._outlet.options.on_progress(ledger.acknowledged)
        self._commit_first()

    def _judge(self, batch: _Batch, refusal: Refusal) -> None:
        """The oldest batch was refused: send it otherwise, or again, or fail. Nothing behind it is committed."""
        if refusal.err_code == DUPLICATE_IN_BATCH:
            self._send_one_by_one(batch)
            return
        batch.incomplete += refusal.err_code == _INCOMPLETE
        again = refusal.temporary or refusal.nobody_there or refusal.err_code == _TOO_MANY_OPEN
        if refusal.sealed and self._outlet.opens_again(batch.rows.subjects[0].as_py().decode(), self._held()):
            if batch.doubtful:
                raise self._outlet.in_doubt(batch.rows.first_index)
            again = True
        if not again and not 0 < batch.incomplete < _TRIES_WHEN_INCOMPLETE:
            raise self._outlet.refused(refusal, batch.rows.first_index, batch.name)
        waiting: Unavailable = ServerUnavailable(f"{batch.name} could not be stored: {refusal.reason}")
        if refusal.nobody_there:
            waiting = self._check_stream(batch) or waiting
        batch.committed_at = None  # refused, so there is nothing unknown about it
        self._outlet.wait(waiting)
        self._stage_all()

    def _check_stream(self, batch: _Batch) -> Unavailable | None:
        subject = batch.rows.subjects[0].as_py().decode()
        try:
            stream = self._outlet.stream_of(subject)
        except LinkLost:
            raise
        except ServerUnavailable as error:
            return error
        if stream is None and self._outlet.opens_again(subject, self._held()):
            return ServerUnavailable(f"the queue for {subject!r} is being migrated", fix="try again later")
        if stream is None:
            raise UnknownStream(
                f"no stream takes message {batch.rows.first_index} on subject {subject!r};"
                f" {self._outlet.ledger.acknowledged} others are stored",
                fix="create a stream for this subject, or check the subject",
            )
        return None

    def _held(self) -> int:
        return sum(len(batch.rows) for batch in self._batches)

    def _send_one_by_one(self, batch: _Batch) -> None:
        outlet = self._outlet
        single = Outlet(self._address, outlet.options, outlet.ledger)
        pipeline = Pipeline(single)
        try:
            pipeline.send(batch.rows)
            pipeline.finish()
            single.release()
        finally:
            single.drop()
        self._batches.remove(batch)
        outlet.progress()
        self._last_answer = time.monotonic()
        self._commit_first()

    def _start_again_on_new_link(self, error: Unavailable) -> None:
        # A batch whose commit was not sent cannot be stored; only the oldest can have been committed.
        unknown = [
            Sent(batch.rows.first_index, batch.rows.subjects[0].as_py().decode(), batch.committed_at)
            for batch in self._batches
            if batch.committed_at is not None
        ]
        for batch in self._batches:
            batch.doubtful |= batch.committed_at is not None
        self._outlet.reconnect(error, unknown)
        self._stage_all()

    def _stage_all(self) -> None:
        self._last_answer = time.monotonic()
        for batch in self._batches:
            self._stage(batch)
