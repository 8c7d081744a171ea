"""The words of the bulk path: how to publish and to read, and what came of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import pyarrow as pa

from purveyor.jetstream.bulk import header_columns
from purveyor.model.errors import InvalidConfig
from purveyor.model.name_rules import check_name, check_subject

SCHEMA: Final = pa.schema(
    [
        pa.field("sequence", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("subject", pa.string()),
        pa.field("headers", header_columns.TYPE),
        pa.field("data", pa.binary()),
    ]
)
"""What `read_range` gives."""

OUTGOING_SCHEMA: Final = pa.schema(
    [
        pa.field("subject", pa.string()),
        pa.field("data", pa.binary()),
        pa.field("headers", header_columns.TYPE),
        pa.field("msg_id", pa.string()),
    ]
)
"""What `publish_many` takes; `headers` and `msg_id` may be left out."""


class PublishMode(Enum):
    """How messages are stored."""

    PIPELINED = "pipelined"
    """One by one, thousands under way. The fastest."""
    ATOMIC = "atomic"
    """In batches of up to 1000, each stored whole or not at all. The stream must have `allow_atomic`.

    A record batch of up to 1000 rows is one such batch; a larger one is cut. All of them go to one stream.
    """


class Route(Enum):
    """How a range is read."""

    AUTO = "auto"
    """By what the stream is and how long the range."""
    DIRECT = "direct"
    """With direct gets: no trace on the server. The stream must have `allow_direct`."""
    CONSUMER = "consumer"
    """With a consumer of our own that goes away: the fastest for long ranges, where it changes nothing that is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """How to publish. `on_progress` is called with the number of messages acknowledged so far."""

    mode: PublishMode = PublishMode.PIPELINED
    window: int = 20_000
    """At most so many messages are under way without an answer (1,000 to a cluster, which takes not many more) ..."""
    window_bytes: int = 16 << 20
    """... and about so many bytes (one message may be larger)."""
    expected_stream: str | None = None
    """Refuse messages that another stream would take."""
    patience_seconds: float = 60.0
    """How long to wait for a server or stream that is away before giving up."""
    on_progress: Callable[[int], None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.window < 1 or self.window_bytes < 1:
            raise InvalidConfig("the window of a bulk publish must be at least 1", fix="leave it at its default")
        if self.expected_stream is not None:
            check_name(self.expected_stream)


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What became of all messages: `stored` now, or known to the server already (`duplicates`, by message id).

    A message that was stored just before a connection broke, and sent again after, counts as a duplicate.
    """

    stored: int
    duplicates: int
    last_sequences: Mapping[str, int]
    """The highest sequence acknowledged, per stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What to read of a range, and in which portions."""

    subjects: tuple[str, ...] = ()
    """Only these, wildcards allowed; none given means all."""
    columns: tuple[str, ...] | None = None
    """Only these columns of `SCHEMA` (in its order): what is not asked for is not built."""
    raw_headers: bool = False
    """Headers as blocks of the protocol (binary, empty where there are none), for those who hand them on unread."""
    batch_rows: int = 20_000
    batch_bytes: int = 3 << 20
    """A batch is about this large at most (one message may be larger)."""
    route: Route = Route.AUTO
    kept_for_us: bool = False
    """A durable of ours keeps the range: then a passing consumer changes nothing on an interest stream either."""
    patience_seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.batch_rows < 1 or self.batch_bytes < 1:
            raise InvalidConfig("batches to read must hold at least one row", fix="leave them at their default")
        for subject in self.subjects:
            check_subject(subject, wildcards=True)
        unknown = [name for name in self.columns or () if name not in SCHEMA.names]
        if unknown or self.columns == ():
            raise InvalidConfig(
                f"no such columns: {', '.join(unknown) or 'none at all'}", fix=f"choose of {', '.join(SCHEMA.names)}"
            )

    @property
    def schema(self) -> pa.Schema:
        """The columns of the batches."""
        chosen = SCHEMA if self.columns is None else [column for column in SCHEMA if column.name in self.columns]
        raw = pa.field("headers", pa.binary())
        return pa.schema([raw if self.raw_headers and column.name == "headers" else column for column in chosen])
