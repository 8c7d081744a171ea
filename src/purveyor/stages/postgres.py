"""PostgreSQL: the statements of stages on the psycopg connection itself, with arrays for many messages at once."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

from psycopg import AsyncConnection as Psycopg
from sqlalchemy.ext.asyncio import AsyncConnection

from purveyor.stages.flow import Outgoing
from purveyor.stages.sql_common import COLUMNS, CommonStatements, Words
from purveyor.stages.sql_tables import Tables
from purveyor.stages.statement_protocol import Claim, Row

CHANNEL: Final = "purveyor_outbox"
_KEY_LOCKS: Final = 1024
"""Keys share so many locks: a transaction that sends to a million keys must not fill the server's lock table."""
_WORDS: Final = Words(
    value="%s",
    one_of_texts="= ANY(%s::text[])",
    one_of_numbers="= ANY(%s::bigint[])",
    held="held",
    not_held="NOT held",
    row="ctid",
    one_of_rows="= ANY(ARRAY({}))".format,
)


def lock_number(*words: str) -> int:
    """The number of an advisory lock."""
    digest = hashlib.blake2b("\0".join(words).encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def driver(connection: AsyncConnection) -> "Psycopg[Any]":
    """The psycopg connection under one of SQLAlchemy: ten times quicker where it counts."""
    assert connection.sync_connection is not None
    found = connection.sync_connection.connection.driver_connection
    assert isinstance(found, Psycopg)
    return found


class Postgres(CommonStatements):
    """See the module."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables, _WORDS)
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
        # A jump from subject to subject along the index of held rows, however many each has.
        self._held = (
            "WITH RECURSIVE oldest AS ("
            f"(SELECT {COLUMNS} FROM {outbox} WHERE sent_ms IS NULL AND held ORDER BY subject, id LIMIT 1) UNION ALL "
            f"SELECT n.* FROM oldest o, LATERAL (SELECT {COLUMNS} FROM {outbox} WHERE sent_ms IS NULL AND held "
            f"AND subject > o.subject ORDER BY subject, id LIMIT 1) n) SELECT {COLUMNS} FROM oldest"
        )

    async def rows(self, connection: AsyncConnection, statement: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = await driver(connection).execute(statement, values)
        return await cursor.fetchall()

    async def run(self, connection: AsyncConnection, statement: str, *values: object) -> int:
        return (await driver(connection).execute(statement, values)).rowcount

    def texts(self, many: Sequence[str]) -> object:
        return list(many)

    def numbers(self, many: Sequence[int]) -> object:
        return f"{{{','.join(map(str, many))}}}"  # thousands: quicker as text than one by one

    async def begin(self, connection: AsyncConnection) -> None:
        """Nothing: the driver begins by itself."""

    async def insert_claims(
        self, connection: AsyncConnection, stage: str, claims: Sequence[Claim], now: int
    ) -> set[str]:
        # Sorted, so that two who claim the same messages cannot wait for each other.
        ordered = sorted(claims, key=lambda claim: claim.id)
        arrays = [claim.id for claim in ordered], [claim.sequence for claim in ordered]
        return {row[0] for row in await self.rows(connection, self._claim, stage, now, *arrays)}

    async def put(
        self, connection: AsyncConnection, messages: Sequence[Outgoing], now: int, *, notify: bool = False
    ) -> None:
        await self.put_raw(driver(connection), messages, now, notify=notify)

    async def put_raw(
        self, connection: "Psycopg[Any]", messages: Sequence[Outgoing], now: int, *, notify: bool = False
    ) -> None:
        """The same, on a connection of psycopg."""
        # Numbers are given out before the commit: without a lock, of two transactions with one key the first to commit
        # could have the higher number. The lock is held from here to the commit, and taken in one order by all.
        locks = sorted({_KEY_LOCK_BASE + hash_key(m.key) for m in messages if m.key is not None})
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
            await connection.execute("SELECT pg_notify(%s, '')", (CHANNEL,))

    async def unsent(self, connection: AsyncConnection, after: int, to: int, limit: int) -> list[Row]:
        # In the binary format: bytes come as they are, and not in hexadecimal.
        cursor = await driver(connection).execute(self._unsent, (after, to, limit), binary=True)
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
        return lock_number("fence", self.place, stage)


_KEY_LOCK_BASE: Final = lock_number("outbox keys") >> 12 << 12


def hash_key(key: str) -> int:
    """Which of the locks a key falls under."""
    return lock_number("key", key) % _KEY_LOCKS
