"""What both ways of publishing share: the link with its inbox for answers, the books, and what a lost link means.

A link may break between sending a message and hearing of it. The message is then sent again with the same id, and the
server drops it if it has it. That is sound only while the stream remembers ids (its `duplicate_window`); later nobody
can tell, and `OutcomeUnknown` says so rather than store a message twice.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from secrets import token_urlsafe
from types import MappingProxyType
from typing import Final

from purveyor.jetstream.address import Address
from purveyor.jetstream.api_errors import FIXES
from purveyor.jetstream.bulk.net.connection import Link, LinkLost
from purveyor.jetstream.bulk.net.pool import OutOfPatience, Patience, connect, give_back
from purveyor.jetstream.bulk.options import PublishOptions, PublishReport
from purveyor.jetstream.bulk.publish.acks import Refusal
from purveyor.jetstream.bulk.publish.maintenance_lookup import (
    migrating,
    migrating_subject,
    opens_again,
)
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.model.errors import OutcomeUnknown, PermissionDenied, PublishRefused, ServerUnavailable, Unavailable
from purveyor.model.metrics import MIGRATION_WAITS

SILENCE_SECONDS: Final = 10.0
"""With messages under way and no answer to any for so long, the link is taken for lost."""

_DEFAULT_WINDOW_SECONDS: Final = 120.0  # the server's, assumed where we may not ask
_MARGIN: Final = 0.9
_OPEN_SECONDS: Final = 0.1


@dataclass(slots=True)
class Ledger:
    """The books of one call."""

    stored: int = 0
    duplicates: int = 0
    last_sequences: dict[str, int] = field(default_factory=dict)
    last_indices: dict[str, int] = field(default_factory=dict)
    """The highest index acknowledged, per stream: what is stored behind it would be out of order."""

    @property
    def acknowledged(self) -> int:
        """Messages that are in their stream."""
        return self.stored + self.duplicates

    def note(self, stream: str, sequence: int, index: int) -> None:
        """A stream has a message, at that sequence."""
        self.last_sequences[stream] = max(sequence, self.last_sequences.get(stream, 0))
        self.last_indices[stream] = max(index, self.last_indices.get(stream, -1))

    def report(self) -> PublishReport:
        """What the caller gets."""
        return PublishReport(self.stored, self.duplicates, MappingProxyType(dict(self.last_sequences)))


@dataclass(frozen=True, slots=True)
class Sent:
    """Messages on some subject that were sent and not answered, for the question whether they may be sent again."""

    index: int
    subject: str
    sent_at: float


class Outlet:
    """The link of one publishing call, through breaks and reconnects."""

    def __init__(self, address: Address, options: PublishOptions, ledger: Ledger) -> None:
        self.options = options
        self.ledger = ledger
        self.patience = Patience(options.patience_seconds)
        self.inbox = _new_inbox(address)
        self.sid = 0
        self._address = address
        self._link: Link | None = None
        self._windows: dict[str, float] = {}
        self._streams: dict[str, str] = {}
        self._held_up: int | None = None

    @property
    def link(self) -> Link:
        """The link, made when it is first needed."""
        if self._link is None:
            self._adopt(connect(self._address, self.patience))
        assert self._link is not None
        return self._link

    def reconnect(self, error: Unavailable, unanswered: Iterable[Sent]) -> None:
        """A new link after the old one broke, or `ServerUnavailable`, or `OutcomeUnknown`."""
        unanswered = list(unanswered)
        self.drop()
        failure: Unavailable = error
        while True:
            try:
                self.patience.failed(failure)
                link = connect(self._address, self.patience)
            except OutOfPatience as over:
                raise self.gave_up(over, len(unanswered)) from over
            try:
                for sent in unanswered:
                    self._check_window(link, sent)
            except OutcomeUnknown:
                link.close()
                raise
            except Unavailable as again:
                link.close()
                failure = again
                continue
            # Another one: a late answer to what the old link sent must not be taken for one to the new.
            self.inbox = _new_inbox(self._address)
            self._adopt(link)
            return

    def wait(self, error: Unavailable) -> None:
        """Pause before another attempt on the same link."""
        try:
            self.patience.failed(error)
        except OutOfPatience as over:
            raise self.gave_up(over, 0) from over

    def gave_up(self, over: OutOfPatience, unanswered: int) -> ServerUnavailable:
        """The error at the end of the caller's patience."""
        stored = f"{self.ledger.acknowledged} messages are stored"
        return ServerUnavailable(
            f"{over.message}; {stored}" + (", some after them were sent and not answered" if unanswered else ""),
            fix=over.fix,
        )

    def refused(self, refusal: Refusal, index: int, what: str) -> PublishRefused:
        """The error for a message that was not stored."""
        number = f" ({refusal.err_code})" if refusal.err_code else ""
        error = PublishRefused(
            f"{what} was refused: {refusal.reason}{number}; {self.ledger.acknowledged} others are stored",
            fix=FIXES.get(refusal.err_code or refusal.code),
            code=refusal.code,
            err_code=refusal.err_code,
        )
        error.index, error.stored = index, self.ledger.acknowledged
        return error

    def opens_again(self, subject: str, held: int) -> bool:
        """Whether the queue that takes a subject, and was sealed or gone, is so for its migration only.

        If so, it counts as waiting from now on, with so many messages in hand.
        """
        stream = self.options.expected_stream or self._streams.get(subject) or self.stream_of(subject)
        again = migrating_subject(self._address, subject) if stream is None else opens_again(self._address, stream)
        if again:
            self.held_up(stream or subject, held)
        return again

    def held_up(self, stream: str, held: int) -> None:
        """A migration keeps so many messages back, until there is progress or the end: for those who watch."""
        if self._held_up is None:
            self._held_up = MIGRATION_WAITS.begin(stream.removeprefix(STREAM_PREFIX), held)

    def progress(self) -> None:
        """A message was stored: whatever was waited for is over."""
        self.patience.progress()
        self._end_waiting()

    def wait_until_open(self, subject: str) -> None:
        """Return when the migration of a queue is over. Sent before, some might be refused and later ones stored."""
        stream = self.options.expected_stream or self._streams.get(subject) or self.stream_of(subject)
        give_up = time.monotonic() + self.options.patience_seconds
        while migrating_subject(self._address, subject) if stream is None else migrating(self._address, stream):
            if time.monotonic() > give_up:
                waited = (
                    f"gave up after {self.options.patience_seconds:g} s: the queue for {subject!r} is being migrated"
                )
                raise self.gave_up(OutOfPatience(waited, fix="try again later"), 0)
            time.sleep(_OPEN_SECONDS)

    def in_doubt(self, index: int) -> OutcomeUnknown:
        """The error for one whose answer got lost before its queue was sealed: the new one will not know its id."""
        return OutcomeUnknown(
            f"message {index} was sent and not answered before the connection broke, and then its queue was sealed for"
            f" migration; {self.ledger.acknowledged} messages are stored",
            fix="look whether it arrived before sending it again",
        )

    def stream_of(self, subject: str) -> str | None:
        """The stream that takes a subject, by the server's word; None if there is none, or we may not ask."""
        return self._stream_of(self.link, subject)

    def release(self) -> None:
        """All is answered: the link may serve others."""
        self._end_waiting()
        if self._link is not None:
            link, self._link = self._link, None
            try:
                link.unsubscribe(self.sid)
                link.flush()
            except LinkLost:
                link.close()
            else:
                give_back(self._address, link)

    def drop(self) -> None:
        """Close the link."""
        self._end_waiting()
        if self._link is not None:
            self._link.close()
            self._link = None

    def _end_waiting(self) -> None:
        if self._held_up is not None:
            MIGRATION_WAITS.end(self._held_up)
            self._held_up = None

    def _adopt(self, link: Link) -> None:
        self._link = link
        self.sid = link.subscribe(f"{self.inbox}.*")

    def _check_window(self, link: Link, sent: Sent) -> None:
        stream = self._stream_of(link, sent.subject)
        if stream is None:
            return  # no such stream any more: sending again will be answered with just that
        if stream not in self._windows:
            try:
                config = link.api(f"STREAM.INFO.{stream}")["config"]
                self._windows[stream] = config.get("duplicate_window", 0) / 1e9
            except PermissionDenied:
                self._windows[stream] = _DEFAULT_WINDOW_SECONDS
        away = time.monotonic() - sent.sent_at
        if away > self._windows[stream] * _MARGIN:
            raise OutcomeUnknown(
                f"message {sent.index} was sent {away:.0f} s ago and not answered before the connection broke; stream"
                f" {stream!r} recognises duplicates for {self._windows[stream]:g} s only;"
                f" {self.ledger.acknowledged} messages are stored",
                fix="look whether it is there before sending it again, and give the stream a longer duplicate_window",
            )

    def _stream_of(self, link: Link, subject: str) -> str | None:
        if self.options.expected_stream is not None:
            return self.options.expected_stream
        if subject not in self._streams:
            try:
                names = link.api("STREAM.NAMES", {"subject": subject}).get("streams") or []
            except PermissionDenied:
                return None
            if not names:
                return None
            self._streams[subject] = names[0]
        return self._streams[subject]


def _new_inbox(address: Address) -> str:
    # Short, because it goes with every message: the server takes a tenth longer over a reply of 50 bytes.
    return f"{address.inbox}.{token_urlsafe(8)}"
