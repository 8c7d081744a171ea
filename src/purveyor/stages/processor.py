"""One group of messages through a stage: the numbered steps, and what a crash between each two means.

With `exactly_once`:

1. **Receive**. A crash after it: nothing happened; the broker delivers again after its ack wait.
2. **Begin** the database transaction (and, in order, check that this instance still owns the stage).
3. **Inbox**: insert the message's id. If it is there already, the message is done: go to 9. If another instance
   processes it, wait for the end of that. A crash from here to 6: the database rolls back, the broker delivers again.
4. **Handler**, with the transaction. If it raises, everything is rolled back: 3 and 5 as well.
5. **Outbox**: insert what the handler returned and sent.
6. **Commit**. From here on it has happened, once. A crash before 7: the relay of this or any other instance sends the
   rows of the outbox; the broker delivers the message again, and the inbox drops it.
7. **Publish** the rows of the outbox. A crash in the middle or after it: the relay sends again, with the same ids; the
   broker drops the ids that it remembers, and the inbox of the receiver drops the rest.
8. **Mark sent**. A crash after it: the broker delivers the message again, and the inbox drops it.
9. **Acknowledge**. The same, if the acknowledgement gets lost.

Without `exactly_once` (best effort) there are no inbox and no outbox: 1, 2, 4, 6, then publish, then 9. A crash between
6 and 9 makes the handler run again though its work is committed: its messages carry the same ids as before, its own
writes must tolerate that.

A message that the stage gives up takes the same steps: the dead letter replaces what the handler would have sent (5),
and the id goes into the inbox (3), so that a message is either done or a dead letter. With best effort, a crash between
the publish and 9 leaves a second dead letter if it lasts longer than the server remembers ids (two minutes), as it
leaves second messages.

**Group commit**: messages that wait together and have fast handlers share one transaction, one after the other. If one
of them fails, all are rolled back and each runs alone: a handler may run again because of another message, as it may
after a deadlock. A group is never larger than what handlers process in a fifth of a second: messages with slow handlers
go alone, and so concurrently.
"""

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from purveyor.model import tracing
from purveyor.model.errors import InvalidInput, PurveyorError, Unavailable
from purveyor.model.metrics import STAGE_MESSAGES
from purveyor.queues.client import Queues
from purveyor.stages.crash_points import CrashPoint, reach
from purveyor.stages.endpoint import Stage
from purveyor.stages.flow import Flow, Outgoing, check_sendable, result_messages
from purveyor.stages.handler_types import AfterCommit, Context, DatabaseKind, Refuse
from purveyor.stages.message_codec import from_json, load
from purveyor.stages.relay import Relay
from purveyor.stages.source import Incoming
from purveyor.stages.sql_statements import Claim, Failures
from purveyor.stages.sql_store import SqlStore, Transaction
from purveyor.stages.stage_dead_letters import describe_error, message_dead_letter, to_outgoing

log = logging.getLogger("purveyor.stages")

Finish: TypeAlias = Callable[[Sequence[Incoming]], Awaitable[None]]

GROUP_SECONDS: Final = 0.2
"""About the longest time that the handlers of a group may take: the next free worker gets the rest of the group."""
_MAX_GROUP_MESSAGES: Final = 128
_UNAVAILABLE_DELAY: Final = timedelta(seconds=1)


class OwnershipLost(PurveyorError):
    """Another instance works on this stage now."""


@dataclass(frozen=True, slots=True)
class Unprocessed:
    """A message to be tried again: after a delay, or without one when those before it with its key are done."""

    message: Incoming
    delay: timedelta | None


class GroupSize:
    """The number of messages that may share a transaction: it grows while handlers are fast, and is 1 for slow ones."""

    def __init__(self) -> None:
        self.limit = 1

    def record(self, seconds: float, count: int, *, truncated: bool) -> None:
        """Record the duration of `count` handlers and whether the group was truncated."""
        if truncated:
            self.limit = max(count, 1)
        elif seconds < GROUP_SECONDS / 2:
            self.limit = min(self.limit * 2, _MAX_GROUP_MESSAGES)

    def reset(self) -> None:
        """Begin with 1 again, after a group that failed."""
        self.limit = 1


@dataclass(frozen=True, slots=True)
class _HandlerCall:
    """One call of a handler: the messages that it caused."""

    message: Incoming
    produced: list[Outgoing]
    callbacks: list[AfterCommit]


@dataclass(frozen=True, slots=True)
class _HandlerInput:
    """The arguments of a handler, and the trace of its call."""

    state: Any
    body: Any
    trace: tracing.Carrier


class Processor:
    """Processes groups of messages of one stage."""

    def __init__(self, stage: Stage, store: SqlStore, queues: Queues, relay: Relay, finish: Finish) -> None:
        self._stage = stage
        self._store = store
        self._queues = queues
        self._relay = relay
        self._finish = finish
        self._exactly_once = stage.options.exactly_once
        self._retry = stage.options.retry
        self.group_size = GroupSize()
        self._failing: set[str] = set()
        self.epoch: int | None = None
        """Set while this instance owns the stage, for one that keeps order."""

    async def process(self, messages: Sequence[Incoming]) -> list[Unprocessed]:
        """Process messages; return those to be tried again. `finish` gets those that are done or given up."""
        if len(messages) > 1:
            try:
                rest = await self._process_together(messages)
            except OwnershipLost:
                raise
            except Exception:  # noqa: BLE001 - each message alone, below, shows which one fails
                self.group_size.reset()
            else:
                return [Unprocessed(message, None) for message in rest]
        unprocessed: list[Unprocessed] = []
        blocked: set[str | None] = set()
        for message in messages:
            if self._retry.ordered and message.key in blocked:
                unprocessed.append(Unprocessed(message, None))
                continue
            delay = await self._process_alone(message)
            if delay is not None:
                unprocessed.append(Unprocessed(message, delay))
                blocked.add(message.key)
        return unprocessed

    async def _process_alone(self, message: Incoming) -> timedelta | None:
        """Process one message in its own transaction; return the delay before its next attempt, if there is one."""
        try:
            if self._retry.is_exhausted(message.deliveries):
                reason = f"delivered {message.deliveries} times without an outcome: does it end its process?"
                await self._give_up(message, Refuse(reason), None)
            else:
                await self._process_together([message])
        except OwnershipLost:
            raise
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            return await self._handle_failure(message, error)
        return None

    async def _process_together(self, messages: Sequence[Incoming]) -> Sequence[Incoming]:
        """Process messages in one transaction; return the rest if the handlers of the first ones took too long."""
        async with self._begin() as transaction:  # 2
            await self._check_owner(transaction)
            fresh = {message.id for message in messages}
            if self._exactly_once:
                assert transaction is not None
                fresh = await transaction.claim(self._stage.id, [*map(_claim, messages)])  # 3
            reach(CrashPoint.INBOX)
            calls: list[_HandlerCall] = []
            began, seconds, count = time.perf_counter(), 0.0, 0
            for message in messages:
                if message.id in fresh:
                    fresh.discard(message.id)  # the group may contain the same message twice
                    calls.append(await self._call_handler(transaction, message))  # 4
                count += 1
                seconds = time.perf_counter() - began
                if seconds > GROUP_SECONDS:
                    break
            messages, rest = messages[:count], messages[count:]
            if rest and transaction is not None and self._exactly_once:
                await transaction.unclaim(self._stage.id, [message.id for message in rest if message.id in fresh])
            produced = [outgoing for call in calls for outgoing in call.produced]
            if self._exactly_once and transaction is not None and produced:
                await transaction.put(produced)  # 5
            await self._forget_failures(transaction, calls)
            reach(CrashPoint.BEFORE_COMMIT)
        reach(CrashPoint.COMMITTED)  # 6
        self.group_size.record(seconds, count, truncated=bool(rest))
        for call in calls:
            await _run_callbacks(call)
        if not produced:
            await self._finish(messages)
        elif self._exactly_once:
            self._relay.after_sending(lambda: self._finish(messages))  # 7, 8, 9
        else:
            refused = await self._send_best_effort(calls)
            reach(CrashPoint.MARKED)
            await self._finish([message for message in messages if message not in refused])
            rest = [*refused, *rest]
        return rest

    async def _send_best_effort(self, calls: Sequence[_HandlerCall]) -> list[Incoming]:
        """Publish the messages of calls without an outbox; return the incoming messages whose calls must run again.

        These are the ones, of several, that produced a refused message. Their work is committed: this waits for an
        unavailable broker rather than have all of them run again.
        """
        while True:
            try:
                await self._relay.send_now([outgoing for call in calls for outgoing in call.produced])
            except Unavailable as error:
                log.warning("stage %s waits with %d messages: %s", self._stage.id, len(calls), error)
                await asyncio.sleep(_UNAVAILABLE_DELAY.total_seconds())
            except PurveyorError:
                if len(calls) == 1:
                    raise
                self.group_size.reset()  # alone, a refusal counts as a failure
                return [refused for call in calls for refused in await self._send_one_call(call)]
            else:
                return []

    async def _send_one_call(self, call: _HandlerCall) -> list[Incoming]:
        try:
            return await self._send_best_effort([call])
        except PurveyorError:
            return [call.message]

    def _begin(self) -> "AbstractAsyncContextManager[Transaction | None]":
        """Begin a transaction, if the stage has anything to put into one."""
        if self._exactly_once or self._stage.database is not DatabaseKind.NONE:
            return self._store.transaction()
        return contextlib.nullcontext()

    async def _forget_failures(self, transaction: Transaction | None, calls: Sequence[_HandlerCall]) -> None:
        tried = [call.message.id for call in calls if call.message.deliveries > 1 or call.message.id in self._failing]
        if not tried:
            return
        self._failing.difference_update(tried)
        async with contextlib.nullcontext(transaction) if transaction else self._store.transaction() as current:
            await current.forget_failures(self._stage.id, tried)

    async def _call_handler(self, transaction: Transaction | None, message: Incoming) -> _HandlerCall:
        stage = self._stage
        try:
            flow = Flow.from_headers(message.headers, message.id)
            body = load(stage.message, message.data)
            state = stage.state() if flow.state is None else from_json(stage.state, flow.state)
        except InvalidInput as error:
            raise Refuse(f"not a message for stage {stage.id}: {error}") from error
        with tracing.span(
            "stage", tracing.carrier_from_headers(message.headers), stage=stage.id, message=message.id
        ) as trace:
            return await self._run_handler(transaction, message, flow, _HandlerInput(state, body, trace))

    async def _run_handler(
        self, transaction: Transaction | None, message: Incoming, flow: Flow, given: _HandlerInput
    ) -> _HandlerCall:
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
            max_payload=self._queues.connection.max_payload,
        )
        if transaction is None or stage.database is DatabaseKind.NONE:
            result = await stage.handler(context, given.body)
        else:
            async with transaction.database(stage.database) as database:
                result = await stage.handler(context, given.body, database)
        produced = [outgoing.with_trace(given.trace) for outgoing in result_messages(stage, flow, context, result)]
        try:
            for outgoing in produced:
                check_sendable(outgoing, self._queues.connection.max_payload)
        except PurveyorError as error:
            raise Refuse(f"stage {stage.id} would send what cannot be sent: {error}") from error
        return _HandlerCall(message, produced, context.callbacks)

    async def _check_owner(self, transaction: Transaction | None) -> None:
        """Raise OwnershipLost if another instance owns the stage. Without a transaction nothing could be undone."""
        if self.epoch is None or transaction is None:
            return
        if await transaction.epoch(self._stage.id) != self.epoch:
            raise OwnershipLost(f"another instance works on stage {self._stage.id} now")

    async def _handle_failure(self, message: Incoming, error: Exception) -> timedelta | None:
        """Count the failure and return the delay before the next attempt; None if the message was given up.

        Without a database nothing is counted, and the message is tried again until there is one.
        """
        reason = describe_error(error)
        try:
            if isinstance(error, Refuse):
                await self._give_up(message, error, None)
                return None
            async with self._store.transaction() as transaction:
                await self._check_owner(transaction)
                failures = await transaction.count_failure(self._stage.id, message.id, reason)
            self._failing.add(message.id)
            delay = self._retry.after(failures.attempts)
            log.warning("stage %s: message %s failed (%s)", self._stage.id, message.id, reason, exc_info=error)
            if delay is None:
                await self._give_up(message, error, failures)
        except OwnershipLost:
            raise
        except Exception as outage:  # noqa: BLE001 - nothing can be decided without a database or a broker
            log.warning("stage %s: message %s failed (%s), and %s", self._stage.id, message.id, reason, outage)
            await asyncio.sleep(_UNAVAILABLE_DELAY.total_seconds())
            return _UNAVAILABLE_DELAY
        return delay

    async def _give_up(self, message: Incoming, error: Exception, failures: Failures | None) -> None:
        """Make the message a dead letter, by the same steps as any other outcome."""
        letter = message_dead_letter(self._stage, message, error, failures, datetime.now(UTC))
        outgoing = to_outgoing(letter, self._queues.connection.max_payload)
        async with self._store.transaction() as transaction:
            await self._check_owner(transaction)
            fresh = {message.id}
            if self._exactly_once:
                fresh = await transaction.claim(self._stage.id, [_claim(message)])
                if fresh:
                    await transaction.put([outgoing])
            await transaction.forget_failures(self._stage.id, [message.id])
        self._failing.discard(message.id)
        STAGE_MESSAGES.add(self._stage.id, "dead_letter")
        log.error("stage %s: message %s is a dead letter now: %s", self._stage.id, message.id, letter.reason)
        if not fresh:
            await self._finish([message])
        elif self._exactly_once:
            self._relay.after_sending(lambda: self._finish([message]))
        else:
            await self._relay.send_now([outgoing])
            await self._finish([message])


def _claim(message: Incoming) -> Claim:
    return Claim(message.id, message.sequence, message.former_id, int(message.stored.timestamp() * 1000))


async def _run_callbacks(call: _HandlerCall) -> None:
    for callback in call.callbacks:
        try:
            result = callback()
            if inspect.isawaitable(result):
                await result
        except Exception:
            log.exception("an after-commit callback of message %s failed", call.message.id)
