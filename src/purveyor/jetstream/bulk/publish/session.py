"""The session of one publishing call: its connection, its inbox for replies, its counts, and migration lookups.

Both ways of publishing share it. A connection may break between a message and its reply. The session then sends the
message again with the same id, and the server drops it if it has it. That is safe only while the stream remembers ids
(its `duplicate_window`). After that time the session raises `OutcomeUnknown` rather than store a message twice.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from secrets import token_urlsafe
from types import MappingProxyType
from typing import Final

from purveyor.jetstream.address import Address
from purveyor.jetstream.api import FIXES, ErrorReply, decode_stored_data
from purveyor.jetstream.bulk.net.connection import BulkConnection, ConnectionLost
from purveyor.jetstream.bulk.net.pool import RetryDeadline, RetryDeadlineExceeded, connect, release, request_api
from purveyor.jetstream.bulk.options import PublishOptions, PublishReport
from purveyor.jetstream.maintenance import (
    ALL_RECORDS,
    RECORDS_STREAM,
    STREAM_PREFIX,
    find_held_stream,
    is_migration_running,
    record_subject,
)
from purveyor.model.errors import (
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    PublishRefused,
    ServerUnavailable,
    Unavailable,
    UnknownStream,
)
from purveyor.model.metrics import MIGRATION_WAITS

SILENCE_SECONDS: Final = 10.0
"""With messages in flight and no reply for this long, the connection counts as lost."""

_DEFAULT_DUPLICATE_WINDOW_SECONDS: Final = (
    120.0  # the server's default, assumed if we may not read the stream's configuration
)
_DUPLICATE_WINDOW_MARGIN: Final = 0.9
_MIGRATION_POLL_SECONDS: Final = 0.1


@dataclass(slots=True)
class PublishTally:
    """The counts of one publishing call."""

    stored: int = 0
    duplicates: int = 0
    last_sequences: dict[str, int] = field(default_factory=dict)
    last_indices: dict[str, int] = field(default_factory=dict)
    """The highest acknowledged index per stream: a lower index stored later would be out of order."""

    @property
    def acknowledged(self) -> int:
        """The number of messages that are in their stream."""
        return self.stored + self.duplicates

    def record(self, stream: str, sequence: int, index: int) -> None:
        """Record that a stream has a message."""
        self.last_sequences[stream] = max(sequence, self.last_sequences.get(stream, 0))
        self.last_indices[stream] = max(index, self.last_indices.get(stream, -1))

    def report(self) -> PublishReport:
        """Return the report for the caller."""
        return PublishReport(self.stored, self.duplicates, MappingProxyType(dict(self.last_sequences)))


@dataclass(frozen=True, slots=True)
class UnansweredMessage:
    """The oldest message on a subject that was sent and got no reply."""

    index: int
    subject: str
    sent_at: float


class PublishSession:
    """The connection of one publishing call, across reconnects."""

    def __init__(self, address: Address, options: PublishOptions, tally: PublishTally) -> None:
        self.options = options
        self.tally = tally
        self.retry_deadline = RetryDeadline(options.patience_seconds)
        self.inbox = _new_inbox(address)
        self.sid = 0
        self._address = address
        self._connection: BulkConnection | None = None
        self._windows: dict[str, float] = {}
        self._streams: dict[str, str] = {}
        self._migration_wait: int | None = None

    @property
    def connection(self) -> BulkConnection:
        """The connection, opened at the first use."""
        if self._connection is None:
            self._adopt(connect(self._address, self.retry_deadline))
        assert self._connection is not None
        return self._connection

    def reconnect(self, error: Unavailable, unanswered: Iterable[UnansweredMessage]) -> None:
        """Open a new connection after the old one broke; raise `ServerUnavailable` or `OutcomeUnknown`."""
        unanswered = list(unanswered)
        self.close()
        failure: Unavailable = error
        while True:
            try:
                self.retry_deadline.pause_or_raise(failure)
                connection = connect(self._address, self.retry_deadline)
            except RetryDeadlineExceeded as over:
                raise self.deadline_error(over, len(unanswered)) from over
            try:
                for sent in unanswered:
                    self._check_window(connection, sent)
            except OutcomeUnknown:
                connection.close()
                raise
            except Unavailable as again:
                connection.close()
                failure = again
                continue
            # A new inbox: a late reply to the old connection must not count as a reply to the new one.
            self.inbox = _new_inbox(self._address)
            self._adopt(connection)
            return

    def pause_before_retry(self, error: Unavailable) -> None:
        """Pause before the next attempt on the same connection; raise `ServerUnavailable` after the deadline."""
        try:
            self.retry_deadline.pause_or_raise(error)
        except RetryDeadlineExceeded as over:
            raise self.deadline_error(over, 0) from over

    def deadline_error(self, over: RetryDeadlineExceeded, unanswered: int) -> ServerUnavailable:
        """Return the error for an exceeded retry deadline."""
        stored = f"{self.tally.acknowledged} messages are stored"
        return ServerUnavailable(
            f"{over.message}; {stored}" + (", some after them were sent and got no reply" if unanswered else ""),
            fix=over.fix,
        )

    def refusal_error(self, refusal: ErrorReply, index: int, what: str) -> PublishRefused:
        """Return the error for a message that the server refused."""
        number = f" ({refusal.err_code})" if refusal.err_code else ""
        error = PublishRefused(
            f"{what} was refused: {refusal.reason}{number}; {self.tally.acknowledged} others are stored",
            fix=FIXES.get(refusal.err_code or refusal.code),
            code=refusal.code,
            err_code=refusal.err_code,
        )
        error.index, error.stored = index, self.tally.acknowledged
        return error

    def will_reopen(self, subject: str, waiting_messages: int) -> bool:
        """Return whether the sealed or missing queue of a subject takes messages again after its migration.

        If so, the metric of migration waits counts this session with `waiting_messages` messages.
        """
        stream = self.options.expected_stream or self._streams.get(subject) or self.stream_of(subject)
        again = is_subject_migrating(self._address, subject) if stream is None else will_reopen(self._address, stream)
        if again:
            self.begin_migration_wait(stream or subject, waiting_messages)
        return again

    def begin_migration_wait(self, stream: str, waiting_messages: int) -> None:
        """Count this session in the metric of migration waits, until there is progress or the session ends."""
        if self._migration_wait is None:
            self._migration_wait = MIGRATION_WAITS.begin(stream.removeprefix(STREAM_PREFIX), waiting_messages)

    def progress(self) -> None:
        """Reset the retry deadline and end a migration wait: a message was stored."""
        self.retry_deadline.progress()
        self._end_migration_wait()

    def wait_for_migration(self, subject: str) -> None:
        """Return when the migration of a queue is over.

        Messages sent earlier could be refused while later ones are stored.
        """
        stream = self.options.expected_stream or self._streams.get(subject) or self.stream_of(subject)
        give_up = time.monotonic() + self.options.patience_seconds
        while is_subject_migrating(self._address, subject) if stream is None else is_migrating(self._address, stream):
            if time.monotonic() > give_up:
                waited = (
                    f"gave up after {self.options.patience_seconds:g} s: the queue for {subject!r} is being migrated"
                )
                raise self.deadline_error(RetryDeadlineExceeded(waited, fix="try again later"), 0)
            time.sleep(_MIGRATION_POLL_SECONDS)

    def outcome_unknown_error(self, index: int) -> OutcomeUnknown:
        """Return the error for a message whose reply was lost before its queue was sealed.

        The migrated queue does not know its message id.
        """
        return OutcomeUnknown(
            f"message {index} was sent and got no reply before the connection broke, and then its queue was sealed for"
            f" migration; {self.tally.acknowledged} messages are stored",
            fix="check whether it arrived before you send it again",
        )

    def stream_of(self, subject: str) -> str | None:
        """Return the stream that takes a subject; None if there is none, or if we may not ask."""
        return self._stream_of(self.connection, subject)

    def check_missing_stream(self, subject: str, index: int, in_flight: int) -> ServerUnavailable:
        """Return why no stream takes a subject during a migration; raise UnknownStream if no migration runs."""
        if self.will_reopen(subject, in_flight):
            return ServerUnavailable(f"the queue for {subject!r} is being migrated", fix="try again later")
        raise UnknownStream(
            f"no stream takes message {index} on subject {subject!r}; {self.tally.acknowledged} others are stored",
            fix="create a stream for this subject, or check the subject",
        )

    def release(self) -> None:
        """Return the connection to the pool; all replies have arrived."""
        self._end_migration_wait()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            try:
                connection.unsubscribe(self.sid)
                connection.flush()
            except ConnectionLost:
                connection.close()
            else:
                release(self._address, connection)

    def close(self) -> None:
        """Close the connection."""
        self._end_migration_wait()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _end_migration_wait(self) -> None:
        if self._migration_wait is not None:
            MIGRATION_WAITS.end(self._migration_wait)
            self._migration_wait = None

    def _adopt(self, connection: BulkConnection) -> None:
        self._connection = connection
        self.sid = connection.subscribe(f"{self.inbox}.*")

    def _check_window(self, connection: BulkConnection, sent: UnansweredMessage) -> None:
        stream = self._stream_of(connection, sent.subject)
        if stream is None:
            return  # the stream is gone: the server refuses the repeated message with that reason
        if stream not in self._windows:
            try:
                config = connection.request_api(f"STREAM.INFO.{stream}")["config"]
                self._windows[stream] = config.get("duplicate_window", 0) / 1e9
            except PermissionDenied:
                self._windows[stream] = _DEFAULT_DUPLICATE_WINDOW_SECONDS
        away = time.monotonic() - sent.sent_at
        if away > self._windows[stream] * _DUPLICATE_WINDOW_MARGIN:
            raise OutcomeUnknown(
                f"message {sent.index} was sent {away:.0f} s ago and got no reply before the connection broke; stream"
                f" {stream!r} recognises duplicates for {self._windows[stream]:g} s only;"
                f" {self.tally.acknowledged} messages are stored",
                fix="check whether it is there before you send it again; give the stream a longer duplicate_window",
            )

    def _stream_of(self, connection: BulkConnection, subject: str) -> str | None:
        if self.options.expected_stream is not None:
            return self.options.expected_stream
        if subject not in self._streams:
            try:
                names = connection.request_api("STREAM.NAMES", {"subject": subject}).get("streams") or []
            except PermissionDenied:
                return None
            if not names:
                return None
            self._streams[subject] = names[0]
        return self._streams[subject]


def _new_inbox(address: Address) -> str:
    # Short, because every message carries it: a reply subject of 50 bytes costs the server a tenth more time.
    return f"{address.inbox}.{token_urlsafe(8)}"


def is_migrating(address: Address, stream: str) -> bool:
    """Return whether a stream is being migrated; True for a client that may not read the record."""
    subject = record_subject(stream)
    if subject is None:
        return False
    try:
        return is_migration_running(_read_record(address, subject))
    except PermissionDenied:
        return True


def will_reopen(address: Address, stream: str) -> bool:
    """Return whether a stream that was sealed or deleted will take messages again, or takes them again already."""
    if is_migrating(address, stream):
        return True
    try:
        return not request_api(address, f"STREAM.INFO.{stream}")["config"].get("sealed")
    except NotFound:
        return False


def is_subject_migrating(address: Address, subject: str) -> bool:
    """Return whether a migration holds back messages on a subject that no stream takes at the moment."""
    try:
        state = request_api(address, f"STREAM.INFO.{RECORDS_STREAM}", {"subjects_filter": ALL_RECORDS})["state"]
        keys = state.get("subjects") or {}
        return any(find_held_stream(_read_record(address, key), subject) is not None for key in keys)
    except (NotFound, PermissionDenied):
        return False


def _read_record(address: Address, key: str) -> bytes:
    """Return the stored migration record under a key; empty if there is none."""
    try:
        reply = request_api(address, f"STREAM.MSG.GET.{RECORDS_STREAM}", {"last_by_subj": key})
    except NotFound:
        return b""
    return decode_stored_data(reply["message"])
