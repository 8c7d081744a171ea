"""The work of `append_once`: one link, many targets, each asked how far it is written and then written on from there.

Three things make a row come exactly once, in its place:

1. What was written is read from the target itself: the position of its newest message, and then the floor. That is
   asked at the beginning, and again whenever what was sent is in doubt.
2. Rows go in a chain, where each expects that the row before it is the newest message of the stream; or, where chains
   do not suit, in atomic batches (or, if rows are few, one by one), the next when the one before is stored, each
   expecting that the newest message of the subject is the one that was seen. So of two writers one is refused, and asks
   again. What was sent before a connection broke is found by asking, or refused because something newer is there.
3. What was seen is trusted for some seconds only. A process that was stopped in between, and comes back when others
   have written the rows and readers have removed them, asks again; one stopped for less finds its message ids known.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, assert_never

from purveyor.jetstream.address import Address
from purveyor.jetstream.api_errors import STREAM_NOT_FOUND
from purveyor.jetstream.bulk.append import replies as answers
from purveyor.jetstream.bulk.append.chain import MOST_FRUITLESS
from purveyor.jetstream.bulk.append.chains import Chains
from purveyor.jetstream.bulk.append.position_scan import last_position
from purveyor.jetstream.bulk.append.replies import Verdict
from purveyor.jetstream.bulk.append.target_state import SINGLES_PAY, Batch, Course, Step
from purveyor.jetstream.bulk.append.types import AppendOptions, RefusalKind
from purveyor.jetstream.bulk.append.write_speed import Pace
from purveyor.jetstream.bulk.net.connection import LinkLost
from purveyor.jetstream.bulk.options import PublishOptions
from purveyor.jetstream.bulk.publish.acks import Ack, one_by_one, parse_answer
from purveyor.jetstream.bulk.publish.acks import Refusal as Answer
from purveyor.jetstream.bulk.publish.maintenance_lookup import opens_again
from purveyor.jetstream.bulk.publish.session import SILENCE_SECONDS, Ledger, Outlet
from purveyor.model.errors import InvalidInput, NoAnswer, PermissionDenied, PublishRefused, PurveyorError, Unavailable

_MOST_OPEN: Final = 40  # a stream takes 50 open batches, and they may all be for one
_FEW: Final = 4
_TRUST_SECONDS: Final = 10.0
_TURN_SECONDS: Final = 1.0
_MOST_TRIES: Final = 12
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 1.0


class Appender:
    """All targets of one call."""

    def __init__(self, address: Address, courses: Sequence[Course], options: AppendOptions) -> None:
        self._address = address
        self._options = options
        self._ledger = Ledger()
        self._outlet = Outlet(address, PublishOptions(patience_seconds=options.patience_seconds), self._ledger)
        self._to_ask: deque[Course] = deque(courses)
        self._to_write: deque[Course] = deque()
        self._resting: list[Course] = []
        self._to_chain: deque[Course] = deque()
        self._chains = Chains(address, self._outlet, options)
        self._under_way: dict[int, Course] = {}
        self._bytes = 0
        self._batches = 0
        self._numbers = 0
        self._moved_at = time.monotonic()
        self._denied: set[str] = set()

    def run(self) -> None:
        """Return when each target has all its rows, or has refused one."""
        try:
            while self._to_write or self._to_chain or self._to_ask or self._resting or self._waits:
                try:
                    self._wake()
                    self._send()
                    if self._waits or self._resting:
                        self._listen()
                except (LinkLost, NoAnswer) as error:
                    self._start_again(error)
            if not self._denied:
                self._chains.release()
                self._outlet.release()
        finally:
            self._outlet.drop()  # after a denial too: more words about it may be on their way

    @property
    def _waits(self) -> bool:
        return bool(self._under_way or self._chains.open)

    # Sending

    def _send(self) -> None:
        while self._to_chain and self._chains.has_room():
            self._chain(self._to_chain.popleft())
        while self._to_write and self._has_room():
            self._write(self._to_write.popleft())
        while self._to_ask:
            self._ask(self._to_ask.popleft())

    def _has_room(self) -> bool:
        return self._batches < _MOST_OPEN and (not self._batches or self._bytes < self._options.window_bytes)

    def _ask(self, course: Course) -> None:
        subject, words = course.question
        number = self._number()
        course.asked_at = time.monotonic()
        self._under_way[number] = course
        course.number = number
        self._outlet.link.publish(subject, words, f"{self._outlet.inbox}.{2 * number}")

    def _write(self, course: Course) -> None:
        if time.monotonic() - course.seen_at > _TRUST_SECONDS:
            self._ask_again(course)
            return
        batch, course.built = course.built, None
        if batch is None or batch.start != course.next or len(batch.rows) > course.limit:
            try:
                batch = self._build(course, course.next)
            except (InvalidInput, PublishRefused) as error:
                kind = RefusalKind.TOO_LARGE if isinstance(error, PublishRefused) else RefusalKind.OTHER
                course.refuse(error.message, 0, kind)
                return
        link = self._outlet.link
        link.queue(batch.head(course.expectation))
        if batch.body is not None:
            link.queue(batch.body)
        course.sent, course.number, course.asked_at = batch, batch.number, time.monotonic()
        self._under_way[batch.number] = course
        self._batches += 1
        self._bytes += batch.size
        link.pump(0.0)
        if self._batches <= _FEW and batch.end < len(course.positions):
            # While the server is busy with this one. A row that cannot be sent will be met again in its turn.
            with suppress(InvalidInput, PublishRefused):
                course.built = self._build(course, batch.end)

    def _chain(self, course: Course) -> None:
        chain = course.chain
        if chain.broken:
            return  # it comes back when all is heard
        if not chain.begun and time.monotonic() - course.seen_at > _TRUST_SECONDS:
            self._ask_again(course)
            return
        try:
            if self._chains.pace is not Pace.SLOW:
                self._chains.send(course)
                if chain.begun and chain.sent < len(course.positions):
                    self._to_chain.append(course)
                return
        except (InvalidInput, PublishRefused):
            pass  # one of the next rows: batches find out which
        course.chains = False
        if not chain.flights:
            self._go_on(course)

    def _build(self, course: Course, start: int) -> Batch:
        outlet = self._outlet
        return course.batch(self._number(), outlet.inbox, start, self._options, outlet.link.info.max_payload)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    # Hearing

    def _listen(self) -> None:
        link = self._outlet.link
        backlog = link.backlog
        try:
            found = link.receive()  # what an earlier turn read while it wrote
            if not len(found):
                link.pump(self._longest_wait())
                found = link.receive()
        except PermissionDenied as error:
            self._deny(error)
            return
        now = time.monotonic()
        if len(found) or link.backlog != backlog or not self._waits:
            self._moved_at = now
            if self._under_way:
                prefix_size = len(self._outlet.inbox) + 1
                for number, headers, payload in one_by_one(found, sid=self._outlet.sid, prefix_size=prefix_size):
                    self._hear(number, headers, payload)
            if self._chains.open:
                for course in self._chains.hear(found):
                    self._advance(course)
        elif now - self._moved_at > SILENCE_SECONDS:
            self._moved_at = now
            for course in [*self._under_way.values(), *self._chains.courses]:
                self._settle(course)
                self._wait(course, Answer(0, 0, f"no answer for {SILENCE_SECONDS:g} s"))

    def _longest_wait(self) -> float:
        if not self._resting:
            return _TURN_SECONDS
        soonest = min(course.rests_until for course in self._resting)
        return min(_TURN_SECONDS, max(0.0, soonest - time.monotonic()))

    def _hear(self, number: int, headers: bytes, payload: bytes) -> None:
        course = self._under_way.get(number // 2)
        if course is None:
            return  # the rest of what is known already
        batch = course.sent
        if batch is None:
            self._settle(course)
            if course.step is Step.OWNER:
                self._owned(course, answers.read_stream(headers, payload))
            else:
                self._answered(course, answers.read_message(headers, payload))
            return
        if not number % 2 and not payload and not headers:
            return  # the batch has begun
        self._settle(course)
        answer = parse_answer(headers, payload)
        if isinstance(answer, Ack):
            self._stored(course, batch, answer)
        else:
            self._refused(course, answer, len(batch.rows))

    def _settle(self, course: Course) -> None:
        """Nothing is under way of it any more."""
        self._chains.abandon(course)
        with suppress(ValueError):
            self._to_chain.remove(course)
        self._under_way.pop(course.number, None)
        if course.sent is not None:
            self._batches -= 1
            self._bytes -= course.sent.size
            course.sent = None

    def _answered(self, course: Course, message: dict[str, Any] | Answer | None) -> None:
        if isinstance(message, Answer):
            self._refused(course, message, 0)
            return
        target = course.target
        try:
            if course.step is Step.FLOOR:
                self._begin(course, answers.floor(message, target))
                return
            found = answers.newest(message, target.position_header)
            position = found.position
            if found.sequence and position is None:
                position = last_position(self._address, target, found.sequence, self._options.patience_seconds)
                self._moved_at = time.monotonic()
        except Unavailable as error:
            self._wait(course, Answer(0, 0, error.message))
        except (PurveyorError, ValueError) as error:
            course.refuse(str(error), 0, RefusalKind.OTHER)
        else:
            course.expected, course.seen_at, course.newest = found.sequence, course.asked_at, position or 0
            if target.floor_subject is None:
                self._begin(course, 0)
            else:
                course.step = Step.FLOOR
                self._to_ask.append(course)

    def _begin(self, course: Course, floor: int) -> None:
        """It is known how far this target was written."""
        stored = course.stored
        if course.written_up_to(max(course.newest, course.target.floor, floor)):
            self._outlet.progress()
        self._count(course.stored - stored)
        if course.target.owner is None or course.next >= len(course.positions):
            self._go_on(course)
        else:
            course.step = Step.OWNER
            self._to_ask.append(course)

    def _owned(self, course: Course, found: tuple[str | None, int] | Answer) -> None:
        if isinstance(found, Answer):
            self._refused(course, found, 0)
        elif course.belongs(*found):
            self._go_on(course)

    def _stored(self, course: Course, batch: Batch, ack: Ack) -> None:
        course.next = batch.end
        if not ack.duplicate:  # a single row whose id the stream knows was there before, and is skipped
            course.stored += len(batch.rows)
            course.expected, course.seen_at = ack.sequence, course.asked_at
            course.limit = min(self._options.batch_rows, 2 * course.limit)
        course.progress()
        self._outlet.progress()
        self._go_on(course)
        self._count(0 if ack.duplicate else len(batch.rows))

    def _advance(self, course: Course) -> None:
        """Some rows of a chain are answered."""
        chain, was_begun = course.chain, course.chain.begun
        said = chain.advance()
        if said is None:
            return
        if said.next > course.next:
            course.next = said.next
            course.stored += said.stored
            course.expected, course.seen_at = chain.sequence or course.expected, said.seen_at
            course.progress()
            self._outlet.progress()
        if said.cause is not None:
            self._broken(course, said.cause)
        elif chain.sent < len(course.positions) and course.chains:
            if not was_begun:
                self._to_chain.append(course)
        elif not chain.flights:
            self._go_on(course)
        self._count(said.stored)

    def _count(self, stored: int) -> None:
        """So many more rows are stored; negative: so many are not, as it turned out."""
        self._ledger.stored += stored
        if stored > 0 and self._options.on_progress is not None:
            self._options.on_progress(self._ledger.stored)

    def _broken(self, course: Course, cause: Answer) -> None:
        """A chain ended before its rows did, and all that was under way of it is answered."""
        course.in_doubt = course.chain.sent
        self._settle(course)
        if course.chain.fruitless >= MOST_FRUITLESS:
            course.chains = False
        if answers.is_conflict(cause):
            self._refused(course, cause, 1)
        else:
            # Sent by itself, and not in a chain, that row is refused for its own sake, or stored.
            course.chains, course.limit = False, 1
            self._ask_again(course)

    def _go_on(self, course: Course) -> None:
        if course.next >= len(course.positions):
            course.finish()
            return
        course.step = Step.WRITE
        if len(course.positions) - course.next > SINGLES_PAY and self._chains.suits(course):
            course.chain.begin(course.next)
            self._to_chain.append(course)
        else:
            self._to_write.append(course)

    # What goes wrong

    def _refused(self, course: Course, answer: Answer, rows: int) -> None:
        verdict, kind = answers.judge(answer, rows)
        away = answer.sealed or answer.err_code == STREAM_NOT_FOUND
        if verdict is Verdict.GIVE_UP and away and opens_again(self._address, course.source[0]):
            self._outlet.held_up(course.source[0], len(course.positions) - course.next)
            self._wait(course, answer)
            return
        match verdict:
            case Verdict.ASK_AGAIN if course.failures < _MOST_TRIES:
                self._rest(course, first_pause=0.0)
            case Verdict.WAIT:
                self._wait(course, answer)
            case Verdict.FEWER:
                course.limit = max(1, rows // 2)
                self._ask_again(course)
            case Verdict.ASK_AGAIN | Verdict.GIVE_UP:
                if course.step is Step.FLOOR:
                    kind = RefusalKind.OTHER  # whatever is wrong there, it is not the target
                course.refuse(
                    f"{' '.join(course.source)}: {answers.in_words(answer)}", answer.err_code or answer.code, kind
                )
            case _:
                assert_never(verdict)

    def _wait(self, course: Course, answer: Answer) -> None:
        now = time.monotonic()
        course.failing_since = course.failing_since or now
        if now - course.failing_since > self._options.patience_seconds:
            reason = f"gave up after {self._options.patience_seconds:g} s: {answers.in_words(answer)}"
            course.refuse(reason, answer.err_code or answer.code, RefusalKind.OTHER)
        else:
            self._rest(course, first_pause=_FIRST_PAUSE)

    def _rest(self, course: Course, *, first_pause: float) -> None:
        """Ask again after a pause that grows while there is no progress."""
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**course.failures) if course.failures else first_pause
        course.failures += 1
        course.rests_until = time.monotonic() + pause
        self._resting.append(course)

    def _wake(self) -> None:
        now = time.monotonic()
        for course in [course for course in self._resting if course.rests_until <= now]:
            self._resting.remove(course)
            self._ask_again(course)

    def _ask_again(self, course: Course) -> None:
        course.step, course.built = Step.NEWEST, None
        self._to_ask.append(course)

    def _deny(self, error: PermissionDenied) -> None:
        subject = answers.denied_subject(error.message)
        for course in [*self._under_way.values(), *self._chains.courses]:
            writes = course.sent is not None or course.chain.flights
            asked = course.target.subject if writes else course.question[0]
            if asked == subject:
                self._settle(course)
                course.refuse(error.message, error.code, RefusalKind.DENIED)
                self._denied.add(subject)
        if subject not in self._denied:
            raise error

    def _start_again(self, error: Unavailable) -> None:
        """On a new link: whatever was under way is in doubt, and what is written is asked again."""
        chained = [*self._chains.courses, *self._to_chain]
        others = [*self._under_way.values(), *self._resting, *self._to_write, *self._to_ask]
        courses = list(dict.fromkeys([*chained, *others]))
        for course in chained:
            course.in_doubt = course.chain.sent
        self._chains.clear()
        self._to_chain.clear()
        self._under_way.clear()
        self._resting.clear()
        self._to_write.clear()
        self._to_ask.clear()
        self._bytes = self._batches = 0
        self._outlet.reconnect(error, ())
        self._moved_at = time.monotonic()
        for course in courses:
            course.sent = None
            self._ask_again(course)
