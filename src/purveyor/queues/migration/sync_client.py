"""Taking part in a migration from a program without an event loop: the driver of a Spark query, say.

The async client is loaded when there is a migration: half a dozen processes of every query come by here, and hardly
ever is there one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from purveyor.jetstream.address import Address
from purveyor.jetstream.codec import Json
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.queues.migration.record import QueueStatus

if TYPE_CHECKING:
    from purveyor.queues.migration.migrator import Migrations

_log = logging.getLogger("purveyor.migration")


def join(address: Address, stream: str, durable: Json, patience_seconds: float) -> None:
    """Have a durable made with the new stream; until then the reader reads the sealed one by position."""
    queue = stream.removeprefix(STREAM_PREFIX)
    _run(address, patience_seconds, lambda migrations: migrations.join(queue, (durable,)))


def passed(address: Address, stream: str, durable: str, sequence: int, patience_seconds: float) -> None:
    """A reader by position has done everything up to a sequence of a sealed work queue."""
    queue = stream.removeprefix(STREAM_PREFIX)
    _run(address, patience_seconds, lambda migrations: migrations.passed(queue, durable, sequence))


def advance(address: Address, stream: str, patience_seconds: float) -> bool:
    """Complete the migration if that is possible now; whether it is over."""
    queue = stream.removeprefix(STREAM_PREFIX)
    ready = _run(address, patience_seconds, lambda migrations: migrations.advance(queue)) is QueueStatus.READY
    if ready:
        _log.info("Stream migration completed, resuming normal operation")
    return ready


def _run(address: Address, patience_seconds: float, work: "Callable[[Migrations], Awaitable[object]]") -> object:
    from purveyor.queues.client import connect  # noqa: PLC0415 - see the module

    async def connected() -> object:
        async with connect(address, name="purveyor-migration", patience_seconds=patience_seconds) as queues:
            return await work(queues.migrations)

    return asyncio.run(connected())
