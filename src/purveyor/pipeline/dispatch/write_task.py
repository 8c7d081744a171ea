"""The task that writes: packs with their targets come in order, and go into the queues of those targets.

Some portions at a time are written by one call of `append_once`, for all targets together. A queue that refuses gets no
more of this run, nor does a subscription whose expressions come to no result (see `resolve`); the driver is told where
it stopped, and decides. Only a row that is too large is dealt with here: it is parked before the rows behind it are
written, for once they are, it would count as written too.
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
from purveyor.model.redaction import censor
from purveyor.pipeline.dispatch.subscriber_messages import (
    INVALID,
    ORIGIN,
    Part,
    invalid,
    letter,
    letters,
    messages,
    parts,
    traces,
    without_hidden,
)
from purveyor.pipeline.dispatch.target_resolution import Resolver, Stop
from purveyor.pipeline.expressions import MOST_LEARNED, Choice, Pair
from purveyor.pipeline.topic_batches import Load, whole_portions
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import connect
from purveyor.queues.dead_letters.letter import DeadLetter, park, token
from purveyor.queues.registry import ACKNOWLEDGED
from purveyor.spark.read_ahead import read_ahead

ROWS_AT_ONCE: Final = 30_000
BYTES_AT_ONCE: Final = 32 << 20
"""About so much is written by one call."""
RESULT: Final = (
    "target int, stored bigint, skipped bigint, refused_at bigint, kind string, code int, reason string, "
    "realm string, topic string, matching array<int>, trace string, waits string"
)
"""One row for each target written; and, without a target, one for each topic that was not known (with the patterns that
match it), each trace that was met, and one if it had to wait for queues that were being migrated."""
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


class Place(NamedTuple):
    """What a task needs to know of a target: a subscription, where its rows begin, and what it never sees."""

    name: str
    incarnation: str
    floor: int
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a task needs to know; sent to it."""

    address: Address
    seats: tuple[Place, ...]
    patterns: tuple[Pair, ...] = ()
    """Realms and expressions that the targets ask for."""
    choices: tuple[Choice, ...] = ()
    """Which of them each target asks for."""
    writers: int = 1
    options: AppendOptions = field(default_factory=AppendOptions)
    traces: bool = False
    """Whether somebody wants to know which traces the events belong to."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the packs of one partition; columns as `batch.deliver` makes them."""
        run = _Run(self)
        for load in read_ahead(map(Load, whole_portions(batches, ROWS_AT_ONCE, BYTES_AT_ONCE))):
            run.write(load)
        yield pa.RecordBatch.from_pylist(run.results(), _RESULT_ARROW)

    def target(self, number: int) -> Target:
        """Where the rows of a target go."""
        if number == INVALID:
            return Target(subject=f"dead-letters.{token(ORIGIN)}", stream=DEAD_LETTERS.stream)
        place = self.seats[number]
        return Target(
            subject=f"{place.name}.main",
            stream=f"stream:{place.name}",
            floor=place.floor,
            floor_subject=f"$KV.{ACKNOWLEDGED}.{place.name}",
            floor_stream=f"KV_{ACKNOWLEDGED}",
            floor_tag=place.incarnation,
            owner=place.incarnation,
        )

    def hidden(self, number: int) -> tuple[str, ...]:
        """What a target never sees."""
        return self.seats[number].hidden if number != INVALID else ()


@dataclass(slots=True)
class _Account:
    """What became of a target's rows so far."""

    target: Target
    stored: int = 0
    skipped: int = 0
    refused: Refusal | None = None

    def add(self, outcome: Outcome) -> None:
        self.stored += outcome.stored
        self.skipped += outcome.skipped
        self.refused = outcome.refused

    def stop(self, at: Stop) -> None:
        """Nothing from there on is for it; what refused earlier rows stands."""
        if self.refused is None:
            self.refused = Refusal(at.position, at.reason, 0, RefusalKind.OTHER)


class _Run:
    """The writing of one partition."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._accounts: dict[int, _Account] = {}
        self._resolver = Resolver(task.patterns, task.choices, [place.floor for place in task.seats])
        self._traces: set[str] = set()

    def write(self, load: Load) -> None:
        resolved = self._resolver.resolve(load)
        if self._task.traces and len(self._traces) < tracing.MOST_LINKS:
            self._traces.update(*map(traces, load.rows.column("headers").chunks))
        writer = load.packs.column("writer")[0].as_py() if self._task.writers > 1 else None
        found = parts(load, writer, self._task.writers, resolved.left_out)
        open_ = [part for part in self._stopped(load, found, resolved.stops) if not self._is_closed(part)]
        tables = self._tables(load, open_) if open_ else {}
        while tables:
            work = [(self._account(number).target, table) for number, table in tables.items()]
            outcomes = append_once(self._task.address, work, self._task.options)
            again = {}
            for (number, table), outcome in zip(tables.items(), outcomes, strict=True):
                account = self._account(number)
                account.add(outcome)
                no = outcome.refused
                if no is not None and no.kind is RefusalKind.TOO_LARGE:
                    self._park(load, number, no)
                    account.refused = None
                    account.target = replace(account.target, floor=no.position)
                    again[number] = table
                elif no is not None and number == INVALID:
                    raise PublishRefused(
                        f"what is no event cannot be parked: {no.reason}",
                        fix=f"{DEAD_LETTERS.stream} must take messages",
                        err_code=no.code,
                    )
            tables = again
        for target, stop in resolved.stops.items():
            if writer is None or target % self._task.writers == writer:
                self._account(target).stop(stop)

    def _stopped(self, load: Load, found: Iterable[Part], stops: Mapping[int, Stop]) -> Iterator[Part]:
        """The parts, but of those who stop only what lies before that."""
        for part in found:
            stop = stops.get(part.target)
            if stop is None:
                yield part
                continue
            before = load.rows.column("position").to_numpy()[part.rows] < stop.position
            if before.any():
                yield Part(part.target, part.rows[before])

    def _tables(self, load: Load, open_: list[Part]) -> dict[int, pa.Table]:
        """The rows of each target; targets with the same rows share a table, which is then prepared once."""
        whole = messages(load)
        seen = self._seen(whole, open_)
        shared: dict[tuple[bytes, tuple[str, ...]], pa.Table] = {}
        tables = {}
        for part in open_:
            rows = pa.array(part.rows)
            if part.target == INVALID:
                tables[part.target] = letters(load.some(part.rows))
                continue
            hidden = self._task.hidden(part.target)
            table = seen.get(hidden, whole)
            key = part.rows.tobytes(), () if table is whole and hidden in seen else hidden
            if key not in shared:
                taken = table if len(rows) == table.num_rows else table.take(rows)
                shared[key] = taken if hidden in seen else without_hidden(taken, hidden)
            tables[part.target] = shared[key]
        return tables

    def _seen(self, whole: pa.Table, open_: list[Part]) -> dict[tuple[str, ...], pa.Table]:
        """All rows as they are seen by those who have the same fields hidden, where that saves work: else by part."""
        rows: Counter[tuple[str, ...]] = Counter()
        for part in open_:
            rows[self._task.hidden(part.target)] += len(part.rows)
        return {hidden: without_hidden(whole, hidden) for hidden, count in rows.items() if count >= whole.num_rows}

    def _account(self, number: int) -> _Account:
        if number not in self._accounts:
            self._accounts[number] = _Account(self._task.target(number))
        return self._accounts[number]

    def _is_closed(self, part: Part) -> bool:
        return part.target in self._accounts and self._accounts[part.target].refused is not None

    def _park(self, load: Load, number: int, no: Refusal) -> None:
        at = np.searchsorted(load.rows.column("position").to_numpy(), [no.position])
        [row] = load.some(at)
        if number == INVALID:
            parked = invalid(row)
        else:
            row["data"] = censor(row["data"], self._task.hidden(number))
            parked = letter(row, f"too large for the queue: {no.reason}", origin=self._task.seats[number].name)
        asyncio.run(_park(self._task.address, parked))

    def results(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [
            {"realm": realm, "topic": topic, "matching": sorted(matching)}
            for (realm, topic), matching in islice(sorted(self._resolver.topics.items()), MOST_LEARNED)
        ]
        waits = metrics.MIGRATION_WAITS.take()
        rows += [{"waits": waits}] if waits is not None else []
        rows += [{"trace": trace} for trace in sorted(self._traces)[: tracing.MOST_LINKS]]
        for number, account in self._accounts.items():
            row: dict[str, Any] = {"target": number, "stored": account.stored, "skipped": account.skipped}
            no = account.refused
            if no is not None:
                row |= {"refused_at": no.position, "kind": no.kind.value, "code": no.code, "reason": no.reason}
            rows.append(row)
        return rows


async def _park(address: Address, parked: DeadLetter) -> None:
    async with connect(address, name="purveyor-dispatch") as queues:
        await park(queues, parked)
