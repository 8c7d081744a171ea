"""`SqlStore`: the database with inbox and outbox, the transactions in which handlers run, and the cleanup of old rows.

The database belongs to the user: stages work in its transactions, so that a message and its effect are one commit.

`Cleanup` removes rows that no longer matter, in small batches, by one instance at a time. It removes a row of the
outbox a while after the relay sent it: until then a replay can send it again. It removes a row of the inbox a while
after its message was processed, and only at or below the sequence up to which the broker delivers nothing again: the
inbox knows a message as long as the broker can deliver it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias

from psycopg import AsyncConnection as Psycopg
from psycopg import Error as PsycopgError
from sqlalchemy import MetaData, event, inspect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.util import await_, greenlet_spawn

from purveyor.model.errors import InvalidConfig, ServerUnavailable, SetupError
from purveyor.stages.endpoint import Timing
from purveyor.stages.flow import Outgoing
from purveyor.stages.handler_types import DatabaseKind
from purveyor.stages.source import Source
from purveyor.stages.sql_dialects import (
    NOTIFY_CHANNEL,
    LeaderLock,
    Postgres,
    PostgresLeaderLock,
    Sqlite,
    SqliteLeaderLock,
    driver_connection,
)
from purveyor.stages.sql_statements import Claim, CleanupBatch, Failures, Statements, add_tables

Database: TypeAlias = AsyncSession | AsyncConnection | Psycopg[Any]
"""The database objects that a handler may take, and that `Stages.send` accepts."""

_SQLITE_BUSY_TIMEOUT_SECONDS: Final = 30
_RECONNECT_DELAY_SECONDS: Final = 1.0
log = logging.getLogger("purveyor.stages")

_CLEANUP_BATCH_ROWS: Final = 2000
_CLEANUP_PAUSE_SECONDS: Final = 0.05


def now_ms() -> int:
    """Return the current time in the unit of the tables: milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class Transaction:
    """One database transaction of a stage, on its own connection."""

    def __init__(self, connection: AsyncConnection, statements: Statements) -> None:
        self.connection = connection
        self._statements = statements

    async def claim(self, stage: str, claims: Sequence[Claim]) -> set[str]:
        """Step 3: insert messages into the inbox; return the ids of those that were not there."""
        return await self._statements.claim(self.connection, stage, claims, now_ms())

    async def unclaim(self, stage: str, ids: Sequence[str]) -> None:
        """Remove messages from the inbox that this transaction does not process after all."""
        await self._statements.unclaim(self.connection, stage, ids)

    async def put(self, messages: Sequence[Outgoing], *, notify: bool = False) -> None:
        """Step 5: store messages to be sent."""
        await self._statements.put(self.connection, messages, now_ms(), notify=notify)

    async def count_failure(self, stage: str, message_id: str, reason: str) -> Failures:
        """Count a failure of a message."""
        return await self._statements.count_failure(self.connection, stage, message_id, reason, now_ms())

    async def forget_failures(self, stage: str, ids: Sequence[str]) -> None:
        """Delete the failures of messages that succeeded or were given up."""
        await self._statements.forget_failures(self.connection, stage, ids)

    async def epoch(self, stage: str) -> int:
        """Return the epoch of the stage's owner; it does not change until the end of the transaction."""
        return await self._statements.epoch(self.connection, stage)

    @contextlib.asynccontextmanager
    async def database(self, kind: DatabaseKind) -> AsyncIterator[Database | None]:
        """Yield the database object for one handler. Each handler gets its own session, flushed at the end."""
        match kind:
            case DatabaseKind.NONE:
                yield None
            case DatabaseKind.CONNECTION:
                yield self.connection
            case DatabaseKind.PSYCOPG:
                yield driver_connection(self.connection)
            case DatabaseKind.SESSION:
                # The session joins this transaction: its own commit flushes, and commits nothing yet.
                async with AsyncSession(
                    self.connection, join_transaction_mode="rollback_only", expire_on_commit=False
                ) as session:
                    yield session
                    if session.in_transaction():
                        await session.commit()


class SqlStore:
    """Inbox and outbox in a database: PostgreSQL (psycopg) or SQLite (aiosqlite), as an engine or a URL.

    The tables are on `metadata`, in its schema. The start creates them on SQLite, which is for evaluation; on
    PostgreSQL only with `create_tables=True`: there `purveyor stages ddl` prints the statements to run.

        store = SqlStore("sqlite:///shop.db")
        store = SqlStore(create_async_engine("postgresql+psycopg://..."), metadata=Base.metadata)
    """

    def __init__(
        self, engine: AsyncEngine | str, *, metadata: MetaData | None = None, create_tables: bool | None = None
    ) -> None:
        self._owns_engine = isinstance(engine, str)
        self.engine = _create_engine(engine) if isinstance(engine, str) else engine
        self.metadata = metadata if metadata is not None else MetaData()
        self.tables = add_tables(self.metadata)
        self.postgres = self.engine.dialect.name == "postgresql"
        if not self.postgres:
            event.listen(self.engine.sync_engine, "do_connect", _open_sqlite)
        _check_driver(self.engine.url)
        self.statements: Statements = Postgres(self.tables) if self.postgres else Sqlite(self.tables)
        self._create = create_tables if create_tables is not None else not self.postgres
        self._sqlite_writer = asyncio.Lock()

    async def open(self) -> None:
        """Create or check the tables. SetupError names the missing ones."""
        wanted = self.tables.all()
        try:
            async with self.engine.begin() as connection:
                if not self.postgres:
                    await connection.exec_driver_sql("PRAGMA journal_mode=WAL")
                if self._create:
                    await connection.run_sync(lambda sync: self.metadata.create_all(sync, tables=list(wanted)))
                missing = await connection.run_sync(
                    lambda sync: [t.name for t in wanted if not inspect(sync).has_table(t.name, schema=t.schema)]
                )
        except (SQLAlchemyError, OSError) as error:
            raise ServerUnavailable(
                f"the database {self.engine.url.render_as_string()} cannot be used: {error}",
                fix="is it running, and is the URL right?",
            ) from error
        if missing:
            raise SetupError(
                f"the tables {', '.join(missing)} are not in {self.engine.url.render_as_string()}",
                fix="run what `purveyor stages ddl --dialect postgresql` prints, or add them to your migrations",
            )

    async def close(self) -> None:
        """Close the engine, if this store created it."""
        if self._owns_engine:
            await self.engine.dispose()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Run a transaction: committed at the end of the block, rolled back when the block raises."""
        async with contextlib.AsyncExitStack() as stack:
            if not self.postgres:
                await stack.enter_async_context(self._sqlite_writer)  # before the file's lock
            connection = await stack.enter_async_context(self.engine.connect())
            async with connection.begin():
                await self.statements.begin(connection)
                yield Transaction(connection, self.statements)

    async def put_with(self, database: Database, messages: Sequence[Outgoing]) -> None:
        """Insert messages into the outbox in a transaction that the caller commits."""
        if isinstance(database, AsyncSession):
            connection = await database.connection()
            await self.statements.put(connection, messages, now_ms(), notify=True)
        elif isinstance(database, AsyncConnection):
            await self.statements.put(database, messages, now_ms(), notify=True)
        else:
            assert isinstance(self.statements, Postgres)
            await self.statements.put_with_driver(database, messages, now_ms(), notify=True)

    async def leader_lock(self, *name: str) -> LeaderLock:
        """Open a leader lock of that name, not acquired yet; each database schema has its own."""
        if self.postgres:
            return await PostgresLeaderLock.open(self.engine, self.tables.outbox.fullname, *name)
        return await SqliteLeaderLock.open(self.engine, *name)

    async def listen(self, on_notify: Callable[[], None]) -> None:
        """Call `on_notify` whenever a transaction of any process put a message into the outbox, until cancelled.

        Notifications are best effort: the caller also polls.
        """
        while self.postgres:
            with contextlib.suppress(SQLAlchemyError, PsycopgError, OSError):
                async with self.engine.connect() as connection:
                    await connection.execution_options(isolation_level="AUTOCOMMIT")
                    raw = driver_connection(connection)
                    await raw.execute(f"LISTEN {NOTIFY_CHANNEL}")
                    on_notify()  # for messages from before the LISTEN
                    async for _ in raw.notifies():
                        on_notify()
            await asyncio.sleep(_RECONNECT_DELAY_SECONDS)


def _create_engine(url: str) -> AsyncEngine:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise InvalidConfig(
            f"not a database URL: {error}", fix="postgresql://user@host/name or sqlite:///file"
        ) from None
    drivers = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite+aiosqlite"}
    parsed = parsed.set(drivername=drivers.get(parsed.drivername, parsed.drivername))
    _check_driver(parsed)
    if parsed.get_backend_name() == "postgresql":
        return create_async_engine(parsed, pool_size=20, max_overflow=40)
    engine = create_async_engine(parsed, connect_args={"timeout": _SQLITE_BUSY_TIMEOUT_SECONDS})

    @event.listens_for(engine.sync_engine, "connect")
    def _(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA synchronous=FULL")

    return engine


def _open_sqlite(dialect: Any, _record: object, arguments: list[Any], options: dict[str, Any]) -> Any:
    """Open a connection for SQLAlchemy; if the caller is cancelled meanwhile, close it.

    aiosqlite drops a connection whose opening is cancelled: its thread reports to an event loop that may be closed.
    """
    return await_(_open_or_close(partial(dialect.connect, *arguments, **options)))


async def _open_or_close(connect: Callable[[], Any]) -> Any:
    opening = asyncio.ensure_future(greenlet_spawn(connect))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        connection = await opening
        await greenlet_spawn(connection.close)
        raise


def _check_driver(url: URL) -> None:
    if (url.get_backend_name(), url.get_driver_name()) not in (("postgresql", "psycopg"), ("sqlite", "aiosqlite")):
        raise InvalidConfig(
            f"stages do not work with {url.drivername!r}", fix="use postgresql+psycopg or sqlite+aiosqlite"
        )


class Cleanup:
    """Removes old rows of inbox and outbox at an interval."""

    def __init__(self, store: SqlStore, sources: Mapping[str, Source], timing: Timing) -> None:
        """Take the `sources` by the stages whose inbox they fill."""
        self._store = store
        self._sources = sources
        self._timing = timing

    async def run(self) -> None:
        """Clean up at the interval of `Timing.upkeep`, until cancelled."""
        while True:
            await asyncio.sleep(self._timing.upkeep.total_seconds())
            try:
                await self.run_once()
            except Exception as error:  # noqa: BLE001 - the next round may succeed
                log.warning("the cleanup of inbox and outbox failed: %s", error)

    async def run_once(self) -> tuple[int, int]:
        """Remove all old rows, unless another instance does; return the number of removed rows of outbox and inbox."""
        lock = await self._store.leader_lock("upkeep")
        outbox = inbox = 0
        try:
            if not await lock.try_acquire():
                return 0, 0
            statements, now, connection = self._store.statements, now_ms(), lock.connection
            batch = CleanupBatch(now - _milliseconds(self._timing.outbox_kept), _CLEANUP_BATCH_ROWS)
            while (removed := await statements.clean_outbox(connection, batch)).rows:
                outbox += removed.rows
                batch = replace(batch, begin=removed.up_to)
                await asyncio.sleep(_CLEANUP_PAUSE_SECONDS)
            for stage, source in self._sources.items():
                floor = await source.ack_floor()
                batch = CleanupBatch(now - _milliseconds(self._timing.inbox_kept), _CLEANUP_BATCH_ROWS)
                while (removed := await statements.clean_inbox(connection, stage, floor, batch)).rows:
                    inbox += removed.rows
                    batch = replace(batch, begin=removed.up_to)
                    await asyncio.sleep(_CLEANUP_PAUSE_SECONDS)
        finally:
            with contextlib.suppress(Exception):
                await lock.close()
        return outbox, inbox


def _milliseconds(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)
