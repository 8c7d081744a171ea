"""Read a long range with a temporary consumer without acknowledgements, and several large pull requests in flight.

The reader finds the end of the range by the consumer's pending count (0), or by a message beyond the range. It never
waits for a last message, which may have been deleted.
"""

from collections.abc import Generator
from secrets import token_hex
from typing import Any, Final

import numpy as np

from purveyor.jetstream.api_protocol import API_PREFIX, NO_RESPONDERS, encode_pull_request
from purveyor.jetstream.bulk.net.connection import BulkConnection, ConnectionLost
from purveyor.jetstream.bulk.net.frame_parser import Frames, header_block, parse_message_lines, parse_status
from purveyor.jetstream.bulk.net.pool import RetryDeadline
from purveyor.jetstream.bulk.read.cursor import RangeCursor, remove_covered
from purveyor.jetstream.bulk.read.row_decoder import ConsumerRows, from_consumer
from purveyor.model.errors import NoAnswer, PurveyorError, ServerUnavailable

_PULL_MESSAGES: Final = 10_000
_PULL_BYTES: Final = 8 << 20
_PULLS_AHEAD: Final = 3
_SILENCE_TIMEOUT_SECONDS: Final = 1.0
_REQUEST_SECONDS: Final = 30.0
_INACTIVE_THRESHOLD_NS: Final = 30_000_000_000
_HEADER_RESERVE_BYTES: Final = 64 << 10


def read_via_consumer(
    connection: BulkConnection, cursor: RangeCursor, retry_deadline: RetryDeadline
) -> Generator[tuple[Any, int], None, None]:
    """Yield the rows of a range, with the sequence that follows each batch."""
    del retry_deadline  # a silent or lost consumer is replaced once; after that the caller decides
    made_progress = True
    while cursor.first <= cursor.last:
        reader = _ConsumerReader(connection, cursor)
        try:
            if not reader.start():
                return
            if not made_progress:
                raise NoAnswer(f"the server reports more messages in stream {cursor.stream!r}, but does not send them")
            made_progress = False
            while not reader.is_finished:
                for batch, following in reader.next():
                    made_progress, cursor = True, cursor.advance_to(following)
                    yield batch, following
            if not reader.is_broken:
                return
        finally:
            reader.stop()


class _ConsumerReader:
    """One temporary consumer on the server, from its creation to its deletion."""

    def __init__(self, connection: BulkConnection, cursor: RangeCursor) -> None:
        self.is_finished = False
        self.is_broken = False
        """Whether it ended before the range did: another consumer must continue."""
        self._connection = connection
        self._cursor = cursor
        self._name = f"r{token_hex(5)}"  # short, because every message carries it
        self._inbox = connection.new_inbox()
        self._sid = 0
        self._outstanding = 0
        self._delivered = 0
        self._max_bytes = max(_PULL_BYTES, connection.info.max_payload + _HEADER_RESERVE_BYTES)

    def start(self) -> bool:
        """Create the consumer; return False if there is nothing to read."""
        config: dict[str, Any] = {
            "name": self._name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._cursor.first,
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _INACTIVE_THRESHOLD_NS,
        }
        subjects = remove_covered(self._cursor.options.subjects)
        if subjects:
            config["filter_subjects"] = subjects
        stream = self._cursor.stream
        info = self._connection.request_api(
            f"CONSUMER.CREATE.{stream}.{self._name}", {"stream_name": stream, "config": config, "action": "create"}
        )
        self._sid = self._connection.subscribe(self._inbox)
        return bool(info.get("num_pending"))

    def stop(self) -> None:
        """Delete the consumer. If the connection is lost, the server deletes the idle consumer by itself."""
        if not self._connection.is_usable:
            return
        try:
            self._connection.unsubscribe(self._sid)
            self._connection.request(f"{API_PREFIX}CONSUMER.DELETE.{self._cursor.stream}.{self._name}")
        except ConnectionLost:
            return
        except PurveyorError:
            self._connection.close()

    def next(self) -> list[tuple[Any, int]]:
        """Return the rows that arrived since the last call."""
        self._request()
        if not self._connection.fill(self._cursor.gather_bytes, _SILENCE_TIMEOUT_SECONDS):
            self.is_finished = self.is_broken = True  # a purge may have deleted the pending messages: start again
            return []
        frames = self._take_statuses(self._connection.receive())
        if not len(frames):
            return []
        lines = parse_message_lines(frames)
        is_message = (lines.sids == self._sid) & lines.has_reply
        if not is_message.any():
            return []
        if not is_message.all():
            frames = frames.select(is_message)
            lines = parse_message_lines(frames)
        return self._take(from_consumer(frames, lines, self._cursor.schema(filtered_here=False)))

    def _take_statuses(self, frames: Frames) -> Frames:
        """Handle the status messages of the server; return the other frames.

        A status has headers and no payload, so few frames need a check, and the remaining messages nearly always have
        the same layout.
        """
        bare = np.flatnonzero((frames.header_sizes > 0) & (frames.payloads == frames.ends))
        if not len(bare):
            return frames
        status_frames = frames.select(bare)
        lines = parse_message_lines(status_frames)
        is_status = (lines.sids == self._sid) & ~lines.has_reply
        for row in np.flatnonzero(is_status).tolist():
            self._handle_status(status_frames, row)
        left = np.ones(len(frames), np.bool_)
        left[bare[is_status]] = False
        return frames.select(left)

    def _request(self) -> None:
        """Keep pull requests in flight, for about the rest of the range at most."""
        while self._outstanding <= (_PULLS_AHEAD - 1) * _PULL_MESSAGES:
            count = min(_PULL_MESSAGES, self._cursor.length - self._outstanding)
            if count <= 0:
                return
            body = encode_pull_request(count, expires_seconds=_REQUEST_SECONDS, max_bytes=self._max_bytes)
            self._connection.publish(
                f"{API_PREFIX}CONSUMER.MSG.NEXT.{self._cursor.stream}.{self._name}",
                body,
                self._inbox,
            )
            self._outstanding += count

    def _take(self, delivery: ConsumerRows) -> list[tuple[Any, int]]:
        count = len(delivery.sequences)
        if delivery.first_count != self._delivered + 1 or delivery.last_count != self._delivered + count:
            self.is_finished = self.is_broken = True  # messages were lost: continue after the last returned row
            return []
        self._delivered += count
        self._outstanding -= count
        last = int(delivery.sequences[-1])
        self.is_finished = last >= self._cursor.last or not delivery.pending
        batches = self._cursor.batches(delivery.batch, delivery.sequences)
        self._cursor = self._cursor.advance_to(last + 1)
        return batches

    def _handle_status(self, frames: Frames, row: int) -> None:
        block = header_block(frames, row)
        status, text = parse_status(block)
        left = _pending_messages(block)
        if status == NO_RESPONDERS:
            raise ServerUnavailable(f"the consumer on stream {self._cursor.stream!r} has no leader")
        if status in (408, 409) and left is not None:
            self._outstanding -= left
            if "maxbytes" in text.lower().replace(" ", "") and left == _PULL_MESSAGES:
                self._max_bytes *= 2  # a message that was stored under a larger max_payload
        elif status >= 400:
            self.is_finished = self.is_broken = True


def _pending_messages(block: bytes) -> int | None:
    for line in block.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"Nats-Pending-Messages" and value.strip().isdigit():
            return int(value)
    return None
