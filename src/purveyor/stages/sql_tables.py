"""The tables of stages, on the user's MetaData, where `create_all`, Alembic and `purveyor stages ddl` find them.

| table | content |
|---|---|
| `purveyor_inbox` | the ids of processed messages, so that none is processed twice |
| `purveyor_outbox` | messages to send, stored in the transaction that caused them; sent ones are kept for a replay |
| `purveyor_failures` | messages that failed and are tried again: how often, since when and why |
| `purveyor_owners` | which instance works on a stage in order, by a number that only grows |

Times are milliseconds since 1970, so that one statement serves both databases. Unsent rows, which the relay looks for
all the time, have a partial index, which is empty when everything is sent, whatever the size of the table.
"""

from dataclasses import dataclass
from typing import Final

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
from sqlalchemy.schema import CreateIndex, CreateTable

from purveyor.model.errors import InvalidConfig

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
