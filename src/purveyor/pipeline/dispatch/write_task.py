"""The task that writes topic batches, which arrive in order, into the queues of their targets.

One call of `append_once` writes some portions for all targets together. A queue that refuses gets no more in this run,
nor does a subscription whose expressions have no result (see `subscriber_messages`); the task reports where it stopped,
and the driver decides. The task itself handles only a row that is too large: it parks the row before it writes the rows
behind it, because then the row would count as written too.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import (
    AppendOptions,
    Outcome,
    Refusal,
    RefusalKind,
    Target,
    append_once,
)
from purveyor.model import metrics, tracing
from purveyor.model.errors import PublishRefused
from purveyor.model.redaction import redact
from purveyor.pipeline.dispatch.subscriber_messages import (
    INVALID_TARGET,
    ORIGIN,
    Resolver,
    TargetRows,
    TargetStop,
    dead_letter_table,
    find_traces,
    invalid_dead_letter,
    make_dead_letter,
    message_table,
    redact_table,
    rows_by_target,
)
from purveyor.pipeline.event_rows import UnpackedMessages, group_portions
from purveyor.pipeline.expressions import MAX_KNOWN_TOPICS, Pair, TargetTopics
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import connect
from purveyor.queues.dead_letters.letter import DeadLetter, park, subject_token
from purveyor.queues.registry import ACKNOWLEDGED
from purveyor.spark.task_tuning import read_ahead

ROWS_PER_APPEND: Final = 30_000
BYTES_PER_APPEND: Final = 32 << 20
"""About this much is written by one call."""
RESULT: Final = (
    "target int, stored bigint, skipped bigint, refused_at bigint, kind string, code int, reason string, "
    "realm string, topic string, matching array<int>, trace string, waits string"
)
"""One row for each target; and rows without a target: one for each topic that was not known (with the patterns that
match it), one for each trace, and one if the task had to wait for queues that were being migrated."""
_RESULT_ARROW: Final = pa.schema(
    [
        ("target", pa.int32()),
        ("stored", pa.int64()),
        ("skipped", pa.int64()),
        ("refused_at", pa.int64()),
        ("kind", pa.string()),
        ("code", pa.int32()),
        ("reason", pa.string()),
        ("realm", pa.string()),
        ("topic", pa.string()),
        ("matching", pa.list_(pa.int32())),
        ("trace", pa.string()),
        ("waits", pa.string()),
    ]
)


class TargetSpec(NamedTuple):
    """The facts about a target that a task needs: the subscription, where its rows begin, and its hidden fields."""

    name: str
    incarnation: str
    floor: int
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTask:
    """The input of a task; Spark sends it to the workers."""

    address: Address
    targets: tuple[TargetSpec, ...]
    patterns: tuple[Pair, ...] = ()
    """Realms and expressions of the targets."""
    target_topics: tuple[TargetTopics, ...] = ()
    """Which of them belong to which target."""
    writers: int = 1
    options: AppendOptions = field(default_factory=AppendOptions)
    traces: bool = False
    """Whether to report the traces of the events."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the topic batches of one partition; the columns are those that `BatchJob.run` selects."""
        writer = _PartitionWriter(self)
        for unpacked in read_ahead(map(UnpackedMessages, group_portions(batches, ROWS_PER_APPEND, BYTES_PER_APPEND))):
            writer.write(unpacked)
        yield pa.RecordBatch.from_pylist(writer.results(), _RESULT_ARROW)

    def append_target(self, number: int) -> Target:
        """Return where the rows of a target go."""
        if number == INVALID_TARGET:
            return Target(subject=f"dead-letters.{subject_token(ORIGIN)}", stream=DEAD_LETTERS.stream)
        spec = self.targets[number]
        return Target(
            subject=f"{spec.name}.main",
            stream=f"stream:{spec.name}",
            floor=spec.floor,
            floor_subject=f"$KV.{ACKNOWLEDGED}.{spec.name}",
            floor_stream=f"KV_{ACKNOWLEDGED}",
            floor_tag=spec.incarnation,
            owner=spec.incarnation,
        )

    def hidden(self, number: int) -> tuple[str, ...]:
        """Return the hidden fields of a target."""
        return self.targets[number].hidden if number != INVALID_TARGET else ()


@dataclass(slots=True)
class _TargetOutcome:
    """The result for a target's rows up to now."""

    target: Target
    stored: int = 0
    skipped: int = 0
    refused: Refusal | None = None

    def add(self, outcome: Outcome) -> None:
        self.stored += outcome.stored
        self.skipped += outcome.skipped
        self.refused = outcome.refused

    def stop(self, at: TargetStop) -> None:
        """Stop the target at a position; a refusal of earlier rows stays."""
        if self.refused is None:
            self.refused = Refusal(at.position, at.reason, 0, RefusalKind.OTHER)


class _PartitionWriter:
    """Writes one partition."""

    def __init__(self, task: WriteTask) -> None:
        self._task = task
        self._outcomes: dict[int, _TargetOutcome] = {}
        self._resolver = Resolver(task.patterns, task.target_topics, [spec.floor for spec in task.targets])
        self._traces: set[str] = set()

    def write(self, unpacked: UnpackedMessages) -> None:
        resolved = self._resolver.resolve(unpacked)
        if self._task.traces and len(self._traces) < tracing.MOST_LINKS:
            self._traces.update(*map(find_traces, unpacked.rows.column("headers").chunks))
        writer = unpacked.topic_batches.column("writer")[0].as_py() if self._task.writers > 1 else None
        by_target = rows_by_target(unpacked, writer, self._task.writers, resolved.excluded)
        open_targets = [
            target_rows
            for target_rows in self._before_stops(unpacked, by_target, resolved.stops)
            if not self._has_stopped(target_rows)
        ]
        tables = self._tables(unpacked, open_targets) if open_targets else {}
        while tables:
            work = [(self._outcome(number).target, table) for number, table in tables.items()]
            outcomes = append_once(self._task.address, work, self._task.options)
            again = {}
            for (number, table), outcome in zip(tables.items(), outcomes, strict=True):
                result = self._outcome(number)
                result.add(outcome)
                refusal = outcome.refused
                if refusal is not None and refusal.kind is RefusalKind.TOO_LARGE:
                    self._park_too_large(unpacked, number, refusal)
                    result.refused = None
                    result.target = replace(result.target, floor=refusal.position)
                    again[number] = table
                elif refusal is not None and number == INVALID_TARGET:
                    raise PublishRefused(
                        f"a message that is not an event cannot be parked: {refusal.reason}",
                        fix=f"{DEAD_LETTERS.stream} must take messages",
                        err_code=refusal.code,
                    )
            tables = again
        for target, stop in resolved.stops.items():
            if writer is None or target % self._task.writers == writer:
                self._outcome(target).stop(stop)

    def _before_stops(
        self, unpacked: UnpackedMessages, by_target: Iterable[TargetRows], stops: Mapping[int, TargetStop]
    ) -> Iterator[TargetRows]:
        """Yield the rows of each target, without those at or behind its stop."""
        for target_rows in by_target:
            stop = stops.get(target_rows.target)
            if stop is None:
                yield target_rows
                continue
            before = unpacked.rows.column("position").to_numpy()[target_rows.rows] < stop.position
            if before.any():
                yield TargetRows(target_rows.target, target_rows.rows[before])

    def _tables(self, unpacked: UnpackedMessages, open_targets: list[TargetRows]) -> dict[int, pa.Table]:
        """Return the rows of each target. Targets with the same rows share a table, which is then prepared once."""
        whole = message_table(unpacked)
        redacted = self._redacted_tables(whole, open_targets)
        shared: dict[tuple[bytes, tuple[str, ...]], pa.Table] = {}
        tables = {}
        for target_rows in open_targets:
            rows = pa.array(target_rows.rows)
            if target_rows.target == INVALID_TARGET:
                tables[target_rows.target] = dead_letter_table(unpacked.take_rows(target_rows.rows))
                continue
            hidden = self._task.hidden(target_rows.target)
            table = redacted.get(hidden, whole)
            key = target_rows.rows.tobytes(), () if table is whole and hidden in redacted else hidden
            if key not in shared:
                taken = table if len(rows) == table.num_rows else table.take(rows)
                shared[key] = taken if hidden in redacted else redact_table(taken, hidden)
            tables[target_rows.target] = shared[key]
        return tables

    def _redacted_tables(self, whole: pa.Table, open_targets: list[TargetRows]) -> dict[tuple[str, ...], pa.Table]:
        """Redact all rows at once for targets with the same hidden fields, where that saves work."""
        rows: Counter[tuple[str, ...]] = Counter()
        for target_rows in open_targets:
            rows[self._task.hidden(target_rows.target)] += len(target_rows.rows)
        return {hidden: redact_table(whole, hidden) for hidden, count in rows.items() if count >= whole.num_rows}

    def _outcome(self, number: int) -> _TargetOutcome:
        if number not in self._outcomes:
            self._outcomes[number] = _TargetOutcome(self._task.append_target(number))
        return self._outcomes[number]

    def _has_stopped(self, target_rows: TargetRows) -> bool:
        return target_rows.target in self._outcomes and self._outcomes[target_rows.target].refused is not None

    def _park_too_large(self, unpacked: UnpackedMessages, number: int, refusal: Refusal) -> None:
        at = np.searchsorted(unpacked.rows.column("position").to_numpy(), [refusal.position])
        [row] = unpacked.take_rows(at)
        if number == INVALID_TARGET:
            parked = invalid_dead_letter(row)
        else:
            row["data"] = redact(row["data"], self._task.hidden(number))
            parked = make_dead_letter(
                row, f"too large for the queue: {refusal.reason}", origin=self._task.targets[number].name
            )
        asyncio.run(_park(self._task.address, parked))

    def results(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [
            {"realm": realm, "topic": topic, "matching": sorted(matching)}
            for (realm, topic), matching in islice(sorted(self._resolver.topics.items()), MAX_KNOWN_TOPICS)
        ]
        waits = metrics.MIGRATION_WAITS.take_finished()
        rows += [{"waits": waits}] if waits is not None else []
        rows += [{"trace": trace} for trace in sorted(self._traces)[: tracing.MOST_LINKS]]
        for number, result in self._outcomes.items():
            row: dict[str, Any] = {"target": number, "stored": result.stored, "skipped": result.skipped}
            refusal = result.refused
            if refusal is not None:
                row |= {
                    "refused_at": refusal.position,
                    "kind": refusal.kind.value,
                    "code": refusal.code,
                    "reason": refusal.reason,
                }
            rows.append(row)
        return rows


async def _park(address: Address, parked: DeadLetter) -> None:
    async with connect(address, name="purveyor-dispatch") as queues:
        await park(queues, parked)
