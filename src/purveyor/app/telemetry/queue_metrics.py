"""What the server knows, looked up when Prometheus asks: queues, dead letters, subscriptions.

A handful of questions however many subscriptions there are: one listing in pages, one look at the dead letters, and of
the registry only what has changed since the last time. Asked again within a second, the answer is the same: nobody can
make the server work by asking often.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from purveyor.app.telemetry import metric_catalogue
from purveyor.app.telemetry.prometheus import Reading
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.jetstream.streams import Fill
from purveyor.model.errors import PermissionDenied, Unavailable
from purveyor.model.metrics import ACKNOWLEDGED, DELIVERED, DISPATCHED, REDELIVERED, RETURNED
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues.catalogue import reserved_names
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.store import LetterBox
from purveyor.queues.registry import Registered, Snapshot, Unreadable, read_subscriptions
from purveyor.queues.stage_queues import STAGE_STREAMS

_log = logging.getLogger(__name__)
_FRESH_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 2.0
_INTERNAL: Final = reserved_names()
_BY_SUBSCRIPTION: Final = (DISPATCHED, DELIVERED, REDELIVERED, ACKNOWLEDGED, RETURNED)


class QueueFigures:
    """Looks at one server. `read` never raises: a server that is away is a figure too."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._snapshot = Snapshot()
        self._asking = asyncio.Lock()
        self._found: list[Reading] = []
        self._found_at = float("-inf")

    async def read(self) -> Sequence[Reading]:
        """All that the server tells."""
        async with self._asking:
            if time.monotonic() - self._found_at > _FRESH_SECONDS:
                self._found = await self._look()
                self._found_at = time.monotonic()
            return self._found

    async def _look(self) -> list[Reading]:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._queues.connection.wait_connected(_PATIENCE_SECONDS)
                fills = await self._queues.streams.fills()
                letters = await LetterBox(self._queues).counts()
                self._snapshot = await asyncio.to_thread(read_subscriptions, self._queues.address, self._snapshot)
        except (TimeoutError, Unavailable):
            return [server_up(there=False)]
        except PermissionDenied as error:
            _log.warning("the figures of queues cannot be looked up: %s", error)
            return [server_up(there=True)]
        names = frozenset({*self._snapshot.subscriptions, *self._snapshot.unreadable})
        for meter in _BY_SUBSCRIPTION:
            meter.keep("subscription", names)
        return [
            server_up(there=True),
            *queue_readings(fills, names, datetime.now(UTC)),
            Reading(metric_catalogue.DEAD_LETTERS, {(origin,): count for origin, count in letters.items()}),
            *subscription_readings(self._snapshot),
        ]


def server_up(*, there: bool) -> Reading:
    """Whether the server answers."""
    return Reading(metric_catalogue.SERVER_UP, {(): float(there)})


def queue_readings(fills: Sequence[Fill], subscriptions: frozenset[str], now: datetime) -> list[Reading]:
    """Every queue of ours; streams of others on the same server are none of our business."""
    messages, size, age, written, sealed = (
        Reading(figure)
        for figure in (
            metric_catalogue.QUEUE_MESSAGES,
            metric_catalogue.QUEUE_BYTES,
            metric_catalogue.QUEUE_AGE,
            metric_catalogue.QUEUE_WRITTEN,
            metric_catalogue.QUEUE_SEALED,
        )
    )
    for fill in fills:
        kind = kind_of(fill.stream, subscriptions)
        if kind is None:
            continue
        labels = fill.stream.removeprefix(STREAM_PREFIX), kind
        messages.add(fill.messages, *labels)
        size.add(fill.bytes, *labels)
        # The clock of another machine may be ahead of ours.
        age.add(0.0 if fill.oldest is None else max((now - fill.oldest).total_seconds(), 0.0), *labels)
        written.add(fill.last_sequence, *labels)
        sealed.add(fill.sealed, *labels)
    return [messages, size, age, written, sealed]


def kind_of(stream: str, subscriptions: frozenset[str]) -> str | None:
    """What a stream is to us; None if it is not ours.

    >>> kind_of("stream:ox", frozenset({"ox"})), kind_of("stream:incoming", frozenset()), kind_of("ORDERS", frozenset())
    ('subscription', 'internal', None)
    """
    name = stream.removeprefix(STREAM_PREFIX)
    if name == stream:
        return None
    if stream.startswith(STAGE_STREAMS):
        return "stage"
    if name in subscriptions:
        return "subscription"
    return "internal" if name in _INTERNAL else None


def subscription_readings(snapshot: Snapshot) -> list[Reading]:
    """How many subscriptions there are in which state, and the names of those that need somebody."""
    found, unread = snapshot.subscriptions.values(), snapshot.unreadable.values()
    states = Counter(state_of(each) for each in found)
    states.update({"unreadable": len(unread)} if unread else {})
    every: list[Registered | Unreadable] = [*found, *unread]
    suspended = [each.name for each in every if each.suspended is not None]
    return [
        Reading(metric_catalogue.SUBSCRIPTIONS, {(state,): count for state, count in states.items()}),
        Reading(metric_catalogue.SUSPENDED, {(name,): 1 for name in suspended}),
        Reading(metric_catalogue.UNREADABLE, {(each.name,): 1 for each in unread}),
        Reading(
            metric_catalogue.PREFILL_FAILED, {(each.name,): 1 for each in found if state_of(each) == "prefill_failed"}
        ),
    ]


def state_of(found: Registered) -> str:
    """One word for a subscription: the one that matters most."""
    if found.record.state is not RecordState.ACTIVE:
        return str(found.record.state.value)
    if found.suspended is not None:
        return "suspended"
    prefill = found.prefill.status if found.prefill is not None else PrefillStatus.DONE
    if prefill is PrefillStatus.FAILED:
        return "prefill_failed"
    if found.record.paused:
        return "paused"
    return "active" if prefill is PrefillStatus.DONE else "prefilling"


__all__ = ["QueueFigures", "kind_of", "queue_readings", "server_up", "state_of", "subscription_readings"]
