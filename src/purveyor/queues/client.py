"""`connect` and `Queues`: everything a program does with durable queues, on one connection."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from purveyor.model.errors import AlreadyExists
from purveyor.queues.address import Address
from purveyor.queues.api import Api
from purveyor.queues.catalogue import Queue
from purveyor.queues.connection import Connection
from purveyor.queues.consumers import Consumers
from purveyor.queues.ensure import Ensured, Ensurer
from purveyor.queues.headers import HeadersIn
from purveyor.queues.keyvalue import Bucket, BucketConfig, Services
from purveyor.queues.messages import Message
from purveyor.queues.migration.migrations import Migrations
from purveyor.queues.migration.reading import Reading
from purveyor.queues.publisher import Expect, Publisher, Receipt
from purveyor.queues.puller import Puller, PullOptions
from purveyor.queues.streams import Streams

if TYPE_CHECKING:  # Arrow takes as long to import as all the rest: only those who use it wait for it
    import pyarrow as pa

    from purveyor.queues import bulk


class Queues:
    """Durable queues. `streams` and `consumers` are the JetStream model as it is; the rest is what programs need."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        api = Api(connection)
        self.streams = Streams(api)
        self.consumers = Consumers(api)
        self._publisher = Publisher(connection, self.streams)
        self._puller = Puller(connection, self.consumers)
        self._services = Services(self.streams, self.consumers, self._publisher, self._puller)
        self.migrations = Migrations(api, self._services)
        self._ensurer = Ensurer(self.streams, self.consumers, self.migrations)
        self._reading = Reading(self._puller, self.streams, self.consumers, self.migrations)

    @property
    def address(self) -> Address:
        """Where it is connected."""
        return self.connection.address

    async def ensure(self, queue: Queue, *, replicas: int = 1, migrate: bool = False) -> Ensured:
        """Make a queue of the catalogue and its readers' durables as declared; see `ensure.Ensurer`."""
        return await self._ensurer.ensure(queue, replicas=replicas, migrate=migrate)

    async def publish(
        self,
        subject: str,
        data: bytes = b"",
        *,
        headers: HeadersIn | None = None,
        msg_id: str | None = None,
        expect: Expect | None = None,
    ) -> Receipt:
        """Store one message; see `Publisher.publish`."""
        return await self._publisher.publish(subject, data, headers=headers, msg_id=msg_id, expect=expect)

    async def publish_many(
        self, messages: "Iterable[bulk.Outgoing]", options: "bulk.PublishOptions | None" = None
    ) -> "bulk.PublishReport":
        """Store many messages in order, each acknowledgement checked; in a thread, on a connection of its own.

        Messages are tuples of subject, data, headers and id; a message without an id gets one. Record batches go to
        `purveyor.queues.publish_many` directly.
        """
        from purveyor.queues import bulk  # noqa: PLC0415 - see the top

        batches = bulk.outgoing(messages)
        return await asyncio.to_thread(bulk.publish_many, self.address, batches, options or bulk.PublishOptions())

    async def fetch(self, stream: str, consumer: str, count: int = 1, *, wait_seconds: float = 5) -> list[Message]:
        """Up to `count` messages of a consumer; see `Puller.fetch`."""
        return await self._reading.fetch(stream, consumer, count, wait_seconds=wait_seconds)

    def pull(self, stream: str, consumer: str, options: PullOptions | None = None) -> AsyncGenerator[Message]:
        """Messages of a consumer without end; see `Puller.pull`."""
        return self._reading.pull(stream, consumer, options)

    async def read_range(
        self, stream: str, first: int, last: int, options: "bulk.ReadOptions | None" = None
    ) -> "AsyncIterator[pa.RecordBatch]":
        """The messages of a range of sequences as Arrow record batches, one in memory at a time."""
        from purveyor.queues import bulk  # noqa: PLC0415 - see the top

        batches = bulk.read_range(self.address, stream, first, last, options or bulk.ReadOptions())
        try:
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                yield batch
        finally:
            await asyncio.to_thread(batches.close)

    async def bucket(self, config: BucketConfig | str) -> Bucket:
        """A key-value bucket, made if it is not there."""
        wanted = BucketConfig(name=config) if isinstance(config, str) else config
        with contextlib.suppress(AlreadyExists):  # with another history, say: it is a bucket all the same
            await self.streams.add(wanted.stream())
        return Bucket(wanted.name, self._services)

    async def close(self) -> None:
        """Close the connection."""
        await self.connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


@contextlib.asynccontextmanager
async def connect(
    address: Address | str, *, name: str = "purveyor", patience_seconds: float = 60
) -> AsyncIterator[Queues]:
    """Connect for the length of a block.

    `patience_seconds` is how long a lost server is waited for before a call fails; it is shorter than the two minutes
    in which the server recognises a repeated message.

        async with connect("nats://127.0.0.1:4222") as queues:
            await queues.publish("orders.new", b"order 1", msg_id="order-1")
    """
    where = Address.parse(address) if isinstance(address, str) else address
    connection = await Connection.open(where, name=name, patience_seconds=patience_seconds)
    async with Queues(connection) as queues:
        yield queues
