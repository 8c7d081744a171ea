"""Offsets of a query in a stream, the ranges that it reads next, and the size of its batches. Pure.

An offset is the sequence of the last message that the query has read, with the identity of the stream (its creation
time). A stream that was deleted and created again counts from 1 again; the checkpoint does not refer to its
messages. A stream that a migration created names in its metadata the stream whose sequences it continues.
"""

from dataclasses import dataclass
from typing import Any, Final

from purveyor.model.errors import DataLost
from purveyor.model.json_fields import Kind

OFFSET = Kind("offset in the checkpoint", ("stream", "created", "sequence", "lost"))
ROWS_PER_PARTITION = 500_000
"""About this many messages make one task."""
FIRST_BATCH_ROWS: Final = 20_000
SMALLEST_BATCH_ROWS: Final = 1000
_MAX_STEP_FACTOR: Final = 4
"""Batches grow or shrink by at most this factor from one to the next."""


@dataclass(frozen=True, slots=True)
class Offset:
    """The last sequence that was read. `lost` counts sequences that were gone before (failOnDataLoss=false)."""

    stream: str
    created: str
    sequence: int
    lost: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the offset as the checkpoint stores it, in version 1.

        The version is omitted: Spark compares offsets as text.
        """
        return {"stream": self.stream, "created": self.created, "sequence": self.sequence, "lost": self.lost}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Offset":
        """Read an offset of the checkpoint; raise UnreadableRecord if a newer program wrote it."""
        OFFSET.check(data)
        return cls(str(data["stream"]), str(data["created"]), int(data["sequence"]), int(data.get("lost", 0)))


@dataclass(frozen=True, slots=True)
class StreamView:
    """The stream as its leader sees it: identity, first and last sequence."""

    name: str
    created: str
    first: int
    last: int
    messages: int = 0
    drops_other_subjects: bool = False
    """Whether the stream drops messages that the reader does not ask for: it keeps messages only for its consumers, and
    the reader selects some subjects. Then a first sequence that moves on does not mean a loss."""
    continues: frozenset[str] = frozenset()
    """Creation times of the streams whose sequences this one continues."""
    sealed: bool = False
    subjects: tuple[str, ...] = ()
    """The subjects that the stream stores; none for a stream that copies others."""

    @property
    def begins(self) -> int:
        """The first sequence that can still be there; one past the last when the stream is empty."""
        return self.first if self.messages else self.last + 1


@dataclass(frozen=True, slots=True)
class SequenceRange:
    """Sequences from first to last, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first} to {self.last}"


def check_identity(offset: Offset, view: StreamView) -> None:
    """Raise DataLost if the stream is not the one that the offset refers to."""
    if offset.created != view.created and offset.created not in view.continues:
        raise DataLost(
            f"stream {view.name!r} was deleted and created again: the query is at sequence {offset.sequence} of the "
            f"stream created at {offset.created}, and this one was created at {view.created}",
            fix="start the query with a new checkpoint, or restore the old stream",
        )


def lost_range(start: Offset, view: StreamView) -> SequenceRange | None:
    """Return the sequences after the offset that limits or a purge removed before the query read them; None if none.

    Messages deleted from the middle leave the first sequence alone. They do not count as lost: an operator removed
    them.
    """
    begins = view.begins
    if view.drops_other_subjects or begins <= start.sequence + 1:
        return None
    return SequenceRange(start.sequence + 1, begins - 1)


def data_lost_error(view: StreamView, gone: SequenceRange) -> DataLost:
    """Build the error that names the lost range."""
    return DataLost(
        f"sequences {gone} of stream {view.name!r} are gone (by limits, a purge or an acknowledgement elsewhere) "
        "before they were read",
        fix="set failOnDataLoss to false to go on with what is left, or start with a new checkpoint",
    )


def next_end(start: Offset, view: StreamView, *, max_offsets: int | None, stop_at: int | None) -> Offset:
    """Return the end of the next batch: at most `max_offsets` further, not past `stop_at`.

    Lost sequences are skipped.
    """
    gone = lost_range(start, view)
    base = gone.last if gone else start.sequence
    last = view.last if stop_at is None else min(view.last, stop_at)
    if max_offsets is not None:
        last = min(last, base + max_offsets)
    if last <= start.sequence:
        return start
    # The next run counts what is gone beyond `stop_at`.
    return Offset(start.stream, view.created, last, start.lost + min(base, last) - start.sequence)


def split_range(first: int, last: int, min_partitions: int, *, max_rows: int | None = None) -> list[SequenceRange]:
    """Divide a range evenly among the executors: at least `min_partitions` pieces, and more for many messages.

    `max_rows` is an upper bound of the messages in the range: a stream that keeps the last message of each subject has
    few, however large its sequences are.

    >>> [str(piece) for piece in split_range(1, 10, 3)]
    ['1 to 4', '5 to 7', '8 to 10']
    """
    count = last - first + 1
    if count <= 0:
        return []
    rows = count if max_rows is None else min(count, max_rows)
    pieces = min(max(min_partitions, round(rows / ROWS_PER_PARTITION), 1), count)
    size, more = divmod(count, pieces)
    ranges, begin = [], first
    for number in range(pieces):
        end = begin + size + (number < more) - 1
        ranges.append(SequenceRange(begin, end))
        begin = end + 1
    return ranges


class BatchSizer:
    """Chooses the batch sizes of one query, so that a batch takes about `seconds`. Pure: the caller gives the time.

    The start of a batch costs the same for any size, so large batches are cheaper. But the time per row is known only
    from batches that are done: a dispatcher with a thousand subscriptions may need for one event what another needs for
    a thousand. So batches begin small, and the duration of each full batch determines the size of the next.
    """

    def __init__(self, seconds: float, max_rows: int) -> None:
        self._seconds = seconds
        self._max_rows = max_rows
        self._limit = min(FIRST_BATCH_ROWS, max_rows)
        self._began: float | None = None

    def limit(self, now: float) -> int:
        """Return the maximum number of rows of the batch that is planned now; the batch before is done.

        >>> sizer = BatchSizer(5.0, max_rows=400_000)
        >>> sizer.limit(0.0), sizer.begin(20_000, 0.0), sizer.limit(2.0)
        (20000, None, 50000)
        """
        if self._began is not None:
            wanted = self._limit * self._seconds / max(now - self._began, 0.001)
            wanted = min(
                max(wanted, self._limit / _MAX_STEP_FACTOR, SMALLEST_BATCH_ROWS),
                self._limit * _MAX_STEP_FACTOR,
                self._max_rows,
            )
            self._limit, self._began = int(wanted), None
        return self._limit

    def begin(self, rows: int, now: float) -> None:
        """Record the start of a batch. Only a full batch shows how long a full batch takes."""
        self._began = now if rows >= self._limit else None
