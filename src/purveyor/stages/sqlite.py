"""SQLite: the statements of stages, with JSON arrays for many at once.

One transaction writes at a time, so there are no locks between keys: rows are numbered in the order of commits.
"""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from purveyor.stages.flow import Outgoing
from purveyor.stages.statements import Claim, Failures, Row
from purveyor.stages.tables import Tables


class Sqlite:
    """See the module."""

    def __init__(self, tables: Tables) -> None:
        inbox, outbox, failures, owners = (table.fullname for table in tables.all())
        columns = "id, message_id, subject, key, headers, data"
        self._claim = (
            f"INSERT INTO {inbox} (stage, message_id, sequence, done_ms) "
            "SELECT ?, value ->> 0, value ->> 1, ? FROM json_each(?) WHERE true "
            "ON CONFLICT DO NOTHING RETURNING message_id"
        )
        self._unclaim = f"DELETE FROM {inbox} WHERE stage = ? AND message_id IN (SELECT value FROM json_each(?))"
        self._put = (
            f"INSERT INTO {outbox} (message_id, subject, key, headers, data, created_ms) VALUES (?, ?, ?, ?, ?, ?)"
        )
        self._failed = (
            f"INSERT INTO {failures} (stage, message_id, attempts, first_ms, last_ms, reason) "
            "VALUES (?, ?, 1, ?, ?, ?) ON CONFLICT (stage, message_id) DO UPDATE SET "
            "attempts = attempts + 1, last_ms = excluded.last_ms, reason = excluded.reason RETURNING attempts, first_ms"
        )
        self._forget = f"DELETE FROM {failures} WHERE stage = ? AND message_id IN (SELECT value FROM json_each(?))"
        self._waiting = (
            f"SELECT EXISTS (SELECT 1 FROM {outbox} WHERE sent_ms IS NULL AND held = 0), "
            f"EXISTS (SELECT 1 FROM {outbox} WHERE sent_ms IS NULL AND held = 1)"
        )
        self._newest = f"SELECT max(id) FROM {outbox} WHERE sent_ms IS NULL AND held = 0"
        self._unsent = (
            f"SELECT {columns} FROM {outbox} WHERE sent_ms IS NULL AND held = 0 AND id > ? AND id <= ? "
            f"ORDER BY id LIMIT ?"
        )
        self._sent = f"UPDATE {outbox} SET sent_ms = ?, held = 0 WHERE id IN (SELECT value FROM json_each(?))"
        self._hold = f"UPDATE {outbox} SET held = 1 WHERE id IN (SELECT value FROM json_each(?))"
        self._held = (
            f"SELECT {columns} FROM {outbox} WHERE id IN "
            f"(SELECT min(id) FROM {outbox} WHERE sent_ms IS NULL AND held = 1 GROUP BY subject)"
        )
        self._unhold = f"UPDATE {outbox} SET held = 0 WHERE sent_ms IS NULL AND held = 1 AND subject = ?"
        self._replay = f"UPDATE {outbox} SET sent_ms = NULL WHERE sent_ms >= ?"
        self._clean_outbox = (
            f"DELETE FROM {outbox} WHERE id IN (SELECT id FROM (SELECT id, sent_ms FROM {outbox} "
            "WHERE sent_ms IS NOT NULL ORDER BY id LIMIT ?) WHERE sent_ms < ?)"
        )
        self._clean_inbox = (
            f"DELETE FROM {inbox} WHERE (stage, message_id) IN (SELECT stage, message_id FROM {inbox} "
            "WHERE done_ms < ? AND stage = ? AND sequence <= ? ORDER BY done_ms LIMIT ?)"
        )
        self._owner = f"SELECT owner FROM {owners} WHERE stage = ?"
        self._take = (
            f"INSERT INTO {owners} (stage, epoch, owner) VALUES (?, 1, ?) "
            "ON CONFLICT (stage) DO UPDATE SET epoch = epoch + 1, owner = excluded.owner RETURNING epoch"
        )
        self._epoch = f"SELECT epoch FROM {owners} WHERE stage = ?"
        self._lay_down = f"UPDATE {owners} SET owner = '' WHERE stage = ? AND epoch = ?"

    async def begin(self, connection: AsyncConnection) -> None:
        """Take the one place of a writer now: a transaction that reads first and writes later may be turned away."""
        await connection.exec_driver_sql("BEGIN IMMEDIATE")

    async def claim(self, connection: AsyncConnection, stage: str, claims: Sequence[Claim], now: int) -> set[str]:
        given = json.dumps([[claim.id, claim.sequence] for claim in claims])
        return {row[0] for row in await _rows(connection, self._claim, (stage, now, given))}

    async def unclaim(self, connection: AsyncConnection, stage: str, ids: Sequence[str]) -> None:
        await _run(connection, self._unclaim, (stage, json.dumps(list(ids))))

    async def put(
        self,
        connection: AsyncConnection,
        messages: Sequence[Outgoing],
        now: int,
        *,
        notify: bool = False,  # nobody can be told: the relay polls
    ) -> None:
        rows = [(m.id, m.subject, m.key, json.dumps(dict(m.headers)), m.data, now) for m in messages]
        await connection.exec_driver_sql(self._put, rows)

    async def failed(self, connection: AsyncConnection, stage: str, message_id: str, reason: str, now: int) -> Failures:
        rows = await _rows(connection, self._failed, (stage, message_id, now, now, reason))
        return Failures(*rows[0])

    async def forget_failures(self, connection: AsyncConnection, stage: str, ids: Sequence[str]) -> None:
        await _run(connection, self._forget, (stage, json.dumps(list(ids))))

    async def waiting(self, connection: AsyncConnection) -> tuple[bool, bool]:
        unsent, held = (await _rows(connection, self._waiting, ()))[0]
        return bool(unsent), bool(held)

    async def newest(self, connection: AsyncConnection) -> int:
        return int((await _rows(connection, self._newest, ()))[0][0] or 0)

    async def unsent(self, connection: AsyncConnection, after: int, to: int, limit: int) -> list[Row]:
        return [*map(Row._make, await _rows(connection, self._unsent, (after, to, limit)))]

    async def mark_sent(self, connection: AsyncConnection, ids: Sequence[int], now: int) -> None:
        await _run(connection, self._sent, (now, json.dumps(list(ids))))

    async def hold(self, connection: AsyncConnection, ids: Sequence[int]) -> None:
        await _run(connection, self._hold, (json.dumps(list(ids)),))

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
        before = await _rows(connection, self._owner, (stage,))
        rows = await _rows(connection, self._take, (stage, owner))
        return int(rows[0][0]), str(before[0][0]) if before else ""

    async def epoch(self, connection: AsyncConnection, stage: str) -> int:
        rows = await _rows(connection, self._epoch, (stage,))
        return int(rows[0][0]) if rows else 0

    async def lay_down(self, connection: AsyncConnection, stage: str, epoch: int) -> None:
        await _run(connection, self._lay_down, (stage, epoch))


async def _rows(connection: AsyncConnection, statement: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in (await connection.exec_driver_sql(statement, values)).all()]


async def _run(connection: AsyncConnection, statement: str, values: tuple[object, ...]) -> int:
    return (await connection.exec_driver_sql(statement, values)).rowcount
