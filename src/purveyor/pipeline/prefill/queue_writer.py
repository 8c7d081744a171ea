"""The write of prefill and replay: the rows of one subscription, sorted, from one task into `<name>.prefill`.

A queue is one order, so one task writes it; where there is much to look at, reading and matching run on all cores
before that (see `frames`). Every message carries a number, made of the run that wrote it and the row's place in that
run. The number is what `append_once` goes by:

    a task that Spark runs again     finds its rows there and skips them
    an older run that still writes   finds a number above all of its own, and can store nothing more
"""

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import AppendOptions, Refusal, RefusalKind, Target, append_once
from purveyor.jetstream.headers import POSITION
from purveyor.model import tracing
from purveyor.model.errors import PublishRefused, UnknownStream
from purveyor.model.redaction import censor
from purveyor.pipeline.dispatch.subscriber_messages import traces
from purveyor.pipeline.forwarded_headers import carried, with_more
from purveyor.pipeline.prefill.strip_old import without_old
from purveyor.pipeline.redact_columns import censored
from purveyor.queues.client import connect
from purveyor.queues.dead_letters.letter import DeadLetter, park
from purveyor.spark.map_in_arrow import map_in_arrow
from purveyor.spark.read_ahead import read_ahead

NUMBER: Final = "Purveyor-Prefill-Number"
"""The header of the number: the run times `RUN`, plus the place of the row."""
REPLAY: Final = "Purveyor-Replay"
"""The header of a message that was written again: the job that did it."""
RUN: Final = 10**12
_RESULT: Final = "rows long, refused_at long, reason string, code int, kind string, traces array<string>"
_RESULT_ARROW: Final = pa.schema(
    [
        pa.field("rows", pa.int64()),
        pa.field("refused_at", pa.int64()),
        pa.field("reason", pa.string()),
        pa.field("code", pa.int32()),
        pa.field("kind", pa.string()),
        pa.field("traces", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Which queue, which run of a job, and how its rows become messages."""

    address: Address
    target: Target
    origin: str
    """The subscription: where dead letters say that they come from."""
    run: int
    id_prefix: str
    """Message ids are this and the row's place, parted by a colon."""
    replay: str | None = None
    """The job, if messages are written again."""
    hidden: tuple[str, ...] = ()
    """The fields that the subscription never sees."""
    by_position: bool = False
    """Whether the place of a row is its position; else rows are counted from 1."""
    patience_seconds: float = 60.0
    traces: bool = False
    """Whether somebody wants to know which traces the rows belong to."""


@dataclass(frozen=True, slots=True)
class Written:
    """How many rows the queue holds, and where it refused one if it did."""

    rows: int
    refusal: Refusal | None = None


def fill(rows: DataFrame, filling: Filling) -> int:
    """Write all rows; returns how many. `UnknownStream` if the queue is gone, `PublishRefused` if it refuses."""
    written = write(rows, filling)
    if written.refusal is not None:
        raise refused(written.refusal, filling.target.stream)
    return written.rows


def write(rows: DataFrame, filling: Filling) -> Written:
    """Write the rows in the order of `rank` and `position`, up to the first that is refused.

    In one task with all that is before it, unless that ends in an exchange of its own.

    Columns: `rank`, `position`, `emptied` (whether `old` is to be cut out of the body), `headers`, `data`.
    """
    ordered = rows.coalesce(1).sortWithinPartitions("rank", "position").drop("rank")
    results = map_in_arrow(ordered, _writer(filling), _RESULT).collect()
    tracing.link([{tracing.TRACEPARENT: trace} for result in results for trace in result.traces or ()])
    for result in results:
        if result.refused_at is not None:
            kind = RefusalKind(result.kind)
            return Written(result.rows, Refusal(result.refused_at, result.reason, result.code, kind))
    return Written(sum(result.rows for result in results))


def refused(refusal: Refusal, stream: str) -> UnknownStream | PublishRefused:
    """The error that a refusal is."""
    if refusal.kind is RefusalKind.MISSING_STREAM:
        return UnknownStream(f"the stream {stream!r} is gone", fix="it is made again at the next attempt")
    return PublishRefused(
        f"the stream {stream!r} does not take a message ({refusal.kind.value}): {refusal.reason}",
        fix="make room or give leave, then ask again",
        err_code=refusal.code,
    )


def _writer(filling: Filling) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        seen = parked = 0
        met: set[str] = set()
        for batch, table in read_ahead(_prepared(batches, filling)):
            if filling.traces and len(met) < tracing.MOST_LINKS:
                met |= traces(batch.column("headers"))
            refusal, too_large = _append(batch, table, filling)
            parked += too_large
            if refusal is not None:
                yield _result(seen - parked, met, refusal)
                return
            seen += batch.num_rows
        yield _result(seen - parked, met)

    return write


def _prepared(batches: Iterator[pa.RecordBatch], filling: Filling) -> Iterator[tuple[pa.RecordBatch, pa.Table]]:
    """Portions with their messages, which are made while the portion before is written."""
    seen = 0
    for batch in batches:
        if batch.num_rows:
            yield batch, messages(batch, filling, seen)
            seen += batch.num_rows


def _append(batch: pa.RecordBatch, table: pa.Table, filling: Filling) -> tuple[Refusal | None, int]:
    """Write a portion; the refusal that ended it, and how many rows were too large and went to the dead letters."""
    options = AppendOptions(patience_seconds=filling.patience_seconds)
    target, parked = filling.target, 0
    while True:
        [outcome] = append_once(filling.address, [(target, table)], options)
        no = outcome.refused
        if no is None or no.kind is not RefusalKind.TOO_LARGE:
            return no, parked
        at = int(np.searchsorted(table["position"].to_numpy(), no.position))
        _park(filling, {**batch.slice(at, 1).to_pylist()[0], "headers": table["headers"][at].as_py()}, no.reason)
        target, parked = replace(target, floor=no.position), parked + 1


def _park(filling: Filling, row: dict[str, Any], reason: str) -> None:
    now = datetime.now(UTC)
    letter = DeadLetter(
        reason=f"too large for the queue: {reason}",
        origin=filling.origin,
        subject=filling.target.subject,
        data=censor(row["data"], filling.hidden),
        failed_first=now,
        failed_last=now,
        headers={name: tuple(values) for name, values in row["headers"]},
        position=row["position"],
    )

    async def parking() -> None:
        async with connect(filling.address, name="purveyor-prefill") as queues:
            await park(queues, letter)

    asyncio.run(parking())


def messages(batch: pa.RecordBatch, filling: Filling, before: int) -> pa.Table:
    """Rows as `append_once` takes them; `before` rows of this run came earlier. Pure."""
    count = batch.num_rows
    places = batch.column("position") if filling.by_position else pa.array(range(before + 1, before + count + 1))
    places = places.cast(pa.int64())
    said = {POSITION: batch.column("position").cast(pa.string())}
    if filling.replay is not None:
        said[REPLAY] = pa.repeat(pa.scalar(filling.replay), count)
    return pa.table(
        {
            "position": pc.add(places, filling.run * RUN),
            "data": censored(_bodies(batch.column("data"), batch.column("emptied")), filling.hidden),
            "headers": with_more(carried(batch.column("headers")), said),
            "msg_id": pc.binary_join_element_wise(filling.id_prefix, places.cast(pa.string()), ":"),
        }
    )


def _bodies(data: Any, emptied: Any) -> Any:
    if not pc.any(emptied).as_py():
        return data
    cut = [without_old(body) if cut else body for body, cut in zip(data.to_pylist(), emptied.to_pylist(), strict=True)]
    return pa.array(cut, pa.binary())


def _result(rows: int, met: Collection[str], no: Refusal | None = None) -> Any:
    row: dict[str, Any] = {"rows": rows, "traces": sorted(met)[: tracing.MOST_LINKS]}
    if no is not None:
        row |= {"refused_at": no.position, "reason": no.reason, "code": no.code, "kind": no.kind.value}
    return pa.RecordBatch.from_pylist([row], _RESULT_ARROW)
