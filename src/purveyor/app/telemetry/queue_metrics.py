"""Metrics read from the NATS server at each scrape: queues, dead letters, subscriptions.

A scrape needs a few requests for any number of subscriptions: a listing of streams in pages, the counts of dead
letters, and the changes of the registry since the last scrape. Scrapes within a second share one result, so frequent
scrapes cannot load the server.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from purveyor.app.telemetry import metric_catalogue
from purveyor.app.telemetry.prometheus import MetricValues
from purveyor.delivery.push.push_reports import PushProblem, read_problems
from purveyor.jetstream.api import clock_offset_seconds
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.jetstream.streams import StreamUsage
from purveyor.model.delivery_policy import Delivery
from purveyor.model.errors import PermissionDenied, Unavailable
from purveyor.model.metrics import ACKNOWLEDGED, DELIVERED, DISPATCHED, REDELIVERED, RETURNED
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues.backlog import FirstSeen, unread_since
from purveyor.queues.catalogue import STAGE_STREAMS, reserved_names
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.store import DeadLetterStore
from purveyor.queues.registry import Registered, Snapshot, Unreadable, read_snapshot
from purveyor.queues.status_board import SILENT_SECONDS, read_notices

_log = logging.getLogger(__name__)
_FRESH_SECONDS: Final = 1.0
_TIMEOUT_SECONDS: Final = 2.0
_INTERNAL: Final = reserved_names()
_BY_SUBSCRIPTION: Final = (DISPATCHED, DELIVERED, REDELIVERED, ACKNOWLEDGED, RETURNED)


class RegistrySnapshots:
    """All subscriptions of the registry. Each read fetches only the changes since the last one.

    The metrics and the console of an API process share one.
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._latest = Snapshot()
        self._lock = asyncio.Lock()

    async def read(self) -> Snapshot:
        """Return the subscriptions as of now."""
        async with self._lock:
            self._latest = await read_snapshot(self._queues, self._latest)
            return self._latest


class QueueMetrics:
    """Reads the metrics of one server. `read` never raises: `purveyor_nats_up` is 0 if the server does not answer."""

    def __init__(self, queues: Queues, registry: RegistrySnapshots) -> None:
        self._queues = queues
        self._registry = registry
        self._lock = asyncio.Lock()
        self._found: list[MetricValues] = []
        self._found_at = float("-inf")
        self._first_seen: FirstSeen = {}

    async def read(self) -> Sequence[MetricValues]:
        """Return all values, at most a second old."""
        async with self._lock:
            if time.monotonic() - self._found_at > _FRESH_SECONDS:
                self._found = await self._collect()
                self._found_at = time.monotonic()
            return self._found

    async def _collect(self) -> list[MetricValues]:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                await self._queues.connection.wait_until_connected(_TIMEOUT_SECONDS)
                usage = await self._queues.streams.usage()
                unread = await unread_since(self._queues, usage, self._first_seen)
                dead_letters = await DeadLetterStore(self._queues).counts()
                snapshot = await self._registry.read()
                problems = await read_problems(self._queues, [*snapshot.subscriptions.values()])
                is_pushing = await self._is_pushing(usage)
        except (TimeoutError, Unavailable):
            return [server_up(there=False)]
        except PermissionDenied as error:
            _log.warning("cannot read the metrics of queues: %s", error)
            return [server_up(there=True)]
        names = frozenset({*snapshot.subscriptions, *snapshot.unreadable})
        for instrument in _BY_SUBSCRIPTION:
            instrument.keep_only("subscription", names)
        return [
            server_up(there=True),
            *queue_values(usage, unread, names, datetime.now(UTC)),
            MetricValues(metric_catalogue.DEAD_LETTERS, {(origin,): count for origin, count in dead_letters.items()}),
            *subscription_values(snapshot),
            *push_values(problems, {} if is_pushing else unpushed_since(snapshot, usage), datetime.now(UTC)),
        ]

    async def _is_pushing(self, usage: Sequence[StreamUsage]) -> bool:
        """Return whether a push worker has reported lately."""
        notices = await read_notices(self._queues, "push")
        ages = [(datetime.now(UTC) - each.at).total_seconds() for each in notices if each.at is not None]
        youngest = min(ages, default=None)
        if youngest is None or youngest <= SILENT_SECONDS:
            return youngest is not None
        offset = await clock_offset_seconds(self._queues, usage[0].stream)  # a wrong clock looks like a silent worker
        return youngest + (offset or 0.0) <= SILENT_SECONDS


def server_up(*, there: bool) -> MetricValues:
    """Return the metric that says whether the server answers."""
    return MetricValues(metric_catalogue.SERVER_UP, {(): float(there)})


def queue_values(
    usage: Sequence[StreamUsage], unread: Mapping[str, datetime], subscriptions: frozenset[str], now: datetime
) -> list[MetricValues]:
    """Return the metrics of Purveyor's queues, without other streams of the server. `unread`: see `unread_since`."""
    messages, size, age, written, sealed = (
        MetricValues(metric)
        for metric in (
            metric_catalogue.QUEUE_MESSAGES,
            metric_catalogue.QUEUE_BYTES,
            metric_catalogue.QUEUE_AGE,
            metric_catalogue.QUEUE_WRITTEN,
            metric_catalogue.QUEUE_SEALED,
        )
    )
    for stream_usage in usage:
        kind = kind_of(stream_usage.stream, subscriptions)
        if kind is None:
            continue
        labels = stream_usage.stream.removeprefix(STREAM_PREFIX), kind
        messages.add(stream_usage.messages, *labels)
        size.add(stream_usage.bytes, *labels)
        since = unread.get(stream_usage.stream, now)
        age.add(max((now - since).total_seconds(), 0.0), *labels)  # the clock of the server may be ahead
        written.add(stream_usage.last_sequence, *labels)
        sealed.add(stream_usage.sealed, *labels)
    return [messages, size, age, written, sealed]


def kind_of(stream: str, subscriptions: frozenset[str]) -> str | None:
    """Return the kind of a queue by its stream; None if the stream is not Purveyor's.

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


def subscription_values(snapshot: Snapshot) -> list[MetricValues]:
    """Return the number of subscriptions by state, and the names of those with problems."""
    found, unread = snapshot.subscriptions.values(), snapshot.unreadable.values()
    states = Counter(state_of(each) for each in found)
    states.update({"unreadable": len(unread)} if unread else {})
    every: list[Registered | Unreadable] = [*found, *unread]
    suspended = [each.name for each in every if each.suspended is not None]
    return [
        MetricValues(metric_catalogue.SUBSCRIPTIONS, {(state,): count for state, count in states.items()}),
        MetricValues(metric_catalogue.SUSPENDED, {(name,): 1 for name in suspended}),
        MetricValues(metric_catalogue.UNREADABLE, {(each.name,): 1 for each in unread}),
        MetricValues(
            metric_catalogue.PREFILL_FAILED, {(each.name,): 1 for each in found if state_of(each) == "prefill_failed"}
        ),
    ]


def unpushed_since(snapshot: Snapshot, usage: Sequence[StreamUsage]) -> Mapping[str, datetime]:
    """Return since when the oldest message of each subscription waits that a push worker should push."""
    oldest = {each.stream: each.oldest for each in usage if each.messages}
    found: dict[str, datetime] = {}
    for name, subscription in snapshot.subscriptions.items():
        since = oldest.get(f"{STREAM_PREFIX}{name}")
        is_pushed = subscription.record.definition.delivery is Delivery.PUSH and state_of(subscription) == "active"
        if since is not None and is_pushed:
            found[name] = since
    return found


def push_values(
    problems: Mapping[str, PushProblem], unpushed: Mapping[str, datetime], now: datetime
) -> list[MetricValues]:
    """Return for how long each subscription with a push problem, or without a push worker, has not been pushed.

    Also return what its failing endpoints do: the metrics need no login, so they do not name the endpoints.
    """
    since = {**unpushed, **{name: problem.since for name, problem in problems.items()}}
    ages: dict[tuple[str, ...], float] = {(name,): max((now - at).total_seconds(), 0.0) for name, at in since.items()}
    attempts, status, is_open = (
        MetricValues(metric)
        for metric in (
            metric_catalogue.PUSH_FAILED_ATTEMPTS,
            metric_catalogue.PUSH_LAST_STATUS,
            metric_catalogue.PUSH_BREAKER_OPEN,
        )
    )
    for name, problem in problems.items():
        if problem.endpoints:
            answers = (each.status for each in problem.endpoints if each.status is not None)
            attempts.add(sum(each.attempts for each in problem.endpoints), name)
            status.add(next(answers, 0), name)
            is_open.add(any(each.breaker != "closed" for each in problem.endpoints), name)
    return [MetricValues(metric_catalogue.PUSH_FAILING, ages), attempts, status, is_open]


def state_of(found: Registered) -> str:
    """Return the most important state of a subscription."""
    if found.record.state is not RecordState.ACTIVE:
        return str(found.record.state.value)
    if found.suspended is not None:
        return "suspended"
    prefill = found.own_prefill.status if found.own_prefill is not None else PrefillStatus.DONE
    if prefill is PrefillStatus.FAILED:
        return "prefill_failed"
    if found.record.paused:
        return "paused"
    return "active" if prefill is PrefillStatus.DONE else "prefilling"


__all__ = ["QueueMetrics", "kind_of", "queue_values", "server_up", "state_of", "subscription_values"]
