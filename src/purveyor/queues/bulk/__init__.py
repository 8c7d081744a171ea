"""The bulk path: volume in and out of streams as Arrow record batches, without asyncio."""

from purveyor.queues.bulk.append import append_once, newest_position
from purveyor.queues.bulk.append_words import AppendOptions, Outcome, Refusal, RefusalKind, Target
from purveyor.queues.bulk.options import (
    OUTGOING_SCHEMA,
    SCHEMA,
    PublishMode,
    PublishOptions,
    PublishReport,
    ReadOptions,
    Route,
)
from purveyor.queues.bulk.pool import close_idle
from purveyor.queues.bulk.publish import Outgoing, outgoing, publish_many
from purveyor.queues.bulk.read import read_range

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
