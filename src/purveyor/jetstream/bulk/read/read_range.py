"""`read_range`: read a range of sequences of a stream as record batches, by one of two routes.

**Direct gets**: page after page, from any replica, without a trace on the server. This is the right way for short
ranges, and the only one for streams that keep messages for their consumers. A page ends with a status. A replica may
lag behind: before the end of its messages counts as the end of the range, the leader is asked.

**A consumer**: temporary, without acknowledgements, with several large pull requests in flight, for long ranges. The
reader finds the end of the range by the consumer's pending count (0), or by a message beyond the range. It never waits
for a last message, which may have been deleted.
"""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Final

import numpy as np
import pyarrow as pa

from purveyor.jetstream.address import Address
from purveyor.jetstream.api import (
    API_PREFIX,
    NO_RESPONDERS,
    PageEnd,
    encode_page_request,
    encode_pull_request,
    parse_page_end,
)
from purveyor.jetstream.bulk.net.connection import BulkConnection, ConnectionLost
from purveyor.jetstream.bulk.net.frame_parser import Frames, header_block, parse_message_lines, parse_status
from purveyor.jetstream.bulk.net.pool import RetryDeadline, RetryDeadlineExceeded, connect, release
from purveyor.jetstream.bulk.options import ReadOptions, Route
from purveyor.jetstream.bulk.read.range_rows import (
    ConsumerRows,
    DirectFrames,
    RangeCursor,
    from_consumer,
    from_direct,
    remove_covered,
)
from purveyor.model.errors import (
    InvalidConfig,
    InvalidInput,
    NoAnswer,
    PurveyorError,
    ServerUnavailable,
    Unavailable,
    UnknownMessage,
)
from purveyor.model.name_rules import check_name

_PAGE_MESSAGES: Final = 50_000
_PAGE_BYTES: Final = 8 << 20
_PAGE_SILENCE_SECONDS: Final = 3.0


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
        if not self._connection.fill(self.cursor.gather_bytes, _PAGE_SILENCE_SECONDS):
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


_PULL_MESSAGES: Final = 10_000
_PULL_BYTES: Final = 8 << 20
_PULLS_AHEAD: Final = 3
_CONSUMER_SILENCE_SECONDS: Final = 1.0
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
        """Delete the consumer. If the connection is lost, the server deletes the idle consumer."""
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
        if not self._connection.fill(self._cursor.gather_bytes, _CONSUMER_SILENCE_SECONDS):
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


_DEFAULTS: Final = ReadOptions()
_MAX_DIRECT_GET_LENGTH: Final = 2000


def read_range(
    address: Address, stream: str, first: int, last: int, options: ReadOptions = _DEFAULTS
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the messages with sequences from `first` to `last`, both included, in order, each once.

    Batches have the columns of `SCHEMA` (or the requested ones) and a size bounded by the options; one batch is in
    memory at a time. The function does not wait for missing messages (gaps, a deleted end, sequences beyond the end of
    the stream at the start of reading). It reconnects for up to `patience_seconds` and continues after the last row.
    Closing the iterator early leaves nothing behind on the server.

    Raise `UnknownStream` (also if the stream is deleted meanwhile), `InvalidConfig` (the stream cannot be read by that
    route), `PermissionDenied`, `AuthenticationFailed`, or `ServerUnavailable` after `patience_seconds`.

    >>> for batch in read_range(address, "ORDERS", 1, 1000):  # doctest: +SKIP
    ...     print(batch.num_rows)
    """
    check_name(stream)
    if first < 0 or last < 0:
        raise InvalidInput(f"invalid range {first} to {last} of stream {stream!r}", fix="sequences start at 1")
    return _read(address, RangeCursor(stream, max(first, 1), last, options))


def _read(address: Address, cursor: RangeCursor) -> Generator[pa.RecordBatch, None, None]:
    retry_deadline = RetryDeadline(cursor.options.patience_seconds)
    begun = False
    direct_only = False
    while cursor.first <= cursor.last:
        connection = connect(address, retry_deadline)
        route = Route.DIRECT
        try:
            state = _read_state(connection, cursor)
            cursor, begun = cursor if begun else cursor.clamp(state.first, state.last), True
            route = Route.DIRECT if direct_only else choose_route(state.config, cursor.options, cursor.length)
            if cursor.first > cursor.last:
                return
            read = read_via_consumer if route is Route.CONSUMER else read_via_direct_get
            with closing(read(connection, cursor, retry_deadline)) as batches:
                for batch, following in batches:
                    retry_deadline.progress()
                    cursor = cursor.advance_to(following)
                    if batch.num_rows:
                        yield batch
        except RetryDeadlineExceeded:
            raise
        except Unavailable as error:
            connection.close()
            retry_deadline.pause_or_raise(error)
        except PurveyorError:
            if direct_only or route is not Route.CONSUMER or not can_use_direct_get(state.config, cursor.options):
                raise
            direct_only = True  # we may not create a consumer there, or the stream has its maximum of consumers
        else:
            return
        finally:
            # The route has ended its subscription, whichever way it ended: later frames are ignored.
            if connection.is_usable:
                release(address, connection)


@dataclass(frozen=True, slots=True)
class _State:
    first: int
    last: int
    config: dict[str, Any]


def _read_state(connection: BulkConnection, cursor: RangeCursor) -> _State:
    info: dict[str, Any] = connection.request_api(f"STREAM.INFO.{cursor.stream}")
    state = info["state"]
    return _State(int(state["first_seq"]), int(state["last_seq"]), info["config"])


def can_use_direct_get(config: dict[str, Any], options: ReadOptions) -> bool:
    """Return whether the stream can also be read without a consumer."""
    return bool(config.get("allow_direct")) and options.route is Route.AUTO


def choose_route(config: dict[str, Any], options: ReadOptions, length: int) -> Route:
    """Return the route for a range of this length in a stream with this configuration."""
    name, retention = config.get("name"), config.get("retention", "limits")
    direct = bool(config.get("allow_direct"))
    # A consumer of a replicated interest stream is replicated as well: creating it takes longer than reading.
    harmless = retention == "interest" and options.retained_by_durable and config.get("num_replicas", 1) == 1
    consumer = retention == "limits" or harmless
    if options.route is Route.CONSUMER and not consumer:
        raise InvalidConfig(
            f"stream {name!r} has {retention} retention: a reading consumer would change what it keeps",
            fix="read it with Route.DIRECT",
        )
    if not direct and (options.route is Route.DIRECT or retention != "limits"):
        raise InvalidConfig(
            f"stream {name!r} ({retention} retention) cannot be read by sequence: it does not allow direct gets",
            fix="switch allow_direct on for the stream",
        )
    if options.route is not Route.AUTO:
        return options.route
    return Route.DIRECT if direct and (length <= _MAX_DIRECT_GET_LENGTH or not consumer) else Route.CONSUMER
