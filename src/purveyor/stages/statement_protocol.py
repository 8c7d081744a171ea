"""What the two databases are asked, in the terms of stages; one statement per question, for many messages at once.

`Statements` is what the store needs of a database. `postgres.py` and `sqlite.py` say it in their words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sqlalchemy.ext.asyncio import AsyncConnection

from purveyor.stages.flow import Outgoing


@dataclass(frozen=True, slots=True)
class Claim:
    """A message that is to be processed: its id, and its sequence in its stream."""

    id: str
    sequence: int
    former_id: str | None = None
    """Its id in rows of an older version."""
    stored_ms: int = 0
    """When the server stored the message: a row with the former id that is older is of another message."""


class Row(NamedTuple):
    """A row of the outbox that is not sent, as the database gives it: there may be many thousands of them."""

    id: int
    message_id: str
    subject: str
    key: str | None
    headers: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Failures:
    """How often a message has failed, and when first (milliseconds)."""

    attempts: int
    first_ms: int


class Cleaned(NamedTuple):
    """How many rows went, and how far that was: a number of the outbox, or a time of the inbox."""

    rows: int
    up_to: int


@dataclass(frozen=True, slots=True)
class Portion:
    """Of what may go: up to `limit` rows older than `before` (milliseconds), from where the last portion ended.

    What went before lies in the way, until the database has tidied up: it is not walked through again and again.
    """

    before: int
    limit: int
    begin: int = 0


class Statements(Protocol):
    """All on a connection that the caller gives, in the transaction that is on it."""

    async def begin(self, connection: AsyncConnection) -> None:
        """What comes first in a transaction that writes."""

    async def claim(self, connection: AsyncConnection, stage: str, claims: Sequence[Claim], now: int) -> set[str]:
        """Put messages into the inbox; the ids of those that were not there. Waits for another who is at it."""

    async def unclaim(self, connection: AsyncConnection, stage: str, ids: Sequence[str]) -> None:
        """Take messages out of the inbox that this transaction put in."""

    async def put(
        self, connection: AsyncConnection, messages: Sequence[Outgoing], now: int, *, notify: bool = False
    ) -> None:
        """Put messages into the outbox, so that their numbers follow the order of commits for each key."""

    async def failed(self, connection: AsyncConnection, stage: str, message_id: str, reason: str, now: int) -> Failures:
        """Count one failure more."""

    async def forget_failures(self, connection: AsyncConnection, stage: str, ids: Sequence[str]) -> None:
        """They failed no more, or were given up."""

    async def waiting(self, connection: AsyncConnection) -> tuple[bool, bool]:
        """Whether there are rows to be sent, and rows held: one small question, asked once a second."""

    async def newest(self, connection: AsyncConnection) -> int:
        """The highest number of a row that is to be sent; 0 when there is none."""

    async def unsent(self, connection: AsyncConnection, after: int, to: int, limit: int) -> list[Row]:
        """The oldest rows that are to be sent, with numbers above one and up to another."""

    async def mark_sent(self, connection: AsyncConnection, ids: Sequence[int], now: int) -> None:
        """They are sent."""

    async def hold(self, connection: AsyncConnection, ids: Sequence[int]) -> None:
        """Nobody takes them at present: out of the way of the others."""

    async def held(self, connection: AsyncConnection) -> list[Row]:
        """The oldest held row of each subject."""

    async def unhold(self, connection: AsyncConnection, subject: str) -> None:
        """Somebody takes this subject again."""

    async def replay(self, connection: AsyncConnection, since: int) -> int:
        """Make rows sent since then unsent again; how many."""

    async def clean_outbox(self, connection: AsyncConnection, portion: Portion) -> Cleaned:
        """Remove rows that were sent, oldest first."""

    async def clean_inbox(self, connection: AsyncConnection, stage: str, floor: int, portion: Portion) -> Cleaned:
        """Remove messages of a stage that were processed and lie at or below a sequence, oldest first."""

    async def take_over(self, connection: AsyncConnection, stage: str, owner: str) -> tuple[int, str]:
        """Become the owner of a stage: the new epoch, and who owned it before.

        Returns when no transaction of an earlier owner is under way any more.
        """

    async def epoch(self, connection: AsyncConnection, stage: str) -> int:
        """The epoch of a stage, which stays what it is until this transaction ends."""

    async def lay_down(self, connection: AsyncConnection, stage: str, epoch: int) -> None:
        """Say that the owner with that epoch works no more."""
