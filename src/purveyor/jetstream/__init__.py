"""A client of NATS JetStream: connection, streams, consumers, publish, pull, key-value, bulk and an embedded server.

It knows nothing of Purveyor's queues, and it is the only package that imports `nats`. A name is imported when it is
first used: an executor that only reads ranges does not load the asynchronous client, and `purveyor --help` loads
neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from purveyor.jetstream.address import Address, Tls
    from purveyor.jetstream.api import Receipt
    from purveyor.jetstream.bulk import (
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
    from purveyor.jetstream.client import JetStream, connect
    from purveyor.jetstream.config import (
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
        stored_size,
    )
    from purveyor.jetstream.consumers import AckSample
    from purveyor.jetstream.key_value import Bucket, BucketConfig, Entry, Operation
    from purveyor.jetstream.messages import Ack, Message
    from purveyor.jetstream.publisher import Expect
    from purveyor.jetstream.puller import PullOptions
    from purveyor.jetstream.server import EmbeddedServer, ServerOptions
    from purveyor.jetstream.streams import StoredMessage

_MODULES = {
    "address": "Address Tls",
    "api": "Receipt",
    "bulk": "AppendOptions Outcome Outgoing PublishMode PublishOptions PublishReport ReadOptions "
    "Refusal RefusalKind Route Target append_once newest_position outgoing publish_many "
    "read_range",
    "client": "JetStream connect",
    "config": "AckPolicy Compression ConsumerConfig ConsumerInfo Deliver Discard Replay Retention Storage "
    "StreamConfig StreamInfo StreamState stored_size",
    "consumers": "AckSample",
    "key_value": "Bucket BucketConfig Entry Operation",
    "messages": "Ack Message",
    "publisher": "Expect",
    "puller": "PullOptions",
    "server": "EmbeddedServer ServerOptions",
    "streams": "StoredMessage",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


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
    "Entry",
    "Expect",
    "JetStream",
    "Message",
    "Operation",
    "Outcome",
    "Outgoing",
    "PublishMode",
    "PublishOptions",
    "PublishReport",
    "PullOptions",
    "ReadOptions",
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
    "newest_position",
    "outgoing",
    "publish_many",
    "read_range",
    "stored_size",
]
