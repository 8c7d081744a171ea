"""The status of one subscription: its backlog, its lag, its leases and its last error. Every surface reads it here."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from purveyor.delivery.push.push_reports import PushProblem, read_problems
from purveyor.jetstream.headers import POSITION, number
from purveyor.model.ack_ranges import Expired
from purveyor.model.delivery_state import DeliveryState
from purveyor.model.errors import UnknownConsumer, UnknownMessage, UnknownStream, UnreadableRecord
from purveyor.model.registration import PrefillStatus
from purveyor.queues.catalogue import DEFAULT_GROUP, Queue, incoming, subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import subject_token
from purveyor.queues.dead_letters.store import DeadLetterStore
from purveyor.queues.registry import Registered, Registry

MOST_HOLDERS: Final = 100
"""A parallel subscription can have thousands of leases; a status names this many instances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """An instance that has leased messages."""

    instance: str
    messages: int
    until: datetime
    """When the last of its leases ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastError:
    """The last thing that went wrong and still matters."""

    part: str
    """`dispatch`, `prefill`, `replay`, `push` or `delivery`."""
    reason: str
    at: datetime | None = None
    sequence: int | None = None
    """The message whose delivery failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionStatus:
    """A registration, and the state of its queue and of its deliveries."""

    registered: Registered
    position: int | None
    """The newest position that is in its queue or was acknowledged; None if there is none."""
    main: int | None
    """The backlog of live events; None if there is no queue."""
    prefill: int | None
    """The backlog of prefill messages."""
    retry: int | None
    """The backlog of redriven dead letters."""
    expired: Expired
    """The messages that exceeded the retention time."""
    oldest: datetime | None = None
    """When the oldest message of its queue was stored."""
    acknowledged: int | None = None
    """The newest position that was acknowledged."""
    dispatched_up_to: int | None = None
    """The position up to which the dispatcher has done its work for this subscription."""
    newest: int | None = None
    """The position of the newest event of all."""
    holders: tuple[LeaseHolder, ...] = ()
    """The instances with leases, those with the latest end first."""
    delayed: int = 0
    """How many messages wait for their next attempt."""
    next_attempt: datetime | None = None
    """When the first of them is delivered again."""
    dead_letters: int = 0
    last_error: LastError | None = None
    push_problem: PushProblem | None = None
    """Why push does not work."""
    unreadable: str | None = None
    """Why this program cannot read the delivery state. It delivers nothing then."""

    @property
    def backlog(self) -> int | None:
        """The number of messages in its queue; None if there is no queue."""
        return None if self.main is None else self.main + (self.prefill or 0) + (self.retry or 0)

    @property
    def lag(self) -> int | None:
        """How many positions the dispatcher is behind for this subscription."""
        if self.newest is None or self.dispatched_up_to is None:
            return None
        return max(self.newest - self.dispatched_up_to, 0)

    @property
    def leased(self) -> int:
        """How many messages are leased."""
        return sum(each.messages for each in self.holders)


async def read_status(queues: Queues, registry: Registry, found: Registered) -> SubscriptionStatus:
    """Read the status of one subscription."""
    (state, unreadable), contents, (newest, dispatched), letters, problems = await asyncio.gather(
        _read_state(registry, found),
        _read_queue(queues, subscription_queue(found.name)),
        _read_dispatched(queues),
        DeadLetterStore(queues).counts(),
        read_problems(queues, [found]),
    )
    acknowledged = state.position if state is not None else 0
    delays = [delay.until for delay in state.delayed.values()] if state is not None else []
    main, prefill, retry = contents.backlog or (None, None, None)
    problem = problems.get(found.name)
    return SubscriptionStatus(
        registered=found,
        position=max(acknowledged, contents.newest or 0) or None,
        main=main,
        prefill=prefill,
        retry=retry,
        oldest=contents.oldest,
        acknowledged=acknowledged or None,
        dispatched_up_to=_dispatched_for(found, dispatched),
        newest=newest,
        holders=_holders(state) if state is not None else (),
        delayed=len(delays),
        next_attempt=_time(min(delays)) if delays else None,
        dead_letters=letters.get(subject_token(f"subscription:{found.name}"), 0),
        last_error=_last_error(found, state, problem),
        expired=state.expired if state is not None else Expired(),
        push_problem=problem,
        unreadable=unreadable,
    )


async def backlogs(queues: Queues) -> dict[str, int]:
    """Return the number of messages in each queue of the server, by the name of the queue."""
    return {info.config.name.removeprefix("stream:"): info.state.messages for info in await queues.streams.list()}


def _holders(state: DeliveryState) -> tuple[LeaseHolder, ...]:
    now = datetime.now(UTC)
    found: dict[str, LeaseHolder] = {}
    for lease in state.leases:
        until, count = _time(lease.until), len(lease.sequences)
        if lease.prefetched or until <= now:  # not delivered, or over: another instance may lease the messages
            continue
        before = found.get(lease.instance)
        if before is not None:
            until, count = max(until, before.until), count + before.messages
        found[lease.instance] = LeaseHolder(instance=lease.instance, messages=count, until=until)
    return tuple(sorted(found.values(), key=lambda each: each.until, reverse=True))


def _last_error(found: Registered, state: DeliveryState | None, problem: PushProblem | None) -> LastError | None:
    """Return the newest error. A failed prefill has no time, and nothing is delivered after it: it counts as newest."""
    last = datetime.max.replace(tzinfo=UTC)
    return max(_errors(found, state, problem), key=lambda error: error.at or last, default=None)


def _errors(found: Registered, state: DeliveryState | None, problem: PushProblem | None) -> Iterator[LastError]:
    if found.suspended is not None:
        yield LastError(part="dispatch", reason=found.suspended.reason, at=found.suspended.at)
    if found.prefill is not None and found.prefill.status is PrefillStatus.FAILED:
        part = "prefill" if found.replay is None else "replay"
        yield LastError(part=part, reason=found.prefill.reason or "no reason was given")
    if problem is not None:
        yield LastError(part="push", reason=problem.reason, at=problem.since)
    for sequence, failures in state.failures.items() if state is not None else ():
        for failure in failures[-1:]:
            yield LastError(part="delivery", reason=failure.describe(), at=_time(failure.at), sequence=sequence)


def _dispatched_for(found: Registered, dispatched: int | None) -> int | None:
    """Return how far the dispatcher is for one subscription: not before it begins, and not past a suspension."""
    if dispatched is None or found.record.begin is None:
        return None
    done = max(dispatched, found.record.begin)
    return done if found.suspended is None else min(done, found.suspended.position - 1)


async def _read_dispatched(queues: Queues) -> tuple[int | None, int | None]:
    """Return the newest position of `incoming`, and the position up to which the dispatcher has done its work."""
    stream = incoming().stream
    try:
        info, reader = await asyncio.gather(queues.streams.info(stream), queues.consumers.info(stream, DEFAULT_GROUP))
    except (UnknownStream, UnknownConsumer):
        return None, None
    newest = info.state.last_seq
    is_done = not reader.num_pending and not reader.num_ack_pending
    return newest, newest if is_done else reader.ack_floor.stream_seq


async def _read_state(registry: Registry, found: Registered) -> tuple[DeliveryState | None, str | None]:
    """Return the delivery state, or why it cannot be read."""
    try:
        return await registry.read_delivery_state(found), None
    except UnreadableRecord as error:
        return None, error.message


@dataclass(frozen=True, slots=True)
class _QueueContents:
    newest: int | None = None
    """The newest position on its subject of live events."""
    backlog: tuple[int, int, int] | None = None
    """The number of messages on each of its subjects; None if there is no queue."""
    oldest: datetime | None = None


async def _read_queue(queues: Queues, queue: Queue) -> _QueueContents:
    main, prefill, retry = queue.subjects
    try:
        found, info = await asyncio.gather(queues.streams.subjects(queue.stream), queues.streams.info(queue.stream))
        newest = await _newest_position(queues, queue.stream, main) if found.get(main) else None
    except UnknownStream:
        return _QueueContents()
    backlog = found.get(main, 0), found.get(prefill, 0), found.get(retry, 0)
    return _QueueContents(newest, backlog, info.state.first_ts if info.state.messages else None)


async def _newest_position(queues: Queues, stream: str, subject: str) -> int | None:
    try:
        return number((await queues.streams.get_last(stream, subject)).headers, POSITION)
    except UnknownMessage:  # acknowledged and deleted between the requests
        return None


def _time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
