"""What the console knows at a moment: plain values, read by `gather`, judged by `flow`, shown by the pages."""

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
    """What a queue is for."""

    INTERNAL = "internal"
    SUBSCRIPTION = "subscription"
    STAGE = "stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """A queue as the server has it."""

    name: str
    kind: QueueKind
    messages: int = 0
    bytes: int = 0
    last_sequence: int = 0
    oldest: datetime | None = None
    sealed: bool = False
    consumers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderFacts:
    """A durable consumer of a queue: up to where it has acknowledged, and what is left for it."""

    durable: str
    ack_floor: int = 0
    pending: int = 0
    unanswered: int = 0
    redelivered: int = 0
    waiting: int = 0
    keeps_newest: bool = False
    """It is there to hold its newest message, and never lets go of it: what it holds is no backlog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """A part of the pipeline, as it said itself."""

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
    def of(cls, told: Json) -> "PartFacts":
        """From its notice; what is missing or strange counts as unknown."""

        def whole(name: str) -> int | None:
            value = told.get(name)
            return value if isinstance(value, int) else None

        rate = told.get("rows_per_second")
        return cls(
            name=str(told.get("part") or "?"),
            state=str(told.get("state") or "?"),
            position=whole("position"),
            lag=whole("lag"),
            rows=whole("rows") or 0,
            rows_per_second=float(rate) if isinstance(rate, int | float) else 0.0,
            batch=whole("batch"),
            batch_ms=whole("batch_ms"),
            restarts=whole("restarts") or 0,
            error=str(told["error"]) if told.get("error") else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFacts:
    """A pipeline process, by its last notice on the board."""

    label: str
    at: datetime
    host: str = ""
    pid: int | None = None
    group: str = ""
    spark_ui: str | None = None
    stopped: bool = False
    parts: tuple[PartFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything at one moment. With a `problem` the rest is what was known before."""

    at: datetime
    problem: str | None = None
    fix: str | None = None
    queues: Mapping[str, QueueFacts] = field(default_factory=dict)
    readers: Mapping[str, tuple[ReaderFacts, ...]] = field(default_factory=dict)
    subscriptions: Mapping[str, Registered] = field(default_factory=dict)
    unreadable: Mapping[str, Unreadable] = field(default_factory=dict)
    """Subscriptions that this program does not understand."""
    pipelines: tuple[PipelineFacts, ...] = ()
    dead_letters: Mapping[str, int] = field(default_factory=dict)
    """How many there are, by the last token of their subject: which part or queue gave up."""

    @property
    def parts(self) -> dict[str, tuple[PipelineFacts, PartFacts]]:
        """The parts of all pipelines by name; of several of a name the one that spoke last."""
        newest_last = sorted(self.pipelines, key=lambda pipeline: (not pipeline.stopped, pipeline.at))
        return {part.name: (pipeline, part) for pipeline in newest_last for part in pipeline.parts}

    @property
    def dead(self) -> int:
        """All dead letters."""
        return sum(self.dead_letters.values())

    @property
    def dispatcher(self) -> str:
        """The durable of `incoming` that dispatch reads by. Of several groups one is shown: each gets all events."""
        groups = [reader.durable for reader in self.readers.get("incoming", ()) if reader.durable not in _NO_GROUP]
        return DEFAULT_GROUP if DEFAULT_GROUP in groups or not groups else groups[0]

    def reader(self, queue: str, durable: str) -> ReaderFacts | None:
        """One reader of a queue."""
        return next((reader for reader in self.readers.get(queue, ()) if reader.durable == durable), None)
