"""One group of messages through a stage: the numbered steps, and what a crash between each two means.

With `exactly_once`:

1. **Receive**. A crash after it: nothing happened; the broker delivers again when its wait is over.
2. **Begin** the database transaction (and, in order, check that this instance still owns the stage).
3. **Inbox**: insert the message's id. It was there: the message is done, go to 9. Another instance is at it: wait for
   its end. A crash from here to 6: the database rolls back, the broker delivers again.
4. **Handler**, with the transaction. If it raises, everything is rolled back: 3 and 5 as well.
5. **Outbox**: insert what the handler returned and sent.
6. **Commit**. From here on it has happened, once. A crash before 7: the relay of this or any other instance sends what
   lies in the outbox; the broker delivers the message again, and the inbox turns it away.
7. **Publish** what lies in the outbox. A crash in the middle or after it: the relay sends again, with the same ids; the
   broker drops what it remembers, and the inbox of the receiver the rest.
8. **Mark sent**. A crash after it: the broker delivers the message again, and the inbox turns it away.
9. **Acknowledge**. The same, if the acknowledgement gets lost.

With `best_effort` there are no inbox and no outbox: 1, 2, 4, 6, then publish, then 9. A crash between 6 and 9 makes the
handler run again though its work is committed: its messages carry the same ids as before, its own writes have to bear
it.

A message that is given up goes the same way: the dead letter takes the place of what the handler would have sent (5),
and the id goes into the inbox (3), so that a message is either done or a dead letter.

**Group commit**: messages that wait together and whose handlers are quick share one transaction, one after the other.
If anything fails, all is rolled back and each of them goes alone: a handler may run again because of its neighbour, as
it may after a deadlock. Never more go together than handlers get through in a fifth of a second: slow ones go alone,
and so beside each other.
"""

import asyncio
import contextlib
import inspect
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from purveyor.jetstream import headers as header_codec
from purveyor.jetstream.headers import MSG_ID
from purveyor.model import tracing
from purveyor.model.errors import InvalidInput, PurveyorError, Unavailable
from purveyor.model.metrics import STAGE_MESSAGES
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import DeadLetter, fitted
from purveyor.stages.crash_points import Point, reach
from purveyor.stages.endpoint import Stage
from purveyor.stages.flow import Flow, Outgoing, check_sendable
from purveyor.stages.handler_types import AfterCommit, Context, Refuse
from purveyor.stages.message_codec import from_json, load
from purveyor.stages.outgoing_messages import messages_of
from purveyor.stages.relay import Relay
from purveyor.stages.source import Incoming
from purveyor.stages.sql_store import Handle, SqlStore, Transaction, now_ms
from purveyor.stages.statement_protocol import Claim, Failures

log = logging.getLogger("purveyor.stages")

Finish: TypeAlias = Callable[[Sequence[Incoming]], Awaitable[None]]

GROUP_SECONDS: Final = 0.2
"""About so long may the handlers of a group take: what is left of it then goes to whoever is free."""
_LARGEST_GROUP: Final = 128
_UNAVAILABLE: Final = timedelta(seconds=1)
_LONGEST_TRACE: Final = 4000


class OwnerLost(PurveyorError):
    """Another instance works on this stage now."""


@dataclass(frozen=True, slots=True)
class Again:
    """A message to be tried again: after a delay, or as soon as those before it in its lane are through."""

    message: Incoming
    delay: timedelta | None


class Pace:
    """How many messages may share a transaction: more while handlers are quick, one when they are not."""

    def __init__(self) -> None:
        self.group = 1
        """At most so many."""

    def went(self, seconds: float, count: int, *, cut: bool) -> None:
        """So many handlers took so long, and were cut off or not."""
        if cut:
            self.group = max(count, 1)
        elif seconds < GROUP_SECONDS / 2:
            self.group = min(self.group * 2, _LARGEST_GROUP)

    def fell(self) -> None:
        """A group failed and its messages went alone: begin small again."""
        self.group = 1


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a handler: what it caused."""

    message: Incoming
    produced: list[Outgoing]
    callbacks: list[AfterCommit]


@dataclass(frozen=True, slots=True)
class _Given:
    """What a handler is called with, and the trace it belongs to."""

    state: Any
    body: Any
    trace: tracing.Carrier


class Processor:
    """Takes groups of messages through one stage."""

    def __init__(self, stage: Stage, store: SqlStore, queues: Queues, relay: Relay, finish: Finish) -> None:
        self._stage = stage
        self._store = store
        self._queues = queues
        self._relay = relay
        self._finish = finish
        self._once = stage.options.exactly_once
        self._retry = stage.options.retry
        self.pace = Pace()
        self._failing: set[str] = set()
        self.epoch: int | None = None
        """Set while this instance owns the stage, for one that keeps order."""

    async def process(self, messages: Sequence[Incoming]) -> list[Again]:
        """Take them through; returns those that are to be tried again. What is done or given up is `finish`ed."""
        if len(messages) > 1:
            try:
                rest = await self._together(messages)
            except OwnerLost:
                raise
            except Exception:  # noqa: BLE001 - found out below, by each alone
                self.pace.fell()
            else:
                return [Again(message, None) for message in rest]
        again: list[Again] = []
        blocked: set[str | None] = set()
        for message in messages:
            if self._retry.ordered and message.key in blocked:
                again.append(Again(message, None))
                continue
            delay = await self._alone(message)
            if delay is not None:
                again.append(Again(message, delay))
                blocked.add(message.key)
        return again

    async def _alone(self, message: Incoming) -> timedelta | None:
        """One message in a transaction of its own; the delay after which it is to be tried again, if so."""
        try:
            if self._retry.hopeless(message.deliveries):
                reason = f"delivered {message.deliveries} times without an outcome: does it end its process?"
                await self._give_up(message, Refuse(reason), None)
            else:
                await self._together([message])
        except OwnerLost:
            raise
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            return await self._failed(message, error)
        return None

    async def _together(self, messages: Sequence[Incoming]) -> Sequence[Incoming]:
        """Messages in one transaction; those that were cut off, because the handlers before them took too long."""
        async with self._begin() as transaction:  # 2
            await self._check_owner(transaction)
            fresh = {message.id for message in messages}
            if self._once:
                assert transaction is not None
                fresh = await transaction.claim(self._stage.id, [*map(_claim, messages)])  # 3
            reach(Point.INBOX)
            calls: list[_Call] = []
            began, seconds, through = time.perf_counter(), 0.0, 0
            for message in messages:
                if message.id in fresh:
                    fresh.discard(message.id)  # the same message may be there twice
                    calls.append(await self._call(transaction, message))  # 4
                through += 1
                seconds = time.perf_counter() - began
                if seconds > GROUP_SECONDS:
                    break
            messages, rest = messages[:through], messages[through:]
            if rest and transaction is not None and self._once:
                await transaction.unclaim(self._stage.id, [message.id for message in rest if message.id in fresh])
            produced = [outgoing for call in calls for outgoing in call.produced]
            if self._once and transaction is not None and produced:
                await transaction.put(produced)  # 5
            await self._forget_failures(transaction, calls)
            reach(Point.BEFORE_COMMIT)
        reach(Point.COMMITTED)  # 6
        self.pace.went(seconds, through, cut=bool(rest))
        for call in calls:
            await _run_callbacks(call)
        if not produced:
            await self._finish(messages)
        elif self._once:
            self._relay.after_sending(lambda: self._finish(messages))  # 7, 8, 9
        else:
            refused = await self._send_best_effort(calls)
            reach(Point.MARKED)
            await self._finish([message for message in messages if message not in refused])
            rest = [*refused, *rest]
        return rest

    async def _send_best_effort(self, calls: Sequence[_Call]) -> list[Incoming]:
        """Publish what is in no outbox; the messages whose own are refused, of several. They have to run again.

        Their work is committed: a broker that is away is waited for rather than have all of them run again.
        """
        while True:
            try:
                await self._relay.send_now([outgoing for call in calls for outgoing in call.produced])
            except Unavailable as error:
                log.warning("stage %s waits with %d messages: %s", self._stage.id, len(calls), error)
                await asyncio.sleep(_UNAVAILABLE.total_seconds())
            except PurveyorError:
                if len(calls) == 1:
                    raise
                self.pace.fell()  # alone, a refusal counts as a failure
                return [refused for call in calls for refused in await self._refused(call)]
            else:
                return []

    async def _refused(self, call: _Call) -> list[Incoming]:
        try:
            return await self._send_best_effort([call])
        except PurveyorError:
            return [call.message]

    def _begin(self) -> "AbstractAsyncContextManager[Transaction | None]":
        """A transaction, if there is anything to put into one."""
        if self._once or self._stage.handle is not Handle.NONE:
            return self._store.transaction()
        return contextlib.nullcontext()

    async def _forget_failures(self, transaction: Transaction | None, calls: Sequence[_Call]) -> None:
        tried = [call.message.id for call in calls if call.message.deliveries > 1 or call.message.id in self._failing]
        if not tried:
            return
        self._failing.difference_update(tried)
        async with contextlib.nullcontext(transaction) if transaction else self._store.transaction() as its:
            await its.forget_failures(self._stage.id, tried)

    async def _call(self, transaction: Transaction | None, message: Incoming) -> _Call:
        stage = self._stage
        try:
            flow = Flow.from_headers(message.headers, message.id)
            body = load(stage.message, message.data)
            state = stage.state() if flow.state is None else from_json(stage.state, flow.state)
        except InvalidInput as error:
            raise Refuse(f"not a message for stage {stage.id}: {error}") from error
        with tracing.span("stage", tracing.of_headers(message.headers), stage=stage.id, message=message.id) as onward:
            return await self._handle(transaction, message, flow, _Given(state, body, onward))

    async def _handle(self, transaction: Transaction | None, message: Incoming, flow: Flow, given: "_Given") -> _Call:
        stage = self._stage
        context: Context[Any] = Context(
            state=given.state,
            endpoint=stage.endpoint,
            stage=stage.number,
            message_id=message.id,
            trace_id=flow.trace,
            key=message.key,
            interactive=flow.interactive,
            attempt=message.deliveries,
            trace=given.trace,
        )
        if transaction is None or stage.handle is Handle.NONE:
            result = await stage.handler(context, given.body)
        else:
            async with transaction.handle(stage.handle) as database:
                result = await stage.handler(context, given.body, database)
        produced = [outgoing.traced(given.trace) for outgoing in messages_of(stage, flow, context, result)]
        try:
            for outgoing in produced:
                check_sendable(outgoing, self._queues.connection.max_payload)
        except PurveyorError as error:
            raise Refuse(f"stage {stage.id} would send what cannot be sent: {error}") from error
        return _Call(message, produced, context.callbacks)

    async def _check_owner(self, transaction: Transaction | None) -> None:
        """For a stage in order. Without a transaction there is nothing that could be undone either."""
        if self.epoch is None or transaction is None:
            return
        if await transaction.epoch(self._stage.id) != self.epoch:
            raise OwnerLost(f"another instance works on stage {self._stage.id} now")

    async def _failed(self, message: Incoming, error: Exception) -> timedelta | None:
        """Count the failure and decide. Without a database nothing is counted: it is tried again until there is one."""
        try:
            if isinstance(error, Refuse):
                await self._give_up(message, error, None)
                return None
            async with self._store.transaction() as transaction:
                await self._check_owner(transaction)
                failures = await transaction.failed(self._stage.id, message.id, _reason(error))
            self._failing.add(message.id)
            delay = self._retry.after(failures.attempts)
            log.warning("stage %s: message %s failed (%s)", self._stage.id, message.id, _reason(error), exc_info=error)
            if delay is None:
                await self._give_up(message, error, failures)
        except OwnerLost:
            raise
        except Exception as away:  # noqa: BLE001 - nothing can be decided without a database or a broker
            log.warning("stage %s: message %s failed (%s), and %s", self._stage.id, message.id, _reason(error), away)
            await asyncio.sleep(_UNAVAILABLE.total_seconds())
            return _UNAVAILABLE
        return delay

    async def _give_up(self, message: Incoming, error: Exception, failures: Failures | None) -> None:
        """The message becomes a dead letter, by the same steps as any other outcome."""
        letter = self._letter(message, error, failures)
        subject, data, headers = fitted(letter, self._queues.connection.max_payload)
        plain = {name: header_codec.first(headers, name) or "" for name in headers if name != MSG_ID}
        outgoing = Outgoing(letter.id, subject, data, plain)
        async with self._store.transaction() as transaction:
            await self._check_owner(transaction)
            fresh = {message.id}
            if self._once:
                fresh = await transaction.claim(self._stage.id, [_claim(message)])
                if fresh:
                    await transaction.put([outgoing])
            await transaction.forget_failures(self._stage.id, [message.id])
        self._failing.discard(message.id)
        STAGE_MESSAGES.add(self._stage.id, "dead_letter")
        log.error("stage %s: message %s is a dead letter now: %s", self._stage.id, message.id, letter.reason)
        if not fresh:
            await self._finish([message])
        elif self._once:
            self._relay.after_sending(lambda: self._finish([message]))
        else:
            await self._relay.send_now([outgoing])
            await self._finish([message])

    def _letter(self, message: Incoming, error: Exception, failures: Failures | None) -> DeadLetter:
        first = now_ms() if failures is None else failures.first_ms
        told = "".join(traceback.format_exception(error))
        return DeadLetter(
            reason=error.message if isinstance(error, Refuse) else _reason(error),
            origin=f"stage:{self._stage.id}",
            subject=message.subject,
            data=message.data,
            failed_first=datetime.fromtimestamp(first / 1000, UTC),
            failed_last=datetime.now(UTC),
            headers=message.headers,
            position=message.sequence,
            attempts=message.deliveries if failures is None else failures.attempts,
            details={
                "endpoint": self._stage.endpoint,
                "stage": self._stage.number,
                "traceback": told[-_LONGEST_TRACE:],
            },
        )


def _claim(message: Incoming) -> Claim:
    return Claim(message.id, message.sequence, message.former_id, int(message.stored.timestamp() * 1000))


async def _run_callbacks(call: _Call) -> None:
    for callback in call.callbacks:
        try:
            result = callback()
            if inspect.isawaitable(result):
                await result
        except Exception:
            log.exception("an after-commit callback of message %s failed", call.message.id)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
