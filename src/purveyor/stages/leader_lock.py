"""A leader lock: a lock between instances on a database connection of its own; a killed instance loses it.

On PostgreSQL it is an advisory lock of that connection's session. On SQLite it is an flock on a file beside the
database, which the system releases when the process ends; a database in memory has one process and needs no lock.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Final, Protocol

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from purveyor.model.file_lock import FileLock
from purveyor.queues.dead_letters.letter import subject_token
from purveyor.stages.sql_dialects import lock_number

_POLL_INTERVAL_SECONDS: Final = 0.02
_RESPONSE_TIMEOUT_SECONDS: Final = 2.0


class LeaderLock(Protocol):
    """A lock that one instance holds at a time, with its connection."""

    @property
    def connection(self) -> AsyncConnection:
        """The connection; it commits each statement by itself."""

    async def try_acquire(self) -> bool:
        """Take the lock if it is free; return whether this instance holds it."""

    async def is_held(self) -> bool:
        """Whether this instance still holds the lock."""

    async def release(self) -> None:
        """Release the lock."""

    async def close(self) -> None:
        """Release the lock and close the connection."""


async def acquire(lock: LeaderLock, poll_interval_seconds: float = _POLL_INTERVAL_SECONDS) -> None:
    """Take a lock as soon as it is free."""
    while not await lock.try_acquire():  # noqa: ASYNC110 - the lock of another process sends no notification
        await asyncio.sleep(poll_interval_seconds)


async def _connect(engine: AsyncEngine) -> AsyncConnection:
    connection = await engine.connect()
    return await connection.execution_options(isolation_level="AUTOCOMMIT")


class PostgresLeaderLock:
    """A leader lock by an advisory lock."""

    def __init__(self, connection: AsyncConnection, number: int) -> None:
        self.connection = connection
        self._number = number
        self._held = False

    @classmethod
    async def open(cls, engine: AsyncEngine, *name: str) -> "PostgresLeaderLock":
        # "seat" is the name that earlier versions lock: it stays, so that old and new instances exclude each other.
        return cls(await _connect(engine), lock_number("seat", *name))

    async def try_acquire(self) -> bool:
        result = await self.connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({self._number})")
        self._held = bool(result.scalar())
        return self._held

    async def is_held(self) -> bool:
        try:
            async with asyncio.timeout(_RESPONSE_TIMEOUT_SECONDS):
                await self.connection.exec_driver_sql("SELECT 1")
        except Exception:  # noqa: BLE001 - after any error the session may be lost
            return False
        return self._held

    async def release(self) -> None:
        if self._held:
            self._held = False
            await self.connection.exec_driver_sql(f"SELECT pg_advisory_unlock({self._number})")

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # the end of the session releases the lock as well
            await self.release()
        with contextlib.suppress(Exception):
            await self.connection.close()


class SqliteLeaderLock:
    """A leader lock by an flock."""

    def __init__(self, connection: AsyncConnection, path: Path | None) -> None:
        self.connection = connection
        self._lock = None if path is None else FileLock(path)

    @classmethod
    async def open(cls, engine: AsyncEngine, *name: str) -> "SqliteLeaderLock":
        database = engine.url.database
        in_memory = not database or database == ":memory:" or "mode=memory" in str(engine.url)
        path = None if in_memory else Path(f"{database}.{subject_token('-'.join(name))}.lock")
        return cls(await _connect(engine), path)

    async def try_acquire(self) -> bool:
        return self._lock is None or self._lock.try_lock()

    async def is_held(self) -> bool:
        return self._lock is None or self._lock.is_held

    async def release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    async def close(self) -> None:
        await self.release()
        with contextlib.suppress(Exception):
            await self.connection.close()
