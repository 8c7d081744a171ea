"""The writer of `append_once`: one connection, many targets. It reads the last position of each and appends the rest.

Three rules store each row exactly once, in its place:

1. The writer reads from the target itself what was written: the position of its newest message, then the floor. It
   reads at the beginning, and again whenever the outcome of a write is in doubt.
2. Rows are sent in a chain, where each row expects the row before it as the newest message of the stream. Where a chain
   is not suitable, rows are sent in atomic batches (or, if there are few rows, one by one): the next one when the one
   before is stored, each expecting the newest message of the subject to be the one that was read. So the server refuses
   one of two concurrent writers, and that writer reads again. After a broken connection, the writer finds what it had
   sent by reading, or the server refuses it because the subject has a newer message.
3. The writer trusts what it has read for some seconds only. A process may be suspended, and resume when other writers
   have written the rows and readers have deleted them: it reads again. If it was suspended for a shorter time, the
   stream still knows its message ids.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, assert_never

from purveyor.jetstream.address import Address
from purveyor.jetstream.api import STREAM_NOT_FOUND, ErrorReply, Receipt
from purveyor.jetstream.bulk import replies
from purveyor.jetstream.bulk.append.chained_writes import ChainSender, WriteSpeed
from purveyor.jetstream.bulk.append.target_state import MAX_FRUITLESS_CHAINS, MAX_SINGLE_ROWS, Batch, Step, TargetState
from purveyor.jetstream.bulk.net.connection import ConnectionLost
from purveyor.jetstream.bulk.options import AppendOptions, PublishOptions, RefusalKind
from purveyor.jetstream.bulk.publish.session import SILENCE_SECONDS, PublishSession, PublishTally, will_reopen
from purveyor.jetstream.bulk.replies import RefusalAction, find_last_position, iterate_replies, parse_reply
from purveyor.model.errors import InvalidInput, NoAnswer, PermissionDenied, PublishRefused, PurveyorError, Unavailable
from purveyor.model.retries import Backoff

_MAX_OPEN_BATCHES: Final = 40  # a stream takes 50 open batches, and all may go to one stream
_BUILD_AHEAD_BATCHES: Final = 4
_STATE_MAX_AGE_SECONDS: Final = 10.0
_PUMP_SECONDS: Final = 1.0
_MAX_CONFLICTS: Final = 12
_RETRY_BACKOFF: Final = Backoff(0.01, 1.0)


class Appender:
    """Writes all targets of one `append_once`."""

    def __init__(self, address: Address, states: Sequence[TargetState], options: AppendOptions) -> None:
        self._address = address
        self._options = options
        self._tally = PublishTally()
        self._session = PublishSession(address, PublishOptions(patience_seconds=options.patience_seconds), self._tally)
        self._to_read: deque[TargetState] = deque(states)
        self._to_write: deque[TargetState] = deque()
        self._delayed: list[TargetState] = []
        self._to_chain: deque[TargetState] = deque()
        self._chain_sender = ChainSender(address, self._session, options)
        self._awaiting_reply: dict[int, TargetState] = {}
        self._bytes = 0
        self._batches = 0
        self._numbers = 0
        self._last_progress_at = time.monotonic()
        self._denied: set[str] = set()

    def run(self) -> None:
        """Return when every target has all its rows or has refused one."""
        try:
            while self._to_write or self._to_chain or self._to_read or self._delayed or self._has_in_flight:
                try:
                    self._wake_due()
                    self._send()
                    if self._has_in_flight or self._delayed:
                        self._receive()
                except (ConnectionLost, NoAnswer) as error:
                    self._restart_on_new_connection(error)
            if not self._denied:
                self._chain_sender.release()
                self._session.release()
        finally:
            self._session.close()  # after a denial too: more errors about it may arrive

    @property
    def _has_in_flight(self) -> bool:
        return bool(self._awaiting_reply or self._chain_sender.has_in_flight)

    # Sending

    def _send(self) -> None:
        while self._to_chain and self._chain_sender.has_room():
            self._send_chain(self._to_chain.popleft())
        while self._to_write and self._has_room():
            self._send_batch(self._to_write.popleft())
        while self._to_read:
            self._send_request(self._to_read.popleft())

    def _has_room(self) -> bool:
        return self._batches < _MAX_OPEN_BATCHES and (not self._batches or self._bytes < self._options.window_bytes)

    def _send_request(self, state: TargetState) -> None:
        subject, payload = state.request
        number = self._next_number()
        state.requested_at = time.monotonic()
        self._awaiting_reply[number] = state
        state.reply_number = number
        self._session.connection.publish(subject, payload, f"{self._session.inbox}.{2 * number}")

    def _send_batch(self, state: TargetState) -> None:
        if time.monotonic() - state.seen_at > _STATE_MAX_AGE_SECONDS:
            self._read_again(state)
            return
        batch, state.built_batch = state.built_batch, None
        if batch is None or batch.start != state.next_row or len(batch.rows) > state.batch_limit:
            try:
                batch = self._build(state, state.next_row)
            except (InvalidInput, PublishRefused) as error:
                kind = RefusalKind.TOO_LARGE if isinstance(error, PublishRefused) else RefusalKind.OTHER
                state.refuse(error.message, 0, kind)
                return
        connection = self._session.connection
        connection.queue(batch.head(state.expected_headers))
        if batch.body is not None:
            connection.queue(batch.body)
        state.sent, state.reply_number, state.requested_at = batch, batch.reply_number, time.monotonic()
        self._awaiting_reply[batch.reply_number] = state
        self._batches += 1
        self._bytes += batch.size
        connection.pump(0.0)
        if self._batches <= _BUILD_AHEAD_BATCHES and batch.end < len(state.positions):
            # Build ahead while the server stores this batch. An invalid row raises again when it is its turn.
            with suppress(InvalidInput, PublishRefused):
                state.built_batch = self._build(state, batch.end)

    def _send_chain(self, state: TargetState) -> None:
        chain = state.chain
        if chain.broken:
            return  # it is scheduled again when all replies are in
        if not chain.begun and time.monotonic() - state.seen_at > _STATE_MAX_AGE_SECONDS:
            self._read_again(state)
            return
        try:
            if self._chain_sender.speed is not WriteSpeed.SLOW:
                self._chain_sender.send(state)
                if chain.begun and chain.sent < len(state.positions):
                    self._to_chain.append(state)
                return
        except (InvalidInput, PublishRefused):
            pass  # one of the next rows is invalid: batches find out which
        state.may_chain = False
        if not chain.sent_rows:
            self._schedule_next(state)

    def _build(self, state: TargetState, start: int) -> Batch:
        session = self._session
        return state.batch(
            self._next_number(), session.inbox, start, self._options, session.connection.info.max_payload
        )

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    # Receiving

    def _receive(self) -> None:
        connection = self._session.connection
        backlog = connection.backlog
        try:
            found = connection.receive()  # frames that an earlier pump read while it wrote
            if not len(found):
                connection.pump(self._max_wait_seconds())
                found = connection.receive()
        except PermissionDenied as error:
            self._handle_denied(error)
            return
        now = time.monotonic()
        if len(found) or connection.backlog != backlog or not self._has_in_flight:
            self._last_progress_at = now
            if self._awaiting_reply:
                prefix_size = len(self._session.inbox) + 1
                for number, headers, payload in iterate_replies(found, sid=self._session.sid, prefix_size=prefix_size):
                    self._handle_reply(number, headers, payload)
            if self._chain_sender.has_in_flight:
                for state in self._chain_sender.receive_replies(found):
                    self._advance_chain(state)
        elif now - self._last_progress_at > SILENCE_SECONDS:
            self._last_progress_at = now
            for state in [*self._awaiting_reply.values(), *self._chain_sender.states]:
                self._clear_in_flight(state)
                self._retry_later(state, ErrorReply(0, 0, f"no reply for {SILENCE_SECONDS:g} s"))

    def _max_wait_seconds(self) -> float:
        if not self._delayed:
            return _PUMP_SECONDS
        soonest = min(state.retry_at for state in self._delayed)
        return min(_PUMP_SECONDS, max(0.0, soonest - time.monotonic()))

    def _handle_reply(self, number: int, headers: bytes, payload: bytes) -> None:
        state = self._awaiting_reply.get(number // 2)
        if state is None:
            return  # a further reply to a batch that was handled
        batch = state.sent
        if batch is None:
            self._clear_in_flight(state)
            if state.step is Step.CHECK_OWNER:
                self._handle_owner(state, replies.parse_stream_reply(headers, payload))
            else:
                self._handle_message(state, replies.parse_message_reply(headers, payload))
            return
        if not number % 2 and not payload and not headers:
            return  # the batch has begun
        self._clear_in_flight(state)
        reply = parse_reply(headers, payload)
        if isinstance(reply, Receipt):
            self._handle_stored(state, batch, reply)
        else:
            self._handle_refusal(state, reply, len(batch.rows))

    def _clear_in_flight(self, state: TargetState) -> None:
        """Remove everything of a target that is in flight."""
        self._chain_sender.abandon(state)
        with suppress(ValueError):
            self._to_chain.remove(state)
        self._awaiting_reply.pop(state.reply_number, None)
        if state.sent is not None:
            self._batches -= 1
            self._bytes -= state.sent.size
            state.sent = None

    def _handle_message(self, state: TargetState, message: dict[str, Any] | ErrorReply | None) -> None:
        if isinstance(message, ErrorReply):
            self._handle_refusal(state, message, 0)
            return
        target = state.target
        try:
            if state.step is Step.READ_FLOOR:
                self._skip_written(state, replies.parse_floor(message, target))
                return
            found = replies.parse_newest(message, target.position_header)
            position = found.position
            if found.sequence and position is None:
                position = find_last_position(self._address, target, found.sequence, self._options.patience_seconds)
                self._last_progress_at = time.monotonic()
        except Unavailable as error:
            self._retry_later(state, ErrorReply(0, 0, error.message))
        except (PurveyorError, ValueError) as error:
            state.refuse(str(error), 0, RefusalKind.OTHER)
        else:
            state.expected, state.seen_at, state.newest = found.sequence, state.requested_at, position or 0
            if target.floor_subject is None:
                self._skip_written(state, 0)
            else:
                state.step = Step.READ_FLOOR
                self._to_read.append(state)

    def _skip_written(self, state: TargetState, floor: int) -> None:
        """Skip the rows that the target has, then check the owner or write."""
        stored = state.stored
        if state.advance_to(max(state.newest, state.target.floor, floor)):
            self._session.progress()
        self._add_stored(state.stored - stored)
        if state.target.owner is None or state.next_row >= len(state.positions):
            self._schedule_next(state)
        else:
            state.step = Step.CHECK_OWNER
            self._to_read.append(state)

    def _handle_owner(self, state: TargetState, found: tuple[str | None, int] | ErrorReply) -> None:
        if isinstance(found, ErrorReply):
            self._handle_refusal(state, found, 0)
        elif state.check_owner(*found):
            self._schedule_next(state)

    def _handle_stored(self, state: TargetState, batch: Batch, ack: Receipt) -> None:
        state.next_row = batch.end
        if not ack.duplicate:  # a single row with a known id was stored before, and is skipped
            state.stored += len(batch.rows)
            state.expected, state.seen_at = ack.sequence, state.requested_at
            state.batch_limit = min(self._options.batch_rows, 2 * state.batch_limit)
        state.progress()
        self._session.progress()
        self._schedule_next(state)
        self._add_stored(0 if ack.duplicate else len(batch.rows))

    def _advance_chain(self, state: TargetState) -> None:
        """Apply the replies to rows of a chain."""
        chain, was_begun = state.chain, state.chain.begun
        progress = chain.advance()
        if progress is None:
            return
        if progress.next_row > state.next_row:
            state.next_row = progress.next_row
            state.stored += progress.stored
            state.expected, state.seen_at = chain.sequence or state.expected, progress.seen_at
            state.progress()
            self._session.progress()
        if progress.cause is not None:
            self._handle_broken_chain(state, progress.cause)
        elif chain.sent < len(state.positions) and state.may_chain:
            if not was_begun:
                self._to_chain.append(state)
        elif not chain.sent_rows:
            self._schedule_next(state)
        self._add_stored(progress.stored)

    def _add_stored(self, stored: int) -> None:
        """Add to the number of stored rows; negative for rows that turned out to be lost."""
        self._tally.stored += stored
        if stored > 0 and self._options.on_progress is not None:
            self._options.on_progress(self._tally.stored)

    def _handle_broken_chain(self, state: TargetState, cause: ErrorReply) -> None:
        """Handle a chain that broke before its last row, when all its replies are in."""
        state.in_doubt = state.chain.sent
        self._clear_in_flight(state)
        if state.chain.fruitless >= MAX_FRUITLESS_CHAINS:
            state.may_chain = False
        if replies.is_conflict(cause):
            self._handle_refusal(state, cause, 1)
        else:
            # Sent alone, not in a chain, that row is stored, or refused with its own reason.
            state.may_chain, state.batch_limit = False, 1
            self._read_again(state)

    def _schedule_next(self, state: TargetState) -> None:
        if state.next_row >= len(state.positions):
            state.finish()
            return
        state.step = Step.WRITE
        if len(state.positions) - state.next_row > MAX_SINGLE_ROWS and self._chain_sender.is_suitable(state):
            state.chain.begin(state.next_row)
            self._to_chain.append(state)
        else:
            self._to_write.append(state)

    # Failures

    def _handle_refusal(self, state: TargetState, reply: ErrorReply, rows: int) -> None:
        action, kind = replies.decide_action(reply, rows)
        away = reply.is_sealed or reply.err_code == STREAM_NOT_FOUND
        if action is RefusalAction.GIVE_UP and away and will_reopen(self._address, state.source[0]):
            self._session.begin_migration_wait(state.source[0], len(state.positions) - state.next_row)
            self._retry_later(state, reply)
            return
        match action:
            case RefusalAction.READ_AGAIN if state.failures < _MAX_CONFLICTS:
                self._schedule_retry(state, at_once=True)
            case RefusalAction.WAIT:
                self._retry_later(state, reply)
            case RefusalAction.SEND_FEWER:
                state.batch_limit = max(1, rows // 2)
                self._read_again(state)
            case RefusalAction.READ_AGAIN | RefusalAction.GIVE_UP:
                if state.step is Step.READ_FLOOR:
                    kind = RefusalKind.OTHER  # the error concerns the floor, not the target
                state.refuse(f"{' '.join(state.source)}: {replies.describe(reply)}", reply.err_code or reply.code, kind)
            case _:
                assert_never(action)

    def _retry_later(self, state: TargetState, reply: ErrorReply) -> None:
        now = time.monotonic()
        state.failing_since = state.failing_since or now
        if now - state.failing_since > self._options.patience_seconds:
            reason = f"gave up after {self._options.patience_seconds:g} s: {replies.describe(reply)}"
            state.refuse(reason, reply.err_code or reply.code, RefusalKind.OTHER)
        else:
            self._schedule_retry(state)

    def _schedule_retry(self, state: TargetState, *, at_once: bool = False) -> None:
        """Ask again after a delay that grows while there is no progress; the first time `at_once` without one."""
        state.failures += 1
        pause = 0.0 if at_once and state.failures == 1 else _RETRY_BACKOFF.delay_seconds(state.failures)
        state.retry_at = time.monotonic() + pause
        self._delayed.append(state)

    def _wake_due(self) -> None:
        now = time.monotonic()
        for state in [state for state in self._delayed if state.retry_at <= now]:
            self._delayed.remove(state)
            self._read_again(state)

    def _read_again(self, state: TargetState) -> None:
        state.step, state.built_batch = Step.READ_NEWEST, None
        self._to_read.append(state)

    def _handle_denied(self, error: PermissionDenied) -> None:
        subject = replies.parse_denied_subject(error.message)
        for state in [*self._awaiting_reply.values(), *self._chain_sender.states]:
            writes = state.sent is not None or state.chain.sent_rows
            requested = state.target.subject if writes else state.request[0]
            if subject is not None and requested == subject:
                self._clear_in_flight(state)
                state.refuse(error.message, error.code, RefusalKind.DENIED)
                self._denied.add(subject)
        if subject not in self._denied:
            raise error

    def _restart_on_new_connection(self, error: Unavailable) -> None:
        """Reconnect and read every target again: everything in flight is in doubt."""
        chained = [*self._chain_sender.states, *self._to_chain]
        others = [*self._awaiting_reply.values(), *self._delayed, *self._to_write, *self._to_read]
        states = list(dict.fromkeys([*chained, *others]))
        for state in chained:
            state.in_doubt = state.chain.sent
        self._chain_sender.reset()
        self._to_chain.clear()
        self._awaiting_reply.clear()
        self._delayed.clear()
        self._to_write.clear()
        self._to_read.clear()
        self._bytes = self._batches = 0
        self._session.reconnect(error, ())
        self._last_progress_at = time.monotonic()
        for state in states:
            state.sent = None
            self._read_again(state)
