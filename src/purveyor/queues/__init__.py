"""Durable queues on NATS JetStream. The only package that speaks NATS; usable without the rest of Purveyor.

Names are imported when they are first used: an executor that only reads ranges does not load the async client, and
`purveyor --help` loads neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from purveyor.queues.address import Address, Tls
    from purveyor.queues.bulk import (
        AppendOptions,
        Outcome,
        Outgoing,
        PublishMode,
        PublishOptions,
        PublishReport,
        ReadOptions,
        Refusal,
        RefusalKind,
        Route,
        Target,
        append_once,
        newest_position,
        outgoing,
        publish_many,
        read_range,
    )
    from purveyor.queues.catalogue import Queue, Reader, incoming, internal_queues, stage_queue, subscription_queue
    from purveyor.queues.client import Queues, connect
    from purveyor.queues.config import (
        AckPolicy,
        Compression,
        ConsumerConfig,
        ConsumerInfo,
        Deliver,
        Discard,
        Replay,
        Retention,
        Storage,
        StreamConfig,
        StreamInfo,
        StreamState,
    )
    from purveyor.queues.consumers import AckSample
    from purveyor.queues.ensure import Ensured, QueueStatus
    from purveyor.queues.keyvalue import Bucket, BucketConfig, Entry, Operation
    from purveyor.queues.messages import Ack, Message
    from purveyor.queues.publisher import Expect, Receipt
    from purveyor.queues.puller import PullOptions
    from purveyor.queues.server import EmbeddedServer, ServerOptions
    from purveyor.queues.storage import stored_size
    from purveyor.queues.streams import StoredMessage

_HOMES = {
    "address": "Address Tls",
    "bulk": "AppendOptions Outcome Outgoing PublishMode PublishOptions PublishReport ReadOptions Refusal RefusalKind "
    "Route Target append_once newest_position outgoing publish_many read_range",
    "catalogue": "Queue Reader incoming internal_queues stage_queue subscription_queue",
    "client": "Queues connect",
    "config": "AckPolicy Compression ConsumerConfig ConsumerInfo Deliver Discard Replay Retention Storage StreamConfig "
    "StreamInfo StreamState",
    "consumers": "AckSample",
    "ensure": "Ensured QueueStatus",
    "keyvalue": "Bucket BucketConfig Entry Operation",
    "messages": "Ack Message",
    "publisher": "Expect Receipt",
    "puller": "PullOptions",
    "server": "EmbeddedServer ServerOptions",
    "storage": "stored_size",
    "streams": "StoredMessage",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "Ack",
    "AckPolicy",
    "AckSample",
    "Address",
    "AppendOptions",
    "Bucket",
    "BucketConfig",
    "Compression",
    "ConsumerConfig",
    "ConsumerInfo",
    "Deliver",
    "Discard",
    "EmbeddedServer",
    "Ensured",
    "Entry",
    "Expect",
    "Message",
    "Operation",
    "Outcome",
    "Outgoing",
    "PublishMode",
    "PublishOptions",
    "PublishReport",
    "PullOptions",
    "Queue",
    "QueueStatus",
    "Queues",
    "ReadOptions",
    "Reader",
    "Receipt",
    "Refusal",
    "RefusalKind",
    "Replay",
    "Retention",
    "Route",
    "ServerOptions",
    "Storage",
    "StoredMessage",
    "StreamConfig",
    "StreamInfo",
    "StreamState",
    "Target",
    "Tls",
    "append_once",
    "connect",
    "incoming",
    "internal_queues",
    "newest_position",
    "outgoing",
    "publish_many",
    "read_range",
    "stage_queue",
    "stored_size",
    "subscription_queue",
]
