"""The outbox relay: sends the rows of the outbox, oldest first, and marks them as sent. Every instance has one.

One instance at a time sends (it holds a leader lock): so for each key messages go out in the order of their commits,
whichever instance committed them. The next relay sends the rows that a crash left behind. Wake-ups in the process and
NOTIFY only make the relay faster: it also polls once a second.

A subject that no stream takes (its endpoint is not deployed yet) must not block the others: the relay holds its rows,
in order, and tries the oldest of them again every few seconds.

Events of stages are rows for the queue `incoming`; `event_writer` stores them there, each once.

A row that no attempt can send (`stage_dead_letters.is_permanent`: a header or subject that the protocol cannot carry, a
message too large for the server or its stream) becomes a dead letter, and the relay continues with the next row, of the
same key too:

1. One transaction stores the dead letter in the outbox and marks the row as sent. A crash before its commit: the relay
   finds the same row and refuses it again.
2. The relay sends the dead letter like any row, each once: before it sends one that was in the outbox for more than a
   minute, it looks for it in the queue `dead-letters` (`_without_parked`).
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Any, Final

import pyarrow as pa
from sqlalchemy.ext.asyncio import AsyncConnection

from purveyor.jetstream.bulk import OUTGOING_SCHEMA, PublishOptions, publish_many
from purveyor.jetstream.headers import Headers
from purveyor.model.errors import InvalidInput, PurveyorError, SetupError, Unavailable
from purveyor.model.event import SUBJECT
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.store import DeadLetterStore, identity_of
from purveyor.stages.crash_points import CrashPoint, has_listener, reach
from purveyor.stages.event_writer import EventWriter
from purveyor.stages.flow import Outgoing
from purveyor.stages.sql_dialects import LeaderLock, acquire
from purveyor.stages.sql_statements import Row
from purveyor.stages.sql_store import SqlStore, now_ms
from purveyor.stages.stage_dead_letters import (
    failed_before,
    is_permanent,
    row_dead_letter,
    stored_headers,
    to_outgoing,
)
from purveyor.stages.task_cancellation import end_tasks

log = logging.getLogger("purveyor.stages")

_FIRST_PAGE_ROWS: Final = 500
_MAX_ROWS: Final = 20_000
_MAX_BYTES: Final = 16 << 20
"""The largest portion that the relay sends before it marks it: a crash in between sends it again."""
_BATCH_ROWS: Final = 5000
_POLL_INTERVAL_SECONDS: Final = 1.0
_PROBE_INTERVAL_SECONDS: Final = 5.0
_PUBLISH_PATIENCE_SECONDS: Final = 10.0
_REMEMBERED: Final = timedelta(minutes=1)
"""In this time the server surely recognises the id of a message: it is half of its window, as clocks may differ."""
_DEAD_LETTER_PREFIX: Final = DEAD_LETTERS.subjects[0].removesuffix(">")


class Relay:
    """The relay of one instance; `run` it until cancelled."""

    def __init__(self, store: SqlStore, queues: Queues, *, replicas: int = 1) -> None:
        self._store = store
        self._queues = queues
        self._letters = DeadLetterStore(queues)
        self._events = EventWriter(store, queues, replicas=replicas)
        self._wake_up = asyncio.Event()
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._probed_at = 0.0
        self._sending = asyncio.Lock()
        self._unpublished: list[tuple[list[Outgoing], asyncio.Future[None]]] = []
        self.polls = 0
        """How often the relay queried the database without a wake-up."""

    def wake(self) -> None:
        """Make the relay look for rows to send."""
        self._wake_up.set()

    def after_sending(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call this when the relay has sent everything that is committed by now."""
        self._callbacks.append(callback)
        self._wake_up.set()

    async def run(self) -> None:
        """Send until cancelled; wait while the database or the broker is unavailable."""
        listening = asyncio.create_task(self._store.listen(self.wake))
        try:
            while True:
                try:
                    await self._send_when_woken()
                except Exception as error:  # noqa: BLE001 - the relay survives every error
                    log.warning("the outbox relay pauses: %s", error)
                    await asyncio.sleep(_POLL_INTERVAL_SECONDS)
        finally:
            await end_tasks([listening])

    async def _send_when_woken(self) -> None:
        lock = await self._store.leader_lock("relay")
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_INTERVAL_SECONDS):
                        await self._wake_up.wait()
                woken = self._wake_up.is_set()
                self._wake_up.clear()
                if woken or await self._has_work(lock.connection):
                    await self._send_as_leader(lock)
        finally:
            await lock.close()

    async def _has_work(self, connection: AsyncConnection) -> bool:
        self.polls += 1
        unsent, held = await self._store.statements.waiting(connection)
        return unsent or (held and time.monotonic() - self._probed_at > _PROBE_INTERVAL_SECONDS)

    async def _send_as_leader(self, lock: LeaderLock) -> None:
        """Send everything that is committed by now, then call the callbacks that wait for it."""
        callbacks, self._callbacks = self._callbacks, []
        try:
            await acquire(lock)
            try:
                await self._send_all(lock.connection)
            finally:
                await lock.release()
        except BaseException:
            self._callbacks = callbacks + self._callbacks
            raise
        for callback in callbacks:
            try:
                await callback()
            except Exception:  # a callback that fails must not keep the others from being called
                log.exception("a callback of the outbox relay failed")

    async def _send_all(self, connection: AsyncConnection) -> None:
        """Send everything that is committed by now, in portions; while one is being sent, mark the one before.

        The next call sends what is committed from now on, also if its row id is lower. All rows of a key with an id up
        to the newest one are committed now, because a transaction gets its row ids after the commit of the one before
        it (`put`).
        """
        held = await self._probe_held(connection)
        newest = await self._store.statements.newest(connection)
        sent: list[int] = []
        last = 0
        while rows := await self._read(connection, last, newest):
            last = rows[-1].id
            sendable = [row for row in rows if row.subject not in held] if held else rows
            if len(sendable) < len(rows):
                await self._store.statements.hold(connection, [row.id for row in rows if row.subject in held])
            sending = asyncio.create_task(self._try_send(sendable))
            try:
                await self._mark_sent(connection, sent)
            finally:
                accepted = await sending
            sent = [row.id for row in sendable] if accepted else []
            if not accepted:
                held |= await self._send_by_subject(connection, sendable)
        await self._mark_sent(connection, sent)

    async def _read(self, connection: AsyncConnection, after: int, to: int) -> list[Row]:
        """Read the oldest unsent rows between two ids, page by page, up to a limit in bytes: rows may be large."""
        rows: list[Row] = []
        size, page = 0, _FIRST_PAGE_ROWS
        while page:
            more = await self._store.statements.unsent(connection, rows[-1].id if rows else after, to, page)
            rows += more
            size += sum(len(row.data) for row in more)
            if len(more) < page:
                break
            page = min(_MAX_ROWS - len(rows), max(_MAX_BYTES - size, 0) * len(rows) // max(size, 1))
        return rows

    async def _try_send(self, rows: Sequence[Row]) -> bool:
        """Send rows in order; return False when the broker refused one. Raises Unavailable without a broker."""
        try:
            if rows:
                await self._publish(rows)
        except Unavailable:
            raise
        except PurveyorError:
            return False
        reach(CrashPoint.PUBLISHED)
        return True

    async def _mark_sent(self, connection: AsyncConnection, ids: Sequence[int]) -> None:
        if ids:
            await self._store.statements.mark_sent(connection, ids, now_ms())
            reach(CrashPoint.MARKED)

    async def _send_by_subject(self, connection: AsyncConnection, rows: Sequence[Row]) -> set[str]:
        """Send rows subject by subject; hold the rows of the subjects that no stream takes, and return these."""
        refused: set[str] = set()
        for subject in dict.fromkeys(row.subject for row in rows):
            subject_rows = [row for row in rows if row.subject == subject]
            try:
                await self._send_or_park(connection, subject_rows)
            except Unavailable:
                raise
            except PurveyorError as error:
                log.warning("the outbox holds messages for %s: %s", subject, error)
                await self._store.statements.hold(connection, [row.id for row in subject_rows])
                refused.add(subject)
        return refused

    async def _send_or_park(self, connection: AsyncConnection, rows: Sequence[Row]) -> None:
        """Send rows of one subject in order; those that are refused permanently become dead letters.

        The relay finds these rows by bisection: a refusal of many names one of them at most. Rows that it sends again
        on the way have the same ids. It raises any other refusal.
        """
        try:
            await self._publish(rows)
        except PurveyorError as error:
            if not is_permanent(error):
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
        """Replace a row of the outbox by a dead letter."""
        limit = self._queues.connection.max_payload
        letter = row_dead_letter(row, error, limit, datetime.now(UTC))
        outgoing = to_outgoing(letter, limit)
        if row.subject == outgoing.subject:
            raise SetupError(f"the dead letter in row {row.id} of the outbox cannot be sent: {letter.reason}")
        async with self._store.transaction() as transaction:
            await transaction.put([outgoing])
            await self._store.statements.mark_sent(transaction.connection, [row.id], now_ms())
        log.error("row %d of the outbox, for %s, is a dead letter now: %s", row.id, row.subject, letter.reason)
        self.wake()

    async def _probe_held(self, connection: AsyncConnection) -> set[str]:
        """Try the oldest row of each held subject; return the subjects that are still held."""
        oldest = await self._store.statements.held(connection)
        if not oldest or time.monotonic() - self._probed_at <= _PROBE_INTERVAL_SECONDS:
            return {row.subject for row in oldest}
        self._probed_at = time.monotonic()
        still_held: set[str] = set()
        for row in oldest:
            try:
                await self._send_or_park(connection, [row])
            except Unavailable:
                raise
            except PurveyorError:
                still_held.add(row.subject)
            else:
                await self._store.statements.unhold(connection, row.subject)
        return still_held

    async def send_now(self, messages: list[Outgoing]) -> None:
        """Publish messages that are in no outbox, together with those of concurrent callers.

        If the broker refuses one, each caller publishes its own again (their ids make that harmless), so that it gets
        only the errors of its own messages.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unpublished.append((messages, done))
        async with self._sending:
            if not done.done():
                together, self._unpublished = self._unpublished, []
                try:
                    await self._publish_now([message for part, _ in together for message in part])
                except Exception as error:  # noqa: BLE001 - each caller gets it
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
        if any(message.subject == SUBJECT for message in messages):
            await self._events.ensure_queue()  # a queue without readers would keep nothing
        _reach_if_dead_letters(messages, CrashPoint.BEFORE_DEAD_LETTER)
        await self._queues.publish_many((message.to_publish() for message in messages), _publish_options())
        _reach_if_dead_letters(messages, CrashPoint.AFTER_DEAD_LETTER)

    async def _without_parked(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Leave out dead letters that a relay published before it could mark them.

        No inbox drops a second copy of a dead letter, and the server recognises its id for two minutes only. So the
        relay looks in the queue for each letter that has been in the outbox for longer than it should have been.
        """
        moment = datetime.now(UTC) - _REMEMBERED
        letters = {row.id: stored_headers(row) for row in rows if row.subject.startswith(_DEAD_LETTER_PREFIX)}
        letters = {id_: headers for id_, headers in letters.items() if failed_before(headers, moment)}
        if not letters:
            return rows
        by_subject: dict[str, list[Headers]] = {}
        for row in rows:
            if row.id in letters:
                by_subject.setdefault(row.subject, []).append(letters[row.id])
        parked = await self._letters.find_parked(by_subject)
        return [row for row in rows if row.id not in letters or identity_of(letters[row.id]) not in parked]

    async def _publish(self, rows: Sequence[Row]) -> None:
        """Publish rows in order; events and other messages go to different queues."""
        _reach_if_dead_letters(rows, CrashPoint.BEFORE_DEAD_LETTER)
        events = [row for row in rows if row.subject == SUBJECT]
        others = [row for row in rows if row.subject != SUBJECT] if events else rows
        others = await self._without_parked(others)
        if others:
            batches = record_batches(others)  # a generator: the thread builds the batches
            await asyncio.to_thread(publish_many, self._queues.address, batches, _publish_options())
        if events:
            await self._events.write(events)
        _reach_if_dead_letters(rows, CrashPoint.AFTER_DEAD_LETTER)


def record_batches(rows: Sequence[Row]) -> Iterator[Any]:
    """Yield rows of the outbox as Arrow record batches for the bulk path, in order."""
    for start in range(0, len(rows), _BATCH_ROWS):
        try:
            yield _record_batch(rows[start : start + _BATCH_ROWS])
        except (ValueError, TypeError, AttributeError, pa.ArrowException) as error:
            raise InvalidInput(f"a row of the outbox is no message: {error}", fix="look at its columns") from error


def _record_batch(rows: Sequence[Row]) -> Any:
    headers = [json.loads(row.headers) for row in rows]
    names = [name for each in headers for name in each]
    values = [value for each in headers for value in each.values()]
    ends = pa.array([0, *accumulate(map(len, headers))], pa.int32())
    one_each = pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), pa.array(values, pa.string()))
    kinds = OUTGOING_SCHEMA.types
    columns = [
        pa.array([row.subject for row in rows], kinds[0]),
        pa.array([row.data for row in rows], kinds[1]),
        pa.MapArray.from_arrays(ends, pa.array(names, pa.string()), one_each).cast(kinds[2]),
        pa.array([row.message_id for row in rows], kinds[3]),
    ]
    return pa.record_batch(columns, schema=OUTGOING_SCHEMA)


def _publish_options() -> PublishOptions:
    return PublishOptions(
        patience_seconds=_PUBLISH_PATIENCE_SECONDS, on_progress=lambda _: reach(CrashPoint.MID_PUBLISH)
    )


def _reach_if_dead_letters(messages: Sequence[Row | Outgoing], point: CrashPoint) -> None:
    if has_listener() and any(message.subject.startswith(_DEAD_LETTER_PREFIX) for message in messages):
        reach(point)
