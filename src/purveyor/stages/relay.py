"""The outbox relay: sends what lies in the outbox, oldest first, and marks it sent. Every instance has one.

One instance at a time has its turn (a seat): so for each key messages go out in the order of their commits, whoever
committed them. What a crash left behind is sent by whoever comes next. In-process bells and NOTIFY wake it; a look once
a second is the truth.

A subject that nobody takes (its endpoint is not deployed yet) must not hold up the others: its rows are held, in order,
out of the way, and the oldest is tried again every few seconds.

A row that no attempt can send (`parking.is_for_good`: a header or subject that the protocol cannot carry, a message too
large for the server or its stream) becomes a dead letter, and the relay goes on with the next row, of the same key too:

1. One transaction stores the dead letter in the outbox and marks the row as sent. A crash before its commit: the relay
   finds the same row and refuses it again.
2. The relay sends the dead letter like any row.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from purveyor.jetstream.bulk import PublishOptions, publish_many
from purveyor.jetstream.headers import MSG_ID, first
from purveyor.model.errors import PurveyorError, SetupError, Unavailable
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import fitted
from purveyor.stages.crash_points import Point, heard, reach
from purveyor.stages.flow import Outgoing
from purveyor.stages.leader_lock import Seat, wait_for
from purveyor.stages.parking import is_for_good, letter_of
from purveyor.stages.relay_batches import record_batches
from purveyor.stages.sql_store import SqlStore, now_ms
from purveyor.stages.statement_protocol import Row

log = logging.getLogger("purveyor.stages")

_FIRST_PAGE: Final = 500
_MOST_ROWS: Final = 20_000
_MOST_BYTES: Final = 16 << 20
"""So many rows and bytes go out before they are marked: what a crash in between sends again."""
_POLL_SECONDS: Final = 1.0
_PROBE_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 10.0
_DEAD_LETTERS: Final = DEAD_LETTERS.subjects[0].removesuffix(">")


class Relay:
    """See the module. `run` until it is cancelled."""

    def __init__(self, store: SqlStore, queues: Queues) -> None:
        self._store = store
        self._queues = queues
        self._bell = asyncio.Event()
        self._waiting: list[Callable[[], Awaitable[None]]] = []
        self._probed_at = 0.0
        self._sending = asyncio.Lock()
        self._outgoing: list[tuple[list[Outgoing], asyncio.Future[None]]] = []
        self.looks = 0
        """How often the database was asked without a bell."""

    def wake(self) -> None:
        """There may be something to send."""
        self._bell.set()

    def after_sending(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call this when everything is sent that is committed by now."""
        self._waiting.append(callback)
        self._bell.set()

    async def run(self) -> None:
        """Send, until cancelled; a database or broker that is away is waited for."""
        listening = asyncio.create_task(self._store.listen(self.wake))
        try:
            while True:
                try:
                    await self._work()
                except Exception as error:  # noqa: BLE001 - the relay outlives everything
                    log.warning("the outbox relay pauses: %s", error)
                    await asyncio.sleep(_POLL_SECONDS)
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def _work(self) -> None:
        seat = await self._store.seat("relay")
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await self._bell.wait()
                rung = self._bell.is_set()
                self._bell.clear()
                if rung or await self._anything(seat.connection):
                    await self._turn(seat)
        finally:
            await seat.close()

    async def _anything(self, connection: AsyncConnection) -> bool:
        self.looks += 1
        unsent, held = await self._store.statements.waiting(connection)
        return unsent or (held and time.monotonic() - self._probed_at > _PROBE_SECONDS)

    async def _turn(self, seat: Seat) -> None:
        """Everything that is committed by now, then those who wait for it."""
        waiting, self._waiting = self._waiting, []
        try:
            await wait_for(seat)
            try:
                await self._send_all(seat.connection)
            finally:
                await seat.give_back()
        except BaseException:
            self._waiting = waiting + self._waiting
            raise
        for callback in waiting:
            try:
                await callback()
            except Exception:  # one that fails must not keep the others from being called
                log.exception("a callback of the outbox relay failed")

    async def _send_all(self, connection: AsyncConnection) -> None:
        """Everything that is committed by now, portion by portion; while one is on its way, the one before is marked.

        What is committed from now on is for the next turn, also if its number is lower: of a key, all that has a number
        up to the newest of now is committed, because a number is given out when the one before it is (`put`).
        """
        held = await self._probe(connection)
        newest = await self._store.statements.newest(connection)
        sent: list[int] = []
        last = 0
        while rows := await self._read(connection, last, newest):
            last = rows[-1].id
            ahead = [row for row in rows if row.subject not in held] if held else rows
            if len(ahead) < len(rows):
                await self._store.statements.hold(connection, [row.id for row in rows if row.subject in held])
            sending = asyncio.create_task(self._try(ahead))
            try:
                await self._mark(connection, sent)
            finally:
                taken = await sending
            sent = [row.id for row in ahead] if taken else []
            if not taken:
                held |= await self._send_by_subject(connection, ahead)
        await self._mark(connection, sent)

    async def _read(self, connection: AsyncConnection, after: int, to: int) -> list[Row]:
        """The oldest unsent rows between two numbers, page by page, of a bounded size: rows may be large."""
        rows: list[Row] = []
        size, page = 0, _FIRST_PAGE
        while page:
            more = await self._store.statements.unsent(connection, rows[-1].id if rows else after, to, page)
            rows += more
            size += sum(len(row.data) for row in more)
            if len(more) < page:
                break
            page = min(_MOST_ROWS - len(rows), max(_MOST_BYTES - size, 0) * len(rows) // max(size, 1))
        return rows

    async def _try(self, rows: Sequence[Row]) -> bool:
        """Send rows in order; False when something was refused. A broker that is away is an error."""
        try:
            if rows:
                await self._publish(rows)
        except Unavailable:
            raise
        except PurveyorError:
            return False
        reach(Point.PUBLISHED)
        return True

    async def _mark(self, connection: AsyncConnection, ids: Sequence[int]) -> None:
        if ids:
            await self._store.statements.mark_sent(connection, ids, now_ms())
            reach(Point.MARKED)

    async def _send_by_subject(self, connection: AsyncConnection, rows: Sequence[Row]) -> set[str]:
        refused: set[str] = set()
        for subject in dict.fromkeys(row.subject for row in rows):
            its = [row for row in rows if row.subject == subject]
            try:
                await self._send_or_park(connection, its)
            except Unavailable:
                raise
            except PurveyorError as error:
                log.warning("the outbox holds messages for %s: %s", subject, error)
                await self._store.statements.hold(connection, [row.id for row in its])
                refused.add(subject)
        return refused

    async def _send_or_park(self, connection: AsyncConnection, rows: Sequence[Row]) -> None:
        """Send rows of one subject in order; those that are refused for good become dead letters.

        Which rows these are is found by halves: a refusal of many names one of them at most. Rows that are sent again
        on the way have the same ids. Any other refusal is raised.
        """
        try:
            await self._publish(rows)
        except PurveyorError as error:
            if not is_for_good(error):
                raise
            if len(rows) == 1:
                await self._park(rows[0], error)
                return
            middle = len(rows) // 2
            await self._send_or_park(connection, rows[:middle])
            await self._send_or_park(connection, rows[middle:])
        else:
            await self._store.statements.mark_sent(connection, [row.id for row in rows], now_ms())

    async def _park(self, row: Row, error: PurveyorError) -> None:
        """Put a dead letter into the outbox in the place of a row."""
        limit = self._queues.connection.max_payload
        letter = letter_of(row, error, limit, datetime.now(UTC))
        subject, data, headers = fitted(letter, limit)
        if row.subject == subject:
            raise SetupError(f"the dead letter in row {row.id} of the outbox cannot be sent: {letter.reason}")
        plain = {name: first(headers, name) or "" for name in headers if name != MSG_ID}
        async with self._store.transaction() as transaction:
            await transaction.put([Outgoing(letter.id, subject, data, plain)])
            await self._store.statements.mark_sent(transaction.connection, [row.id], now_ms())
        log.error("row %d of the outbox, for %s, is a dead letter now: %s", row.id, row.subject, letter.reason)
        self.wake()

    async def _probe(self, connection: AsyncConnection) -> set[str]:
        """Try the oldest row of each held subject; the subjects that are still held."""
        oldest = await self._store.statements.held(connection)
        if not oldest or time.monotonic() - self._probed_at <= _PROBE_SECONDS:
            return {row.subject for row in oldest}
        self._probed_at = time.monotonic()
        still: set[str] = set()
        for row in oldest:
            try:
                await self._send_or_park(connection, [row])
            except Unavailable:
                raise
            except PurveyorError:
                still.add(row.subject)
            else:
                await self._store.statements.unhold(connection, row.subject)
        return still

    async def send_now(self, messages: list[Outgoing]) -> None:
        """Publish messages that are in no outbox; those that others hand in meanwhile go with them.

        If something is refused, each hands in his own again (their ids make that harmless), and hears of his own alone.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outgoing.append((messages, done))
        async with self._sending:
            if not done.done():
                together, self._outgoing = self._outgoing, []
                try:
                    await self._publish_now([message for part, _ in together for message in part])
                except Exception as error:  # noqa: BLE001 - told to each of them
                    for _, waiting in together:
                        waiting.set_exception(error)
                else:
                    for _, waiting in together:
                        waiting.set_result(None)
        try:
            done.result()
        except Unavailable:
            raise
        except PurveyorError:
            await self._publish_now(messages)

    async def _publish_now(self, messages: Sequence[Outgoing]) -> None:
        self._note_letters(messages, Point.BEFORE_DEAD_LETTER)
        await self._queues.publish_many((message.to_publish() for message in messages), self._options())
        self._note_letters(messages, Point.AFTER_DEAD_LETTER)

    async def _publish(self, rows: Sequence[Row]) -> None:
        self._note_letters(rows, Point.BEFORE_DEAD_LETTER)
        batches = record_batches(rows)  # made in the thread, where they are needed
        await asyncio.to_thread(publish_many, self._queues.address, batches, self._options())
        self._note_letters(rows, Point.AFTER_DEAD_LETTER)

    @staticmethod
    def _options() -> PublishOptions:
        return PublishOptions(patience_seconds=_PATIENCE_SECONDS, on_progress=lambda _: reach(Point.MID_PUBLISH))

    @staticmethod
    def _note_letters(messages: Sequence[Row | Outgoing], point: Point) -> None:
        if heard() and any(message.subject.startswith(_DEAD_LETTERS) for message in messages):
            reach(point)
