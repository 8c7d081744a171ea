"""The databases of stages, where they differ: the statements and the leader locks of PostgreSQL and of SQLite.

PostgreSQL runs statements on the psycopg connection itself, with arrays for many messages at once. SQLite gets JSON
arrays; one transaction writes at a time there, so it needs no locks between keys: row ids follow the order of commits.

A leader lock is a lock between instances on a separate database connection; a killed instance loses it. On PostgreSQL
it is an advisory lock of that connection's session. On SQLite it is an flock on a file beside the database, which the
system releases when the process ends; a database in memory has one process and needs no lock.
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from psycopg import AsyncConnection as Psycopg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from purveyor.model.event import SUBJECT
from purveyor.model.file_lock import FileLock
from purveyor.queues.dead_letters.letter import subject_token
from purveyor.stages.flow import Outgoing
from purveyor.stages.sql_statements import ROW_COLUMNS, Claim, DialectSyntax, Row, Statements, Tables

NOTIFY_CHANNEL: Final = "purveyor_outbox"
_KEY_LOCK_COUNT: Final = 1024
"""Keys share this number of locks: a transaction that sends to a million keys must not fill the server's lock table."""
_POSTGRES_SYNTAX: Final = DialectSyntax(
    value="%s",
    in_texts="= ANY(%s::text[])",
    in_numbers="= ANY(%s::bigint[])",
    held="held",
    not_held="NOT held",
    row_address="ctid",
    in_rows="= ANY(ARRAY({}))".format,
)
_SQLITE_IN: Final = "IN (SELECT value FROM json_each(?))"
_SQLITE_SYNTAX: Final = DialectSyntax(
    value="?",
    in_texts=_SQLITE_IN,
    in_numbers=_SQLITE_IN,
    held="held = 1",
    not_held="held = 0",
    row_address="rowid",
    in_rows="IN ({})".format,
)
_LOCK_POLL_INTERVAL_SECONDS: Final = 0.02
_LOCK_RESPONSE_TIMEOUT_SECONDS: Final = 2.0


def lock_number(*words: str) -> int:
    """Return the number of an advisory lock."""
    digest = hashlib.blake2b("\0".join(words).encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


_KEY_LOCK_BASE: Final = lock_number("outbox keys") >> 12 << 12


_EVENT_LOCK: Final = lock_number("outbox events")


def key_lock_number(key: str) -> int:
    """Return the number of the advisory lock of a key."""
    return _KEY_LOCK_BASE + lock_number("key", key) % _KEY_LOCK_COUNT


def driver_connection(connection: AsyncConnection) -> "Psycopg[Any]":
    """Return the psycopg connection below one of SQLAlchemy: ten times faster for the frequent statements."""
    assert connection.sync_connection is not None
    found = connection.sync_connection.connection.driver_connection
    assert isinstance(found, Psycopg)
    return found


class Postgres(Statements):
    """The statements of PostgreSQL."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables, _POSTGRES_SYNTAX)
        inbox, outbox = tables.inbox.fullname, tables.outbox.fullname
        self._claim = (
            f"INSERT INTO {inbox} (stage, message_id, sequence, done_ms) "
            "SELECT %s, i, s, %s FROM unnest(%b::text[], %b::bigint[]) AS t (i, s) "
            "ON CONFLICT DO NOTHING RETURNING message_id"
        )
        self._put = (
            f"INSERT INTO {outbox} (message_id, subject, key, headers, data, created_ms) "
            "SELECT i, s, k, h, d, %s FROM unnest(%b::text[], %b::text[], %b::text[], %b::text[], %b::bytea[]) "
            "AS t (i, s, k, h, d)"
        )
        # It jumps from subject to subject along the index of held rows, however many rows each subject has.
        self._held = (
            "WITH RECURSIVE oldest AS ("
            f"(SELECT {ROW_COLUMNS} FROM {outbox} WHERE sent_ms IS NULL AND held ORDER BY subject, id LIMIT 1) "
            f"UNION ALL SELECT n.* FROM oldest o, LATERAL (SELECT {ROW_COLUMNS} FROM {outbox} "
            "WHERE sent_ms IS NULL AND held AND subject > o.subject ORDER BY subject, id LIMIT 1) n) "
            f"SELECT {ROW_COLUMNS} FROM oldest"
        )

    async def rows(self, connection: AsyncConnection, statement: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = await driver_connection(connection).execute(statement, values)
        return await cursor.fetchall()

    async def run(self, connection: AsyncConnection, statement: str, *values: object) -> int:
        return (await driver_connection(connection).execute(statement, values)).rowcount

    def texts(self, many: Sequence[str]) -> object:
        return list(many)

    def numbers(self, many: Sequence[int]) -> object:
        return f"{{{','.join(map(str, many))}}}"  # thousands: faster as text than one by one

    async def begin(self, connection: AsyncConnection) -> None:
        """Do nothing: the driver begins a transaction with the first statement."""

    async def insert_claims(
        self, connection: AsyncConnection, stage: str, claims: Sequence[Claim], now: int
    ) -> set[str]:
        # Sorted, so that two transactions that claim the same messages cannot deadlock.
        ordered = sorted(claims, key=lambda claim: claim.id)
        arrays = [claim.id for claim in ordered], [claim.sequence for claim in ordered]
        return {row[0] for row in await self.rows(connection, self._claim, stage, now, *arrays)}

    async def put(
        self, connection: AsyncConnection, messages: Sequence[Outgoing], now: int, *, notify: bool = False
    ) -> None:
        await self.put_with_driver(driver_connection(connection), messages, now, notify=notify)

    async def put_with_driver(
        self, connection: "Psycopg[Any]", messages: Sequence[Outgoing], now: int, *, notify: bool = False
    ) -> None:
        """Insert messages into the outbox on a connection of psycopg."""
        # The database gives out row ids before the commit: without a lock, of two transactions with one key the first
        # to commit could have the higher id. This transaction holds the locks from here to the commit; all transactions
        # take them in one order. All events share a lock: their row ids are their order (`event_writer`).
        numbers = {key_lock_number(m.key) for m in messages if m.key is not None and m.subject != SUBJECT}
        locks = sorted(numbers | {_EVENT_LOCK for m in messages if m.subject == SUBJECT})
        if locks:
            await connection.execute("SELECT pg_advisory_xact_lock(k) FROM unnest(%s::bigint[]) AS t (k)", (locks,))
        columns = (
            [m.id for m in messages],
            [m.subject for m in messages],
            [m.key for m in messages],
            [json.dumps(dict(m.headers)) for m in messages],
            [m.data for m in messages],
        )
        await connection.execute(self._put, (now, *columns))
        if notify:
            await connection.execute("SELECT pg_notify(%s, '')", (NOTIFY_CHANNEL,))

    async def unsent(self, connection: AsyncConnection, after: int, to: int, limit: int) -> list[Row]:
        # In the binary format: it transfers bytes as they are, not in hexadecimal.
        cursor = await driver_connection(connection).execute(self._unsent, (after, to, limit), binary=True)
        return [*map(Row._make, await cursor.fetchall())]

    async def held(self, connection: AsyncConnection) -> list[Row]:
        return [*map(Row._make, await self.rows(connection, self._held))]

    async def take_over(self, connection: AsyncConnection, stage: str, owner: str) -> tuple[int, str]:
        # Waits for the shared locks of an earlier owner's transactions (`epoch`); later ones find the new epoch.
        await self.run(connection, "SELECT pg_advisory_xact_lock(%s)", self._fence(stage))
        return await super().take_over(connection, stage, owner)

    async def epoch(self, connection: AsyncConnection, stage: str) -> int:
        # Two statements: one alone would see the table as it was before it waited for the lock.
        await self.run(connection, "SELECT pg_advisory_xact_lock_shared(%s)", self._fence(stage))
        return await super().epoch(connection, stage)

    def _fence(self, stage: str) -> int:
        return lock_number("fence", self.outbox_table, stage)


class Sqlite(Statements):
    """The statements of SQLite."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables, _SQLITE_SYNTAX)
        inbox, outbox = tables.inbox.fullname, tables.outbox.fullname
        self._claim = (
            f"INSERT INTO {inbox} (stage, message_id, sequence, done_ms) "
            "SELECT ?, value ->> 0, value ->> 1, ? FROM json_each(?) WHERE true "
            "ON CONFLICT DO NOTHING RETURNING message_id"
        )
        self._put = (
            f"INSERT INTO {outbox} (message_id, subject, key, headers, data, created_ms) VALUES (?, ?, ?, ?, ?, ?)"
        )
        self._held = (
            f"SELECT {ROW_COLUMNS} FROM {outbox} WHERE id IN "
            f"(SELECT min(id) FROM {outbox} WHERE sent_ms IS NULL AND held = 1 GROUP BY subject)"
        )

    async def rows(self, connection: AsyncConnection, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in (await connection.exec_driver_sql(statement, values)).all()]

    async def run(self, connection: AsyncConnection, statement: str, *values: object) -> int:
        return (await connection.exec_driver_sql(statement, values)).rowcount

    def texts(self, many: Sequence[str]) -> object:
        return json.dumps(list(many))

    def numbers(self, many: Sequence[int]) -> object:
        return json.dumps(list(many))

    async def begin(self, connection: AsyncConnection) -> None:
        """Take the write lock now: SQLite may refuse it to a transaction that reads first and writes later."""
        await connection.exec_driver_sql("BEGIN IMMEDIATE")

    async def insert_claims(
        self, connection: AsyncConnection, stage: str, claims: Sequence[Claim], now: int
    ) -> set[str]:
        given = json.dumps([[claim.id, claim.sequence] for claim in claims])
        return {row[0] for row in await self.rows(connection, self._claim, stage, now, given)}

    async def put(
        self,
        connection: AsyncConnection,
        messages: Sequence[Outgoing],
        now: int,
        *,
        notify: bool = False,  # SQLite has no notifications: the relay polls
    ) -> None:
        rows = [(m.id, m.subject, m.key, json.dumps(dict(m.headers)), m.data, now) for m in messages]
        await connection.exec_driver_sql(self._put, rows)

    async def held(self, connection: AsyncConnection) -> list[Row]:
        return [*map(Row._make, await self.rows(connection, self._held))]


class LeaderLock(Protocol):
    """A lock that one instance holds at a time, with its connection."""

    @property
    def connection(self) -> AsyncConnection:
        """The connection, in autocommit mode."""

    async def try_acquire(self) -> bool:
        """Take the lock if it is free; return whether this instance holds it."""

    async def is_held(self) -> bool:
        """Whether this instance still holds the lock."""

    async def release(self) -> None:
        """Release the lock."""

    async def close(self) -> None:
        """Release the lock and close the connection."""


async def acquire(lock: LeaderLock, poll_interval_seconds: float = _LOCK_POLL_INTERVAL_SECONDS) -> None:
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
            async with asyncio.timeout(_LOCK_RESPONSE_TIMEOUT_SECONDS):
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
