"""The words of `append_once`: where rows go, how, and what became of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from purveyor.jetstream.headers import POSITION
from purveyor.model.errors import InvalidConfig
from purveyor.model.name_rules import check_header, check_name, check_subject

MOST_ROWS: Final = 1000
"""The most messages that a server takes in one atomic batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where rows go, and what tells how far it was written before."""

    subject: str
    """Its stream should have `allow_atomic`: without it rows are refused wherever a chain does not suit, unless few."""
    stream: str
    floor: int = 0
    """Rows at or below this position were written already, whatever the stream holds."""
    floor_subject: str | None = None
    """A message (in a bucket, say) whose JSON body names in `position` a floor as well: the position last acknowledged,
    for a queue from which acknowledged messages are deleted. It must be raised before a message is deleted."""
    floor_stream: str | None = None
    floor_tag: str | None = None
    """If given, the floor counts only when its body names this in `incarnation`."""
    owner: str | None = None
    """If given, the stream is written only while its metadata do not name another incarnation. Of a stream that is
    removed, made again under its name and owned by another, not one row is written to the new one: asked again before
    each write that is not bound to what was seen, and bound by sequences, which never begin anew for a name."""
    position_header: str = POSITION

    def __post_init__(self) -> None:
        check_subject(self.subject)
        check_name(self.stream)
        check_header(self.position_header, "")
        if (self.floor_subject is None) != (self.floor_stream is None):
            raise InvalidConfig("a floor needs both its subject and its stream", fix="give both, or neither")
        if self.floor_subject is not None and self.floor_stream is not None:
            check_subject(self.floor_subject)
            check_name(self.floor_stream)


class RefusalKind(Enum):
    """Why a target did not take a row, as far as a caller acts on it."""

    MISSING_STREAM = "missing stream"
    FULL = "full"
    """A limit of the stream, the account or the disk is reached."""
    DENIED = "denied"
    """The credentials do not allow it."""
    TOO_LARGE = "too large"
    """This one row; those behind it can be written with `floor` at its position."""
    REPLACED = "replaced"
    """It is the stream of another owner by now."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first position that was not written, and why. `code` is the server's reason (10000 and up) or status."""

    position: int
    reason: str
    code: int
    kind: RefusalKind


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the rows of one target: all of them are in it, or all before the position refused."""

    target: Target
    stored: int
    skipped: int
    """Rows that were there before; also those that a second writer, or this call before a break, wrote meanwhile."""
    last_position: int
    """The highest position known to be written; 0 if none is."""
    refused: Refusal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendOptions:
    """How to append. `on_progress` is called with the number of rows stored so far, over all targets."""

    batch_rows: int = MOST_ROWS
    """The most rows in an atomic batch."""
    window_bytes: int = 16 << 20
    """About so many bytes are under way without an answer (one row may be larger)."""
    patience_seconds: float = 60.0
    """How long to wait for a server that is away, or for a stream without a leader, before giving up."""
    on_progress: Callable[[int], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.batch_rows <= MOST_ROWS or self.window_bytes < 1:
            raise InvalidConfig(f"a batch has 1 to {MOST_ROWS} rows, the window at least a byte", fix="leave them out")
