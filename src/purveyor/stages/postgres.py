"""PostgreSQL: the statements of stages on the psycopg connection itself, with arrays for many messages at once."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

from psycopg import AsyncConnection as Psycopg
from sqlalchemy.ext.asyncio import AsyncConnection

from purveyor.stages.flow import Outgoing
from purveyor.stages.statements import Claim, Failures, Row
from purveyor.stages.tables import Tables

CHANNEL: Final = "purveyor_outbox"
_KEY_LOCKS: Final = 1024
"""Keys share so many locks: a transaction that sends to a million keys must not fill the server's lock table."""


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


class Postgres:
    """See the module."""

    def __init__(self, tables: Tables) -> None:
        inbox, outbox, failures, owners = (table.fullname for table in tables.all())
        self.place = outbox
        columns = "id, message_id, subject, key, headers, data"
        self._claim = (
            f"INSERT INTO {inbox} (stage, message_id, sequence, done_ms) "
            "SELECT %s, i, s, %s FROM unnest(%b::text[], %b::bigint[]) AS t (i, s) "
            "ON CONFLICT DO NOTHING RETURNING message_id"
        )
        self._unclaim = f"DELETE FROM {inbox} WHERE stage = %s AND message_id = ANY(%s::text[])"
        self._put = (
            f"INSERT INTO {outbox} (message_id, subject, key, headers, data, created_ms) "
            "SELECT i, s, k, h, d, %s FROM unnest(%b::text[], %b::text[], %b::text[], %b::text[], %b::bytea[]) "
            "AS t (i, s, k, h, d)"
        )
        self._failed = (
            f"INSERT INTO {failures} AS f (stage, message_id, attempts, first_ms, last_ms, reason) "
            "VALUES (%s, %s, 1, %s, %s, %s) ON CONFLICT (stage, message_id) DO UPDATE SET "
            "attempts = f.attempts + 1, last_ms = excluded.last_ms, reason = excluded.reason "
            "RETURNING attempts, first_ms"
        )
        self._forget = f"DELETE FROM {failures} WHERE stage = %s AND message_id = ANY(%s::text[])"
        self._waiting = (
            f"SELECT EXISTS (SELECT 1 FROM {outbox} WHERE sent_ms IS NULL AND NOT held), "
            f"EXISTS (SELECT 1 FROM {outbox} WHERE sent_ms IS NULL AND held)"
        )
        self._newest = f"SELECT max(id) FROM {outbox} WHERE sent_ms IS NULL AND NOT held"
        self._unsent = (
            f"SELECT {columns} FROM {outbox} WHERE sent_ms IS NULL AND NOT held AND id > %s AND id <= %s "
            f"ORDER BY id LIMIT %s"
        )
        self._sent = f"UPDATE {outbox} SET sent_ms = %s, held = false WHERE id = ANY(%s::bigint[])"
        self._hold = f"UPDATE {outbox} SET held = true WHERE id = ANY(%s::bigint[])"
        # A jump from subject to subject along the index of held rows, however many each has.
        self._held = (
            "WITH RECURSIVE oldest AS ("
            f"(SELECT {columns} FROM {outbox} WHERE sent_ms IS NULL AND held ORDER BY subject, id LIMIT 1) UNION ALL "
            f"SELECT n.* FROM oldest o, LATERAL (SELECT {columns} FROM {outbox} WHERE sent_ms IS NULL AND held "
            f"AND subject > o.subject ORDER BY subject, id LIMIT 1) n) SELECT {columns} FROM oldest"
        )
        self._unhold = f"UPDATE {outbox} SET held = false WHERE sent_ms IS NULL AND held AND subject = %s"
        self._replay = f"UPDATE {outbox} SET sent_ms = NULL WHERE sent_ms >= %s"
        # Only the oldest rows are looked at: a search for those sent long ago could go through the whole table.
        self._clean_outbox = (
            f"DELETE FROM {outbox} WHERE id IN (SELECT id FROM (SELECT id, sent_ms FROM {outbox} "
            "WHERE sent_ms IS NOT NULL ORDER BY id LIMIT %s) AS oldest WHERE sent_ms < %s)"
        )
        self._clean_inbox = (
            f"DELETE FROM {inbox} WHERE (stage, message_id) IN (SELECT stage, message_id FROM {inbox} "
            "WHERE done_ms < %s AND stage = %s AND sequence <= %s ORDER BY done_ms LIMIT %s)"
        )
        self._owner = f"SELECT owner FROM {owners} WHERE stage = %s"
        self._take = (
            f"INSERT INTO {owners} AS o (stage, epoch, owner) VALUES (%s, 1, %s) "
            "ON CONFLICT (stage) DO UPDATE SET epoch = o.epoch + 1, owner = excluded.owner RETURNING epoch"
        )
        self._epoch = f"SELECT epoch FROM {owners} WHERE stage = %s"
        self._lay_down = f"UPDATE {owners} SET owner = '' WHERE stage = %s AND epoch = %s"

    async def begin(self, connection: AsyncConnection) -> None:
        """Nothing: the driver begins by itself."""

    async def claim(self, connection: AsyncConnection, stage: str, claims: Sequence[Claim], now: int) -> set[str]:
        # Sorted, so that two who claim the same messages cannot wait for each other.
        ordered = sorted(claims, key=lambda claim: claim.id)
        arrays = [claim.id for claim in ordered], [claim.sequence for claim in ordered]
        return {row[0] for row in await _rows(connection, self._claim, (stage, now, *arrays))}

    async def unclaim(self, connection: AsyncConnection, stage: str, ids: Sequence[str]) -> None:
        await _run(connection, self._unclaim, (stage, list(ids)))

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

    async def failed(self, connection: AsyncConnection, stage: str, message_id: str, reason: str, now: int) -> Failures:
        rows = await _rows(connection, self._failed, (stage, message_id, now, now, reason.replace("\0", "")))
        return Failures(*rows[0])

    async def forget_failures(self, connection: AsyncConnection, stage: str, ids: Sequence[str]) -> None:
        await _run(connection, self._forget, (stage, list(ids)))

    async def waiting(self, connection: AsyncConnection) -> tuple[bool, bool]:
        unsent, held = (await _rows(connection, self._waiting, ()))[0]
        return unsent, held

    async def newest(self, connection: AsyncConnection) -> int:
        return int((await _rows(connection, self._newest, ()))[0][0] or 0)

    async def unsent(self, connection: AsyncConnection, after: int, to: int, limit: int) -> list[Row]:
        # In the binary format: bytes come as they are, and not in hexadecimal.
        cursor = await driver(connection).execute(self._unsent, (after, to, limit), binary=True)
        return [*map(Row._make, await cursor.fetchall())]

    async def mark_sent(self, connection: AsyncConnection, ids: Sequence[int], now: int) -> None:
        numbers = ",".join(map(str, ids))  # thousands: quicker as text than one by one
        await _run(connection, self._sent, (now, f"{{{numbers}}}"))

    async def hold(self, connection: AsyncConnection, ids: Sequence[int]) -> None:
        await _run(connection, self._hold, (list(ids),))

    async def held(self, connection: AsyncConnection) -> list[Row]:
        return [*map(Row._make, await _rows(connection, self._held, ()))]

    async def unhold(self, connection: AsyncConnection, subject: str) -> None:
        await _run(connection, self._unhold, (subject,))

    async def replay(self, connection: AsyncConnection, since: int) -> int:
        return await _run(connection, self._replay, (since,))

    async def clean_outbox(self, connection: AsyncConnection, before: int, limit: int) -> int:
        return await _run(connection, self._clean_outbox, (limit, before))

    async def clean_inbox(self, connection: AsyncConnection, stage: str, before: int, floor: int, limit: int) -> int:
        return await _run(connection, self._clean_inbox, (before, stage, floor, limit))

    async def take_over(self, connection: AsyncConnection, stage: str, owner: str) -> tuple[int, str]:
        # Waits for the shared locks of an earlier owner's transactions (`epoch`); later ones find the new epoch.
        await _run(connection, "SELECT pg_advisory_xact_lock(%s)", (self._fence(stage),))
        before = await _rows(connection, self._owner, (stage,))
        rows = await _rows(connection, self._take, (stage, owner))
        return int(rows[0][0]), str(before[0][0]) if before else ""

    async def epoch(self, connection: AsyncConnection, stage: str) -> int:
        # Two statements: one alone would see the table as it was before it waited for the lock.
        await _run(connection, "SELECT pg_advisory_xact_lock_shared(%s)", (self._fence(stage),))
        rows = await _rows(connection, self._epoch, (stage,))
        return int(rows[0][0]) if rows else 0

    async def lay_down(self, connection: AsyncConnection, stage: str, epoch: int) -> None:
        await _run(connection, self._lay_down, (stage, epoch))

    def _fence(self, stage: str) -> int:
        return lock_number("fence", self.place, stage)


_KEY_LOCK_BASE: Final = lock_number("outbox keys") >> 12 << 12


def hash_key(key: str) -> int:
    """Which of the locks a key falls under."""
    return lock_number("key", key) % _KEY_LOCKS


async def _rows(connection: AsyncConnection, statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
    cursor = await driver(connection).execute(statement, values)
    return await cursor.fetchall()


async def _run(connection: AsyncConnection, statement: str, values: Sequence[object]) -> int:
    cursor = await driver(connection).execute(statement, values)
    return cursor.rowcount
