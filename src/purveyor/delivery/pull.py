"""Pull: consumers ask for messages and report what became of them. The HTTP API, push and the stages use it.

`lease_rules` holds the rules, `subscription_changes` decides whether a subscription is deliverable, `state_writer`
stores the delivery state and reads the queue. This service holds nothing that another process needs: any number of
processes serve the same subscriptions.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from typing import Final

from purveyor.delivery import lease_rules
from purveyor.delivery.after_ack import PrefetchedLease
from purveyor.delivery.dead_letters.park import DeadLetterWriter, as_attempt_log, attempt_entry
from purveyor.delivery.lease_types import AckTarget, LeaseLimit, NackRequest, Pending
from purveyor.delivery.message_buffer import MemoryBudget, dead_letter_id, position_of, subject_kind_of
from purveyor.delivery.state_writer import SharedServices, StateWriter, Transition
from purveyor.delivery.subscription_changes import is_deliverable
from purveyor.delivery.transitions import (
    MAX_EXPIRED_PER_TRANSITION,
    DeliveredMessage,
    LeaseResult,
    PullRequest,
    PullResult,
    ack,
    ack_and_prefetch,
    buffered_target,
    check_instance,
    expire_old,
    lease_messages,
    lease_policy,
    limit_error,
    record_deliveries,
    subject_kind_in,
    take_prefetched,
    to_ack_target,
    to_datetime,
    to_delivered,
    to_milliseconds,
    unknown_message,
)
from purveyor.jetstream.streams import StoredMessage
from purveyor.model import metrics
from purveyor.model.delivery_policy import LONGEST_DELAY_SECONDS, OrderBy, check_lease_seconds
from purveyor.model.delivery_state import DeliveryState, FailedDelivery, Lease
from purveyor.model.errors import InvalidInput, UnknownMessage, UnknownSubscription
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues

__all__ = [
    "DEFAULT_INSTANCE",
    "MAX_LEASE_MESSAGES",
    "MAX_WAIT_SECONDS",
    "DeliveredMessage",
    "GiveUp",
    "PullService",
    "open_pull",
]

_log = logging.getLogger(__name__)
DEFAULT_INSTANCE: Final = "default"
MAX_LEASE_MESSAGES: Final = 1000
MAX_WAIT_SECONDS: Final = 3600.0

GiveUp = Callable[[StateWriter, Pending, Sequence[FailedDelivery]], Awaitable[None]]
"""Parks and acknowledges a message that reached the maximum of attempts."""


class PullService:
    """Delivery on request. `give_up` replaces what happens to a message that reached the maximum of attempts.

    >>> async with open_pull(queues) as pull:  # doctest: +SKIP
    ...     message = await pull.next("ox", timeout=10)
    ...     await pull.acknowledge("ox", message.sequence)

    Every method raises `UnknownSubscription` if there is no subscription of that name, and `Unavailable` when the
    server is away for longer than the patience of the connection; then nothing is lost, and the call can be repeated.
    """

    def __init__(
        self, shared: SharedServices, *, clock: Callable[[], float] = time.time, give_up: GiveUp | None = None
    ) -> None:
        self._shared = shared
        self._clock = clock
        self._give_up = give_up or self._park_exhausted
        self.dead_letter_writer = DeadLetterWriter(shared.queues, replicas=shared.replicas)
        self._limited: set[str] = set()
        """Subscriptions that reached a limit when they were asked last."""

    async def next(
        self,
        name: str,
        instance: str = DEFAULT_INSTANCE,
        timeout: float = 0.0,  # noqa: ASYNC109 - the name in the API; how long to wait, not when to fail
        pop: bool = False,
        checked: bool = False,
    ) -> DeliveredMessage | None:
        """Return the next message for an instance, waiting up to `timeout` seconds; None if there is none.

        With `pop` the message is acknowledged at once. With `checked` the first check is omitted: the caller has just
        asked without waiting and got nothing. `PrefillFailed` if an operator has to act first; `WindowFull` if the
        subscription reached a limit.
        """
        request = PullRequest(instance=check_instance(instance), pop=pop, checked=checked)
        if timeout or checked:
            found = await self._poll(name, request, timeout)
        else:
            found = _messages(name, await self.pull_once(name, request))
        return found[0] if found else None

    async def lease(
        self,
        name: str,
        instance: str = DEFAULT_INSTANCE,
        max: int = 100,  # noqa: A002 - the name in the API
        lease_seconds: float | None = None,
        timeout: float = 0.0,  # noqa: ASYNC109 - as above
    ) -> list[DeliveredMessage]:
        """Return up to `max` messages as soon as there is one. In ordered delivery: the oldest, in their order."""
        if not 1 <= max <= MAX_LEASE_MESSAGES:
            raise InvalidInput(f"a lease of {max} messages", fix=f"ask for 1 to {MAX_LEASE_MESSAGES}")
        seconds = None if lease_seconds is None else check_lease_seconds(lease_seconds)
        request = PullRequest(instance=check_instance(instance), max_messages=max, lease_seconds=seconds)
        return await self._poll(name, request, timeout)

    async def acknowledge(self, name: str, sequence: int, *, instance: str | None = None) -> None:
        """Acknowledge a message, whichever instance has it. It is never delivered again.

        If an `instance` asks for the next message soon after, the same write leases that message to it (`Prefetcher`).
        `UnknownMessage` if the message does not exist (any more) or was never delivered: the acknowledgement may be a
        late one, meant for a deleted subscription of the same name.
        """
        writer = await self.state_writer(name)
        message = await self._find(writer, sequence)

        def transition(state: DeliveryState) -> Transition[PrefetchedLease | None]:
            if not state.deliveries(sequence):
                raise unknown_message(name, sequence)
            return ack_and_prefetch(writer, state, message, instance, self.now())

        prefetched = await writer.commit(transition)
        if instance is not None:
            writer.prefetcher.record_ack(instance, prefetched)
        metrics.ACKNOWLEDGED.add(name)

    async def acknowledge_up_to(self, name: str, sequence: int, *, instance: str = DEFAULT_INSTANCE) -> int:
        """Acknowledge all messages that an instance has, up to one of them; return how many.

        `LeaseLost` if the instance no longer has that message.
        """
        writer = await self.state_writer(name)
        message = await self._find(writer, sequence)
        policy = lease_policy(writer)

        def transition(state: DeliveryState) -> Transition[int]:
            if sequence in state.acked(message.kind):
                raise unknown_message(name, sequence)
            if writer.buffer.find(sequence) is None:
                return Transition(value=0, shortfall=1, needs_fresh_state=True)
            state = lease_rules.expire_leases(state, self.now())
            leased = lease_rules.leased_up_to(state, writer.buffer.pending(state), sequence, instance, policy)
            # The position of the last message is enough: earlier messages in the queue were written before it.
            acked = [buffered_target(writer, each.sequence)._replace(position=message.position) for each in leased]
            after = lease_rules.ack(state, acked, writer.buffer.seen())
            return Transition(value=len(acked), state=after, acked=acked)

        count = await writer.commit(transition)
        if not count:
            raise unknown_message(name, sequence)
        metrics.ACKNOWLEDGED.add(name, by=count)
        return count

    async def retry(
        self, name: str, sequence: int, *, delay: float | None = None, instance: str = DEFAULT_INSTANCE
    ) -> None:
        """Deliver a message again, after `delay` seconds or, without it, after the delay of the retry policy.

        `LeaseLost` if another instance has it.
        """
        if delay is not None and not 0 <= delay <= LONGEST_DELAY_SECONDS:
            raise InvalidInput(f"a delay of {delay:g} seconds", fix=f"give 0 to {LONGEST_DELAY_SECONDS:g}")
        writer = await self.state_writer(name)
        await self._find(writer, sequence)
        retry_policy, policy = writer.definition.retry, lease_policy(writer)

        def transition(state: DeliveryState) -> Transition[None]:
            now = self.now()
            state = lease_rules.expire_leases(state, now)
            seconds = retry_policy.backoff_seconds(max(state.deliveries(sequence), 1)) if delay is None else delay
            request = NackRequest(instance=instance, now=now, delay=to_milliseconds(seconds))
            return Transition(value=None, state=lease_rules.nack(state, sequence, request, policy), notifies=True)

        await writer.commit(transition)
        metrics.RETURNED.add(name)

    async def reject(self, name: str, sequence: int, reason: str, *, instance: str = DEFAULT_INSTANCE) -> None:
        """Turn a message into a dead letter. `LeaseLost` if another instance has it.

        1. The message is parked under an id that derives from its origin. 2. It is acknowledged. After a crash between
        the two it is delivered again; parked again within the duplicate window, it is the same dead letter.
        """
        writer = await self.state_writer(name)
        message = await self._find(writer, sequence)

        def check(state: DeliveryState) -> Transition[DeliveryState]:
            state = lease_rules.expire_leases(state, self.now())
            if sequence in state.acked(message.kind):
                raise unknown_message(name, sequence)
            lease_rules.check_may_settle(state, sequence, instance)
            return Transition(value=state, needs_fresh_state=True)

        state = await writer.commit(check)
        stored = await writer.buffer.read(sequence)
        if stored is None:
            raise unknown_message(name, sequence)
        last = attempt_entry(self.now(), f"rejected by instance {instance!r}", reason)
        log = [*as_attempt_log(state.failures.get(sequence, ())), last]
        reason = reason or "rejected by the consumer"
        await self.dead_letter_writer.park(writer, stored, reason, state.deliveries(sequence), log)
        await writer.commit(lambda state: ack(writer, state, [message]))

    async def park_delivered(self, name: str, message: DeliveredMessage, reason: str) -> None:
        """Park a message that this process got and cannot pass on.

        1. The message is parked under an id that derives from its origin. 2. It is acknowledged, unless it was popped.
        After a crash between the two it is delivered again. After a crash before 1, a popped message is lost, as after
        a crash before the answer to the consumer.
        """
        writer = await self.state_writer(name)
        stored = StoredMessage(
            stream=subscription_queue(name).stream,
            sequence=message.sequence,
            timestamp=None,
            subject=f"{name}.{message.kind.value}",
            headers=message.headers,
            data=message.data,
        )
        await self.dead_letter_writer.park(writer, stored, reason, message.num_delivered)
        if message.lease is not None:
            with contextlib.suppress(UnknownMessage):  # another process acknowledged it
                await writer.commit(lambda state: ack(writer, state, [to_ack_target(message)]))

    async def extend(
        self, name: str, sequence: int, *, lease_seconds: float | None = None, instance: str = DEFAULT_INSTANCE
    ) -> datetime:
        """Restart the lease of a message, with all its messages; return when it expires.

        `LeaseLost` if the instance no longer has it.
        """
        writer = await self.state_writer(name)
        seconds = writer.definition.lease_seconds if lease_seconds is None else check_lease_seconds(lease_seconds)
        duration = to_milliseconds(seconds)

        def transition(state: DeliveryState) -> Transition[Lease]:
            after, lease = lease_rules.extend_lease(state, sequence, instance, self.now(), duration)
            return Transition(value=lease, state=after)

        return to_datetime((await writer.commit(transition)).until)

    async def expire(self, name: str) -> int:
        """Acknowledge messages that exceeded the retention time of the subscription; return how many.

        Requests for messages do that too; this is for a subscription without consumers.
        """
        writer = await self.state_writer(name)

        def transition(state: DeliveryState) -> Transition[int]:
            after, expired = expire_old(writer, state, self.now())
            is_read = len(expired) < MAX_EXPIRED_PER_TRANSITION and next(writer.buffer.pending(after), None) is None
            return Transition(
                value=len(expired), state=after if expired else None, acked=expired, shortfall=int(is_read)
            )

        total = 0
        while expired := await writer.commit(transition):
            total += expired
        if total:
            metrics.EXPIRED.add(name, by=total)
        return total

    def invalidate(self, name: str) -> None:
        """Read the registration of a subscription again: this process has changed it."""
        self._shared.registrations.invalidate(name)

    async def pull_once(self, name: str, request: PullRequest) -> PullResult:
        """Return what there is for an instance now, or when to ask again, if that is known."""
        while True:
            registered = await self._shared.registrations.get(name)
            if not is_deliverable(registered):
                return PullResult([])
            writer = await self._shared.state_writers.get(registered)
            if (prefetched := take_prefetched(writer, request)) is not None:
                return PullResult(await self._read_leased(writer, prefetched))
            try:
                # Without strict order, the answer to one instance is the answer to all.
                result = await writer.commit(
                    lambda state, writer=writer: lease_messages(writer, state, request, self.now()),  # type: ignore[misc]
                    interchangeable=writer.definition.order_by is not OrderBy.POSITION,
                )
            except UnknownSubscription:
                self.invalidate(name)  # deleted and perhaps added again
                continue
            error = await self._give_up_exhausted(writer, result)
            if result.expired:
                metrics.EXPIRED.add(name, by=result.expired)
            messages = await self._read_leased(writer, result)
            if error is not None and not messages:
                raise error
            decision = result.decision
            if messages or not (decision.exhausted or decision.lease or result.expired):
                self._log_limit(name, decision.limit)
                return PullResult(messages, decision.next_check_at, decision.truncated, decision.limit)

    async def state_writer(self, name: str) -> StateWriter:
        """Return the state writer of a subscription."""
        return await self._shared.state_writers.get(await self._shared.registrations.get(name))

    def now(self) -> int:
        """Return the time in milliseconds since 1970."""
        return to_milliseconds(self._clock())

    async def _poll(self, name: str, request: PullRequest, wait_seconds: float) -> list[DeliveredMessage]:
        """Check; if there is nothing, listen, check again, and wait for a notification."""
        if not 0 <= wait_seconds <= MAX_WAIT_SECONDS:
            raise InvalidInput(f"a wait of {wait_seconds:g} seconds", fix=f"give 0 to {MAX_WAIT_SECONDS:g}")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        if wait_seconds <= 0:
            return _messages(name, await self.pull_once(name, request))
        if not request.checked and (found := (await self.pull_once(name, request)).messages):
            return found
        async with self._shared.notifier.listener(name) as listener:
            while True:
                notified = await listener.listen()
                result = await self.pull_once(name, request)
                left = deadline - loop.time()
                if result.messages or left <= 0:
                    return _messages(name, result)
                if result.next_check_at is not None:
                    left = min(left, max((result.next_check_at - self.now()) / 1000, 0.001))
                await listener.wait(notified, left)

    def _log_limit(self, name: str, limit: LeaseLimit | None) -> None:
        """Log once that a subscription reached a limit."""
        if limit is None:
            self._limited.discard(name)
        elif name not in self._limited:
            self._limited.add(name)
            _log.warning("%s", limit_error(name, limit))

    async def _read_leased(self, writer: StateWriter, result: LeaseResult) -> list[DeliveredMessage]:
        """Return the messages of a lease. Acknowledge messages that a limit or an operator deleted meanwhile."""
        lease = result.decision.lease
        if lease is None:
            return []
        found: list[DeliveredMessage] = []
        missing = [each for each, message in zip(lease.sequences, result.messages, strict=True) if message is None]
        fetched = await writer.buffer.fetch(missing) if missing else {}
        for sequence, held, count in zip(lease.sequences, result.messages, result.decision.deliveries, strict=True):
            message = held or fetched.get(sequence)
            if message is None:
                deleted = writer.buffer.find(sequence) or AckTarget(sequence, subject_kind_in(lease, sequence))
                await writer.commit(lambda state, deleted=deleted: ack(writer, state, [deleted]))  # type: ignore[misc]
                continue
            found.append(to_delivered(message, lease, count, popped=result.popped))
        if writer.definition.order_by is not OrderBy.POSITION:
            writer.buffer.release(lease.sequences)
        record_deliveries(writer.name, found, popped=result.popped)
        return found

    async def _give_up_exhausted(self, writer: StateWriter, result: LeaseResult) -> Exception | None:
        """Give up exhausted messages. Return an error instead of raising it: leased messages are still delivered."""
        try:
            for message in result.decision.exhausted:
                await self._give_up(writer, message, result.decision.failures.get(message.sequence, ()))
        except Exception as error:  # noqa: BLE001 - the caller raises it when there is nothing to deliver
            return error
        return None

    async def _park_exhausted(self, writer: StateWriter, message: Pending, failures: Sequence[FailedDelivery]) -> None:
        """Park a message that reached the maximum of attempts, and acknowledge it."""
        attempts = writer.definition.retry.max_attempts or 0
        stored = await writer.buffer.read(message.sequence)
        headers = {} if stored is None else stored.headers
        target = AckTarget(message.sequence, message.kind, position_of(headers) or 0, dead_letter_id(headers))
        if stored is not None:
            reason = f"not acknowledged after {attempts} deliveries"
            await self.dead_letter_writer.park(writer, stored, reason, attempts, as_attempt_log(failures))
        await writer.commit(lambda state: ack(writer, state, [target]))

    async def _find(self, writer: StateWriter, sequence: int) -> AckTarget:
        """Return a message as a target for an answer; `UnknownMessage` if it does not exist (any more)."""
        found = writer.buffer.find(sequence)
        if found is not None:
            return found
        message = await writer.buffer.read(sequence)
        if message is None:
            raise unknown_message(writer.name, sequence)
        headers = message.headers
        return AckTarget(sequence, subject_kind_of(message), position_of(headers) or 0, dead_letter_id(headers))


@contextlib.asynccontextmanager
async def open_pull(
    queues: Queues,
    *,
    replicas: int = 1,
    clock: Callable[[], float] = time.time,
    memory: MemoryBudget | None = None,
) -> AsyncIterator[PullService]:
    """Open a pull service with its own shared services, for a program that needs no other delivery service."""
    async with SharedServices.build(queues, replicas=replicas, memory=memory) as shared:
        yield PullService(shared, clock=clock)


def _messages(name: str, result: PullResult) -> list[DeliveredMessage]:
    """Return the messages; `WindowFull` if there are none because of a limit."""
    if not result.messages and result.limit is not None:
        raise limit_error(name, result.limit)
    return result.messages
