"""The tables and the SQL statements of stages; `sql_dialects.py` adds what differs between the databases.

| table | content |
|---|---|
| `purveyor_inbox` | the ids of processed messages, so that none is processed twice |
| `purveyor_outbox` | messages to send, stored in the transaction that caused them; sent ones are kept for a replay |
| `purveyor_failures` | messages that failed and are tried again: how often, since when and why |
| `purveyor_owners` | which instance works on a stage in order, by a number that only grows; the id of the outbox |

The tables are on the user's MetaData, where `create_all`, Alembic and `purveyor stages ddl` find them. Times are
milliseconds since 1970, so that one statement serves both databases. Unsent rows, which the relay looks for all the
time, have a partial index, which is empty when everything is sent, in a table of any size.

Each statement serves many messages at once. In all of them three things differ between the databases: the placeholder
of a value, the form of a list of values, and the test of a flag (so that the condition fits the partial indexes). These
are the `DialectSyntax` of a database.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    and_,
    false,
    not_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.schema import CreateIndex, CreateTable

from purveyor.model.errors import InvalidConfig
from purveyor.stages.flow import NOT_STORABLE, Outgoing

DIALECTS: Final = ("postgresql", "sqlite")
_Id = BigInteger().with_variant(Integer(), "sqlite")  # SQLite assigns row ids to INTEGER columns only


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables on one MetaData."""

    inbox: Table
    outbox: Table
    failures: Table
    owners: Table

    def all(self) -> tuple[Table, ...]:
        """Return the tables in the order to create them."""
        return self.inbox, self.outbox, self.failures, self.owners


def add_tables(metadata: MetaData) -> Tables:
    """Return the tables on that MetaData, in its schema; add them if they are missing."""
    known = {table.name: table for table in metadata.tables.values()}
    if "purveyor_inbox" in known:
        return Tables(*(known[f"purveyor_{name}"] for name in ("inbox", "outbox", "failures", "owners")))
    inbox = Table(
        "purveyor_inbox",
        metadata,
        Column("stage", Text, primary_key=True),
        Column("message_id", Text, primary_key=True),
        Column("sequence", BigInteger, nullable=False),
        Column("done_ms", BigInteger, nullable=False),
        Index("purveyor_inbox_done", "done_ms"),
    )
    outbox = Table(
        "purveyor_outbox",
        metadata,
        Column("id", _Id, Identity(), primary_key=True),
        Column("message_id", Text, nullable=False),
        Column("subject", Text, nullable=False),
        Column("key", Text),
        Column("headers", Text, nullable=False),
        Column("data", LargeBinary, nullable=False),
        Column("created_ms", BigInteger, nullable=False),
        Column("sent_ms", BigInteger),
        Column("held", Boolean, nullable=False, server_default=false()),
        sqlite_autoincrement=True,
    )
    unsent = and_(outbox.c.sent_ms.is_(None), not_(outbox.c.held))
    held = and_(outbox.c.sent_ms.is_(None), outbox.c.held)
    Index("purveyor_outbox_unsent", outbox.c.id, postgresql_where=unsent, sqlite_where=unsent)
    Index("purveyor_outbox_held", outbox.c.subject, outbox.c.id, postgresql_where=held, sqlite_where=held)
    failures = Table(
        "purveyor_failures",
        metadata,
        Column("stage", Text, primary_key=True),
        Column("message_id", Text, primary_key=True),
        Column("attempts", Integer, nullable=False),
        Column("first_ms", BigInteger, nullable=False),
        Column("last_ms", BigInteger, nullable=False),
        Column("reason", Text, nullable=False),
    )
    owners = Table(
        "purveyor_owners",
        metadata,
        Column("stage", Text, primary_key=True),
        Column("epoch", BigInteger, nullable=False),
        Column("owner", Text, nullable=False),
    )
    return Tables(inbox, outbox, failures, owners)


def ddl(dialect: str, schema: str | None = None) -> str:
    """Return the statements that create the tables, for an operator to read and run."""
    known: dict[str, Dialect] = {"postgresql": postgresql.dialect(), "sqlite": sqlite.dialect()}  # type: ignore[no-untyped-call]
    if dialect not in known:
        raise InvalidConfig(f"no dialect {dialect!r}", fix=f"choose one of {', '.join(DIALECTS)}")
    statements: list[str] = []
    for table in add_tables(MetaData(schema=schema)).all():
        statements.append(str(CreateTable(table).compile(dialect=known[dialect])).strip())
        indexes = sorted(table.indexes, key=lambda index: str(index.name))
        statements.extend(str(CreateIndex(index).compile(dialect=known[dialect])).strip() for index in indexes)
    return "\n\n".join(f"{statement.expandtabs(4)};" for statement in statements) + "\n"


_OUTBOX: Final = "outbox"
"""The row of `purveyor_owners` with the id of the outbox. The name of a stage has a dot."""
_MAX_CLOCK_DIFFERENCE_MS: Final = 300_000
"""How far the clocks of the application and of the broker may differ: five minutes."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A message that a stage is about to process: its id, and its sequence in its stream."""

    id: str
    sequence: int
    former_id: str | None = None
    """Its id in rows of an older version."""
    stored_ms: int = 0
    """When the server stored the message: an older row with the former id belongs to another message."""


class Row(NamedTuple):
    """An unsent row of the outbox, as the database returns it: there may be many thousands of them."""

    id: int
    message_id: str
    subject: str
    key: str | None
    headers: str
    data: bytes


ROW_COLUMNS: Final = ", ".join(Row._fields)
"""The columns of an unsent row, in the order of `Row`."""


@dataclass(frozen=True, slots=True)
class Failures:
    """How often a message has failed, and when first (milliseconds)."""

    attempts: int
    first_ms: int


class Cleaned(NamedTuple):
    """The number of removed rows, and the last of them: an id of the outbox, or a time of the inbox."""

    rows: int
    up_to: int


@dataclass(frozen=True, slots=True)
class CleanupBatch:
    """The rows of one cleanup statement: up to `limit` rows older than `before` (milliseconds), from `begin` on.

    `begin` is the end of the last batch, so that a statement does not scan the dead rows of the batches before it,
    which stay until the database vacuums them.
    """

    before: int
    limit: int
    begin: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectSyntax:
    """The syntax of one database where the two differ."""

    value: str
    in_texts: str
    in_numbers: str
    held: str
    not_held: str
    row_address: str
    """The column with the physical address of a row."""
    in_rows: Callable[[str], str]
    """The condition that a row is in the result of a query."""


class Statements(ABC):
    """All statements, on a connection that the caller gives, in the transaction that is on it."""

    def __init__(self, tables: Tables, syntax: DialectSyntax) -> None:
        inbox, outbox, failures, owners = (table.fullname for table in tables.all())
        v = syntax.value
        self.outbox_table = outbox
        self._done = f"SELECT message_id, done_ms FROM {inbox} WHERE stage = {v} AND message_id {syntax.in_texts}"
        self._unclaim = f"DELETE FROM {inbox} WHERE stage = {v} AND message_id {syntax.in_texts}"
        self._count_failure = (
            f"INSERT INTO {failures} AS f (stage, message_id, attempts, first_ms, last_ms, reason) "
            f"VALUES ({v}, {v}, 1, {v}, {v}, {v}) ON CONFLICT (stage, message_id) DO UPDATE SET "
            "attempts = f.attempts + 1, last_ms = excluded.last_ms, reason = excluded.reason "
            "RETURNING attempts, first_ms"
        )
        self._forget_failures = f"DELETE FROM {failures} WHERE stage = {v} AND message_id {syntax.in_texts}"
        self._waiting = (
            f"SELECT EXISTS (SELECT 1 FROM {outbox} WHERE sent_ms IS NULL AND {syntax.not_held}), "
            f"EXISTS (SELECT 1 FROM {outbox} WHERE sent_ms IS NULL AND {syntax.held})"
        )
        self._newest = f"SELECT max(id) FROM {outbox} WHERE sent_ms IS NULL AND {syntax.not_held}"
        self._unsent = (
            f"SELECT {ROW_COLUMNS} FROM {outbox} WHERE sent_ms IS NULL AND {syntax.not_held} AND id > {v} "
            f"AND id <= {v} ORDER BY id LIMIT {v}"
        )
        self._message_id = f"SELECT message_id FROM {outbox} WHERE id = {v}"
        self._mark_sent = f"UPDATE {outbox} SET sent_ms = {v}, held = false WHERE id {syntax.in_numbers}"
        self._hold = f"UPDATE {outbox} SET held = true WHERE sent_ms IS NULL AND id {syntax.in_numbers}"
        self._unhold = f"UPDATE {outbox} SET held = false WHERE sent_ms IS NULL AND {syntax.held} AND subject = {v}"
        self._replay = f"UPDATE {outbox} SET sent_ms = NULL WHERE sent_ms >= {v}"
        # It reads only the oldest rows: a search for those sent long ago could scan the whole table.
        self._clean_outbox = (
            f"DELETE FROM {outbox} WHERE id IN (SELECT id FROM (SELECT id, sent_ms FROM {outbox} "
            f"WHERE sent_ms IS NOT NULL AND id > {v} ORDER BY id LIMIT {v}) AS oldest WHERE sent_ms < {v}) RETURNING id"
        )
        # By their addresses, which follow the order of insertion: their ids are spread over the whole of a large table.
        oldest = (
            f"SELECT {syntax.row_address} FROM {inbox} WHERE done_ms >= {v} AND done_ms < {v} "
            f"AND stage = {v} AND sequence <= {v} ORDER BY done_ms LIMIT {v}"
        )
        self._clean_inbox = f"DELETE FROM {inbox} WHERE {syntax.row_address} {syntax.in_rows(oldest)} RETURNING done_ms"
        self._owner = f"SELECT owner FROM {owners} WHERE stage = {v}"
        self._take_over = (
            f"INSERT INTO {owners} AS o (stage, epoch, owner) VALUES ({v}, 1, {v}) "
            "ON CONFLICT (stage) DO UPDATE SET epoch = o.epoch + 1, owner = excluded.owner RETURNING epoch"
        )
        self._add_owner = (
            f"INSERT INTO {owners} (stage, epoch, owner) VALUES ({v}, 0, {v}) ON CONFLICT (stage) DO NOTHING"
        )
        self._epoch = f"SELECT epoch FROM {owners} WHERE stage = {v}"
        self._sign_off = f"UPDATE {owners} SET owner = '' WHERE stage = {v} AND epoch = {v}"

    # What each database does in its own way

    @abstractmethod
    async def rows(self, connection: AsyncConnection, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""

    @abstractmethod
    async def run(self, connection: AsyncConnection, statement: str, *values: object) -> int:
        """Run a statement and return the number of rows it changed."""

    @abstractmethod
    def texts(self, many: Sequence[str]) -> object:
        """Return many texts as one value."""

    @abstractmethod
    def numbers(self, many: Sequence[int]) -> object:
        """Return many numbers as one value."""

    @abstractmethod
    async def begin(self, connection: AsyncConnection) -> None:
        """Begin a transaction that writes."""

    @abstractmethod
    async def insert_claims(
        self, connection: AsyncConnection, stage: str, claims: Sequence[Claim], now: int
    ) -> set[str]:
        """Insert messages into the inbox; return the ids of the new ones. Waits for a concurrent insert of the same."""

    @abstractmethod
    async def put(
        self, connection: AsyncConnection, messages: Sequence[Outgoing], now: int, *, notify: bool = False
    ) -> None:
        """Insert messages into the outbox, so that their row ids follow the order of commits for each key."""

    @abstractmethod
    async def held(self, connection: AsyncConnection) -> list[Row]:
        """Return the oldest held row of each subject."""

    # Inbox and failures

    async def claim(self, connection: AsyncConnection, stage: str, claims: Sequence[Claim], now: int) -> set[str]:
        """Insert messages into the inbox; return the ids of those that no version has processed before."""
        fresh = await self.insert_claims(connection, stage, claims, now)
        former = {claim.former_id: claim for claim in claims if claim.former_id is not None and claim.id in fresh}
        if former:
            known = await self.rows(connection, self._done, stage, self.texts([*former]))
            fresh -= {
                former[old].id for old, done_ms in known if done_ms + _MAX_CLOCK_DIFFERENCE_MS >= former[old].stored_ms
            }
        return fresh

    async def unclaim(self, connection: AsyncConnection, stage: str, ids: Sequence[str]) -> None:
        """Remove messages from the inbox that this transaction inserted."""
        await self.run(connection, self._unclaim, stage, self.texts(ids))

    async def count_failure(
        self, connection: AsyncConnection, stage: str, message_id: str, reason: str, now: int
    ) -> Failures:
        """Count one more failure of a message."""
        reason = NOT_STORABLE.sub("\N{REPLACEMENT CHARACTER}", reason)
        return Failures(*(await self.rows(connection, self._count_failure, stage, message_id, now, now, reason))[0])

    async def forget_failures(self, connection: AsyncConnection, stage: str, ids: Sequence[str]) -> None:
        """Delete the failures of messages that succeeded or were given up."""
        await self.run(connection, self._forget_failures, stage, self.texts(ids))

    # Outbox

    async def waiting(self, connection: AsyncConnection) -> tuple[bool, bool]:
        """Return whether there are rows to send, and held rows: a cheap statement, run once a second."""
        unsent, held = (await self.rows(connection, self._waiting))[0]
        return bool(unsent), bool(held)

    async def newest(self, connection: AsyncConnection) -> int:
        """Return the highest id of a row to send; 0 when there is none."""
        return int((await self.rows(connection, self._newest))[0][0] or 0)

    async def unsent(self, connection: AsyncConnection, after: int, to: int, limit: int) -> list[Row]:
        """Return the oldest rows to send, with ids above `after` and up to `to`."""
        return [*map(Row._make, await self.rows(connection, self._unsent, after, to, limit))]

    async def message_id(self, connection: AsyncConnection, row_id: int) -> str | None:
        """Return the message id of a row; None if there is no such row."""
        found = await self.rows(connection, self._message_id, row_id)
        return str(found[0][0]) if found else None

    async def outbox_id(self, connection: AsyncConnection, new_id: str) -> str:
        """Return the id of this outbox, which the first caller gives it."""
        await self.run(connection, self._add_owner, _OUTBOX, new_id)
        return str((await self.rows(connection, self._owner, _OUTBOX))[0][0])

    async def mark_sent(self, connection: AsyncConnection, ids: Sequence[int], now: int) -> None:
        """Mark rows as sent."""
        await self.run(connection, self._mark_sent, now, self.numbers(ids))

    async def hold(self, connection: AsyncConnection, ids: Sequence[int]) -> None:
        """Hold rows of a subject that no stream takes, so that they do not block others."""
        await self.run(connection, self._hold, self.numbers(ids))

    async def unhold(self, connection: AsyncConnection, subject: str) -> None:
        """Send the held rows of a subject again: a stream takes it."""
        await self.run(connection, self._unhold, subject)

    async def replay(self, connection: AsyncConnection, since: int) -> int:
        """Mark rows sent since then as unsent; return their number."""
        return await self.run(connection, self._replay, since)

    # Cleanup

    async def clean_outbox(self, connection: AsyncConnection, batch: CleanupBatch) -> Cleaned:
        """Remove sent rows, oldest first."""
        values = (batch.begin, batch.limit, batch.before)
        return _cleaned(await self.rows(connection, self._clean_outbox, *values))

    async def clean_inbox(self, connection: AsyncConnection, stage: str, floor: int, batch: CleanupBatch) -> Cleaned:
        """Remove processed messages of a stage at or below a sequence, oldest first."""
        values = (batch.begin, batch.before, stage, floor, batch.limit)
        return _cleaned(await self.rows(connection, self._clean_inbox, *values))

    # Owners of stages in order

    async def take_over(self, connection: AsyncConnection, stage: str, owner: str) -> tuple[int, str]:
        """Become the owner of a stage; return the new epoch and the former owner.

        Returns when no transaction of an earlier owner is running any more.
        """
        before = await self.rows(connection, self._owner, stage)
        rows = await self.rows(connection, self._take_over, stage, owner)
        return int(rows[0][0]), str(before[0][0]) if before else ""

    async def epoch(self, connection: AsyncConnection, stage: str) -> int:
        """Return the epoch of a stage, which does not change until this transaction ends."""
        rows = await self.rows(connection, self._epoch, stage)
        return int(rows[0][0]) if rows else 0

    async def sign_off(self, connection: AsyncConnection, stage: str, epoch: int) -> None:
        """Record that the owner with that epoch has stopped."""
        await self.run(connection, self._sign_off, stage, epoch)


def _cleaned(removed: list[tuple[Any, ...]]) -> Cleaned:
    return Cleaned(len(removed), max((int(row[0]) for row in removed), default=0))
