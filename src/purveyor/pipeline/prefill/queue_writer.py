"""The write of prefill and replay: one task writes the rows of one subscription, sorted, into `<name>.prefill`.

A queue has one order, so one task writes it; where there is much to read, reading and matching run on all cores before
that (see `archive_queries`). Every message carries a number, made of the run that wrote it and the row's place in that
run. `append_once` goes by that number:

    a task that Spark runs again     finds its rows in the queue and skips them
    an older run that still writes   finds a larger number than its own, and can store nothing more

A prefill message has the body of the event that last changed the object, with an empty `old`, and with another
`publisher_name` if the event names one for its copy in a prefill. Every other byte of the text stays. Spark's JSON
functions parse and print, which rounds long numbers, so the writing task does this.
"""

import asyncio
import json
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
from purveyor.model.errors import InvalidInput, PublishRefused, UnknownStream
from purveyor.model.message_headers import PREFILL_PUBLISHER, REPLAY_JOB
from purveyor.model.redaction import redact
from purveyor.pipeline.dispatch.subscriber_messages import add_headers, copy_headers, find_traces, redact_bodies
from purveyor.queues.client import connect
from purveyor.queues.dead_letters.letter import DeadLetter, park
from purveyor.spark.pyspark_internals import map_in_arrow
from purveyor.spark.task_tuning import read_ahead

NUMBER: Final = "Purveyor-Prefill-Number"
"""The header of the number: the run times `NUMBERS_PER_RUN`, plus the place of the row."""
NUMBERS_PER_RUN: Final = 10**12
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
_JSON_SPACE: Final = " \t\n\r"
_DECODER: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class FillSpec:
    """Which queue, which run of a job, and how its rows become messages."""

    address: Address
    target: Target
    origin: str
    """The subscription: the origin of dead letters."""
    run: int
    id_prefix: str
    """A message id is this prefix, a colon, and the row's place."""
    replay: str | None = None
    """The job, if this is a replay."""
    hidden: tuple[str, ...] = ()
    """The fields that are hidden from the subscription."""
    by_position: bool = False
    """Whether the place of a row is its position; else rows are counted from 1."""
    patience_seconds: float = 60.0
    traces: bool = False
    """Whether to report the traces of the rows."""


@dataclass(frozen=True, slots=True)
class FillResult:
    """How many rows the queue holds, and where it refused one if it did."""

    rows: int
    refusal: Refusal | None = None


def fill_queue(rows: DataFrame, spec: FillSpec) -> int:
    """Write all rows; return how many. Raise `UnknownStream` if the queue is gone, `PublishRefused` if it refuses."""
    written = write_rows(rows, spec)
    if written.refusal is not None:
        raise refusal_error(written.refusal, spec.target.stream)
    return written.rows


def write_rows(rows: DataFrame, spec: FillSpec) -> FillResult:
    """Write the rows in the order of `rank` and `position`, up to the first that is refused.

    One task does this and everything before it, unless that ends in an exchange.

    Columns: `rank`, `position`, `emptied` (whether `old` is to be cut out of the body), `headers`, `data`.
    """
    ordered = rows.coalesce(1).sortWithinPartitions("rank", "position").drop("rank")
    results = map_in_arrow(ordered, _writer(spec), _RESULT).collect()
    tracing.link([{tracing.TRACEPARENT: trace} for result in results for trace in result.traces or ()])
    for result in results:
        if result.refused_at is not None:
            kind = RefusalKind(result.kind)
            return FillResult(result.rows, Refusal(result.refused_at, result.reason, result.code, kind))
    return FillResult(sum(result.rows for result in results))


def refusal_error(refusal: Refusal, stream: str) -> UnknownStream | PublishRefused:
    """Return the error for a refusal."""
    if refusal.kind is RefusalKind.MISSING_STREAM:
        return UnknownStream(f"the stream {stream!r} is gone", fix="the next attempt creates it again")
    return PublishRefused(
        f"the stream {stream!r} does not take a message ({refusal.kind.value}): {refusal.reason}",
        fix="make room or allow it, then request the job again",
        err_code=refusal.code,
    )


def _writer(spec: FillSpec) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        seen = parked = 0
        traces_found: set[str] = set()
        for batch, table in read_ahead(_prepared(batches, spec)):
            if spec.traces and len(traces_found) < tracing.MOST_LINKS:
                traces_found |= find_traces(batch.column("headers"))
            refusal, too_large = _append(batch, table, spec)
            parked += too_large
            if refusal is not None:
                yield _result(seen - parked, traces_found, refusal)
                return
            seen += batch.num_rows
        yield _result(seen - parked, traces_found)

    return write


def _prepared(batches: Iterator[pa.RecordBatch], spec: FillSpec) -> Iterator[tuple[pa.RecordBatch, pa.Table]]:
    """Yield record batches with their messages, which are prepared while the batch before is written."""
    seen = 0
    for batch in batches:
        if batch.num_rows:
            yield batch, messages(batch, spec, seen)
            seen += batch.num_rows


def _append(batch: pa.RecordBatch, table: pa.Table, spec: FillSpec) -> tuple[Refusal | None, int]:
    """Write a batch; return the refusal that ended it, and how many rows were too large and were parked."""
    options = AppendOptions(patience_seconds=spec.patience_seconds)
    target, parked = spec.target, 0
    while True:
        [outcome] = append_once(spec.address, [(target, table)], options)
        refusal = outcome.refused
        if refusal is None or refusal.kind is not RefusalKind.TOO_LARGE:
            return refusal, parked
        at = int(np.searchsorted(table["position"].to_numpy(), refusal.position))
        _park(spec, {**batch.slice(at, 1).to_pylist()[0], "headers": table["headers"][at].as_py()}, refusal.reason)
        target, parked = replace(target, floor=refusal.position), parked + 1


def _park(spec: FillSpec, row: dict[str, Any], reason: str) -> None:
    now = datetime.now(UTC)
    letter = DeadLetter(
        reason=f"too large for the queue: {reason}",
        origin=spec.origin,
        subject=spec.target.subject,
        data=redact(row["data"], spec.hidden),
        failed_first=now,
        failed_last=now,
        headers={name: tuple(values) for name, values in row["headers"]},
        position=row["position"],
    )

    async def parking() -> None:
        async with connect(spec.address, name="purveyor-prefill") as queues:
            await park(queues, letter)

    asyncio.run(parking())


def messages(batch: pa.RecordBatch, spec: FillSpec, before: int) -> pa.Table:
    """Return rows in the form that `append_once` takes; `before` rows of this run came earlier. Pure."""
    count, data = batch.num_rows, _bodies(batch.column("data"), batch.column("emptied"))
    if spec.replay is None:
        data = rename_publishers(data, batch.column("headers"))
    places = batch.column("position") if spec.by_position else pa.array(range(before + 1, before + count + 1))
    places = places.cast(pa.int64())
    added = {POSITION: batch.column("position").cast(pa.string())}
    if spec.replay is not None:
        added[REPLAY_JOB] = pa.repeat(pa.scalar(spec.replay), count)
    return pa.table(
        {
            "position": pc.add(places, spec.run * NUMBERS_PER_RUN),
            "data": redact_bodies(data, spec.hidden),
            "headers": add_headers(copy_headers(batch.column("headers")), added),
            "msg_id": pc.binary_join_element_wise(spec.id_prefix, places.cast(pa.string()), ":"),
        }
    )


def _bodies(data: Any, emptied: Any) -> Any:
    if not pc.any(emptied).as_py():
        return data
    cut = [without_old(body) if cut else body for body, cut in zip(data.to_pylist(), emptied.to_pylist(), strict=True)]
    return pa.array(cut, pa.binary())


def rename_publishers(data: Any, headers: Any) -> Any:
    """Set the `publisher_name` of the events whose headers name one for their copy in a prefill. Pure."""
    offsets = headers.offsets.to_numpy()
    start, end = int(offsets[0]), int(offsets[-1])
    named = np.flatnonzero(pc.equal(headers.keys.slice(start, end - start), PREFILL_PUBLISHER))
    if not len(named):
        return data
    names = pc.list_element(headers.items.slice(start, end - start).take(pa.array(named)), 0).to_pylist()
    bodies = data.to_pylist()
    rows = np.searchsorted(offsets - start, named, side="right") - 1
    for row, name in zip(rows.tolist(), names, strict=True):
        bodies[row] = with_publisher(bodies[row], name)
    return pa.array(bodies, pa.binary())


def _result(rows: int, traces_found: Collection[str], refusal: Refusal | None = None) -> Any:
    row: dict[str, Any] = {"rows": rows, "traces": sorted(traces_found)[: tracing.MOST_LINKS]}
    if refusal is not None:
        row |= {
            "refused_at": refusal.position,
            "reason": refusal.reason,
            "code": refusal.code,
            "kind": refusal.kind.value,
        }
    return pa.RecordBatch.from_pylist([row], _RESULT_ARROW)


def without_old(data: bytes) -> bytes:
    """Return the event with an empty `body.old`; raise InvalidInput if it is not a JSON object.

    >>> without_old(b'{"topic": "a", "body": {"old": {"n": 1}, "new": {"n": 1.10}}}')
    b'{"topic": "a", "body": {"old": {}, "new": {"n": 1.10}}}'
    """
    try:
        text = data.decode()
        body = _member(text, _skip_space(text, 0), "body")
        old = _member(text, body[0], "old") if body else None
    except (ValueError, IndexError, StopIteration) as error:
        raise _no_event(error) from error
    if old is None:
        return data
    return f"{text[: old[0]]}{{}}{text[old[1] :]}".encode()


def with_publisher(data: bytes, name: str) -> bytes:
    """Return an event of the transform with another `publisher_name`; raise InvalidInput if it is not a JSON object.

    >>> with_publisher(b'{"publisher_name":"live","ts":"..."}', "prefill")
    b'{"publisher_name":"prefill","ts":"..."}'
    """
    try:
        text = data.decode()
        found = _member(text, _skip_space(text, 0), "publisher_name", single=True)
    except (ValueError, IndexError, StopIteration) as error:
        raise _no_event(error) from error
    if found is None:
        return data
    return f"{text[: found[0]]}{json.dumps(name)}{text[found[1] :]}".encode()


def _no_event(error: Exception) -> InvalidInput:
    return InvalidInput(
        f"an archived event is no JSON object: {error}", fix="find the other program that writes the archive"
    )


def _member(text: str, at: int, name: str, *, single: bool = False) -> tuple[int, int] | None:
    """Return where the value of an object's member begins and ends; of several the last, as parsers do.

    `single`: there is only one, so what follows it is not read.
    """
    found = None
    if text[at] != "{":
        raise ValueError(f"expected an object at character {at}")
    at = _skip_space(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _skip_space(text, _skip_space(text, at) + 1)
        _, end = _DECODER.raw_decode(text, begin)
        if key == name:
            found = (begin, end)
            if single:
                return found
        at = _skip_space(text, end)
        if text[at] == ",":
            at = _skip_space(text, at + 1)
    return found


def _skip_space(text: str, at: int) -> int:
    while text[at] in _JSON_SPACE:
        at += 1
    return at
