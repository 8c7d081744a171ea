"""From topic batches to the rows of each target: messages for subscription queues, and dead letters. Pure.

Spark names for each topic batch the subscriptions that get it, and for a topic on which the expressions were not tried
before all subscriptions that may get it (see `matching`). `Resolver` tries these expressions, once for each topic, and
leaves out the targets that do not match. An expression without a result stops its subscription at the first position
that depends on it: the task writes what lies before, and nothing behind it. Other subscriptions do not wait.

Dispatch, catch-up, prefill and replay copy messages into subscription queues. A copy keeps the headers of the event's
message, except those of the server and those that belong to an earlier copy. It has its own message id, in dispatch its
position, and carries the id of the event as `Purveyor-Id`. Publishers set that header; where it is missing, the message
id of the event is its id.

A body is copied byte by byte, except for fields that are hidden from the subscription. One pass of RE2 over all bytes
finds the rows that may contain such a field; only those are rewritten, by the rule of `model.redaction`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.bulk.arrow_columns import HEADERS_TYPE as HEADERS
from purveyor.jetstream.headers import MSG_ID, POSITION
from purveyor.model.message_headers import EVENT_ID
from purveyor.model.redaction import candidate_pattern, redact
from purveyor.model.tracing import TRACEPARENT
from purveyor.model.tracing import is_valid_traceparent as valid_trace
from purveyor.pipeline.event_rows import Indices, UnpackedMessages, invalid_reason
from purveyor.pipeline.expressions import Expressions, Pair, TargetTopics, TopicInterests
from purveyor.queues.dead_letters.letter import DeadLetter

_NOT_COPIED_PREFIXES: Final = ("nats-", "purveyor-")


def copy_headers(headers: Any) -> Any:
    """Return the headers that a copy keeps."""
    per_row = headers.offsets.to_numpy().astype(np.int64)
    start, end = int(per_row[0]), int(per_row[-1])
    encoded = headers.keys.slice(start, end - start).dictionary_encode()
    given = encoded.dictionary.to_pylist()
    names = pa.array([_renamed(name) for name in given], pa.string()).take(encoded.indices)
    keep = pc.is_valid(names).to_numpy(zero_copy_only=False)
    if EVENT_ID in given and MSG_ID in given:
        names_of_rows, rows = encoded.indices.to_numpy(), np.repeat(np.arange(len(headers)), np.diff(per_row))
        has_id = np.zeros(len(headers), np.bool_)
        has_id[rows[names_of_rows == given.index(EVENT_ID)]] = True
        keep = keep & ~((names_of_rows == given.index(MSG_ID)) & has_id[rows])
    counts = np.concatenate((np.zeros(1, np.int64), np.cumsum(keep)))
    offsets = pa.array(counts[per_row - start].astype(np.int32))
    lists = headers.items.slice(start, end - start).cast(HEADERS.item_type)
    kept = pa.array(keep)
    return pa.MapArray.from_arrays(offsets, names.filter(kept), lists.filter(kept), type=HEADERS)


def add_headers(headers: Any, more: Mapping[str, Any]) -> Any:
    """Add headers with new names: for each name one value per row.

    >>> one = pa.array([[("Trace", ["a"])], []], HEADERS)
    >>> add_headers(one, {"Place": pa.array(["1", "2"])}).to_pylist()
    [[('Trace', ['a']), ('Place', ['1'])], [('Place', ['2'])]]
    """
    count, each = len(headers), np.arange(len(headers))
    per_row = np.diff(headers.offsets.to_numpy())
    rows = np.concatenate((np.repeat(each, per_row), *(each for _ in more)))
    names = [headers.keys, *(pa.repeat(pa.scalar(name, pa.string()), count) for name in more)]
    single = pa.array(np.arange(count + 1, dtype=np.int32))
    lists = [headers.items, *(pa.ListArray.from_arrays(single, text).cast(HEADERS.item_type) for text in more.values())]
    order = pa.array(np.argsort(rows, kind="stable"))
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(per_row + len(more)))).astype(np.int32)
    return pa.MapArray.from_arrays(
        pa.array(ends), pa.concat_arrays(names).take(order), pa.concat_arrays(lists).take(order), type=HEADERS
    )


def _renamed(name: str) -> str | None:
    if name in (MSG_ID, EVENT_ID):
        return EVENT_ID
    return None if name.lower().startswith(_NOT_COPIED_PREFIXES) else name


def redact_bodies(bodies: Any, hidden: Sequence[str]) -> Any:
    """Remove the fields that are hidden from one subscription from bodies of events, an array of bytes. Pure."""
    if not hidden or not len(bodies):
        return bodies
    suspicious = pc.match_substring_regex(bodies, pattern=candidate_pattern(tuple(hidden)))
    at = np.flatnonzero(suspicious.to_numpy(zero_copy_only=False))
    changed = [redact(body, hidden) for body in bodies.take(pa.array(at)).to_pylist()]
    if not changed:
        return bodies
    return pc.replace_with_mask(bodies, suspicious, pa.array(changed, bodies.type))


INVALID_TARGET: Final = -1
"""The target of messages that are not events: the dead letters."""
INVALID_WRITER: Final = 0
"""The writer that writes those, of several writers."""
ORIGIN: Final = "incoming"

_NONE: Final = np.zeros(0, np.int64)


def message_table(unpacked: UnpackedMessages) -> pa.Table:
    """Return all rows in the form that `append_once` takes."""
    positions = unpacked.rows.column("position")
    return pa.table(
        {
            "position": positions,
            "data": unpacked.rows.column("data"),
            "headers": pa.chunked_array([copy_headers(each) for each in unpacked.rows.column("headers").chunks]),
            "msg_id": positions.cast(pa.string()),
        }
    )


def redact_table(rows: pa.Table, hidden: Sequence[str]) -> pa.Table:
    """Remove hidden fields from the rows; return the same table if nothing changes."""
    bodies = rows.column("data").chunks
    seen = [redact_bodies(each, hidden) for each in bodies]
    if all(one is other for one, other in zip(seen, bodies, strict=True)):
        return rows
    return rows.set_column(rows.schema.get_field_index("data"), "data", pa.chunked_array(seen))


def find_traces(headers: Any) -> set[str]:
    """Return the traces of the events, from their headers."""
    names, lists = headers.keys, headers.items
    if len(names) == 0:
        return set()
    own_targets = pc.equal(names, TRACEPARENT)
    return {trace for found in lists.filter(own_targets).to_pylist() for trace in found or () if valid_trace(trace)}


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The rows of one target, as ascending indices."""

    target: int
    rows: Indices


def rows_by_target(
    unpacked: UnpackedMessages, writer: int | None, writers: int, excluded: Indices = _NONE
) -> Iterator[TargetRows]:
    """Yield the rows of each target. With several writers, only of the targets of this one.

    A topic batch of messages that are not events goes to the dead letters only. `excluded` has pairs of a topic batch
    and a target (see `pair_key`) that do not belong together.
    """
    good = unpacked.topic_batches.column("realm").is_valid().to_numpy(zero_copy_only=False)
    matched = unpacked.topic_batches.column("matched")

    def own_targets(indices: Indices, batches: Indices, targets: Indices) -> dict[int, Indices]:
        """Return the indices of each target of this writer, ascending."""
        kept = np.ones(len(targets), np.bool_) if writer is None else targets % writers == writer
        if len(excluded):
            kept &= ~np.isin(pair_key(batches, targets), excluded)
        return dict(_group_by(targets[kept], indices[kept]))

    of_batch, targets = _pairs(pc.struct_field(matched, "targets"))
    batches = own_targets(of_batch, of_batch, targets)
    filtered: dict[int, Indices] = {}
    if matched.type.get_field_index("passing") >= 0:
        of_row, targets = _passing(unpacked, pc.struct_field(matched, "passing"))
        filtered = own_targets(of_row, unpacked.batch_of_row[of_row], targets)
    rows: dict[bytes, Indices] = {}  # many targets get the same topic batches
    for target in sorted({*batches, *filtered}):
        of_target = batches.get(target, _NONE)
        key = of_target.tobytes()
        if key not in rows:
            rows[key] = _rows_of(unpacked, of_target)
        found = rows[key]
        yield TargetRows(target, np.union1d(found, filtered[target]) if target in filtered else found)
    if not good.all() and writer in (None, INVALID_WRITER):
        yield TargetRows(INVALID_TARGET, _rows_of(unpacked, np.flatnonzero(~good)))


def pair_key(batches: Indices, targets: Indices) -> Indices:
    """Encode each pair of a topic batch and a target as one number."""
    return (batches << 32) | targets


def _pairs(lists: Any) -> tuple[Indices, Indices]:
    """Flatten lists of numbers: return for each number the index of its list, and the number."""
    of_list = np.repeat(np.arange(len(lists)), np.asarray(pc.fill_null(lists.value_lengths(), 0)))
    return of_list, np.asarray(lists.flatten()).astype(np.int64)


def _group_by(keys: Indices, values: Indices) -> Iterator[tuple[int, Indices]]:
    order = np.lexsort((values, keys))
    keys, values = keys[order], values[order]
    found, firsts = np.unique(keys, return_index=True)
    yield from zip(
        found.tolist(), np.split(values, firsts[1:]), strict=False
    )  # an empty array is split into one empty part


def _rows_of(unpacked: UnpackedMessages, batches: Indices) -> Indices:
    if len(batches) == unpacked.topic_batches.num_rows:
        return np.arange(unpacked.rows.num_rows)
    wanted = np.zeros(unpacked.topic_batches.num_rows, np.bool_)
    wanted[batches] = True
    return np.flatnonzero(wanted[unpacked.batch_of_row])


def _passing(unpacked: UnpackedMessages, lists: Any) -> tuple[Indices, Indices]:
    """Return the rows that pass a filter, and for each the target of that filter."""
    has = lists.is_valid().to_numpy(zero_copy_only=False)
    by_batch = np.argsort(unpacked.batch_of_row, kind="stable")
    rows = by_batch[has[unpacked.batch_of_row[by_batch]]]
    indices, targets = _pairs(lists.flatten())
    return rows[indices], targets


def make_dead_letter(row: dict[str, Any], reason: str, origin: str = ORIGIN) -> DeadLetter:
    """Make a dead letter of a row."""
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


def invalid_dead_letter(row: dict[str, Any]) -> DeadLetter:
    """Make a dead letter of a row that is not an event."""
    return make_dead_letter(row, invalid_reason(row["data"]) or "no event when it was read")


def dead_letter_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Return rows that are not events as dead letters for `append_once`, which adds the position itself."""
    found = [invalid_dead_letter(row) for row in rows]
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


@dataclass(frozen=True, slots=True)
class TargetStop:
    """The first position that a target cannot get, and why."""

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Resolution:
    """Decisions about some topic batches: pairs with targets that do not belong together, and where targets stop."""

    excluded: Indices = field(default_factory=lambda: _NONE)
    stops: Mapping[int, TargetStop] = field(default_factory=dict)


class Resolver:
    """Decides about unseen topics during one run of a task. `topics` has for each pair the patterns that match it.

    Positions up to its floor are not for a target.
    """

    def __init__(self, patterns: Sequence[Pair], target_topics: Sequence[TargetTopics], floors: Sequence[int]) -> None:
        self._expressions = Expressions(patterns)
        self._interests = TopicInterests(patterns, target_topics)
        self._floors = floors
        self.topics: dict[Pair, frozenset[int]] = {}

    def resolve(self, unpacked: UnpackedMessages) -> Resolution:
        """Decide about all topic batches whose topic is unseen."""
        unseen = np.flatnonzero(pc.struct_field(unpacked.topic_batches.column("matched"), "unseen"))
        if not len(unseen):
            return Resolution()
        take_rows = unpacked.topic_batches.take(pa.array(unseen))
        pairs = list(zip(take_rows.column("realm").to_pylist(), take_rows.column("topic").to_pylist(), strict=True))
        match_topics = self._expressions.match_topics(pairs)
        self.topics |= {pair: found.matching for pair, found in match_topics.items() if not found.failed}
        excluded = []
        stops: dict[int, TargetStop] = {}
        for batch, pair in zip(unseen.tolist(), pairs, strict=True):
            targets = self._interests.non_matching(pair, match_topics[pair])
            excluded.append(pair_key(np.full(len(targets), batch), np.fromiter(targets, np.int64, len(targets))))
            for target, number in self._interests.undecided(pair, match_topics[pair]).items():
                positions = unpacked.rows.column("position").to_numpy()[unpacked.batch_of_row == batch]
                for position in positions[positions > self._floors[target]][:1].tolist():
                    stop = TargetStop(position, self._expressions.failures[number])
                    stops[target] = min(stops.get(target, stop), stop, key=lambda each: each.position)
        return Resolution(np.concatenate(excluded), stops)
