"""Messages of packs as messages of subscription queues, and as dead letters. Pure, and for all of them at once.

The body goes as it came, but for what is hidden from the one who gets it; of the headers see `carrying`. The message id
of a copy is its position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.bulk.header_columns import TYPE as HEADERS
from purveyor.jetstream.headers import POSITION
from purveyor.model.tracing import TRACEPARENT
from purveyor.model.tracing import valid as valid_trace
from purveyor.pipeline.event_columns import why_none
from purveyor.pipeline.forwarded_headers import carried
from purveyor.pipeline.redact_columns import censored
from purveyor.pipeline.topic_batches import Indices, Load
from purveyor.queues.dead_letters.letter import DeadLetter

INVALID: Final = -1
"""The target of what is no event: the dead letters."""
INVALID_WRITER: Final = 0
"""Which of several writers writes those."""
ORIGIN: Final = "incoming"

_NONE: Final = np.zeros(0, np.int64)


def messages(load: Load) -> pa.Table:
    """All rows as `append_once` takes them."""
    positions = load.rows.column("position")
    return pa.table(
        {
            "position": positions,
            "data": load.rows.column("data"),
            "headers": pa.chunked_array([carried(each) for each in load.rows.column("headers").chunks]),
            "msg_id": positions.cast(pa.string()),
        }
    )


def without_hidden(rows: pa.Table, hidden: Sequence[str]) -> pa.Table:
    """The same rows, as one sees them from whom these fields are hidden; the table itself if that is no difference."""
    bodies = rows.column("data").chunks
    seen = [censored(each, hidden) for each in bodies]
    if all(one is other for one, other in zip(seen, bodies, strict=True)):
        return rows
    return rows.set_column(rows.schema.get_field_index("data"), "data", pa.chunked_array(seen))


def traces(headers: Any) -> set[str]:
    """The traces that events belong to, as their headers tell."""
    names, lists = headers.keys, headers.items
    if len(names) == 0:
        return set()
    mine = pc.equal(names, TRACEPARENT)
    return {trace for found in lists.filter(mine).to_pylist() for trace in found or () if valid_trace(trace)}


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of one target, as indices of those of a load, ascending."""

    target: int
    rows: Indices


def parts(load: Load, writer: int | None, writers: int, left_out: Indices = _NONE) -> Iterator[Part]:
    """The rows of each target in a load. With several writers, only the targets that are this one's.

    A pack that holds no events is for the dead letters, and for nobody else. `left_out` are pairs of a pack and a
    target (see `pair_of`) that do not belong together.
    """
    good = load.packs.column("realm").is_valid().to_numpy(zero_copy_only=False)
    matched = load.packs.column("matched")

    def mine(places: Indices, packs: Indices, targets: Indices) -> dict[int, Indices]:
        """To each target of ours its places, ascending."""
        kept = np.ones(len(targets), np.bool_) if writer is None else targets % writers == writer
        if len(left_out):
            kept &= ~np.isin(pair_of(packs, targets), left_out)
        return dict(_grouped(targets[kept], places[kept]))

    of_pack, targets = _pairs(pc.struct_field(matched, "targets"))
    packs = mine(of_pack, of_pack, targets)
    filtered: dict[int, Indices] = {}
    if matched.type.get_field_index("passing") >= 0:
        of_row, targets = _passing(load, pc.struct_field(matched, "passing"))
        filtered = mine(of_row, load.of_pack[of_row], targets)
    rows: dict[bytes, Indices] = {}  # many targets get the same packs
    for target in sorted({*packs, *filtered}):
        of_target = packs.get(target, _NONE)
        key = of_target.tobytes()
        if key not in rows:
            rows[key] = _rows_of(load, of_target)
        found = rows[key]
        yield Part(target, np.union1d(found, filtered[target]) if target in filtered else found)
    if not good.all() and writer in (None, INVALID_WRITER):
        yield Part(INVALID, _rows_of(load, np.flatnonzero(~good)))


def pair_of(packs: Indices, targets: Indices) -> Indices:
    """Packs and targets, each pair of them as one number."""
    return (packs << 32) | targets


def _pairs(lists: Any) -> tuple[Indices, Indices]:
    """What lists of numbers hold: for each number the index of its list, and the number."""
    of_list = np.repeat(np.arange(len(lists)), np.asarray(pc.fill_null(lists.value_lengths(), 0)))
    return of_list, np.asarray(lists.flatten()).astype(np.int64)


def _grouped(keys: Indices, values: Indices) -> Iterator[tuple[int, Indices]]:
    order = np.lexsort((values, keys))
    keys, values = keys[order], values[order]
    found, firsts = np.unique(keys, return_index=True)
    yield from zip(found.tolist(), np.split(values, firsts[1:]), strict=False)  # of nothing there is one empty part


def _rows_of(load: Load, packs: Indices) -> Indices:
    if len(packs) == load.packs.num_rows:
        return np.arange(load.rows.num_rows)
    wanted = np.zeros(load.packs.num_rows, np.bool_)
    wanted[packs] = True
    return np.flatnonzero(wanted[load.of_pack])


def _passing(load: Load, lists: Any) -> tuple[Indices, Indices]:
    """What filters let pass: rows, and for each the target that it is for."""
    has = lists.is_valid().to_numpy(zero_copy_only=False)
    by_pack = np.argsort(load.of_pack, kind="stable")
    rows = by_pack[has[load.of_pack[by_pack]]]
    places, targets = _pairs(lists.flatten())
    return rows[places], targets


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
