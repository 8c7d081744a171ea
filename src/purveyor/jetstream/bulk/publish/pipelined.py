"""Publishing one by one with thousands under way, each answer matched to its message.

Neighbours on one subject share a reply subject, which spares the server and us a fifth of the work. A single server
answers them in the order they were sent, so the n-th answer is the n-th message's. Where that does not hold (several
subjects go to several streams; a cluster may refuse one message before it has stored the one ahead of it) each message
has a reply subject of its own.

Order: messages go out in the order given, on one connection, and after a break everything unanswered is sent again in
that order. When one is refused, no further ones are sent, the answers to those under way are collected, and the error
tells the index: messages behind it that were under way may be stored.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.api_errors import TOO_MANY_REQUESTS
from purveyor.jetstream.bulk.arrow_bytes import Mask, Positions, contents
from purveyor.jetstream.bulk.header_columns import join
from purveyor.jetstream.bulk.net.connection import LinkLost
from purveyor.jetstream.bulk.publish.acks import Answers, Refusal, parse_answers
from purveyor.jetstream.bulk.publish.frame_builder import Rows, frames, indices
from purveyor.jetstream.bulk.publish.session import SILENCE_SECONDS, Outlet, Sent
from purveyor.model.errors import NoAnswer, ServerUnavailable, Unavailable, UnknownStream

_MOST_ROWS: Final = 1250
_MOST_BYTES: Final = 1 << 20
_CLUSTER_WINDOW: Final = 1000
"""A stream of a cluster holds 10,000 messages that it has not stored yet, of all publishers, and refuses more."""
_PORTIONS: Final = 4  # of a small window: while one is answered the next are under way
_TURN_SECONDS: Final = 1.0
_GATHERED_BYTES: Final = 64 << 10  # of answers, before they are looked at: about a thousand
_GATHERED_SECONDS: Final = 0.05
_LEFT_OVER_SECONDS: Final = 0.002


@dataclass(slots=True, eq=False)
class _Flight:
    """Neighbouring messages that were sent together, kept until each is answered."""

    rows: Rows
    piece: memoryview
    in_order: bool
    """Answered in order, all on the reply subject of the first."""
    heard: int = 0
    sent_at: float = 0.0
    sent: bool = True

    @property
    def first(self) -> int:
        return self.rows.first_index

    @property
    def end(self) -> int:
        return self.rows.first_index + len(self.rows)


class Pipeline:
    """Messages on their way. `send` returns when they are under way, `finish` when all are answered."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        window = outlet.options.window
        self._window = min(window, _CLUSTER_WINDOW) if outlet.link.info.clustered else window
        self._flights: deque[_Flight] = deque()
        self._bytes = 0
        # Whether message i is unanswered, at place i modulo the window: no two messages under way share a place.
        self._open: Mask = np.zeros(self._window, np.bool_)
        self._refusals: dict[int, Refusal] = {}
        self._doubtful: set[int] = set()
        """Sent on a link that broke: whether they are stored, only the stream they were sent to knows."""
        self._last_answer = self._last_look = time.monotonic()

    def send(self, rows: Rows) -> None:
        """Send messages, waiting for room where too many are under way."""
        most = min(-(-self._window // _PORTIONS), _MOST_ROWS)
        for part in portions(rows, most, min(self._outlet.options.window_bytes, _MOST_BYTES)):
            one_subject = part.subject is not None or len(pc.unique(part.subjects)) == 1
            in_order = one_subject and not self._outlet.link.info.clustered
            flight = _Flight(part, as_bytes(self._frames(part, in_order=in_order)), in_order)
            while not self._has_room(flight):
                self._turn(_TURN_SECONDS)
            flight.sent_at = time.monotonic()
            self._open[self._places(flight)] = True
            self._flights.append(flight)
            self._bytes += len(flight.piece)
            self._outlet.link.queue(flight.piece)
            self._turn(0.0)

    def finish(self) -> None:
        """Wait until each message is answered."""
        while self._flights:
            self._turn(_TURN_SECONDS)

    def _frames(self, rows: Rows, *, in_order: bool) -> Any:
        inbox = f" {self._outlet.inbox}.".encode()
        return frames(rows, replies=inbox + b"%d" % rows.first_index if in_order else join(inbox, indices(rows)))

    def _has_room(self, flight: _Flight) -> bool:
        if not self._flights:
            return True
        fits = self._bytes + len(flight.piece) <= self._outlet.options.window_bytes
        return fits and flight.end - self._flights[0].first <= self._window

    def _places(self, flight: _Flight) -> Positions:
        return np.arange(flight.first, flight.end) % self._window

    def _turn(self, timeout: float) -> None:
        """One turn of sending and hearing; what goes wrong is dealt with here."""
        try:
            self._listen(timeout)
        except LinkLost as error:
            self._send_again_on_new_link(error)
        if self._refusals:
            self._judge()

    def _listen(self, timeout: float) -> None:
        link = self._outlet.link
        backlog = link.backlog
        now = time.monotonic()
        if timeout:
            # Answers that an earlier turn received and did not look at may be the last ones: wait for no more of them.
            link.fill(_GATHERED_BYTES, min(timeout, _LEFT_OVER_SECONDS) if link.buffered else timeout)
        else:
            self._last_answer = now  # the caller was busy elsewhere: silence is counted from here
            link.pump(0.0)
            if link.buffered < _GATHERED_BYTES and now - self._last_look < _GATHERED_SECONDS:
                return  # looking at a few answers costs nearly as much as at a thousand
        self._last_look = now
        found = link.receive()
        if len(found):
            prefix_size = len(self._outlet.inbox) + 1
            answers = parse_answers(
                found, sid=self._outlet.sid, prefix_size=prefix_size, to_indices=self._answered_messages
            )
            self._settle(answers)
        elif link.backlog != backlog:
            self._last_answer = time.monotonic()
        elif timeout and time.monotonic() - self._last_answer > SILENCE_SECONDS:
            raise LinkLost(f"no message was acknowledged for {SILENCE_SECONDS:g} s")

    def _answered_messages(self, numbers: Positions) -> Positions:
        """Which messages were answered on the reply subjects with those numbers, in the order of the answers."""
        result = numbers.copy()
        for flight in self._flights:
            if flight.in_order:
                which = np.flatnonzero(numbers == flight.first)
                places = flight.heard + np.arange(len(which))
                result[which] = np.where(places < len(flight.rows), flight.first + places, -1)
                flight.heard += len(which)
        return result

    def _settle(self, answers: Answers) -> None:
        ledger = self._outlet.ledger
        before = ledger.acknowledged
        for ack in answers.acks:
            closed = self._close(ack.indices)
            duplicates = min(ack.duplicates, closed)
            ledger.stored += closed - duplicates
            ledger.duplicates += duplicates
            ledger.note(ack.stream, ack.last_sequence, int(ack.indices.max()))
        for index, refusal in answers.refusals.items():
            if self._close(np.array([index], np.int64)):
                self._refusals[index] = refusal
        self._last_answer = time.monotonic()
        self._forget_answered()
        if ledger.acknowledged > before:
            self._outlet.progress()
            if self._outlet.options.on_progress is not None:
                self._outlet.options.on_progress(ledger.acknowledged)

    def _close(self, answered: Positions) -> int:
        """Take messages as answered; how many of them were not before (after a break an answer may come twice)."""
        if not self._flights:
            return 0
        inside = (answered >= self._flights[0].first) & (answered < self._flights[-1].end)
        before = np.count_nonzero(self._open)
        self._open[answered[inside] % self._window] = False
        return int(before - np.count_nonzero(self._open))

    def _forget_answered(self) -> None:
        while self._flights and not self._refusals and not self._open[self._places(self._flights[0])].any():
            self._bytes -= len(self._flights.popleft().piece)

    def _send_again_on_new_link(self, error: Unavailable) -> None:
        for flight in self._flights:
            if flight.sent:
                self._doubtful.update((flight.first + np.flatnonzero(self._open[self._places(flight)])).tolist())
        self._outlet.reconnect(error, self._unanswered())
        self._send_open()

    def _send_open(self) -> None:
        """Send everything unanswered (again), in order. When it was first sent stays: that is what may be stored."""
        for flight in self._flights:
            open_ = self._open[self._places(flight)]
            flight.in_order = False
            flight.piece = as_bytes(self._frames(flight.rows, in_order=False).filter(pa.array(open_)))
            flight.sent = True
            self._outlet.link.queue(flight.piece)
        self._bytes = sum(len(flight.piece) for flight in self._flights)
        self._last_answer = time.monotonic()

    def _unanswered(self) -> Iterator[Sent]:
        """The oldest unanswered message on each subject."""
        seen: set[bytes] = set()
        for flight in self._flights:
            rows = np.flatnonzero(self._open[self._places(flight)])
            subjects = flight.rows.subjects.take(pa.array(rows))
            for subject in pc.unique(subjects).to_pylist():
                if subject not in seen:
                    seen.add(subject)
                    row = int(rows[pc.index(subjects, subject).as_py()])
                    yield Sent(flight.first + row, subject.decode(), flight.sent_at)

    def _judge(self) -> None:
        """Something was refused: hear the rest, then either fail with the first refusal, or wait and send again."""
        lost = self._hear_the_rest()
        refusals, self._refusals = self._refusals, {}
        sealed = {
            subject: self._outlet.opens_again(subject, self._held())
            for subject in {self._subject(index) for index, refusal in refusals.items() if refusal.sealed}
        }
        for index in sorted(refusals):
            refusal = refusals[index]
            if refusal.sealed and sealed[self._subject(index)]:
                if index in self._doubtful:
                    raise self._outlet.in_doubt(index)
            elif not (refusal.nobody_there or refusal.temporary):
                raise self._outlet.refused(refusal, index, f"message {index}")
        waiting: Unavailable = lost or ServerUnavailable("JetStream was not ready")
        asked: set[str] = set()
        for index in sorted(refusals):
            subject = self._subject(index)
            if subject not in asked:
                asked.add(subject)
                waiting = self._check_stream(index, subject, refusals[index]) or waiting
        self._open[np.array(list(refusals), np.int64) % self._window] = True
        if isinstance(waiting, LinkLost):
            self._send_again_on_new_link(waiting)
        else:
            for flight in self._flights if lost is None else ():
                flight.sent, flight.sent_at = False, time.monotonic()  # all is answered: none of them is in doubt
            for subject in sealed:
                self._outlet.wait_until_open(subject)
            if not sealed:
                self._outlet.wait(waiting)
            self._send_open()

    def _check_stream(self, index: int, subject: str, refusal: Refusal) -> Unavailable | None:
        """Whether the stream of a refused message is there, only not ready, and order can still be kept."""
        try:
            stream = self._outlet.stream_of(subject)
        except (LinkLost, NoAnswer) as error:
            return LinkLost(error.message)
        except ServerUnavailable as error:
            return error
        if stream is None and self._outlet.opens_again(subject, self._held()):
            return ServerUnavailable(f"the queue for {subject!r} is being migrated", fix="try again later")
        if stream is None:
            raise UnknownStream(
                f"no stream takes message {index} on subject {subject!r};"
                f" {self._outlet.ledger.acknowledged} others are stored",
                fix="create a stream for this subject, or check the subject",
            )
        if self._outlet.ledger.last_indices.get(stream, -1) > index and not refusal.in_process:
            raise self._outlet.refused(
                Refusal(refusal.code, refusal.err_code, f"{refusal.reason}; stream {stream!r} stored later ones"),
                index,
                f"message {index}",
            )
        if refusal.sealed:
            return ServerUnavailable(f"stream {stream!r} is sealed for migration", fix="try again later")
        if refusal.code == TOO_MANY_REQUESTS:
            return ServerUnavailable(f"stream {stream!r} cannot store so much at once", fix="publish from fewer places")
        return ServerUnavailable(f"stream {stream!r} has no leader", fix="is its server up?")

    def _held(self) -> int:
        """How many messages are under way, from the oldest that is not stored."""
        return self._flights[-1].end - self._flights[0].first if self._flights else 0

    def _subject(self, index: int) -> str:
        flight = next(flight for flight in self._flights if flight.first <= index < flight.end)
        subject: str = flight.rows.subjects[index - flight.first].as_py().decode()
        return subject

    def _hear_the_rest(self) -> LinkLost | None:
        """Send no more and wait for the answers to what is under way."""
        try:
            for piece in self._outlet.link.withdraw():
                flight = self._flight_of(piece)
                if flight is None:
                    self._outlet.link.queue(piece)
                else:
                    flight.sent = False
            while any(f.sent and self._open[self._places(f)].any() for f in self._flights):
                self._listen(_TURN_SECONDS)
        except LinkLost as error:
            return error
        return None

    def _flight_of(self, piece: memoryview) -> _Flight | None:
        return next((flight for flight in self._flights if flight.piece is piece), None)


def portions(rows: Rows, most_rows: int, most_bytes: int) -> Iterator[Rows]:
    """Neighbouring messages in portions of at most so many, and about so many bytes (at least one message)."""
    sums = np.cumsum(rows.sizes())
    start = 0
    while start < len(rows):
        before = int(sums[start - 1]) if start else 0
        end = int(np.searchsorted(sums, before + most_bytes, side="right"))
        end = min(max(end, start + 1), start + most_rows, len(rows))
        yield rows.slice(start, end - start)
        start = end


def as_bytes(built: Any) -> memoryview:
    """All frames of an array as one run of bytes, without copying."""
    return contents(built)[0].data
