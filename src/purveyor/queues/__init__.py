"""Durable queues on NATS JetStream. The only package that speaks NATS; usable without the rest of Purveyor."""

from purveyor.queues.address import Address, Tls
from purveyor.queues.bulk import (
    Outgoing,
    PublishMode,
    PublishOptions,
    PublishReport,
    ReadOptions,
    Route,
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

__all__ = [
    "Ack",
    "AckPolicy",
    "AckSample",
    "Address",
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
    "Replay",
    "Retention",
    "Route",
    "ServerOptions",
    "Storage",
    "StoredMessage",
    "StreamConfig",
    "StreamInfo",
    "StreamState",
    "Tls",
    "connect",
    "incoming",
    "internal_queues",
    "publish_many",
    "read_range",
    "stage_queue",
    "stored_size",
    "subscription_queue",
]
