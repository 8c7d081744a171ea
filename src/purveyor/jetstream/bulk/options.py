"""Options and results of the bulk path: publishing, reading and appending."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import pyarrow as pa

from purveyor.jetstream.bulk import arrow_columns
from purveyor.jetstream.headers import POSITION
from purveyor.model.errors import InvalidConfig
from purveyor.model.name_rules import check_header, check_name, check_subject

SCHEMA: Final = pa.schema(
    [
        pa.field("sequence", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("subject", pa.string()),
        pa.field("headers", arrow_columns.HEADERS_TYPE),
        pa.field("data", pa.binary()),
    ]
)
"""The columns that `read_range` returns."""

OUTGOING_SCHEMA: Final = pa.schema(
    [
        pa.field("subject", pa.string()),
        pa.field("data", pa.binary()),
        pa.field("headers", arrow_columns.HEADERS_TYPE),
        pa.field("msg_id", pa.string()),
    ]
)
"""The columns that `publish_many` takes; `headers` and `msg_id` are optional."""

MAX_BATCH_ROWS: Final = 1000
"""The maximum number of messages that a server takes in one atomic batch."""


class PublishMode(Enum):
    """How messages are stored."""

    PIPELINED = "pipelined"
    """One by one, thousands in flight. The fastest mode."""
    ATOMIC = "atomic"
    """In batches of up to 1000, each stored as a whole or not at all. The stream must have `allow_atomic`.

    A record batch of up to 1000 rows is one such batch; a larger one is split. All messages go to one stream.
    """


class Route(Enum):
    """How a range is read."""

    AUTO = "auto"
    """Chosen by the configuration of the stream and the length of the range."""
    DIRECT = "direct"
    """With direct gets, which leave no trace on the server. The stream must have `allow_direct`."""
    CONSUMER = "consumer"
    """With a temporary consumer: the fastest way for long ranges, where it does not change what the stream keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """Options of `publish_many`. It calls `on_progress` with the number of messages acknowledged so far."""

    mode: PublishMode = PublishMode.PIPELINED
    window: int = 20_000
    """The maximum number of messages in flight (at most 1,000 to a cluster, which queues not many more)."""
    window_bytes: int = 16 << 20
    """The approximate maximum of bytes in flight (one message may be larger)."""
    expected_stream: str | None = None
    """Raise PublishRefused for messages that another stream would take."""
    patience_seconds: float = 60.0
    """How long to wait for an unavailable server or stream."""
    on_progress: Callable[[int], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.window < 1 or self.window_bytes < 1:
            raise InvalidConfig("the window of a bulk publish must be at least 1", fix="leave it at its default")
        if self.expected_stream is not None:
            check_name(self.expected_stream)


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The result for all messages: `stored` by this call, or stored before (`duplicates`, by message id).

    A message stored just before a connection broke, and sent again after it, counts as a duplicate.
    """

    stored: int
    duplicates: int
    last_sequences: Mapping[str, int]
    """The highest acknowledged sequence per stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Options of `read_range`: what to read, and the size of the batches."""

    subjects: tuple[str, ...] = ()
    """Read only these subjects (wildcards allowed); empty: all."""
    columns: tuple[str, ...] | None = None
    """Return only these columns of `SCHEMA` (in its order); the others are not built."""
    raw_headers: bool = False
    """Return headers as blocks of the protocol (binary, empty without headers), to forward them unparsed."""
    batch_rows: int = 20_000
    batch_bytes: int = 3 << 20
    """The approximate maximum size of a batch (one message may be larger)."""
    route: Route = Route.AUTO
    retained_by_durable: bool = False
    """A durable of the caller keeps the range: a temporary consumer then changes nothing on an interest stream."""
    patience_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.batch_rows < 1 or self.batch_bytes < 1:
            raise InvalidConfig("batches to read must hold at least one row", fix="leave them at their default")
        for subject in self.subjects:
            check_subject(subject, wildcards=True)
        unknown = [name for name in self.columns or () if name not in SCHEMA.names]
        if unknown or self.columns == ():
            raise InvalidConfig(
                f"no such columns: {', '.join(unknown) or 'none at all'}", fix=f"choose from {', '.join(SCHEMA.names)}"
            )

    @property
    def schema(self) -> pa.Schema:
        """The columns of the returned batches."""
        chosen = SCHEMA if self.columns is None else [column for column in SCHEMA if column.name in self.columns]
        raw = pa.field("headers", pa.binary())
        return pa.schema([raw if self.raw_headers and column.name == "headers" else column for column in chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The subject that `append_once` writes to, and where it reads the last written position."""

    subject: str
    """Its stream should have `allow_atomic`: without it, the stream refuses more than a few rows outside a chain."""
    stream: str
    floor: int = 0
    """Rows at or below this position count as written, regardless of what the stream holds."""
    floor_subject: str | None = None
    """The subject of a message (for example in a bucket) whose JSON field `position` is a floor as well: the last
    acknowledged position, for a queue that deletes acknowledged messages. It must be raised before a message is
    deleted."""
    floor_stream: str | None = None
    floor_tag: str | None = None
    """If given, the floor counts only if the JSON field `incarnation` has this value."""
    owner: str | None = None
    """If given, the stream is written only while its metadata do not name another incarnation. If a stream is deleted
    and created again under its name for another owner, no row is written to the new one: the writer checks the owner
    before each write that does not depend on a read message, and expects sequences, which never repeat for a name."""
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
    """Why a target refused a row, as far as a caller acts on it."""

    MISSING_STREAM = "missing stream"
    FULL = "full"
    """A limit of the stream, the account or the disk is reached."""
    DENIED = "denied"
    """The credentials do not allow it."""
    TOO_LARGE = "too large"
    """This one row; the rows after it can be written with `floor` at its position."""
    REPLACED = "replaced"
    """The stream now belongs to another owner."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first position that was not written, and why. `code` is the server's err_code (10000 and up) or status."""

    position: int
    reason: str
    code: int
    kind: RefusalKind


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one target: it has all rows, or all rows before the refused position."""

    target: Target
    stored: int
    skipped: int
    """Rows that the target had; also those that a second writer, or this call before a break, wrote meanwhile."""
    last_position: int
    """The highest position known to be written; 0 if none."""
    refused: Refusal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendOptions:
    """Options of `append_once`. It calls `on_progress` with the number of rows stored so far in all targets."""

    batch_rows: int = MAX_BATCH_ROWS
    """The maximum number of rows in an atomic batch."""
    window_bytes: int = 16 << 20
    """The approximate maximum of bytes in flight (one row may be larger)."""
    patience_seconds: float = 60.0
    """How long to wait for an unavailable server, or for a stream without a leader."""
    on_progress: Callable[[int], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.batch_rows <= MAX_BATCH_ROWS or self.window_bytes < 1:
            raise InvalidConfig(f"a batch has 1 to {MAX_BATCH_ROWS} rows, the window at least a byte", fix="omit them")
