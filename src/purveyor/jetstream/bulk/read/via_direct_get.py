"""Reading with direct gets: page after page, each answered by any replica, with no trace on the server.

The right way for short ranges, and the only one for streams that keep messages for their consumers. A page ends with a
status that tells the last sequence looked at. A replica may lag behind: before the end of its messages is taken for the
end of the range, the leader is asked.
"""

import json
from collections.abc import Generator
from typing import Any, Final

import numpy as np

from purveyor.jetstream.bulk.net.connection import Link
from purveyor.jetstream.bulk.net.frame_parser import split_lines
from purveyor.jetstream.bulk.net.pool import Patience
from purveyor.jetstream.bulk.publish.acks import NO_RESPONDERS, header_block, status_of
from purveyor.jetstream.bulk.read.cursor import Range
from purveyor.jetstream.bulk.read.row_decoder import DirectFrames, from_direct
from purveyor.jetstream.bulk.read.subject_filters import without_covered
from purveyor.model.errors import NoAnswer, Refused, ServerUnavailable, UnknownMessage

_PAGE_MESSAGES: Final = 50_000
_PAGE_BYTES: Final = 8 << 20
_SILENCE_SECONDS: Final = 3.0


def fetch(link: Link, wanted: Range, patience: Patience) -> Generator[tuple[Any, int], None, None]:
    """The rows of a range, with the sequence that follows each batch."""
    pages = _Pages(link, wanted)
    try:
        while pages.wanted.first <= pages.wanted.last:
            pages.ask()
            while not pages.at_end:
                yield from pages.next()
            if pages.more:
                continue
            found = pages.ask_leader()
            if found is None or found > pages.wanted.last:
                return
            # The replica that answered does not have it yet, the leader does.
            patience.failed(NoAnswer(f"a replica of stream {wanted.stream!r} lags behind sequence {found}"))
    finally:
        if link.usable:
            pages.stop()


class _Pages:
    """The pages of one range."""

    def __init__(self, link: Link, wanted: Range) -> None:
        self.wanted = wanted
        self.at_end = False
        self.more = False
        """At the end of a page: whether the server has more."""
        self._link = link
        self._inbox = link.new_inbox()
        self._sid = link.subscribe(self._inbox)
        # The server filters by one subject; several are sorted out here.
        subjects = without_covered(wanted.options.subjects)
        self._subject = subjects[0] if len(subjects) == 1 else None
        self._filters = subjects if len(subjects) > 1 else ()
        self._schema = wanted.schema(filtered_here=bool(self._filters))

    def ask(self) -> None:
        """Ask for the next page."""
        self.at_end = self.more = False
        body: dict[str, Any] = {
            "seq": self.wanted.first,
            "batch": min(_PAGE_MESSAGES, self.wanted.length),
            "max_bytes": max(_PAGE_BYTES, self.wanted.options.batch_bytes),
        }
        if self._subject:
            body["next_by_subj"] = self._subject
        self._link.publish(f"$JS.API.DIRECT.GET.{self.wanted.stream}", json.dumps(body).encode(), self._inbox)

    def stop(self) -> None:
        """Receive no more of what may be under way."""
        self._link.unsubscribe(self._sid)

    def next(self) -> list[tuple[Any, int]]:
        """What has come of the page since the last time."""
        if not self._link.fill(self.wanted.gather_bytes, _SILENCE_SECONDS):
            raise NoAnswer(f"stream {self.wanted.stream!r} does not answer to direct gets", fix="try again")
        frames = self._link.receive()
        if len(frames):
            frames = frames.only(split_lines(frames).sids == self._sid)
        if not len(frames):
            return []
        found = DirectFrames.look(frames)
        portions: list[tuple[Any, int]] = []
        if found.is_message.any():
            batch, sequences = from_direct(found, self._schema)
            portions = self.wanted.portions(batch, sequences, self._filters)
            self.wanted = self.wanted.from_(max(self.wanted.first, int(sequences[-1]) + 1))
        for row in np.flatnonzero(~found.is_message).tolist():
            self._status(header_block(frames, row))
        return portions

    def ask_leader(self) -> int | None:
        """The next sequence of the range that the leader of the stream has."""
        body = {"seq": self.wanted.first, "next_by_subj": self._subject or ">"}
        try:
            answer = self._link.api(f"STREAM.MSG.GET.{self.wanted.stream}", body)
        except UnknownMessage:
            return None
        return int(answer["message"]["seq"])

    def _status(self, block: bytes) -> None:
        status, said = status_of(block)
        match status:
            case 204:
                self.at_end = True
                self.more = b"\r\nNats-Num-Pending: 0\r\n" not in block
            case 404:
                self.at_end = True
            case _ if status == NO_RESPONDERS:
                raise ServerUnavailable(f"stream {self.wanted.stream!r} does not answer to direct gets")
            case _:
                raise Refused(f"a direct get from stream {self.wanted.stream!r} was refused: {said}", code=status)
