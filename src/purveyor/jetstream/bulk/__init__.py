"""The bulk path: read, publish and append many messages as Arrow record batches, without asyncio."""

from purveyor.jetstream.bulk.append.append_once import append_once, newest_position
from purveyor.jetstream.bulk.net.pool import close_idle
from purveyor.jetstream.bulk.options import (
    OUTGOING_SCHEMA,
    SCHEMA,
    AppendOptions,
    Outcome,
    PublishMode,
    PublishOptions,
    PublishReport,
    ReadOptions,
    Refusal,
    RefusalKind,
    Route,
    Target,
)
from purveyor.jetstream.bulk.publish.publish_many import Outgoing, outgoing, publish_many
from purveyor.jetstream.bulk.read.read_range import read_range

__all__ = [
    "OUTGOING_SCHEMA",
    "SCHEMA",
    "AppendOptions",
    "Outcome",
    "Outgoing",
    "PublishMode",
    "PublishOptions",
    "PublishReport",
    "ReadOptions",
    "Refusal",
    "RefusalKind",
    "Route",
    "Target",
    "append_once",
    "close_idle",
    "newest_position",
    "outgoing",
    "publish_many",
    "read_range",
]
