"""The chains of all targets of one `append_once`: rows go out one by one with thousands under way, answers come in.

A chain's first row goes alone, and expects what was seen on the subject, like a batch does; each other row expects the
row before it (see `append_chain`), so between those nothing has to be waited for. The server is a single one: it
answers the messages of a subject in the order they were sent.
"""

import time
from bisect import bisect_right
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from purveyor.queues.address import Address
from purveyor.queues.bulk.acks import Refusal, StreamAcks, parse_answers
from purveyor.queues.bulk.append_chain import Flight
from purveyor.queues.bulk.append_course import Course
from purveyor.queues.bulk.append_pace import LEAST_ROWS, PACES, PROBE_ROWS, Pace
from purveyor.queues.bulk.append_sheet import Block
from purveyor.queues.bulk.append_words import AppendOptions
from purveyor.queues.bulk.frames import Frames
from purveyor.queues.bulk.link import Link
from purveyor.queues.bulk.outlet import Outlet
from purveyor.queues.bulk.pipeline import as_bytes
from purveyor.queues.bulk.slices import Positions
from purveyor.queues.bulk.wire import frame
from purveyor.queues.headers import EXPECTED_STREAM

# A stream takes in no more than 10,000 messages ahead of storing them, and all may be for one.
_MOST_ROWS: Final = 8000
_FLIGHT_ROWS: Final = 1000
_FLIGHT_BYTES: Final = 2 << 20


class Chains:
    """What is under way in chains."""

    def __init__(self, address: Address, outlet: Outlet, options: AppendOptions) -> None:
        self._address = address
        self._outlet = outlet
        self._options = options
        self._flights: dict[int, tuple[Course, Flight]] = {}
        self._rows = self._bytes = 0
        self._numbers = 0
        self._link: Link | None = None
        self._inbox = ""
        self._sid = 0

    @property
    def pace(self) -> Pace:
        """How the server takes single messages."""
        return PACES.of(self._address.urls)

    @property
    def open(self) -> bool:
        """Whether answers are to come."""
        return bool(self._flights)

    @property
    def courses(self) -> list[Course]:
        """The targets of which something is under way."""
        return list(dict.fromkeys(course for course, _ in self._flights.values()))

    def suits(self, course: Course) -> bool:
        """Whether the rows that are left of a target should go in a chain."""
        if not course.chains or not course.sheet.has_ids or self._outlet.link.info.clustered:
            return False
        pace, left = self.pace, len(course.positions) - course.next
        return pace is Pace.FAST or (pace is Pace.UNKNOWN and left >= LEAST_ROWS)

    def has_room(self) -> bool:
        """Whether more may be sent. While the pace is measured, one portion is under way at a time."""
        if not self._flights:
            return True
        if self.pace is Pace.UNKNOWN:
            return False
        return self._rows < _MOST_ROWS and self._bytes < self._options.window_bytes

    def send(self, course: Course) -> None:
        """Send the next rows of a target. A row that cannot be sent is an error of our tree, and nothing is sent."""
        link = self._outlet.link
        start = course.chain.sent
        block = course.sheet.block(start, link.info.max_payload)
        if link is not self._link:
            self._link, self._inbox = link, f"{self._outlet.inbox}c"  # apart from the answers to all else
            self._sid = link.subscribe(f"{self._inbox}.*")
        reply = f" {self._inbox}.{self._numbers}".encode()
        if course.chain.begun:
            rows = self._count(block, start)
            piece = as_bytes(block.frames(b"HPUB " + course.target.subject.encode() + reply, start, rows))
        else:
            rows, piece = 1, memoryview(_first(block, start - block.start, course, reply))
        link.queue(piece)
        flight = Flight(self._numbers, start, rows, len(piece), time.monotonic())
        self._numbers += rows
        self._flights[flight.number] = course, flight
        self._rows += rows
        self._bytes += flight.size
        course.chain.flights.append(flight)
        course.chain.sent = start + rows
        link.pump(0.0)

    def hear(self, found: Frames) -> list[Course]:
        """Take in answers; the targets that they were for."""
        answers = parse_answers(found, sid=self._sid, prefix_size=len(self._inbox) + 1, to_indices=self._answered)
        numbers = list(self._flights)
        for ack in answers.acks:
            self._take(ack, numbers)
        for number, refusal in answers.refusals.items():
            if number >= 0:
                _, flight = self._flights[numbers[bisect_right(numbers, number) - 1]]
                flight.refusals[number - flight.number] = refusal
        touched: dict[Course, None] = {}
        for number in numbers:
            course, flight = self._flights[number]
            if flight.heard:
                touched[course] = None
            if flight.answered:
                self._forget(flight)
                if self.pace is Pace.UNKNOWN:
                    PACES.note(self._address.urls, flight.rows, time.monotonic() - flight.sent_at)
        return list(touched)

    def abandon(self, course: Course) -> None:
        """Wait for no more answers to a target's rows."""
        for flight in course.chain.flights:
            if flight.number in self._flights:
                self._forget(flight)
        course.chain.flights.clear()

    def clear(self) -> None:
        """The link is gone, and all answers with it."""
        for course in self.courses:
            self.abandon(course)
        self._link = None

    def release(self) -> None:
        """No more answers are wanted on this link."""
        if self._link is not None:
            self._link.unsubscribe(self._sid)
            self._link = None

    def _count(self, block: Block, start: int) -> int:
        """How many rows go together, from a row of a block on."""
        place = start - block.start
        before = int(block.ends[place - 1]) if place else 0
        most_bytes = min(self._options.window_bytes, _FLIGHT_BYTES)
        fitting = int(np.searchsorted(block.ends, before + most_bytes, side="right")) - place
        most_rows = PROBE_ROWS if self.pace is Pace.UNKNOWN else _FLIGHT_ROWS
        return max(1, min(fitting, most_rows, len(block.rows) - place))

    def _answered(self, numbers: Positions) -> Positions:
        """Which rows were answered on the reply subjects with those numbers, in the order of the answers."""
        result = np.full(len(numbers), -1, np.int64)
        for number, (_, flight) in self._flights.items():
            which = np.flatnonzero(numbers == number)
            if len(which):
                result[which] = flight.next_answers(len(which))
        return result

    def _take(self, ack: StreamAcks, numbers: list[int]) -> None:
        """Rows that one stream has: those of one target, because no two chains are meant for the same stream."""
        rows = np.sort(ack.indices[ack.indices >= 0])
        while len(rows):
            course, flight = self._flights[numbers[bisect_right(numbers, int(rows[0])) - 1]]
            count = int(np.searchsorted(rows, flight.number + flight.rows))
            places = rows[:count] - flight.number
            rows = rows[count:]
            if ack.stream != course.target.stream:
                wrong = Refusal(400, 0, f"stream {ack.stream!r} takes this subject")
                flight.refusals.update(dict.fromkeys(places.tolist(), wrong))
                continue
            flight.there[places] = True
            if ack.duplicates:
                flight.duplicates.update(places.tolist())
            else:
                course.chain.sequence = max(course.chain.sequence, ack.last_sequence)

    def _forget(self, flight: Flight) -> None:
        del self._flights[flight.number]
        self._rows -= flight.rows
        self._bytes -= flight.size


def _first(block: Block, place: int, course: Course, reply: bytes) -> bytes:
    """The frame of a chain's first row."""
    target = course.target
    lines = f"{EXPECTED_STREAM}: {target.stream}\r\n".encode() + course.expectation
    row = replace(block.rows.slice(place, 1), subjects=pa.array([target.subject.encode()], pa.binary()))
    return frame(row, 0, reply=reply, extra_lines=lines)
