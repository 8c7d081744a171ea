"""Read a range with batched direct gets: page after page, from any replica, without a trace on the server.

This is the right way for short ranges, and the only one for streams that keep messages for their consumers. A page ends
with a status. A replica may lag behind: before the end of its messages counts as the end of the range, the leader is
asked.
"""

from collections.abc import Generator
from typing import Any, Final

import numpy as np

from purveyor.jetstream.api_protocol import API_PREFIX, PageEnd, encode_page_request, parse_page_end
from purveyor.jetstream.bulk.net.connection import BulkConnection
from purveyor.jetstream.bulk.net.frame_parser import header_block, parse_message_lines, parse_status
from purveyor.jetstream.bulk.net.pool import RetryDeadline
from purveyor.jetstream.bulk.read.cursor import RangeCursor, remove_covered
from purveyor.jetstream.bulk.read.row_decoder import DirectFrames, from_direct
from purveyor.model.errors import NoAnswer, ServerUnavailable, UnknownMessage

_PAGE_MESSAGES: Final = 50_000
_PAGE_BYTES: Final = 8 << 20
_SILENCE_TIMEOUT_SECONDS: Final = 3.0


def read_via_direct_get(
    connection: BulkConnection, cursor: RangeCursor, retry_deadline: RetryDeadline
) -> Generator[tuple[Any, int], None, None]:
    """Yield the rows of a range, with the sequence that follows each batch."""
    reader = _PageReader(connection, cursor)
    try:
        while reader.cursor.first <= reader.cursor.last:
            reader.request_page()
            while not reader.is_page_done:
                yield from reader.next()
            if reader.has_more:
                continue
            found = reader.find_next_on_leader()
            if found is None or found > reader.cursor.last:
                return
            # The leader has a message that the replica does not have yet.
            retry_deadline.pause_or_raise(
                NoAnswer(f"a replica of stream {cursor.stream!r} lags behind sequence {found}")
            )
    finally:
        if connection.is_usable:
            reader.stop()


class _PageReader:
    """Requests the pages of one range and parses them."""

    def __init__(self, connection: BulkConnection, cursor: RangeCursor) -> None:
        self.cursor = cursor
        self.is_page_done = False
        self.has_more = False
        """At the end of a page: whether the server has more messages."""
        self._connection = connection
        self._inbox = connection.new_inbox()
        self._sid = connection.subscribe(self._inbox)
        # The server filters by one subject; several are filtered here.
        subjects = remove_covered(cursor.options.subjects)
        self._subject = subjects[0] if len(subjects) == 1 else None
        self._filters = subjects if len(subjects) > 1 else ()
        self._schema = cursor.schema(filtered_here=bool(self._filters))

    def request_page(self) -> None:
        """Request the next page."""
        self.is_page_done = self.has_more = False
        body = encode_page_request(
            self.cursor.first,
            count=min(_PAGE_MESSAGES, self.cursor.length),
            max_bytes=max(_PAGE_BYTES, self.cursor.options.batch_bytes),
            subject=self._subject,
        )
        self._connection.publish(f"{API_PREFIX}DIRECT.GET.{self.cursor.stream}", body, self._inbox)

    def stop(self) -> None:
        """End the subscription; messages in flight are ignored."""
        self._connection.unsubscribe(self._sid)

    def next(self) -> list[tuple[Any, int]]:
        """Return the rows of the page that arrived since the last call."""
        if not self._connection.fill(self.cursor.gather_bytes, _SILENCE_TIMEOUT_SECONDS):
            raise NoAnswer(f"stream {self.cursor.stream!r} does not answer to direct gets", fix="try again")
        frames = self._connection.receive()
        if len(frames):
            frames = frames.select(parse_message_lines(frames).sids == self._sid)
        if not len(frames):
            return []
        found = DirectFrames.parse(frames)
        batches: list[tuple[Any, int]] = []
        if found.is_message.any():
            batch, sequences = from_direct(found, self._schema)
            batches = self.cursor.batches(batch, sequences, self._filters)
            self.cursor = self.cursor.advance_to(max(self.cursor.first, int(sequences[-1]) + 1))
        for row in np.flatnonzero(~found.is_message).tolist():
            self._handle_status(header_block(frames, row))
        return batches

    def find_next_on_leader(self) -> int | None:
        """Return the next sequence of the range on the leader of the stream; None if there is none."""
        body = {"seq": self.cursor.first, "next_by_subj": self._subject or ">"}
        try:
            reply = self._connection.request_api(f"STREAM.MSG.GET.{self.cursor.stream}", body)
        except UnknownMessage:
            return None
        return int(reply["message"]["seq"])

    def _handle_status(self, block: bytes) -> None:
        status, text = parse_status(block)
        has_pending = b"\r\nNats-Num-Pending: 0\r\n" not in block
        end = parse_page_end(self.cursor.stream, status, text, has_pending=has_pending)
        if end is PageEnd.UNAVAILABLE:
            raise ServerUnavailable(f"stream {self.cursor.stream!r} does not answer to direct gets")
        self.is_page_done, self.has_more = True, end is PageEnd.HAS_MORE
