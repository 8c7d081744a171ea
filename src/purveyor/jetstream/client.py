"""`JetStream`: the client of a NATS JetStream server, on one connection."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from purveyor.jetstream.address import Address
from purveyor.jetstream.api import Api, Receipt
from purveyor.jetstream.connection import Connection
from purveyor.jetstream.consumers import Consumers
from purveyor.jetstream.headers import HeadersIn
from purveyor.jetstream.key_value import Bucket, BucketConfig, BucketServices
from purveyor.jetstream.messages import Message
from purveyor.jetstream.publisher import Expect, Publisher
from purveyor.jetstream.puller import Puller, PullOptions
from purveyor.jetstream.streams import Streams
from purveyor.model.errors import AlreadyExists

if TYPE_CHECKING:  # importing Arrow takes as long as all other imports: only code that uses it waits for it
    import pyarrow as pa

    from purveyor.jetstream import bulk


class JetStream:
    """A client of a JetStream server: streams, consumers, publish, pull and key-value buckets."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._api = Api(connection)
        self.streams = Streams(self._api)
        self.consumers = Consumers(self._api)
        self._publisher = Publisher(connection, self.streams)
        self._puller = Puller(connection, self.consumers)
        self._services = BucketServices(self.streams, self.consumers, self._publisher, self._puller)

    @property
    def address(self) -> Address:
        """The address of the server."""
        return self.connection.address

    async def publish(
        self,
        subject: str,
        data: bytes = b"",
        *,
        headers: HeadersIn | None = None,
        msg_id: str | None = None,
        expect: Expect | None = None,
    ) -> Receipt:
        """Store one message (`Publisher.publish`)."""
        return await self._publisher.publish(subject, data, headers=headers, msg_id=msg_id, expect=expect)

    async def publish_many(
        self, messages: "Iterable[bulk.Outgoing]", options: "bulk.PublishOptions | None" = None
    ) -> "bulk.PublishReport":
        """Store many messages in order and check each acknowledgement, in a thread with its own connection.

        Messages are tuples of subject, data, headers and id; a message without an id gets one. To publish record
        batches, call `purveyor.jetstream.publish_many`.
        """
        from purveyor.jetstream import bulk  # noqa: PLC0415 - imports Arrow

        batches = bulk.outgoing(messages)
        return await asyncio.to_thread(bulk.publish_many, self.address, batches, options or bulk.PublishOptions())

    async def fetch(self, stream: str, consumer: str, count: int = 1, *, wait_seconds: float = 5) -> list[Message]:
        """Return up to `count` messages of a consumer (`Puller.fetch`)."""
        return await self._puller.fetch(stream, consumer, count, wait_seconds=wait_seconds)

    def pull(self, stream: str, consumer: str, options: PullOptions | None = None) -> AsyncGenerator[Message]:
        """Yield the messages of a consumer without end (`Puller.pull`)."""
        return self._puller.pull(stream, consumer, options)

    async def read_range(
        self, stream: str, first: int, last: int, options: "bulk.ReadOptions | None" = None
    ) -> "AsyncIterator[pa.RecordBatch]":
        """Yield the messages of a range of sequences as Arrow record batches, one in memory at a time."""
        from purveyor.jetstream import bulk  # noqa: PLC0415 - imports Arrow

        batches = bulk.read_range(self.address, stream, first, last, options or bulk.ReadOptions())
        try:
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:
                yield batch
        finally:
            await asyncio.to_thread(batches.close)

    async def bucket(self, config: BucketConfig | str) -> Bucket:
        """Return a key-value bucket; create it if it does not exist."""
        wanted = BucketConfig(name=config) if isinstance(config, str) else config
        stream = wanted.stream()
        try:
            await self.streams.add(stream)
        except AlreadyExists:  # for example with another history: use it as it is
            if stream.allow_msg_ttl and not (await self.streams.info(stream.name)).config.allow_msg_ttl:
                await self.streams.update(stream.name, {"allow_msg_ttl": True})
        return Bucket(wanted.name, self._services, wanted.marker_age)

    async def close(self) -> None:
        """Close the connection."""
        await self.connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def resolve_address(address: Address | str | None) -> Address:
    """Return an address that a caller gave, or that of the server that the environment names."""
    if address is None:
        from purveyor.jetstream.server.discovery import find_server_address  # noqa: PLC0415 - most callers need no server

        return find_server_address()
    return Address.parse(address) if isinstance(address, str) else address


@contextlib.asynccontextmanager
async def connect(
    address: Address | str | None = None, *, name: str = "purveyor", patience_seconds: float = 60
) -> AsyncIterator[JetStream]:
    """Connect for the duration of a block. Without an address: to the server that the environment names.

    That is PURVEYOR_NATS_URL, else the embedded server that runs on PURVEYOR_DATA_DIR or on the default data directory.

    A call waits for a lost server up to `patience_seconds` before it fails. The default is shorter than the two minutes
    in which the server recognises a repeated message.

        async with connect("nats://127.0.0.1:4222") as jetstream:
            await jetstream.publish("orders.new", b"order 1", msg_id="order-1")
    """
    connection = await Connection.open(resolve_address(address), name=name, patience_seconds=patience_seconds)
    async with JetStream(connection) as jetstream:
        yield jetstream
