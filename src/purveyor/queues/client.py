"""`Queues`: a JetStream client that creates Purveyor's queues and reads them while they are migrated."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from purveyor.jetstream.address import Address
from purveyor.jetstream.client import JetStream
from purveyor.jetstream.connection import Connection
from purveyor.jetstream.messages import Message
from purveyor.jetstream.puller import PullOptions
from purveyor.queues.catalogue import Queue
from purveyor.queues.ensure import Ensured, Ensurer
from purveyor.queues.migration.aware_puller import MigrationAwarePuller
from purveyor.queues.migration.events import MigrationOptions
from purveyor.queues.migration.migrator import Migrator


class Queues(JetStream):
    """Purveyor's queues on one connection: a JetStream client with `ensure` and `migrations`."""

    def __init__(self, connection: Connection, migration_options: MigrationOptions | None = None) -> None:
        super().__init__(connection)
        self.migrations = Migrator(self._api, self._services, migration_options)
        self._ensurer = Ensurer(self.streams, self.consumers, self.migrations)
        self._aware_puller = MigrationAwarePuller(self._puller, self.streams, self.consumers, self.migrations)

    async def ensure(self, queue: Queue, *, replicas: int = 1, migrate: bool = False) -> Ensured:
        """Create or update the stream of a queue and the durables of its readers; see `Ensurer.ensure`."""
        return await self._ensurer.ensure(queue, replicas=replicas, migrate=migrate)

    async def fetch(self, stream: str, consumer: str, count: int = 1, *, wait_seconds: float = 5) -> list[Message]:
        """Return up to `count` messages of a consumer, also while the queue is migrated."""
        return await self._aware_puller.fetch(stream, consumer, count, wait_seconds=wait_seconds)

    def pull(self, stream: str, consumer: str, options: PullOptions | None = None) -> AsyncGenerator[Message]:
        """Yield messages of a consumer without end, also while the queue is migrated."""
        return self._aware_puller.pull(stream, consumer, options)


@contextlib.asynccontextmanager
async def connect(
    address: Address | str,
    *,
    name: str = "purveyor",
    patience_seconds: float = 60,
    migration_options: MigrationOptions | None = None,
) -> AsyncIterator[Queues]:
    """Connect for the length of a block.

    `patience_seconds` is how long a call waits for a lost server before it fails. It is shorter than the two minutes in
    which the server recognises a repeated message. `migration_options` say how this client migrates queues.

        async with connect("nats://127.0.0.1:4222") as queues:
            await queues.ensure(LDIF)
    """
    parsed = Address.parse(address) if isinstance(address, str) else address
    connection = await Connection.open(parsed, name=name, patience_seconds=patience_seconds)
    async with Queues(connection, migration_options) as queues:
        yield queues
