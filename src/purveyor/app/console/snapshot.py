"""The state of the system at one moment, as plain values. `collector` reads it, `alerts` and the pages use it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Final

from purveyor.model.json_fields import Json
from purveyor.queues.catalogue import DEFAULT_GROUP, RECEIPTS
from purveyor.queues.registry import Registered, Unreadable

_NO_GROUP: Final = ("archive", RECEIPTS)


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
        groups = [reader.durable for reader in self.readers.get("incoming", ()) if reader.durable not in _NO_GROUP]
        return DEFAULT_GROUP if DEFAULT_GROUP in groups or not groups else groups[0]

    def reader(self, queue: str, durable: str) -> ReaderSnapshot | None:
        """Return a reader of a queue."""
        return next((reader for reader in self.readers.get(queue, ()) if reader.durable == durable), None)
