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

from purveyor.app.telemetry import catalogue
from purveyor.app.telemetry.page import Reading
from purveyor.model.errors import PermissionDenied, Unavailable, UnknownStream
from purveyor.model.figures import ACKNOWLEDGED, DELIVERED, DISPATCHED, REDELIVERED, RETURNED
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues import catalogue as declared
from purveyor.queues.catalogue import PREFIX, reserved_names
from purveyor.queues.client import Queues
from purveyor.queues.registry import Registered, Snapshot, read_subscriptions
from purveyor.queues.stage_queues import STAGE_STREAMS
from purveyor.queues.streams import Fill

_log = logging.getLogger(__name__)
_FRESH_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 2.0
_INTERNAL: Final = reserved_names()
_LETTERS: Final = "dead-letters."
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
                letters = await self._dead_letters()
                self._snapshot = await asyncio.to_thread(read_subscriptions, self._queues.address, self._snapshot)
        except (TimeoutError, Unavailable):
            return [server_up(there=False)]
        except PermissionDenied as error:
            _log.warning("the figures of queues cannot be looked up: %s", error)
            return [server_up(there=True)]
        subscriptions = self._snapshot.subscriptions
        for meter in _BY_SUBSCRIPTION:
            meter.keep("subscription", frozenset(subscriptions))
        return [
            server_up(there=True),
            *queue_readings(fills, frozenset(subscriptions), datetime.now(UTC)),
            Reading(catalogue.DEAD_LETTERS, {(origin,): count for origin, count in letters.items()}),
            *subscription_readings(list(subscriptions.values())),
        ]

    async def _dead_letters(self) -> dict[str, int]:
        try:
            found = await self._queues.streams.subjects(declared.DEAD_LETTERS.stream, f"{_LETTERS}>")
        except UnknownStream:
            return {}
        return {subject.removeprefix(_LETTERS): count for subject, count in found.items()}


def server_up(*, there: bool) -> Reading:
    """Whether the server answers."""
    return Reading(catalogue.SERVER_UP, {(): float(there)})


def queue_readings(fills: Sequence[Fill], subscriptions: frozenset[str], now: datetime) -> list[Reading]:
    """Every queue of ours; streams of others on the same server are none of our business."""
    messages, size, age, written, sealed = (
        Reading(figure)
        for figure in (
            catalogue.QUEUE_MESSAGES,
            catalogue.QUEUE_BYTES,
            catalogue.QUEUE_AGE,
            catalogue.QUEUE_WRITTEN,
            catalogue.QUEUE_SEALED,
        )
    )
    for fill in fills:
        kind = kind_of(fill.stream, subscriptions)
        if kind is None:
            continue
        labels = fill.stream.removeprefix(PREFIX), kind
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
    name = stream.removeprefix(PREFIX)
    if name == stream:
        return None
    if stream.startswith(STAGE_STREAMS):
        return "stage"
    if name in subscriptions:
        return "subscription"
    return "internal" if name in _INTERNAL else None


def subscription_readings(found: Sequence[Registered]) -> list[Reading]:
    """How many subscriptions there are in which state, and the names of those that need somebody."""
    states = Counter(state_of(each) for each in found)
    return [
        Reading(catalogue.SUBSCRIPTIONS, {(state,): count for state, count in states.items()}),
        Reading(catalogue.SUSPENDED, {(each.name,): 1 for each in found if each.suspended is not None}),
        Reading(catalogue.PREFILL_FAILED, {(each.name,): 1 for each in found if state_of(each) == "prefill_failed"}),
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
