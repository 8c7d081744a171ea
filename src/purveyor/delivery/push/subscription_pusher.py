"""The push loop of one subscription: lease messages as the endpoints have capacity, send them, settle the results.

One turn settles the results that arrived and leases as many messages again. A message is leased only when it can be
sent at once; so after a crash every leased message counts as attempted, and is delivered again when its lease expires.
Each message is sent by a task of the loop's task group: build the request, await the response, decide, keep the result.

In strict order (`order_by: position`) the loop leases several messages and one task sends them one after another. When
one fails, the loop releases those behind it.
"""

import asyncio
import contextlib
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import Final

from purveyor.delivery.push.attempt_history import AttemptHistory
from purveyor.delivery.push.endpoint_pool import EarliestTimer, EndpointFactory, EndpointPool, EndpointSender, is_slow
from purveyor.delivery.push.push_leases import BlockedKeys, PushLeases
from purveyor.delivery.push.push_reports import (
    UNAVAILABLE_PAUSE_SECONDS,
    AttemptLog,
    EventCallback,
    PushProblems,
    PushReporter,
)
from purveyor.delivery.push.settlement import Action, Decision, Outcome, PushResult, ResultSettler, decide
from purveyor.delivery.subscription_changes import Listener
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.delivery.transitions import DeliveredMessage, PullResult, limit_error
from purveyor.jetstream.connection import Connection
from purveyor.model import metrics, tracing
from purveyor.model.delivery_policy import AfterDeadLetter, OrderBy, Push
from purveyor.model.errors import PrefillFailed, PurveyorError, UnknownSubscription, describe
from purveyor.model.subscription import Subscription
from purveyor.queues.registry import Registered

_MAX_SETTLED_BATCH: Final = 100
_MAX_STRICT_BATCH: Final = 50
_FLUSH_SECONDS: Final = 0.005
_RECONFIGURE_SECONDS: Final = 30.0
_SECRETS: Final = "secrets"
_LEASE_LIMIT: Final = "the window"
_LEASING: Final = "leasing messages"
_RECORDING: Final = "recording a response"
_SETTLING: Final = "settling messages"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushServices:
    """The objects that all subscriptions of a push worker share."""

    connection: Connection
    leases: PushLeases
    subscriptions: Subscriptions
    endpoints: EndpointFactory
    attempts: AttemptLog
    history: AttemptHistory
    blocked_keys: BlockedKeys
    problems: PushProblems
    on_event: EventCallback
    first_leases: asyncio.Semaphore
    """Limits how many subscriptions lease for the first time at once."""


class SubscriptionPusher:
    """Pushes one subscription: `run` until `stop`, `update` when its definition changes."""

    def __init__(self, services: PushServices, registered: Registered) -> None:
        self.name = registered.name
        self.incarnation = registered.incarnation
        self._services = services
        self._loop = asyncio.get_running_loop()
        self._definition = registered.record.definition
        self._push = _push_config(self._definition)
        self._needs_configuring = True
        self._wake = asyncio.Event()
        self._retry_timer = EarliestTimer(self.check_queue)
        self._flush_timer = EarliestTimer(self._wake.set)
        self._listener = Listener(services.connection, self.name, on_notify=self._on_notify)
        self._reporter = PushReporter(self.name, self.incarnation, services.problems, services.on_event)
        self._endpoints = EndpointPool(
            self.name, services.endpoints, self._reporter, wake=self.check_queue, timer=self._retry_timer
        )
        self._settler = ResultSettler(
            self._reporter,
            leases=services.leases,
            attempts=services.attempts,
            subscriptions=services.subscriptions,
        )
        self._recorder = services.history.recorder(self.name, self.incarnation)
        self._results: list[PushResult] = []
        self._unsent: list[int] = []
        """Messages that are leased, were not sent, and are to be released."""
        self._strict_queue: deque[DeliveredMessage] = deque()
        self._strict_batch = 1
        self._in_flight = 0
        self._settle_at = 1
        """Settle when this many results are there."""
        self._may_have_messages = True
        self._listening = True
        self._notified = False
        self._stopping = False
        self._leased_until = 0.0
        self._lease_not_before = float("-inf")
        """When messages may be leased again after a failure."""
        self._resume = asyncio.Event()

    def update(self, registered: Registered) -> None:
        """Apply another definition."""
        self._definition = registered.record.definition
        self._push = _push_config(self._definition)
        self._needs_configuring = True
        self._lease_not_before = float("-inf")
        self._resume.set()
        self.check_queue()

    def check_queue(self) -> None:
        """Look for messages in the next turn."""
        self._may_have_messages = True
        self._wake.set()

    def stop(self) -> None:
        """Lease nothing more; `run` returns when the messages in flight are settled."""
        self._stopping = True
        self._resume.set()
        self._wake.set()

    async def run(self) -> None:
        """Push until `stop`, or until the subscription is gone. Every other error is retried, and results are kept."""
        try:
            async with asyncio.TaskGroup() as self._sends:
                async with self._services.first_leases:
                    self._configure()
                    await self._try_to_lease(self._capacity())
                while not self._stopping or self._has_unsettled:
                    try:
                        await self._run_turn()
                    except UnknownSubscription:
                        raise
                    except Exception as error:  # noqa: BLE001 - results would stay unsettled if the loop ended
                        await self._pause(self._reporter.report_failure(_SETTLING, error))
        except* UnknownSubscription:
            pass  # the messages in flight belong to a deleted subscription: their requests are cancelled
        finally:
            await self._close()

    async def _close(self) -> None:
        self._retry_timer.cancel()
        self._flush_timer.cancel()
        await self._endpoints.close()
        self._reporter.close()
        for gauge in (metrics.PUSH_WINDOW, metrics.PUSH_OUTSTANDING):
            gauge.remove(self.name)
        self._services.attempts.clear_cache(self.name)
        with contextlib.suppress(PurveyorError):
            await self._listener.close()

    async def _pause(self, seconds: float) -> None:
        """Wait before the next turn; another definition ends the wait."""
        self._resume.clear()
        limit = min(seconds, UNAVAILABLE_PAUSE_SECONDS) if self._stopping else seconds
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._resume.wait(), limit)

    async def _run_turn(self) -> None:
        """Settle the results that are there and lease messages, or wait."""
        self._wake.clear()
        if self._needs_configuring:
            self._configure()
        capacity = self._capacity()
        if not (self._results or self._unsent):
            if capacity:
                await self._try_to_lease(capacity)
            else:
                await self._wake.wait()
            return
        results, self._results, unsent, self._unsent = self._results, [], self._unsent, []
        if not capacity or self._is_strict:  # in strict order, settle before the next lease
            await self._settle(results, unsent)
            return
        outcomes = await asyncio.gather(
            self._settle(results, unsent), self._try_to_lease(capacity), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    # Lease.

    def _capacity(self) -> int:
        """Return how many messages can be sent at once, or 0 if there is no reason to lease any."""
        if self._stopping or not self._may_have_messages or self._loop.time() < self._lease_not_before:
            return 0
        if self._is_strict and (self._strict_queue or self._in_flight):
            return 0
        capacity = self._endpoints.capacity()
        return min(capacity, 1) * self._strict_batch if self._is_strict else capacity

    async def _try_to_lease(self, capacity: int) -> None:
        """Lease and send messages. After a failure, pause leasing; the loop continues to settle results."""
        if not capacity:
            return
        try:
            await self._lease(capacity)
        except UnknownSubscription:
            raise
        except Exception as error:  # noqa: BLE001 - a retry may succeed, and messages in flight are to be settled
            pause = self._reporter.report_failure(_LEASING, error)
            self._may_have_messages, self._lease_not_before = True, self._loop.time() + pause
            self._retry_timer.set(pause + 0.001)
        else:
            self._reporter.clear_failure(_LEASING)

    async def _lease(self, capacity: int) -> None:
        """Lease up to `capacity` messages and start to send them.

        While leases come back full, the loop does not listen for new messages. It takes the queue as empty only after
        a lease that came back short while it was listening.
        """
        if self._listening:
            self._notified = False
            await self._listener.listen()
        began = self._loop.time()
        try:
            result, next_check_seconds = await self._services.leases.lease(self.name, capacity, self._lease_seconds)
        except PrefillFailed:
            result, next_check_seconds = PullResult([]), None  # until an operator acts; then the registry changes
        found = result.messages
        limit = "" if result.limit is None else str(limit_error(self.name, result.limit))
        self._reporter.set_problem(_LEASE_LIMIT, limit)
        if len(found) == capacity or result.truncated:
            self._listening = False
        elif not self._listening:
            self._listening = True
        else:
            self._may_have_messages = self._notified
            if next_check_seconds is not None:
                self._retry_timer.set(next_check_seconds)
        if not found:
            self._endpoints.end_probes()
        self._leased_until = began + self._lease_seconds
        if self._is_strict:
            self._strict_queue.extend(found)
            if found:
                self._sends.create_task(self._send_in_order())
        elif found and self._push.after_dead_letter is AfterDeadLetter.PARK_KEY:
            await self._send_unless_blocked(found)
        else:
            for message in found:
                self._start_send(message)

    async def _send_unless_blocked(self, messages: list[DeliveredMessage]) -> None:
        """Send messages, and give up those whose key is blocked."""
        try:
            blocked = await self._services.blocked_keys.find_blocked(self.name, self.incarnation, messages)
        except Exception:
            self._unsent += [message.sequence for message in messages]
            raise
        for message in messages:
            key = blocked.get(message.sequence)
            if key is None:
                self._start_send(message)
                continue
            outcome = Outcome(error=f"parked with an earlier message about {key!r}", sent=False)
            self._results.append(PushResult(message, outcome, Decision(Action.GIVE_UP), time.time(), is_logged=True))
            self._wake.set()

    # Send.

    def _start_send(self, message: DeliveredMessage) -> None:
        """Choose an endpoint and send a message to it in a task."""
        sender = self._reserve()
        if sender is None:
            self._unsent.append(message.sequence)
            self._wake.set()
        else:
            self._sends.create_task(self._send(message, sender))

    async def _send_in_order(self) -> None:
        """Send the leased messages one after another, while the lease lasts and none fails; release the rest."""
        queue = self._strict_queue
        while queue and not self._stopping:
            if self._loop.time() + self._push.ack_deadline_seconds > self._leased_until:
                break  # another worker could lease it before the response
            message, sender = queue.popleft(), self._reserve()
            if sender is None:
                self._unsent.append(message.sequence)
                break
            if not await self._send(message, sender):
                break
        self._release_queue()

    def _release_queue(self) -> None:
        self._unsent += [message.sequence for message in self._strict_queue]
        self._strict_queue.clear()
        self._wake.set()

    def _reserve(self) -> EndpointSender | None:
        """Choose an endpoint and reserve capacity for one message; None if there is none."""
        sender = self._endpoints.choose(self._loop.time())
        if sender is not None:
            sender.in_flight += 1
            self._in_flight += 1
        return sender

    async def _send(self, message: DeliveredMessage, sender: EndpointSender) -> bool:
        """Make one attempt: build the request, await the response, decide, keep the result. Return whether it is acked.

        It handles every exception, so that each attempt has a result.
        """
        began, sent_in_round, deadline = self._loop.time(), sender.window.round, self._push.ack_deadline_seconds
        try:
            request = sender.build_request(message)
        except Exception as error:  # noqa: BLE001 - another attempt would fail too; no other message is affected
            outcome = Outcome(error=f"it cannot be sent as {self._push.format.value}: {describe(error)}", sent=False)
            result = PushResult(message, outcome, Decision(Action.GIVE_UP), time.time())
            self._record(result, sender, 0.0)
            self._finish(result, sender)
            return False
        outcome = sender.without_secrets(await sender.host.post(request, deadline))
        try:
            decision = self._decide(message, sender, outcome, sent_in_round, self._loop.time() - began)
        except Exception as error:  # noqa: BLE001 - a response that breaks a rule is a failed attempt
            self._reporter.report_failure(_RECORDING, error)
            outcome = Outcome(error=f"the answer cannot be read: {describe(error)}")
            decision = Decision(Action.RETRY, self._definition.retry.max_backoff_seconds)
        result = PushResult(message, outcome, decision, time.time())
        self._record(result, sender, self._loop.time() - began)
        self._finish(result, sender)
        return decision.action is Action.ACKNOWLEDGE

    def _decide(
        self, message: DeliveredMessage, sender: EndpointSender, outcome: Outcome, sent_in_round: int, seconds: float
    ) -> Decision:
        """Decide about an attempt, and record it in the state of the endpoint and in the metrics."""
        push, retry, attempt = self._push, self._definition.retry, message.num_delivered
        decision = decide(outcome, push, retry, attempt, random.random())  # noqa: S311 - only to spread retries
        slow = is_slow(seconds, push.ack_deadline_seconds)
        self._endpoints.record(sender, outcome, decision, sent_in_round=sent_in_round, is_slow=slow)
        label = decision.action.name.lower()
        metrics.PUSH_ATTEMPTS.add(self.name, label)
        metrics.PUSH_SECONDS.add(seconds, self.name)
        if tracing.is_enabled():
            trace = tracing.carrier_from_headers(message.headers)
            tracing.record("push", seconds, trace, subscription=self.name, attempt=attempt, outcome=label)
        return decision

    def _record(self, result: PushResult, sender: EndpointSender, seconds: float) -> None:
        """Add an attempt to the attempt log of the subscription."""
        try:
            self._recorder.record(result, sender.endpoint.url, seconds)
        except Exception as error:  # noqa: BLE001 - the result is kept in any case
            self._reporter.report_failure(_RECORDING, error)

    def _finish(self, result: PushResult, sender: EndpointSender) -> None:
        """Keep a result, and wake the loop when it is time to settle."""
        sender.in_flight -= 1
        self._in_flight -= 1
        self._results.append(result)
        is_acked = result.decision.action is Action.ACKNOWLEDGE
        if is_acked:
            self._reporter.report_recovery()
            self._reporter.clear_failure(_RECORDING)
            if not self._strict_queue:
                self._strict_batch = min(self._strict_batch * 2, _MAX_STRICT_BATCH)
        else:
            self._strict_batch = 1
            self._stopping = self._stopping or result.decision.action is Action.DISABLE
        is_last = not self._in_flight and not self._strict_queue
        if not is_acked or is_last or len(self._results) >= self._settle_at:
            self._wake.set()
        else:
            self._flush_timer.set(_FLUSH_SECONDS)

    # Settle.

    async def _settle(self, results: list[PushResult], unsent: list[int]) -> None:
        """Settle results. If that fails, keep them for another turn."""
        window = self._endpoints.window
        self._settle_at = _MAX_STRICT_BATCH if self._is_strict else min(max(window // 4, 1), _MAX_SETTLED_BATCH)
        metrics.PUSH_WINDOW.set(window, self.name)
        metrics.PUSH_OUTSTANDING.set(self._in_flight, self.name)
        began = self._loop.time()
        has_more = self._is_strict and bool(self._strict_queue or self._in_flight)
        renew_milliseconds = round(self._lease_seconds * 1000) if has_more else None
        try:
            settlement = await self._settler.settle(
                results, unsent, self._definition, renew_milliseconds=renew_milliseconds
            )
        except BaseException:
            self._results, self._unsent = results + self._results, unsent + self._unsent
            raise
        self._reporter.clear_failure(_SETTLING)
        if renew_milliseconds is not None:
            self._leased_until = began + self._lease_seconds
        if settlement.released or self._definition.order_by is OrderBy.KEY:
            self._may_have_messages = True
        if settlement.retry_delays:
            self._retry_timer.set(min(settlement.retry_delays.values()) / 1000 + 0.002)
        await self._settler.delete_logs(results)

    # Configuration.

    def _configure(self) -> None:
        """Apply the definition. If a secret is missing, nothing is sent, and the loop tries again later."""
        try:
            self._endpoints.configure(self._push)
            self._needs_configuring = False
            self._reporter.set_problem(_SECRETS, "")
        except Exception as error:  # noqa: BLE001 - the status shows settings that cannot be used
            reason = describe(error)
            self._reporter.report_event("stuck", reason)
            self._reporter.set_problem(_SECRETS, reason)
            self._retry_timer.set(_RECONFIGURE_SECONDS)

    def _on_notify(self) -> None:
        self._notified = True
        self.check_queue()

    @property
    def _has_unsettled(self) -> bool:
        return bool(self._in_flight or self._strict_queue or self._results or self._unsent)

    @property
    def _is_strict(self) -> bool:
        return self._definition.order_by is OrderBy.POSITION

    @property
    def _lease_seconds(self) -> float:
        """Longer than a response may take. In strict order the loop renews the lease while messages wait."""
        deadline = self._push.ack_deadline_seconds
        return deadline * (2 if self._is_strict else 1) + min(max(deadline / 2, 1.0), 10.0)


def _push_config(definition: Subscription) -> Push:
    assert definition.push is not None
    return definition.push
