"""`SqlStore`: where inbox and outbox live, and the transactions in which handlers run.

The database is the user's own: stages work in its transactions, so that a message and its effect are one commit.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum
from typing import Any, Final, TypeAlias

from psycopg import AsyncConnection as Psycopg
from psycopg import Error as PsycopgError
from sqlalchemy import MetaData, event, inspect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from purveyor.model.errors import InvalidConfig, ServerUnavailable, SetupError
from purveyor.stages.flow import Outgoing
from purveyor.stages.leader_lock import PostgresSeat, Seat, SqliteSeat
from purveyor.stages.postgres import CHANNEL, Postgres, driver
from purveyor.stages.sql_tables import add_tables
from purveyor.stages.sqlite import Sqlite
from purveyor.stages.statement_protocol import Claim, Failures, Statements

Database: TypeAlias = AsyncSession | AsyncConnection | Psycopg[Any]
"""What a handler may be given, and an initiation be done with."""

_BUSY_SECONDS: Final = 30
_RECONNECT_SECONDS: Final = 1.0


class Handle(Enum):
    """What a handler asks for by the type of its third parameter."""

    NONE = "none"
    SESSION = "AsyncSession"
    CONNECTION = "AsyncConnection"
    PSYCOPG = "psycopg.AsyncConnection"


def now_ms() -> int:
    """The time as the tables have it."""
    return time.time_ns() // 1_000_000


class Transaction:
    """One database transaction of a stage, on a connection of its own."""

    def __init__(self, connection: AsyncConnection, statements: Statements) -> None:
        self.connection = connection
        self._ask = statements

    async def claim(self, stage: str, claims: Sequence[Claim]) -> set[str]:
        """Step 3: note messages as processed; the ids of those that were not before."""
        return await self._ask.claim(self.connection, stage, claims, now_ms())

    async def unclaim(self, stage: str, ids: Sequence[str]) -> None:
        """They are not processed after all."""
        await self._ask.unclaim(self.connection, stage, ids)

    async def put(self, messages: Sequence[Outgoing], *, notify: bool = False) -> None:
        """Step 5: store messages to be sent."""
        await self._ask.put(self.connection, messages, now_ms(), notify=notify)

    async def failed(self, stage: str, message_id: str, reason: str) -> Failures:
        """Count a failure."""
        return await self._ask.failed(self.connection, stage, message_id, reason, now_ms())

    async def forget_failures(self, stage: str, ids: Sequence[str]) -> None:
        """Count no more."""
        await self._ask.forget_failures(self.connection, stage, ids)

    async def epoch(self, stage: str) -> int:
        """Who owns the stage; stays so until the end of the transaction."""
        return await self._ask.epoch(self.connection, stage)

    @contextlib.asynccontextmanager
    async def handle(self, kind: Handle) -> AsyncIterator[Database | None]:
        """What one handler works with. A session is its own; what it has not flushed is flushed at the end."""
        match kind:
            case Handle.NONE:
                yield None
            case Handle.CONNECTION:
                yield self.connection
            case Handle.PSYCOPG:
                yield driver(self.connection)
            case Handle.SESSION:
                # The session joins our transaction: its own commit flushes, and commits nothing yet.
                async with AsyncSession(
                    self.connection, join_transaction_mode="rollback_only", expire_on_commit=False
                ) as session:
                    yield session
                    if session.in_transaction():
                        await session.commit()


class SqlStore:
    """Inbox and outbox in a database: PostgreSQL (psycopg) or SQLite (aiosqlite), as an engine or a URL.

    The tables are on `metadata`, in its schema. They are created at the start on SQLite, which is for trying out; on
    PostgreSQL only when asked for with `create_tables=True`: there `purveyor stages ddl` prints what to run.

        store = SqlStore("sqlite:///shop.db")
        store = SqlStore(create_async_engine("postgresql+psycopg://..."), metadata=Base.metadata)
    """

    def __init__(
        self, engine: AsyncEngine | str, *, metadata: MetaData | None = None, create_tables: bool | None = None
    ) -> None:
        self._owned = isinstance(engine, str)
        self.engine = _engine(engine) if isinstance(engine, str) else engine
        self.metadata = metadata if metadata is not None else MetaData()
        self.tables = add_tables(self.metadata)
        self.postgres = self.engine.dialect.name == "postgresql"
        _check_driver(self.engine.url)
        self.statements: Statements = Postgres(self.tables) if self.postgres else Sqlite(self.tables)
        self._create = create_tables if create_tables is not None else not self.postgres
        self._one_writer = asyncio.Lock()

    async def open(self) -> None:
        """Make or check the tables. SetupError says what is missing."""
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
        """Close the engine, if it was made here."""
        if self._owned:
            await self.engine.dispose()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """A transaction: committed at the end of the block, rolled back when it raises."""
        async with contextlib.AsyncExitStack() as stack:
            if not self.postgres:
                await stack.enter_async_context(self._one_writer)  # in line here, instead of in the file's lock
            connection = await stack.enter_async_context(self.engine.connect())
            async with connection.begin():
                await self.statements.begin(connection)
                yield Transaction(connection, self.statements)

    async def put_with(self, database: Database, messages: Sequence[Outgoing]) -> None:
        """Store messages to be sent in a transaction of the caller's, who commits it."""
        if isinstance(database, AsyncSession):
            connection = await database.connection()
            await self.statements.put(connection, messages, now_ms(), notify=True)
        elif isinstance(database, AsyncConnection):
            await self.statements.put(database, messages, now_ms(), notify=True)
        else:
            assert isinstance(self.statements, Postgres)
            await self.statements.put_raw(database, messages, now_ms(), notify=True)

    async def seat(self, *name: str) -> Seat:
        """A connection with a lock of that name, not taken yet; one per database and schema."""
        if self.postgres:
            return await PostgresSeat.open(self.engine, self.tables.outbox.fullname, *name)
        return await SqliteSeat.open(self.engine, *name)

    async def listen(self, heard: Callable[[], None]) -> None:
        """Call `heard` whenever somebody's transaction put something into the outbox; runs until it is cancelled.

        Only a quick bell: whoever listens looks by himself as well.
        """
        while self.postgres:
            with contextlib.suppress(SQLAlchemyError, PsycopgError, OSError):
                async with self.engine.connect() as connection:
                    await connection.execution_options(isolation_level="AUTOCOMMIT")
                    raw = driver(connection)
                    await raw.execute(f"LISTEN {CHANNEL}")
                    heard()  # what was put in before we listened
                    async for _ in raw.notifies():
                        heard()
            await asyncio.sleep(_RECONNECT_SECONDS)


def _engine(url: str) -> AsyncEngine:
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
    engine = create_async_engine(parsed, connect_args={"timeout": _BUSY_SECONDS})

    @event.listens_for(engine.sync_engine, "connect")
    def _(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA synchronous=FULL")

    return engine


def _check_driver(url: URL) -> None:
    if (url.get_backend_name(), url.get_driver_name()) not in (("postgresql", "psycopg"), ("sqlite", "aiosqlite")):
        raise InvalidConfig(
            f"stages do not work with {url.drivername!r}", fix="use postgresql+psycopg or sqlite+aiosqlite"
        )
