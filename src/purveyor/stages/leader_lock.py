"""A seat: a connection of its own with a lock on it, which one instance holds at a time and a killed one loses.

On PostgreSQL an advisory lock of that connection's session. On SQLite an flock on a file beside the database, which the
system gives back when the process ends; a database in memory has one process and needs none.
"""

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final, Protocol

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from purveyor.queues.dead_letters.letter import token
from purveyor.stages.postgres import lock_number

_PAUSE_SECONDS: Final = 0.02
_ANSWER_SECONDS: Final = 2.0


class Seat(Protocol):
    """See the module."""

    @property
    def connection(self) -> AsyncConnection:
        """The connection; each statement on it is committed by itself."""

    async def take(self) -> bool:
        """Try once."""

    async def alive(self) -> bool:
        """Whether what was taken is still held."""

    async def give_back(self) -> None:
        """Let another have it."""

    async def close(self) -> None:
        """Give it back, and the connection too."""


async def wait_for(seat: Seat, pause_seconds: float = _PAUSE_SECONDS) -> None:
    """Take a seat as soon as it is free."""
    while not await seat.take():  # noqa: ASYNC110 - the lock of another process rings no bell
        await asyncio.sleep(pause_seconds)


async def _connect(engine: AsyncEngine) -> AsyncConnection:
    connection = await engine.connect()
    return await connection.execution_options(isolation_level="AUTOCOMMIT")


class PostgresSeat:
    """By an advisory lock."""

    def __init__(self, connection: AsyncConnection, number: int) -> None:
        self.connection = connection
        self._number = number
        self._held = False

    @classmethod
    async def open(cls, engine: AsyncEngine, *name: str) -> "PostgresSeat":
        return cls(await _connect(engine), lock_number("seat", *name))

    async def take(self) -> bool:
        answer = await self.connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({self._number})")
        self._held = bool(answer.scalar())
        return self._held

    async def alive(self) -> bool:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self.connection.exec_driver_sql("SELECT 1")
        except Exception:  # noqa: BLE001 - whatever it is, the session cannot be relied on
            return False
        return self._held

    async def give_back(self) -> None:
        if self._held:
            self._held = False
            await self.connection.exec_driver_sql(f"SELECT pg_advisory_unlock({self._number})")

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # the end of the session gives it back as well
            await self.give_back()
        with contextlib.suppress(Exception):
            await self.connection.close()


class SqliteSeat:
    """By an flock."""

    def __init__(self, connection: AsyncConnection, path: Path | None) -> None:
        self.connection = connection
        self._path = path
        self._fd: int | None = None

    @classmethod
    async def open(cls, engine: AsyncEngine, *name: str) -> "SqliteSeat":
        database = engine.url.database
        in_memory = not database or database == ":memory:" or "mode=memory" in str(engine.url)
        path = None if in_memory else Path(f"{database}.{token('-'.join(name))}.lock")
        return cls(await _connect(engine), path)

    async def take(self) -> bool:
        if self._path is None or self._fd is not None:
            return True
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    async def alive(self) -> bool:
        return self._path is None or self._fd is not None

    async def give_back(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    async def close(self) -> None:
        await self.give_back()
        with contextlib.suppress(Exception):
            await self.connection.close()
