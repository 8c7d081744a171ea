"""The statements of stages that both databases are asked alike; `postgres.py` and `sqlite.py` add what differs.

What differs in all of them is how a value is marked, how many values are given as one, and how a flag is asked for
(so that the question fits the partial indexes of `tables`): the `Words` of a database.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from purveyor.stages.flow import NOT_STORABLE
from purveyor.stages.sql_tables import Tables
from purveyor.stages.statement_protocol import Claim, Cleaned, Failures, Portion, Row

_CLOCKS_MS: Final = 300_000
"""How far the clocks of the application and of the broker may be apart: five minutes."""
COLUMNS = ", ".join(Row._fields)
"""Of a row to be sent, in the order of `Row`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """How one database says it."""

    value: str
    one_of_texts: str
    one_of_numbers: str
    held: str
    not_held: str
    row: str
    """Where a row lies."""
    one_of_rows: Callable[[str], str]
    """One of those that a question answers."""


class CommonStatements(ABC):
    """See the module, and `statements.Statements` for what each call means."""

    def __init__(self, tables: Tables, words: Words) -> None:
        inbox, outbox, failures, owners = (table.fullname for table in tables.all())
        v = words.value
        self.place = outbox
        self._done = f"SELECT message_id, done_ms FROM {inbox} WHERE stage = {v} AND message_id {words.one_of_texts}"
        self._unclaim = f"DELETE FROM {inbox} WHERE stage = {v} AND message_id {words.one_of_texts}"
        self._failed = (
            f"INSERT INTO {failures} AS f (stage, message_id, attempts, first_ms, last_ms, reason) "
            f"VALUES ({v}, {v}, 1, {v}, {v}, {v}) ON CONFLICT (stage, message_id) DO UPDATE SET "
            "attempts = f.attempts + 1, last_ms = excluded.last_ms, reason = excluded.reason "
            "RETURNING attempts, first_ms"
        )
        self._forget = f"DELETE FROM {failures} WHERE stage = {v} AND message_id {words.one_of_texts}"
        self._waiting = (
            f"SELECT EXISTS (SELECT 1 FROM {outbox} WHERE sent_ms IS NULL AND {words.not_held}), "
            f"EXISTS (SELECT 1 FROM {outbox} WHERE sent_ms IS NULL AND {words.held})"
        )
        self._newest = f"SELECT max(id) FROM {outbox} WHERE sent_ms IS NULL AND {words.not_held}"
        self._unsent = (
            f"SELECT {COLUMNS} FROM {outbox} WHERE sent_ms IS NULL AND {words.not_held} AND id > {v} AND id <= {v} "
            f"ORDER BY id LIMIT {v}"
        )
        self._sent = f"UPDATE {outbox} SET sent_ms = {v}, held = false WHERE id {words.one_of_numbers}"
        self._hold = f"UPDATE {outbox} SET held = true WHERE sent_ms IS NULL AND id {words.one_of_numbers}"
        self._unhold = f"UPDATE {outbox} SET held = false WHERE sent_ms IS NULL AND {words.held} AND subject = {v}"
        self._replay = f"UPDATE {outbox} SET sent_ms = NULL WHERE sent_ms >= {v}"
        # Only the oldest rows are looked at: a search for those sent long ago could go through the whole table.
        self._clean_outbox = (
            f"DELETE FROM {outbox} WHERE id IN (SELECT id FROM (SELECT id, sent_ms FROM {outbox} "
            f"WHERE sent_ms IS NOT NULL AND id > {v} ORDER BY id LIMIT {v}) AS oldest WHERE sent_ms < {v}) RETURNING id"
        )
        # By where the rows lie, which is as they came: found by their ids they would be all over a large table.
        oldest = (
            f"SELECT {words.row} FROM {inbox} WHERE done_ms >= {v} AND done_ms < {v} "
            f"AND stage = {v} AND sequence <= {v} ORDER BY done_ms LIMIT {v}"
        )
        self._clean_inbox = f"DELETE FROM {inbox} WHERE {words.row} {words.one_of_rows(oldest)} RETURNING done_ms"
        self._owner = f"SELECT owner FROM {owners} WHERE stage = {v}"
        self._take = (
            f"INSERT INTO {owners} AS o (stage, epoch, owner) VALUES ({v}, 1, {v}) "
            "ON CONFLICT (stage) DO UPDATE SET epoch = o.epoch + 1, owner = excluded.owner RETURNING epoch"
        )
        self._epoch = f"SELECT epoch FROM {owners} WHERE stage = {v}"
        self._lay_down = f"UPDATE {owners} SET owner = '' WHERE stage = {v} AND epoch = {v}"

    # How the database is asked

    @abstractmethod
    async def rows(self, connection: AsyncConnection, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """What a statement answers."""

    @abstractmethod
    async def run(self, connection: AsyncConnection, statement: str, *values: object) -> int:
        """How many rows a statement touched."""

    @abstractmethod
    def texts(self, many: Sequence[str]) -> object:
        """Many texts as one value."""

    @abstractmethod
    def numbers(self, many: Sequence[int]) -> object:
        """Many numbers as one value."""

    @abstractmethod
    async def insert_claims(
        self, connection: AsyncConnection, stage: str, claims: Sequence[Claim], now: int
    ) -> set[str]:
        """Put messages into the inbox; the ids of those that were not there. Waits for another who is at it."""

    # What it is asked

    async def claim(self, connection: AsyncConnection, stage: str, claims: Sequence[Claim], now: int) -> set[str]:
        fresh = await self.insert_claims(connection, stage, claims, now)
        former = {claim.former_id: claim for claim in claims if claim.former_id is not None and claim.id in fresh}
        if former:
            known = await self.rows(connection, self._done, stage, self.texts([*former]))
            fresh -= {former[old].id for old, done_ms in known if done_ms + _CLOCKS_MS >= former[old].stored_ms}
        return fresh

    async def unclaim(self, connection: AsyncConnection, stage: str, ids: Sequence[str]) -> None:
        await self.run(connection, self._unclaim, stage, self.texts(ids))

    async def failed(self, connection: AsyncConnection, stage: str, message_id: str, reason: str, now: int) -> Failures:
        reason = NOT_STORABLE.sub("\N{REPLACEMENT CHARACTER}", reason)
        return Failures(*(await self.rows(connection, self._failed, stage, message_id, now, now, reason))[0])

    async def forget_failures(self, connection: AsyncConnection, stage: str, ids: Sequence[str]) -> None:
        await self.run(connection, self._forget, stage, self.texts(ids))

    async def waiting(self, connection: AsyncConnection) -> tuple[bool, bool]:
        unsent, held = (await self.rows(connection, self._waiting))[0]
        return bool(unsent), bool(held)

    async def newest(self, connection: AsyncConnection) -> int:
        return int((await self.rows(connection, self._newest))[0][0] or 0)

    async def unsent(self, connection: AsyncConnection, after: int, to: int, limit: int) -> list[Row]:
        return [*map(Row._make, await self.rows(connection, self._unsent, after, to, limit))]

    async def mark_sent(self, connection: AsyncConnection, ids: Sequence[int], now: int) -> None:
        await self.run(connection, self._sent, now, self.numbers(ids))

    async def hold(self, connection: AsyncConnection, ids: Sequence[int]) -> None:
        await self.run(connection, self._hold, self.numbers(ids))

    async def unhold(self, connection: AsyncConnection, subject: str) -> None:
        await self.run(connection, self._unhold, subject)

    async def replay(self, connection: AsyncConnection, since: int) -> int:
        return await self.run(connection, self._replay, since)

    async def clean_outbox(self, connection: AsyncConnection, portion: Portion) -> Cleaned:
        values = (portion.begin, portion.limit, portion.before)
        return _cleaned(await self.rows(connection, self._clean_outbox, *values))

    async def clean_inbox(self, connection: AsyncConnection, stage: str, floor: int, portion: Portion) -> Cleaned:
        values = (portion.begin, portion.before, stage, floor, portion.limit)
        return _cleaned(await self.rows(connection, self._clean_inbox, *values))

    async def take_over(self, connection: AsyncConnection, stage: str, owner: str) -> tuple[int, str]:
        before = await self.rows(connection, self._owner, stage)
        rows = await self.rows(connection, self._take, stage, owner)
        return int(rows[0][0]), str(before[0][0]) if before else ""

    async def epoch(self, connection: AsyncConnection, stage: str) -> int:
        rows = await self.rows(connection, self._epoch, stage)
        return int(rows[0][0]) if rows else 0

    async def lay_down(self, connection: AsyncConnection, stage: str, epoch: int) -> None:
        await self.run(connection, self._lay_down, stage, epoch)


def _cleaned(gone: list[tuple[Any, ...]]) -> Cleaned:
    return Cleaned(len(gone), max((int(row[0]) for row in gone), default=0))
