"""The chains of all targets of one `append_once`: rows go out one by one with thousands under way, answers come in.

A chain's first row goes alone, and expects what was seen on the subject, like a batch does; each other row expects the
row before it (see `append_chain`), so between those nothing has to be waited for, and one in some hundred is answered.
The server is a single one: it takes the messages of a connection in the order they were sent.
"""

import time
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.append.chain import Flight
from purveyor.jetstream.bulk.append.encoded_table import Block
from purveyor.jetstream.bulk.append.target_state import Course
from purveyor.jetstream.bulk.append.types import AppendOptions
from purveyor.jetstream.bulk.append.write_speed import LEAST_ROWS, PACES, PROBE_ROWS, Pace
from purveyor.jetstream.bulk.net.connection import Link
from purveyor.jetstream.bulk.net.frame_parser import Frames
from purveyor.jetstream.bulk.publish.acks import Ack, Refusal, one_by_one, parse_answer
from purveyor.jetstream.bulk.publish.frame_builder import frame
from purveyor.jetstream.bulk.publish.pipelined import as_bytes
from purveyor.jetstream.bulk.publish.session import Outlet
from purveyor.jetstream.headers import EXPECTED_STREAM

# A stream takes in no more than 10,000 messages ahead of storing them, and all may be for one.
_MOST_ROWS: Final = 8000
_ROWS_AT_ONCE: Final = 1000
_BYTES_AT_ONCE: Final = 2 << 20
_FLIGHT_ROWS: Final = 250
"""Of so many rows the last is answered."""


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
        if course.chain.begun:
            rows = self._count(block, start)
            replies = [b""] * rows
            ends = [*range(_FLIGHT_ROWS, rows, _FLIGHT_ROWS), rows]
            for begin, end in zip((0, *ends), ends, strict=False):
                replies[end - 1] = self._take_off(
                    course, start + begin, end - begin, block.size(start + begin, end - begin)
                )
            beginning = b"HPUB " + course.target.subject.encode()
            link.queue(as_bytes(block.frames(beginning, pa.array(replies, pa.binary()), start, rows)))
        else:
            reply = self._take_off(course, start, 1, block.size(start, 1))
            link.queue(memoryview(_first(block, start - block.start, course, reply)))
        link.pump(0.0)

    def _take_off(self, course: Course, start: int, rows: int, size: int) -> bytes:
        """Rows are on their way; the reply that their last one carries."""
        flight = Flight(self._numbers, start, rows, size, time.monotonic())
        self._numbers += 1
        self._flights[flight.number] = course, flight
        self._rows += rows
        self._bytes += size
        course.chain.flights.append(flight)
        course.chain.sent = start + rows
        return f" {self._inbox}.{flight.number}".encode()

    def hear(self, found: Frames) -> list[Course]:
        """Take in answers; the targets that they were for."""
        touched: dict[Course, None] = {}
        for number, headers, payload in one_by_one(found, sid=self._sid, prefix_size=len(self._inbox) + 1):
            if number not in self._flights:
                continue  # nobody waits for it any more
            course, flight = self._flights[number]
            answer = parse_answer(headers, payload)
            if isinstance(answer, Ack) and answer.stream != course.target.stream:
                answer = Refusal(400, 0, f"stream {answer.stream!r} takes this subject")
            flight.hear(answer)
            self._forget(flight)
            touched[course] = None
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
        most_bytes = min(self._options.window_bytes, _BYTES_AT_ONCE)
        fitting = int(np.searchsorted(block.ends, before + most_bytes, side="right")) - place
        most_rows = PROBE_ROWS if self.pace is Pace.UNKNOWN else _ROWS_AT_ONCE
        return max(1, min(fitting, most_rows, len(block.rows) - place))

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
