"""The range that is still to be read."""

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from purveyor.jetstream.bulk.arrow_bytes import Positions
from purveyor.jetstream.bulk.options import ReadOptions
from purveyor.jetstream.bulk.read import subject_filters

_NEARLY_DONE = 5000


@dataclass(frozen=True, slots=True)
class Range:
    """Sequences `first` to `last` of a stream, and what of them is wanted."""

    stream: str
    first: int
    last: int
    options: ReadOptions

    def within(self, first: int, last: int) -> "Range":
        """The part that a stream with those ends can have."""
        return replace(self, first=max(self.first, first), last=min(self.last, last))

    def from_(self, first: int) -> "Range":
        """What is left from there on."""
        return replace(self, first=first)

    @property
    def length(self) -> int:
        """How many messages there can be."""
        return max(0, self.last - self.first + 1)

    @property
    def gather_bytes(self) -> int:
        """How much to collect before cutting: much in a long range; near the end what comes, at once."""
        return self.options.batch_bytes if self.length > _NEARLY_DONE else 1

    def schema(self, *, filtered_here: bool) -> Any:
        """The columns to build; subjects too if rows are chosen by them here."""
        schema = self.options.schema
        if not filtered_here or "subject" in schema.names:
            return schema
        return replace(self.options, columns=("subject", *schema.names)).schema

    def portions(self, batch: Any, sequences: Positions, subjects: tuple[str, ...] = ()) -> list[tuple[Any, int]]:
        """A delivery in batches of the size asked for, each with the sequence that follows it.

        Rows outside of the range, and those that none of the subjects takes, are left out.
        """
        inside = (sequences >= self.first) & (sequences <= self.last)
        if not inside.all():
            batch, sequences = batch.filter(pa.array(inside)), sequences[inside]
        result = []
        rows = self.options.batch_rows
        for start in range(0, batch.num_rows, rows):
            part = batch.slice(start, rows)
            if subjects:
                part = subject_filters.keep(part, subjects)
            if part.schema != self.options.schema:
                part = part.select(self.options.schema.names)
            result.append((part, int(sequences[min(start + rows, len(sequences)) - 1]) + 1))
        return result
