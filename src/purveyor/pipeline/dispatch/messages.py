"""Rows of a batch as messages of subscription queues, and as dead letters. Pure, and for all rows at once.

The body goes as it came, but for what is hidden from the one who gets it; of the headers see `carrying`. The message id
of a copy is its position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.model.tracing import TRACEPARENT
from purveyor.model.tracing import valid as valid_trace
from purveyor.pipeline.carrying import carried
from purveyor.pipeline.censoring import censored
from purveyor.pipeline.event_columns import why_none
from purveyor.queues.bulk.headers import TYPE as HEADERS
from purveyor.queues.dead_letters import DeadLetter
from purveyor.queues.headers import POSITION

INVALID: Final = -1
"""The target of what is no event: the dead letters."""
INVALID_WRITER: Final = 0
"""Which of several writers writes those."""
ORIGIN: Final = "incoming"

Indices = npt.NDArray[np.int64]


def messages(batch: pa.RecordBatch) -> pa.Table:
    """All rows as `append_once` takes them."""
    positions = batch.column("position")
    return pa.table(
        {
            "position": positions,
            "data": batch.column("data").cast(pa.binary()),
            "headers": carried(batch.column("headers")),
            "msg_id": positions.cast(pa.string()),
        }
    )


def without_hidden(rows: pa.Table, hidden: Sequence[str]) -> pa.Table:
    """The same rows, as one sees them from whom these fields are hidden; the table itself if that is no difference."""
    column = rows.column("data")
    bodies = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    seen = censored(bodies, hidden)
    return rows if seen is bodies else rows.set_column(rows.schema.get_field_index("data"), "data", seen)


def traces(batch: pa.RecordBatch) -> set[str]:
    """The traces that the events of a batch belong to, as their headers tell."""
    flat = batch.column("headers")
    names, lists = flat.keys, flat.items
    if len(names) == 0:
        return set()
    mine = pc.equal(names, TRACEPARENT)
    return {trace for found in lists.filter(mine).to_pylist() for trace in found or () if valid_trace(trace)}


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one target, as indices of the batch, ascending."""

    target: int
    rows: Indices


def parts(batch: pa.RecordBatch, writer: int | None, writers: int) -> Iterator[Part]:
    """The rows of each target in a batch. With several writers, only the targets that are this one's.

    A row that is no event is for the dead letters, and for nobody else.
    """
    good = batch.column("realm").is_valid().to_numpy(zero_copy_only=False)
    targets = pc.struct_field(batch.column("matched"), "targets")
    offsets = targets.offsets.to_numpy().astype(np.int64)
    rows = np.repeat(np.arange(batch.num_rows), np.diff(offsets))
    flat = targets.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])).to_numpy()
    mine = good[rows]
    if writer is not None:
        mine &= flat % writers == writer
    rows, flat = rows[mine], flat[mine]
    order = np.argsort(flat, kind="stable")
    rows, flat = rows[order], flat[order]
    if len(flat):  # not all are poison, or another writer's
        firsts = np.flatnonzero(np.concatenate(([True], flat[1:] != flat[:-1])))
        for first, last in zip(firsts, np.append(firsts[1:], len(flat)), strict=True):
            yield Part(int(flat[first]), rows[first:last])
    if not good.all() and writer in (None, INVALID_WRITER):
        yield Part(INVALID, np.flatnonzero(~good))


def letter(row: dict[str, Any], reason: str, origin: str = ORIGIN) -> DeadLetter:
    """A row that nobody can use."""
    now = datetime.now(UTC)
    return DeadLetter(
        reason=reason,
        origin=origin,
        subject=row["subject"],
        data=row["data"],
        failed_first=now,
        failed_last=now,
        headers={name: tuple(values) for name, values in row["headers"] or ()},
        position=row["position"],
    )


def invalid(row: dict[str, Any]) -> DeadLetter:
    """A row that is no event."""
    return letter(row, why_none(row["data"]) or "no event when it was read")


def letters(rows: list[dict[str, Any]]) -> pa.Table:
    """What is no event, as dead letters in the form that `append_once` takes; it adds the position itself."""
    found = [invalid(row) for row in rows]
    headers = [each.to_message()[2] for each in found]
    return pa.table(
        {
            "position": pa.array([each.position for each in found], pa.int64()),
            "data": pa.array([each.data for each in found], pa.binary()),
            "headers": pa.array(
                [[(name, list(values)) for name, values in each.items() if name != POSITION] for each in headers],
                HEADERS,
            ),
            "msg_id": pa.array([each.id for each in found], pa.string()),
        }
    )
