"""The state of the system at one moment, as plain values, and the collector that reads it for the console.

The collector needs a few requests for any number of subscriptions. All pages that ask within a second share one
snapshot. While no page is open, the collector still reads periodically, so that an operator who opens the console at
night sees the last hour.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Final

from purveyor.app.console.time_series import History, Key
from purveyor.app.http.context import Services
from purveyor.app.telemetry.queue_metrics import kind_of
from purveyor.delivery.push.push_reports import PushProblem, read_problems
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.jetstream.streams import StreamUsage
from purveyor.model.errors import PurveyorError, Unavailable, UnknownStream
from purveyor.model.json_fields import Json
from purveyor.model.metrics import DELIVERED, REDELIVERED, RETURNED
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues import status_board
from purveyor.queues.catalogue import DEFAULT_GROUP, keeps_newest
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.store import DeadLetterStore
from purveyor.queues.registry import Registered, Unreadable
from purveyor.queues.status_board import STANDBY_PREFIX, Notice
from purveyor.sources.ldap.source_status import SourceReport, read_sources

_ARCHIVE: Final = "archive"
SILENT_SECONDS: Final = 10.0
"""The console treats a pipeline without a status for this time as not running."""


class QueueKind(Enum):
    """The purpose of a queue."""

    INTERNAL = "internal"
    SUBSCRIPTION = "subscription"
    STAGE = "stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """The state of a queue."""

    name: str
    kind: QueueKind
    messages: int = 0
    bytes: int = 0
    last_sequence: int = 0
    oldest: datetime | None = None
    sealed: bool = False
    consumers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSnapshot:
    """The state of a durable consumer of a queue."""

    durable: str
    ack_floor: int = 0
    pending: int = 0
    unanswered: int = 0
    redelivered: int = 0
    waiting: int = 0
    keeps_newest: bool = False
    """True: it exists to keep its newest message in the queue, so its pending messages are no backlog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSnapshot:
    """The state of a pipeline part, from its own report."""

    name: str
    state: str
    position: int | None = None
    lag: int | None = None
    rows: int = 0
    rows_per_second: float = 0.0
    batch: int | None = None
    batch_ms: int | None = None
    restarts: int = 0
    error: str | None = None

    @classmethod
    def of(cls, report: Json) -> "PartSnapshot":
        """Return the state from a notice. A missing or invalid value is unknown."""

        def whole(name: str) -> int | None:
            value = report.get(name)
            return value if isinstance(value, int) else None

        rate = report.get("rows_per_second")
        return cls(
            name=str(report.get("part") or "?"),
            state=str(report.get("state") or "?"),
            position=whole("position"),
            lag=whole("lag"),
            rows=whole("rows") or 0,
            rows_per_second=float(rate) if isinstance(rate, int | float) else 0.0,
            batch=whole("batch"),
            batch_ms=whole("batch_ms"),
            restarts=whole("restarts") or 0,
            error=str(report["error"]) if report.get("error") else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSnapshot:
    """The state of a pipeline process, from its last notice on the status board."""

    label: str
    at: datetime
    host: str = ""
    pid: int | None = None
    group: str = ""
    spark_ui: str | None = None
    stopped: bool = False
    state: str | None = None
    """Of a standby: `warming` or `standby`."""
    parts: tuple[PartSnapshot, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSnapshot:
    """The state of the whole system. With a `problem`, the other values are those of the last successful read."""

    at: datetime
    problem: str | None = None
    fix: str | None = None
    queues: Mapping[str, QueueSnapshot] = field(default_factory=dict)
    readers: Mapping[str, tuple[ReaderSnapshot, ...]] = field(default_factory=dict)
    subscriptions: Mapping[str, Registered] = field(default_factory=dict)
    unreadable: Mapping[str, Unreadable] = field(default_factory=dict)
    """Subscriptions whose records this version cannot read."""
    pipelines: tuple[PipelineSnapshot, ...] = ()
    standbys: tuple[PipelineSnapshot, ...] = ()
    """The pipelines that wait to take over."""
    sources: tuple[SourceReport, ...] = ()
    """The sources that follow directories."""
    push_problems: Mapping[str, PushProblem] = field(default_factory=dict)
    """Why subscriptions are not pushed, by name."""
    dead_letters: Mapping[str, int] = field(default_factory=dict)
    """The number of dead letters by the last token of their subject: the part or subscription that gave up."""

    @property
    def parts(self) -> dict[str, tuple[PipelineSnapshot, PartSnapshot]]:
        """The parts of all pipelines by name. Of several with one name, the one that reported last."""
        newest_last = sorted(self.pipelines, key=lambda pipeline: (not pipeline.stopped, pipeline.at))
        return {part.name: (pipeline, part) for pipeline in newest_last for part in pipeline.parts}

    @property
    def dead_letter_total(self) -> int:
        """The number of all dead letters."""
        return sum(self.dead_letters.values())

    @property
    def dispatcher(self) -> str:
        """The durable of `incoming` that the dispatcher reads. Of several groups the console shows one."""
        durables = [reader.durable for reader in self.readers.get("incoming", ())]
        groups = [each for each in durables if each != _ARCHIVE and not keeps_newest(each)]
        return DEFAULT_GROUP if DEFAULT_GROUP in groups or not groups else groups[0]

    @property
    def part_readers(self) -> dict[str, tuple[str, str]]:
        """The queue and the durable that each part of the pipeline reads."""
        return {
            "transform": ("ldif", "transformer"),
            "dispatch": ("incoming", self.dispatcher),
            "archive": ("incoming", "archive"),
            "prefill": ("prefill", "prefill"),
        }

    def reader(self, queue: str, durable: str) -> ReaderSnapshot | None:
        """Return a reader of a queue."""
        return next((reader for reader in self.readers.get(queue, ()) if reader.durable == durable), None)

    def processed(self, queue: str, durable: str) -> int | None:
        """Return the sequence up to which a reader has processed its queue; None without such a reader.

        A part reports its position with each batch. It moves its durable later, some parts by minutes: until then the
        queue keeps the messages, so that they can be read again.
        """
        reader, found = self.reader(queue, durable), self.queues.get(queue)
        if reader is None:
            return None
        name = next((part for part, source in self.part_readers.items() if source == (queue, durable)), None)
        pipeline, part = self.parts.get(name or "", (None, None))
        if pipeline is None or part is None or part.position is None or found is None:
            return reader.ack_floor
        of_another = name == "dispatch" and pipeline.group not in ("", durable)
        if of_another or part.position > found.last_sequence:  # of another group, or of a stream that was made again
            return reader.ack_floor
        return max(reader.ack_floor, part.position)

    def backlog(self, queue: str, durable: str) -> int:
        """Return the number of messages that a reader has not processed."""
        reader, done, found = self.reader(queue, durable), self.processed(queue, durable), self.queues.get(queue)
        if reader is None or done is None:
            return 0
        waiting = reader.pending + reader.unanswered
        return waiting if found is None or done == reader.ack_floor else min(waiting, found.last_sequence - done)


_log = logging.getLogger(__name__)
FRESH_SECONDS: Final = 0.8
_REST_FACTOR: Final = 20
"""A snapshot stays fresh for this multiple of the CPU time it took: with thousands of queues it is read less often."""
_MAX_FRESH_SECONDS: Final = 5.0
_IDLE_INTERVAL_SECONDS: Final = 15.0
_TIMEOUT_SECONDS: Final = 3.0
_READ_BY_DURABLES: Final = ("ldif", "incoming", "prefill")


class Collector:
    """Reads snapshots of one server. `read` never raises: a server that does not answer is part of the snapshot."""

    def __init__(self, services: Callable[[], Services]) -> None:
        self._services = services
        self._lock = asyncio.Lock()
        self._latest = SystemSnapshot(
            at=datetime.now(UTC), problem="The console has not read the queues yet", fix="Wait a moment"
        )
        self._read_at = float("-inf")
        self._fresh_seconds = FRESH_SECONDS
        self.history = History()

    async def run(self) -> None:
        """Read snapshots periodically, until cancelled."""
        while True:
            with contextlib.suppress(Exception):  # the next request of a page reports it
                await self.read()
            await asyncio.sleep(_IDLE_INTERVAL_SECONDS)

    async def read(self, *, fresh: bool = False) -> SystemSnapshot:
        """Return a snapshot, usually at most a second old. `fresh`: read it now, after a change by the operator."""
        async with self._lock:
            if fresh or time.monotonic() - self._read_at > self._fresh_seconds:
                cpu_before = time.thread_time()
                self._latest = await self._collect()
                self._read_at = time.monotonic()
                rest = _REST_FACTOR * (time.thread_time() - cpu_before)
                self._fresh_seconds = min(max(FRESH_SECONDS, rest), _MAX_FRESH_SECONDS)
            return self._latest

    async def _collect(self) -> SystemSnapshot:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                found = await self._read_all(self._services())
        except (TimeoutError, Unavailable) as error:
            problem = error.message if isinstance(error, PurveyorError) else "The NATS server does not answer"
            return replace(self._latest, at=datetime.now(UTC), problem=problem, fix=_fix(error))
        except PurveyorError as error:
            _log.warning("the console cannot read the queues: %s", error)
            return replace(self._latest, at=datetime.now(UTC), problem=error.message, fix=_fix(error))
        self.history.add(found.at.timestamp(), recorded_numbers(found))
        return found

    async def _read_all(self, services: Services) -> SystemSnapshot:
        queues = services.queues
        await queues.connection.wait_until_connected(_TIMEOUT_SECONDS)
        usage = await queues.streams.usage()
        last_sequences = {stream_usage.stream: stream_usage.last_sequence for stream_usage in usage}
        registered = await services.registry_snapshots.read()
        readers = {
            name: await _readers(queues, f"{STREAM_PREFIX}{name}")
            for name in _READ_BY_DURABLES
            if f"{STREAM_PREFIX}{name}" in last_sequences
        }
        return SystemSnapshot(
            at=datetime.now(UTC),
            queues=queue_snapshots(usage, frozenset({*registered.subscriptions, *registered.unreadable})),
            readers=readers,
            subscriptions=registered.subscriptions,
            unreadable=registered.unreadable,
            pipelines=tuple(map(pipeline_snapshot, await status_board.read_notices(queues, "pipeline"))),
            standbys=tuple(map(pipeline_snapshot, await status_board.read_notices(queues, STANDBY_PREFIX))),
            sources=tuple(await read_sources(queues, datetime.now(UTC))),
            push_problems=await read_problems(queues, [*registered.subscriptions.values()]),
            dead_letters=await DeadLetterStore(queues).counts(),
        )


async def _readers(queues: Queues, stream: str) -> tuple[ReaderSnapshot, ...]:
    try:
        found = await queues.consumers.list(stream)
    except UnknownStream:  # removed meanwhile
        return ()
    return tuple(
        ReaderSnapshot(
            durable=each.name,
            ack_floor=each.ack_floor.stream_seq,
            pending=each.num_pending,
            unanswered=each.num_ack_pending,
            redelivered=each.num_redelivered,
            waiting=each.num_waiting,
            keeps_newest=keeps_newest(each.name),
        )
        for each in found
    )


def queue_snapshots(usage: Iterable[StreamUsage], subscriptions: frozenset[str]) -> dict[str, QueueSnapshot]:
    """Return Purveyor's queues by name, without other streams of the server. Pure."""
    found: dict[str, QueueSnapshot] = {}
    for stream_usage in usage:
        kind = kind_of(stream_usage.stream, subscriptions)
        if kind is None:
            continue
        name = stream_usage.stream.removeprefix(STREAM_PREFIX)
        found[name] = QueueSnapshot(
            name=name,
            kind=QueueKind(kind),
            messages=stream_usage.messages,
            bytes=stream_usage.bytes,
            last_sequence=stream_usage.last_sequence,
            oldest=stream_usage.oldest,
            sealed=stream_usage.sealed,
            consumers=stream_usage.consumers,
        )
    return found


def pipeline_snapshot(notice: Notice) -> PipelineSnapshot:
    """Return a pipeline from its notice on the status board. Pure."""
    status = notice.value
    pid = status.get("pid")
    parts = status.get("parts")
    return PipelineSnapshot(
        label=notice.key.partition(".")[2],
        at=notice.at or datetime.fromtimestamp(0, UTC),
        host=str(status.get("host") or ""),
        pid=pid if isinstance(pid, int) else None,
        group=str(status.get("group") or ""),
        spark_ui=str(status["spark_ui"]) if status.get("spark_ui") else None,
        stopped=status.get("stopped") is True,
        state=str(status["state"]) if status.get("state") else None,
        parts=tuple(PartSnapshot.of(part) for part in parts if isinstance(part, dict))
        if isinstance(parts, list)
        else (),
    )


def recorded_numbers(snapshot: SystemSnapshot) -> Mapping[Key, float]:
    """Return the numbers to record over time. Pure, apart from the counters of this process.

    last: how much was ever written to a queue. done: how much of that has left it. floor: how far a reader is.
    written: how far a prefill is. failed: attempts to push that endpoints refused, since the problem began.
    pipeline: the last report of any pipeline, as a time. The rest counts from the moment when a problem begins:
    `Series.still_seconds` of a value that is there only meanwhile is how long it has lasted.
    """
    found: dict[Key, float] = {}
    for name, queue in snapshot.queues.items():
        found["last", name] = queue.last_sequence
        found["done", name] = queue.last_sequence - queue.messages
        found["waiting", name] = queue.messages
    for name, readers in snapshot.readers.items():
        for reader in readers:
            found["floor", name, reader.durable] = snapshot.processed(name, reader.durable) or 0
    for origin, count in snapshot.dead_letters.items():
        found["dead", origin] = count
    found[("pipeline",)] = max((each.at.timestamp() for each in snapshot.pipelines), default=0.0)
    found |= _failed_attempts(snapshot)
    for name, registered in snapshot.subscriptions.items():
        if registered.prefill is not None and registered.prefill.status is PrefillStatus.RUNNING:
            found["written", name] = registered.prefill.written
        if registered.record.state is not RecordState.ACTIVE:
            found["unsettled", name] = 1
    for name, (_, part) in snapshot.parts.items():
        found["batch_ms", name] = part.batch_ms or 0
        found["batch", name] = part.batch or 0
        if part.error is not None:
            found["fails", name] = 1
        found["lag", name] = part.lag or 0
        found["rows_per_second", name] = part.rows_per_second
    for series, counter in (("delivered", DELIVERED), ("redelivered", REDELIVERED), ("returned", RETURNED)):
        for (name,), value in counter.values().items():
            found[series, name] = value
    return found


def _failed_attempts(snapshot: SystemSnapshot) -> dict[Key, float]:
    """Return how many attempts to push have failed since the problem of each subscription began."""
    found: dict[Key, float] = {}
    for name, registered in snapshot.subscriptions.items():
        if registered.record.definition.push is not None:
            problem = snapshot.push_problems.get(name)
            found["failed", name] = sum(each.attempts for each in problem.endpoints) if problem else 0
    return found


def is_working(snapshot: SystemSnapshot, history: History, part: str) -> bool:
    """Return whether a part has work or ended a batch within the last seconds. Pure."""
    return bool(
        snapshot.backlog(*snapshot.part_readers[part]) or history.of("batch", part).rate(snapshot.at.timestamp())
    )


def _fix(error: BaseException) -> str | None:
    return error.fix if isinstance(error, PurveyorError) else None
