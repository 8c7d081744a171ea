"""Reading a long range: a consumer of our own without acknowledgements, pulled with large requests kept under way.

The end is known by the consumer's own word (nothing pending), or by a message beyond the range; never by waiting for a
last message that may have been deleted.
"""

import json
from collections.abc import Generator
from secrets import token_hex
from typing import Any, Final

import numpy as np

from purveyor.jetstream.bulk.net.connection import Link, LinkLost
from purveyor.jetstream.bulk.net.frame_parser import Frames, split_lines
from purveyor.jetstream.bulk.net.pool import Patience
from purveyor.jetstream.bulk.publish.acks import NO_RESPONDERS, header_block, status_of
from purveyor.jetstream.bulk.read.cursor import Range
from purveyor.jetstream.bulk.read.row_decoder import Delivery, from_consumer
from purveyor.jetstream.bulk.read.subject_filters import without_covered
from purveyor.model.errors import NoAnswer, PurveyorError, ServerUnavailable

_PULL_MESSAGES: Final = 10_000
_PULL_BYTES: Final = 8 << 20
_PULLS_AHEAD: Final = 3
_SILENCE_SECONDS: Final = 1.0
_EXPIRES: Final = 30_000_000_000
_INACTIVE: Final = 30_000_000_000
_ROOM_FOR_HEADERS: Final = 64 << 10


def consume(link: Link, wanted: Range, patience: Patience) -> Generator[tuple[Any, int], None, None]:
    """The rows of a range, with the sequence that follows each batch."""
    del patience  # a consumer that is silent or gone is replaced once; what goes on after that is the caller's to judge
    moved = True
    while wanted.first <= wanted.last:
        pull = _Pull(link, wanted)
        try:
            if not pull.start():
                return
            if not moved:
                raise NoAnswer(f"the server says that stream {wanted.stream!r} has more, and does not send it")
            moved = False
            while not pull.over:
                for batch, following in pull.next():
                    moved, wanted = True, wanted.from_(following)
                    yield batch, following
            if not pull.broken:
                return
        finally:
            pull.stop()


class _Pull:
    """One consumer on the server, from its creation to its end."""

    def __init__(self, link: Link, wanted: Range) -> None:
        self.over = False
        self.broken = False
        """Ended before the range did: another consumer must go on."""
        self._link = link
        self._wanted = wanted
        self._name = f"r{token_hex(5)}"  # short: it comes back with every message
        self._inbox = link.new_inbox()
        self._sid = 0
        self._owed = 0
        self._delivered = 0
        self._max_bytes = max(_PULL_BYTES, link.info.max_payload + _ROOM_FOR_HEADERS)

    def start(self) -> bool:
        """Create the consumer; false when there is nothing to read."""
        config: dict[str, Any] = {
            "name": self._name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._wanted.first,
            "ack_policy": "none",
            "replay_policy": "instant",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _INACTIVE,
        }
        subjects = without_covered(self._wanted.options.subjects)
        if subjects:
            config["filter_subjects"] = subjects
        stream = self._wanted.stream
        info = self._link.api(
            f"CONSUMER.CREATE.{stream}.{self._name}", {"stream_name": stream, "config": config, "action": "create"}
        )
        self._sid = self._link.subscribe(self._inbox)
        return bool(info.get("num_pending"))

    def stop(self) -> None:
        """Leave nothing behind. Should the link be gone, the server removes an idle consumer by itself."""
        if not self._link.usable:
            return
        try:
            self._link.unsubscribe(self._sid)
            self._link.request(f"$JS.API.CONSUMER.DELETE.{self._wanted.stream}.{self._name}")
        except LinkLost:
            return
        except PurveyorError:
            self._link.close()

    def next(self) -> list[tuple[Any, int]]:
        """What has come since the last time."""
        self._ask()
        if not self._link.fill(self._wanted.gather_bytes, _SILENCE_SECONDS):
            self.over = self.broken = True  # a purge may have taken what was pending: ask anew
            return []
        frames = self._hear_statuses(self._link.receive())
        if not len(frames):
            return []
        lines = split_lines(frames)
        is_message = (lines.sids == self._sid) & lines.has_reply
        if not is_message.any():
            return []
        if not is_message.all():
            frames = frames.only(is_message)
            lines = split_lines(frames)
        return self._take(from_consumer(frames, lines, self._wanted.schema(filtered_here=False)))

    def _hear_statuses(self, frames: Frames) -> Frames:
        """What is left when the server's own words are heard.

        They have headers alone, so few frames need a look, and the messages that are left are nearly always alike.
        """
        bare = np.flatnonzero((frames.header_sizes > 0) & (frames.payloads == frames.ends))
        if not len(bare):
            return frames
        few = frames.only(bare)
        lines = split_lines(few)
        is_status = (lines.sids == self._sid) & ~lines.has_reply
        for row in np.flatnonzero(is_status).tolist():
            self._status(few, row)
        left = np.ones(len(frames), np.bool_)
        left[bare[is_status]] = False
        return frames.only(left)

    def _ask(self) -> None:
        """Keep requests under way for about as much as is left, at most."""
        while self._owed <= (_PULLS_AHEAD - 1) * _PULL_MESSAGES:
            count = min(_PULL_MESSAGES, self._wanted.length - self._owed)
            if count <= 0:
                return
            body = {"batch": count, "max_bytes": self._max_bytes, "expires": _EXPIRES}
            self._link.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{self._wanted.stream}.{self._name}",
                json.dumps(body).encode(),
                self._inbox,
            )
            self._owed += count

    def _take(self, delivery: Delivery) -> list[tuple[Any, int]]:
        count = len(delivery.sequences)
        if delivery.first_count != self._delivered + 1 or delivery.last_count != self._delivered + count:
            self.over = self.broken = True  # something went missing on the way: go on behind the last row given out
            return []
        self._delivered += count
        self._owed -= count
        last = int(delivery.sequences[-1])
        self.over = last >= self._wanted.last or not delivery.pending
        portions = self._wanted.portions(delivery.batch, delivery.sequences)
        self._wanted = self._wanted.from_(last + 1)
        return portions

    def _status(self, frames: Frames, row: int) -> None:
        block = header_block(frames, row)
        status, said = status_of(block)
        left = _pending_messages(block)
        if status == NO_RESPONDERS:
            raise ServerUnavailable(f"the consumer on stream {self._wanted.stream!r} has no leader")
        if status in (408, 409) and left is not None:
            self._owed -= left
            if "maxbytes" in said.lower().replace(" ", "") and left == _PULL_MESSAGES:
                self._max_bytes *= 2  # a message that was stored under a larger max_payload than today's
        elif status >= 400:
            self.over = self.broken = True


def _pending_messages(block: bytes) -> int | None:
    for line in block.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"Nats-Pending-Messages" and value.strip().isdigit():
            return int(value)
    return None
