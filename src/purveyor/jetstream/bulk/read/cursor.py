"""The rest of a range that is to be read, and the subject filters of a read.

The server applies the filters that it supports; the others are applied here.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.bulk.arrow_bytes import Positions
from purveyor.jetstream.bulk.options import ReadOptions
from purveyor.model.name_rules import subject_matches

_GATHER_UNTIL_LEFT = 5000


@dataclass(frozen=True, slots=True)
class RangeCursor:
    """The sequences `first` to `last` of a stream with the options of the read."""

    stream: str
    first: int
    last: int
    options: ReadOptions

    def clamp(self, first: int, last: int) -> "RangeCursor":
        """Return the part of the range between the first and last sequence of the stream."""
        return replace(self, first=max(self.first, first), last=min(self.last, last))

    def advance_to(self, first: int) -> "RangeCursor":
        """Return the rest of the range from a sequence on."""
        return replace(self, first=first)

    @property
    def length(self) -> int:
        """The maximum number of messages in the range."""
        return max(0, self.last - self.first + 1)

    @property
    def gather_bytes(self) -> int:
        """The bytes to collect before parsing: many in a long range; near the end, whatever has arrived."""
        return self.options.batch_bytes if self.length > _GATHER_UNTIL_LEFT else 1

    def schema(self, *, filtered_here: bool) -> Any:
        """Return the columns to build, including subjects if rows are filtered by subject here."""
        schema = self.options.schema
        if not filtered_here or "subject" in schema.names:
            return schema
        return replace(self.options, columns=("subject", *schema.names)).schema

    def batches(self, batch: Any, sequences: Positions, subjects: tuple[str, ...] = ()) -> list[tuple[Any, int]]:
        """Split a delivery into batches of the requested size, each with the sequence that follows it.

        Rows outside the range, and rows that match none of the subjects, are dropped.
        """
        inside = (sequences >= self.first) & (sequences <= self.last)
        if not inside.all():
            batch, sequences = batch.filter(pa.array(inside)), sequences[inside]
        result = []
        rows = self.options.batch_rows
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            if subjects:
                part = filter_batch(part, subjects)
            if part.schema != self.options.schema:
                part = part.select(self.options.schema.names)
            result.append((part, int(sequences[min(start + rows, len(sequences)) - 1]) + 1))
        return result


def remove_covered(subjects: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns without those that another one covers (the server refuses such a pair).

    >>> remove_covered(("orders.>", "orders.new", "bills"))
    ('orders.>', 'bills')
    """
    distinct = tuple(dict.fromkeys(subjects))
    kept = tuple(one for one in distinct if not any(one != other and covers(other, one) for other in distinct))
    return () if ">" in kept else kept


def covers(wide: str, narrow: str) -> bool:
    """Return whether `wide` matches each subject that `narrow` matches.

    A wildcard counts as an ordinary token, except that `*` does not cover a `>`.
    """
    if narrow.endswith(">") and not wide.endswith(">"):
        return False
    return subject_matches(wide, narrow)


def to_regex(subjects: tuple[str, ...]) -> str:
    """Return a regular expression for the subjects that any of the patterns matches."""
    return "^(?:" + "|".join(map(_pattern_regex, subjects)) + ")$"


def filter_batch(batch: Any, subjects: tuple[str, ...]) -> Any:
    """Return the rows of a batch whose subject matches any of the patterns."""
    column = batch.column(batch.schema.get_field_index("subject"))
    return batch.filter(pc.match_substring_regex(column, to_regex(subjects)))


def _pattern_regex(subject: str) -> str:
    tokens = [r"[^.]+" if token == "*" else re.escape(token) for token in subject.split(".")]
    if tokens[-1] == re.escape(">"):
        tokens[-1] = ".+"
    return r"\.".join(tokens)
