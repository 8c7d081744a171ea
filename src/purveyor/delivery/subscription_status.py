"""The status of a subscription: how far its queue is written, and its backlog. Every surface reads it here."""

import asyncio
from dataclasses import dataclass

from purveyor.delivery.push.push_problems import PushProblem, read_problems
from purveyor.jetstream.headers import POSITION, number
from purveyor.model.ack_ranges import Expired
from purveyor.model.delivery_state import AckSummary
from purveyor.model.errors import UnknownMessage, UnknownStream, UnreadableRecord
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.registry import Registered, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionStatus:
    """A registration, and the state of its queue."""

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
    push_problem: PushProblem | None = None
    """Why push does not work."""
    unreadable: str | None = None
    """Why this program cannot read the delivery state. It delivers nothing then."""


async def read_status(queues: Queues, registry: Registry, found: Registered) -> SubscriptionStatus:
    """Read the status of one subscription."""
    queue = subscription_queue(found.name)
    main, prefill, retry = queue.subjects
    (acks, unreadable), newest, backlog, problems = await asyncio.gather(
        _read_acks(registry, found),
        _newest_position(queues, queue.stream, main),
        _backlog(queues, queue.stream),
        read_problems(queues, [found]),
    )
    positions = [position for position in (acks.position if acks else 0, newest) if position]
    return SubscriptionStatus(
        registered=found,
        position=max(positions, default=None),
        main=None if backlog is None else backlog.get(main, 0),
        prefill=None if backlog is None else backlog.get(prefill, 0),
        retry=None if backlog is None else backlog.get(retry, 0),
        expired=acks.expired if acks else Expired(),
        push_problem=problems.get(found.name),
        unreadable=unreadable,
    )


async def backlogs(queues: Queues) -> dict[str, int]:
    """Return the number of messages in each queue of the server, by the name of the queue."""
    return {info.config.name.removeprefix("stream:"): info.state.messages for info in await queues.streams.list()}


async def _read_acks(registry: Registry, found: Registered) -> tuple[AckSummary | None, str | None]:
    """Return what is acknowledged, or why it cannot be read."""
    try:
        return await registry.read_acknowledged(found), None
    except UnreadableRecord as error:
        return None, error.message


async def _newest_position(queues: Queues, stream: str, subject: str) -> int | None:
    try:
        message = await queues.streams.get_last(stream, subject)
    except (UnknownMessage, UnknownStream):
        return None
    return number(message.headers, POSITION)


async def _backlog(queues: Queues, stream: str) -> dict[str, int] | None:
    try:
        return await queues.streams.subjects(stream)
    except UnknownStream:
        return None
