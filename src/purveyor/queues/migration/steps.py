"""The steps of a migration by name, in their order, and who hears of them: people by progress, tests by a crash."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Step(Enum):
    """What has just been done. A crash after any of them is recovered by whoever comes next."""

    RECORDED = "recorded"
    """The record of the migration is written; the stream is as it was."""
    SEALED = "sealed"
    """Nothing can be written any more, and up to which sequence it was is noted."""
    PAUSED = "paused"
    """Snapshot: its readers get nothing more, and what they had in hand is answered."""
    ARCHIVED = "archived"
    """Snapshot: everything lies on disk, checked."""
    DRAINED = "drained"
    """It holds no message, and the lease is ours."""
    DELETED = "deleted"
    """The old stream is gone."""
    CREATED = "created"
    """The new stream is there: publishers can go on."""
    READERS_MADE = "readers made"
    """Its durables are there."""
    CONVERTED = "converted"
    """Its retention is the wanted one."""
    DONE = "done"
    """The record says so."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a migration is; `total` 0 where that is not known."""

    queue: str
    what: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to migrate. `archives` is where a snapshot goes; without it queues are only drained."""

    archives: Path | None = None
    lease_seconds: float = 10.0
    """One that works on a queue and is not heard of for so long has lost it to the next."""
    grace_seconds: float = 0.25
    """A sealed stream is not replaced sooner: what publishers have under way is to be refused, all of it."""
    stuck_seconds: float = 1.0
    """Messages that nobody waits for and nobody has in hand for so long are parked."""
    in_flight_seconds: float = 60.0
    """Before a snapshot, messages in hand are waited for until their ack wait is over, and no longer than this."""
    on_step: Callable[[Step], None] = lambda _step: None
    on_progress: Callable[[Progress], None] = lambda _progress: None
