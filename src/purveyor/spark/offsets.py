"""Where a query is in a stream, and which ranges come next. Pure: every decision of the readers is made here.

An offset is the sequence of the last message taken in, with the identity of the stream (its creation time): a stream
that was deleted and made again counts from 1 once more, and its messages are not those that the checkpoint speaks of.
One that a migration made says in its metadata which stream it goes on from, with the sequences that come next.
"""

from dataclasses import dataclass
from typing import Any

from purveyor.model.errors import DataLost
from purveyor.model.stored_record import Kind

OFFSET = Kind("offset in the checkpoint", ("stream", "created", "sequence", "lost"))
ROWS_PER_PARTITION = 500_000
"""About so many messages are a task: up to as many are one, half as many again are two."""


@dataclass(frozen=True, slots=True)
class Offset:
    """The last sequence taken in; `lost` counts those that were gone before they could be (failOnDataLoss=false)."""

    stream: str
    created: str
    sequence: int
    lost: int = 0

    def to_json(self) -> dict[str, Any]:
        """As it lies in the checkpoint. Of version 1, which is not written: Spark compares offsets by their text."""
        return {"stream": self.stream, "created": self.created, "sequence": self.sequence, "lost": self.lost}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Offset":
        """From the checkpoint; UnreadableRecord if a newer program wrote it."""
        OFFSET.check(data)
        return cls(str(data["stream"]), str(data["created"]), int(data["sequence"]), int(data.get("lost", 0)))


@dataclass(frozen=True, slots=True)
class StreamView:
    """What the leader says of the stream: identity, the first and last sequence it has or had."""

    name: str
    created: str
    first: int
    last: int
    messages: int = 0
    sheds_others: bool = False
    """Whether messages that the reader did not ask for leave the front in the ordinary course: a choice of subjects on
    a stream that keeps messages for its consumers. A first sequence that moves on then tells nothing."""
    continues: frozenset[str] = frozenset()
    """When the streams were made that it goes on from."""
    sealed: bool = False

    @property
    def begins(self) -> int:
        """The first sequence that can still be there; one past the last when it is empty."""
        return self.first if self.messages else self.last + 1


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """Sequences from first to last, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"


def check_identity(offset: Offset, view: StreamView) -> None:
    """DataLost if the stream is not the one that the offset speaks of."""
    if offset.created != view.created and offset.created not in view.continues:
        raise DataLost(
            f"stream {view.name!r} was deleted and made again: the query stands at sequence {offset.sequence} of the "
            f"stream made at {offset.created}, and this one was made at {view.created}",
            fix="start the query with a new checkpoint, or bring the old stream back",
        )


def lost_range(start: Offset, view: StreamView) -> SequenceRange | None:
    """What is gone behind the offset: removed by limits or a purge before the query took it in.

    Messages deleted from the middle leave the first sequence alone: they are not lost, somebody removed them.
    """
    begins = view.begins
    if view.sheds_others or begins <= start.sequence + 1:
        return None
    return SequenceRange(start.sequence + 1, begins - 1)


def loss(view: StreamView, gone: SequenceRange) -> DataLost:
    """The error that names the range."""
    return DataLost(
        f"sequences {gone} of stream {view.name!r} are gone (by limits, a purge or an acknowledgement elsewhere) "
        "before they were read",
        fix="set failOnDataLoss to false to go on with what is left, or start with a new checkpoint",
    )


def advance(start: Offset, view: StreamView, *, max_offsets: int | None, stop_at: int | None) -> Offset:
    """The end of the next batch: at most `max_offsets` further, never past `stop_at`; skips what is gone for good."""
    gone = lost_range(start, view)
    base = gone.last if gone else start.sequence
    last = view.last if stop_at is None else min(view.last, stop_at)
    if max_offsets is not None:
        last = min(last, base + max_offsets)
    if last <= start.sequence:
        return start
    # What is gone beyond `stop_at` is the next run's to count.
    return Offset(start.stream, view.created, last, start.lost + min(base, last) - start.sequence)


def split(first: int, last: int, min_partitions: int, *, most_rows: int | None = None) -> list[SequenceRange]:
    """A range cut into even pieces for the executors: at least `min_partitions`, and more for many messages.

    `most_rows` is how many messages there can be: a stream that keeps the last one of each subject has few, however far
    its sequences have come.

    >>> [str(piece) for piece in split(1, 10, 3)]
    ['1 to 4', '5 to 7', '8 to 10']
    """
    count = last - first + 1
    if count <= 0:
        return []
    rows = count if most_rows is None else min(count, most_rows)
    pieces = min(max(min_partitions, round(rows / ROWS_PER_PARTITION), 1), count)
    size, more = divmod(count, pieces)
    ranges, begin = [], first
    for number in range(pieces):
        end = begin + size + (number < more) - 1
        ranges.append(SequenceRange(begin, end))
        begin = end + 1
    return ranges
