"""SQLite: the statements of stages, with JSON arrays for many at once.

One transaction writes at a time, so there are no locks between keys: rows are numbered in the order of commits.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from purveyor.stages.flow import Outgoing
from purveyor.stages.sql_common import COLUMNS, CommonStatements, Words
from purveyor.stages.sql_tables import Tables
from purveyor.stages.statement_protocol import Claim, Row

_ONE_OF: Final = "IN (SELECT value FROM json_each(?))"
_WORDS: Final = Words(
    value="?",
    one_of_texts=_ONE_OF,
    one_of_numbers=_ONE_OF,
    held="held = 1",
    not_held="held = 0",
    row="rowid",
    one_of_rows="IN ({})".format,
)


class Sqlite(CommonStatements):
    """See the module."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables, _WORDS)
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
            f"SELECT {COLUMNS} FROM {outbox} WHERE id IN "
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
        """Take the one place of a writer now: a transaction that reads first and writes later may be turned away."""
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
        notify: bool = False,  # nobody can be told: the relay polls
    ) -> None:
        rows = [(m.id, m.subject, m.key, json.dumps(dict(m.headers)), m.data, now) for m in messages]
        await connection.exec_driver_sql(self._put, rows)

    async def held(self, connection: AsyncConnection) -> list[Row]:
        return [*map(Row._make, await self.rows(connection, self._held))]
