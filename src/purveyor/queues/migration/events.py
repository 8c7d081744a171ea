"""The reports of a running migration: steps, events and progress; and the options that name their receivers.

Operators read events as log lines of the logger `purveyor.migration`, in the words of the older system. Programs
receive them as objects (`MigrationOptions.on_event`) and never parse the text.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeAlias

_log = logging.getLogger("purveyor.migration")


class Step(Enum):
    """A step that is done. The next process that works on the migration recovers from a crash after any of them."""

    RECORDED = "recorded"
    """The record of the migration is written; the stream is unchanged."""
    SEALED = "sealed"
    """Nothing can be written any more, and the record has the last sequence."""
    PAUSED = "paused"
    """Snapshot: the readers receive nothing more, and have answered for the messages that they had."""
    ARCHIVED = "archived"
    """Snapshot: everything is on disk and checked."""
    DRAINED = "drained"
    """The stream holds no message, and this process has the lease."""
    DELETED = "deleted"
    """The old stream is deleted."""
    CREATED = "created"
    """The new stream exists: publishers can continue."""
    READERS_MADE = "readers made"
    """Its durables exist."""
    CONVERTED = "converted"
    """It has the wanted retention."""
    DONE = "done"
    """The record says that the migration is done."""


@dataclass(frozen=True, slots=True)
class StreamSealed:
    """This process sealed a stream."""

    stream: str

    def __str__(self) -> str:
        return f"Stream '{self.stream}' sealed for migration"


@dataclass(frozen=True, slots=True)
class StreamDraining:
    """A sealed stream still holds messages."""

    stream: str
    messages: int

    def __str__(self) -> str:
        return f"Stream '{self.stream}' sealed with {self.messages} messages remaining to drain"


@dataclass(frozen=True, slots=True)
class StreamDrained:
    """A sealed stream is empty."""

    stream: str

    def __str__(self) -> str:
        return f"Sealed stream '{self.stream}' is empty, completing migration"


@dataclass(frozen=True, slots=True)
class MigrationCompleted:
    """The new stream is in use."""

    stream: str

    def __str__(self) -> str:
        return f"Migration completed for '{self.stream}'"


@dataclass(frozen=True, slots=True)
class OperationResumed:
    """A reader, or all queues of a process, have left the migration behind."""

    def __str__(self) -> str:
        return "Stream migration completed, resuming normal operation"


@dataclass(frozen=True, slots=True)
class MigrationWarning:
    """Something that an operator should know."""

    text: str

    def __str__(self) -> str:
        return self.text


MigrationEvent: TypeAlias = (
    StreamSealed | StreamDraining | StreamDrained | MigrationCompleted | OperationResumed | MigrationWarning
)
EventListener: TypeAlias = Callable[[MigrationEvent], None]


def log_event(event: MigrationEvent) -> None:
    """Log an event: the listener where no other one is set."""
    _log.log(logging.WARNING if isinstance(event, MigrationWarning) else logging.INFO, "%s", event)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a migration is; `total` is 0 where it is unknown."""

    queue: str
    what: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationOptions:
    """How to migrate. Snapshots go to `archives`; without it queues are only drained."""

    archives: Path | None = None
    lease_seconds: float = 10.0
    """A process that does not renew its lease on a queue for this long loses it to the next."""
    grace_seconds: float = 0.25
    """The shortest time between sealing and replacing a stream, so that the server refuses messages in flight."""
    stuck_seconds: float = 1.0
    """Messages that no consumer will deliver again are parked after this time."""
    in_flight_seconds: float = 60.0
    """The longest wait, before a snapshot, for readers to answer for the messages that they have. At most their ack
    wait is waited for."""
    on_step: Callable[[Step], None] = lambda _step: None
    on_event: EventListener = log_event
    on_progress: Callable[[Progress], None] = lambda _progress: None
