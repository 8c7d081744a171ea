"""Writes the events in the outbox into the queue `incoming`: in the order of their commits, each once.

Readers of `incoming` have no inbox, so the message id alone would not do: the server knows it for two minutes. As the
transform does, the relay reads from the queue itself what it has written:

1. The events of an outbox have a separate subject, `incoming.outbox.<outbox>.<generation>`, and a durable that holds
   the newest of them, also when the other readers have processed it. Each carries the id of its row in a header. Row
   ids follow the order of commits (`sql_dialects`), so the newest message is the watermark: rows up to it are stored.
2. `append_once` skips these rows and stores the rest, in order, on condition that no other relay writes in between.
3. The durable moves up to the newest event; the server may drop the ones before it.
4. The relay marks the rows as sent.

A crash anywhere before 4: the next relay finds the same rows, and 2 skips the stored ones, after any time. A relay that
lost its leader lock and resumes late finds its rows below the watermark, or the server refuses them.

A database that was restored from an older copy gives row ids again to other rows. The writer notices that the row of
the newest event is not in the outbox, and begins a new generation: it skips none of the rows. Events that the lost part
of the database had published stay in the queue.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import pyarrow as pa

from purveyor.jetstream.api import MESSAGE_TOO_LARGE
from purveyor.jetstream.bulk import AppendOptions, Refusal, RefusalKind, Target, append_once
from purveyor.jetstream.headers import MSG_ID, first
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.errors import (
    InvalidInput,
    PermissionDenied,
    PublishRefused,
    PurveyorError,
    SetupError,
    UnknownConsumer,
    UnknownMessage,
    UnknownStream,
)
from purveyor.model.event import OUTBOX_SUBJECT
from purveyor.queues.catalogue import incoming, outbox_receipts
from purveyor.queues.client import Queues
from purveyor.stages.crash_points import CrashPoint, reach
from purveyor.stages.handler_types import new_id
from purveyor.stages.sql_statements import Row
from purveyor.stages.sql_store import SqlStore

log = logging.getLogger("purveyor.stages")

ROW_HEADER: Final = "Purveyor-Outbox-Row"
"""The header with the row of an event in its outbox."""
_STREAM: Final = incoming().stream
_PATIENCE_SECONDS: Final = 10.0
_HEADERS: Final = pa.map_(pa.string(), pa.list_(pa.string()))


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest event of an outbox in `incoming`."""

    sequence: int
    generation: int
    row: int
    message_id: str

    @classmethod
    def read(cls, message: StoredMessage) -> Self:
        generation, row = message.subject.rpartition(".")[2], first(message.headers, ROW_HEADER) or ""
        if not generation.isdecimal() or not row.isdecimal():
            raise SetupError(
                f"message {message.sequence} of {message.stream} on {message.subject} is not from an outbox relay",
                fix="remove it: `purveyor stream purge` takes a subject",
            )
        return cls(message.sequence, int(generation), int(row), first(message.headers, MSG_ID) or "")


class EventWriter:
    """Writes the events of one outbox. Only the relay that holds the leader lock calls `write`."""

    def __init__(self, store: SqlStore, queues: Queues, *, replicas: int = 1) -> None:
        self._store = store
        self._queues = queues
        self._replicas = replicas
        self._outbox: str | None = None
        self._ready_on = 0
        self._plain_ready_on = 0

    async def write(self, rows: Sequence[Row]) -> None:
        """Store the events in these rows, in order of their ids.

        Raises PublishRefused, UnknownStream or PermissionDenied if the queue refuses one, and Unavailable without a
        server; the rows before it are stored.
        """
        outbox = await self._ensure()
        target = await self._find_target(outbox, rows[0].id)  # 1
        try:
            outcomes = await asyncio.to_thread(append_once, self._queues.address, [(target, _table(rows))], _OPTIONS)
        except PurveyorError:
            self._ready_on = 0
            raise
        reach(CrashPoint.EVENTS_STORED)  # 2
        await self._release(outbox)  # 3
        if outcomes[0].refused is not None:
            self._ready_on = 0
            raise _to_error(outcomes[0].refused)

    async def ensure_queue(self) -> None:
        """Ensure the queue and its readers, once per connection, for events that are in no outbox."""
        generation = self._queues.connection.generation
        if self._plain_ready_on != generation:
            (await self._queues.ensure(incoming(), replicas=self._replicas)).require_usable()
            self._plain_ready_on = generation

    async def _ensure(self) -> str:
        """Ensure the queue, its readers and the durable of this outbox, once per connection; return the outbox."""
        if self._outbox is None:
            async with self._store.transaction() as transaction:
                self._outbox = await self._store.statements.outbox_id(transaction.connection, new_id()[:16])
        generation = self._queues.connection.generation
        if self._ready_on != generation:
            queue = incoming(outboxes=(self._outbox,))
            (await self._queues.ensure(queue, replicas=self._replicas)).require_usable()
            self._ready_on = self._plain_ready_on = generation
        return self._outbox

    async def _find_target(self, outbox: str, first_row: int) -> Target:
        newest = await self._read_newest(outbox)
        generation = 0 if newest is None else newest.generation
        if newest is not None and newest.row >= first_row and not await self._is_ours(newest):
            generation += 1
            log.warning(
                "row %d of the outbox is not the newest event in %s: the database is an older copy of itself, "
                "and the relay skips none of its rows",
                newest.row,
                _STREAM,
            )
        subject = f"{OUTBOX_SUBJECT}.{outbox}.{generation}"
        return Target(subject=subject, stream=_STREAM, position_header=ROW_HEADER)

    async def _read_newest(self, outbox: str) -> _Newest | None:
        try:
            return _Newest.read(await self._queues.streams.get_last(_STREAM, f"{OUTBOX_SUBJECT}.{outbox}.*"))
        except UnknownMessage:
            return None

    async def _is_ours(self, newest: _Newest) -> bool:
        """Whether this database wrote the newest event.

        If a row before it is unsent, that row itself is in the outbox: rows are marked as sent, and removed, in order.
        """
        async with self._store.engine.connect() as connection:
            return await self._store.statements.message_id(connection, newest.row) == newest.message_id

    async def _release(self, outbox: str) -> None:
        """Move the durable to the newest event. If that fails, the queue keeps more events until the next time."""
        with contextlib.suppress(UnknownConsumer, UnknownStream):
            newest = await self._read_newest(outbox)
            if newest is not None:
                await self._queues.consumers.reset(_STREAM, outbox_receipts(outbox), newest.sequence)
            return
        self._ready_on = 0  # removed by an operator: the next write creates it again


_OPTIONS: Final = AppendOptions(patience_seconds=_PATIENCE_SECONDS, on_progress=lambda _: reach(CrashPoint.MID_PUBLISH))


def _table(rows: Sequence[Row]) -> Any:
    try:
        headers = [[(name, [value]) for name, value in json.loads(row.headers).items()] for row in rows]
        return pa.table(
            {
                "position": pa.array([row.id for row in rows], pa.int64()),
                "data": pa.array([row.data for row in rows], pa.binary()),
                "headers": pa.array(headers, _HEADERS),
                "msg_id": pa.array([row.message_id for row in rows], pa.string()),
            }
        )
    except (ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        raise InvalidInput(f"a row of the outbox is no event: {error}", fix="look at its columns") from error


def _to_error(refused: Refusal) -> PurveyorError:
    text = f"{_STREAM} refused the event in row {refused.position} of the outbox: {refused.reason}"
    match refused.kind:
        case RefusalKind.TOO_LARGE:
            return PublishRefused(text, fix="send less", code=400, err_code=MESSAGE_TOO_LARGE)
        case RefusalKind.MISSING_STREAM:
            return UnknownStream(text, fix="the relay creates it at its next attempt")
        case RefusalKind.DENIED:
            return PermissionDenied(text, fix="`purveyor queues permissions` prints what stages need", code=403)
        case _:
            return PublishRefused(text, fix="see the reason", code=refused.code, err_code=refused.code)
