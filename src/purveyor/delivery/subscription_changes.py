"""How a process notices changes of subscriptions: a cache of registrations, and notifications that wake long polls.

`RegistrationCache` reads a registration once, because delivery needs one for each message, and keeps it until the
registry changes; one watcher per process reports changes. A cached registration may be a moment old. It cannot allow a
delivery too early: a subscription with a prefill becomes deliverable only after its prefill was seen as done. A replay
takes that back, which need not be seen at once, and so does a prefill of new topics, which is stored before the
dispatcher begins to match the first event behind it (docs/decisions/0028-selections-change-at-a-position.md). A
subscription that was deleted and added again has another incarnation, which the state writer checks.

`Notifier` wakes long polls when a subscription may have something to deliver. A notification comes from this process,
from a change of the registry, and from a message that another process sends to the queue or to the delivery state of
the subscription. For the latter the server forwards one message and no more, so a queue under load costs a waiting
process nothing. The server forwards a message when it is sent, but the message can be read only when it is stored: so
one message causes several notifications in a row. Notifications are best effort; waiters also poll.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, assert_never

from purveyor.jetstream.connection import Connection, NatsSubscription
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.errors import PrefillFailed, PurveyorError, UnknownSubscription
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues.client import Queues
from purveyor.queues.registry import ACKNOWLEDGED, SUBSCRIPTIONS, Registered, Registry

_log = logging.getLogger(__name__)
_WATCH_RETRY_SECONDS: Final = 1.0
_STATES_READ: Final = ("prefill",)
"""Delivery depends on the prefill state; the dispatch state does not matter to it."""
_NOTIFY_DELAYS_SECONDS: Final = (0.0, 0.02, 0.1, 0.5)
_STATE_DELAY_SECONDS: Final = 0.05
_CONNECTION_CHECK_SECONDS: Final = 2.0
_POLL_INTERVAL_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class _CachedRegistration:
    registered: Registered
    generation: int


class RegistrationCache:
    """Reads registrations from the registry. `on_change` is called with the name of a changed subscription."""

    def __init__(
        self, queues: Queues, *, on_change: Callable[[str], None] = lambda _name: None, replicas: int = 1
    ) -> None:
        self._queues = queues
        self._on_change = on_change
        self._replicas = replicas
        self._registry: Registry | None = None
        self._cached: dict[str, _CachedRegistration] = {}
        self._changes = 0
        self._is_current = False
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False

    async def get(self, name: str) -> Registered:
        """Return a subscription; `UnknownSubscription` if it does not exist or is being deleted."""
        cached = self._cached.get(name)
        if cached is not None and cached.generation == self._queues.connection.generation:
            return cached.registered
        return await self.refresh(name)

    async def refresh(self, name: str) -> Registered:
        """Read a subscription from the registry, as `get` returns it."""
        registry = await self._open()
        generation, changes = self._queues.connection.generation, self._changes
        self._cached.pop(name, None)
        registered = await registry.get(name, _STATES_READ)
        if registered.record.state is RecordState.DELETING:
            raise UnknownSubscription(f"subscription {name!r} is being deleted", fix="delete it again if that ended")
        if self._is_current and changes == self._changes:
            self._cached[name] = _CachedRegistration(registered, generation)
        return registered

    def invalidate(self, name: str) -> None:
        """Read a subscription from the registry next time: for callers that have just changed it."""
        self._changes += 1
        self._cached.pop(name, None)
        self._on_change(name)

    async def close(self) -> None:
        """Stop watching. Later calls read from the registry each time."""
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._is_current = False
            self._cached.clear()

    async def _open(self) -> Registry:
        if self._registry is None:
            self._registry = await Registry.open(self._queues, replicas=self._replicas)
        if not self._is_closed and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch())
        return self._registry

    async def _watch(self) -> None:
        while True:
            try:
                await self._follow_changes()
            except PurveyorError as error:
                _log.warning("the registry cannot be watched; each registration is read until it can: %s", error)
            self._is_current = False
            self._cached.clear()
            await asyncio.sleep(_WATCH_RETRY_SECONDS)

    async def _follow_changes(self) -> None:
        bucket = await self._queues.bucket(SUBSCRIPTIONS)
        async with contextlib.aclosing(bucket.watch(values=False)) as changes:
            async for entry in changes:
                if entry is None:
                    self._is_current = True
                    continue
                name, _, part = entry.key.rpartition(".")
                if self._is_current and part not in ("dispatch", "replay"):
                    self.invalidate(name)


def is_deliverable(registered: Registered) -> bool:
    """Return whether messages may be delivered now. Pure; `PrefillFailed` if an operator has to act first."""
    record, prefill = registered.record, registered.prefill
    if record.state is not RecordState.ACTIVE or record.paused:
        return False
    if prefill is None:
        return not record.definition.request_prefill
    match prefill.status:
        case PrefillStatus.DONE:
            return True
        case PrefillStatus.PENDING | PrefillStatus.RUNNING:
            return False
        case PrefillStatus.FAILED:
            raise PrefillFailed(
                f"the prefill of subscription {registered.name!r} failed: {prefill.reason or 'no reason was given'}",
                fix="correct the cause and request the prefill again, or delete the subscription",
                code=409,
            )
        case _:
            assert_never(prefill.status)


class Listener:
    """Listens for one subscription while at least one caller waits."""

    def __init__(self, connection: Connection, name: str, *, on_notify: Callable[[], None] | None = None) -> None:
        self._connection = connection
        self._on_notify = on_notify
        # Not `<name>.*`: permission for that with any name would include `$JS.>`. A redrive changes the state, so the
        # subject of redriven messages is not needed.
        kinds = (SubjectKind.PREFILL, SubjectKind.MAIN)
        self._subjects: dict[str, tuple[float, ...]] = {
            f"{name}.{kind.value}": _NOTIFY_DELAYS_SECONDS for kind in kinds
        }
        self._subjects[f"$KV.{ACKNOWLEDGED}.{name}"] = (_STATE_DELAY_SECONDS,)
        self._listening: dict[str, NatsSubscription] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._lock = asyncio.Lock()
        self._notified = asyncio.Event()
        self.waiters = 0

    async def listen(self) -> asyncio.Event:
        """Listen on all subjects. The returned event is set by the next notification."""
        async with self._lock:
            for subject, delays in self._subjects.items():
                if subject not in self._listening:
                    self._listening[subject] = await self._connection.subscribe_once(
                        subject,
                        lambda subject=subject, delays=delays: self._on_message(subject, delays),  # type: ignore[misc]
                    )
        return self._notified

    def _on_message(self, subject: str, delays: tuple[float, ...]) -> None:
        self._listening.pop(subject, None)
        self._timers = {timer for timer in self._timers if not timer.cancelled() and timer.when() > self._now()}
        for delay in delays:
            if delay:
                self._timers.add(asyncio.get_running_loop().call_later(delay, self.notify))
            else:  # not a timer: uvloop returns a handle without a time
                asyncio.get_running_loop().call_soon(self.notify)

    def notify(self) -> None:
        """Wake all waiters."""
        notified, self._notified = self._notified, asyncio.Event()
        notified.set()
        if self._on_notify is not None:
            self._on_notify()

    async def wait(self, notified: asyncio.Event, seconds: float) -> None:
        """Return after a notification, after `seconds`, after a reconnect, or when the next poll is due."""
        generation, begun = self._connection.generation, self._now()
        end = begun + min(seconds, _POLL_INTERVAL_SECONDS)
        while not notified.is_set() and self._now() < end and self._connection.generation == generation:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(notified.wait(), min(end - self._now(), _CONNECTION_CHECK_SECONDS))

    async def close(self) -> None:
        """Stop listening."""
        for timer in self._timers:
            timer.cancel()
        listening, self._listening = self._listening, {}
        for subscription in listening.values():
            await subscription.close()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class Notifier:
    """The listeners of one process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._listeners: dict[str, Listener] = {}

    @contextlib.asynccontextmanager
    async def listener(self, name: str) -> AsyncIterator[Listener]:
        """Yield the listener of a subscription. All waiters of one subscription share it."""
        listener = self._listeners.setdefault(name, Listener(self._connection, name))
        listener.waiters += 1
        try:
            yield listener
        finally:
            listener.waiters -= 1
            if not listener.waiters and self._listeners.get(name) is listener:
                del self._listeners[name]
                await listener.close()

    def notify(self, name: str) -> None:
        """Wake the waiters of a subscription, if there are any."""
        listener = self._listeners.get(name)
        if listener is not None:
            listener.notify()
