"""Wake long polls when a subscription may have something to deliver.

A notification comes from this process, from a change of the registry (`registration_cache`), and from a message that
another process sends to the queue or to the delivery state of the subscription. For the latter the server forwards one
message and no more, so a queue under load costs a waiting process nothing. The server forwards a message when it is
sent, but the message can be read only when it is stored: so one message causes several notifications in a row.
Notifications are best effort; waiters also poll.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final

from purveyor.jetstream.connection import Connection, NatsSubscription
from purveyor.model.delivery_state import SubjectKind
from purveyor.queues.registry import ACKNOWLEDGED

_NOTIFY_DELAYS_SECONDS: Final = (0.0, 0.02, 0.1, 0.5)
_STATE_DELAY_SECONDS: Final = 0.05
_CONNECTION_CHECK_SECONDS: Final = 2.0
_POLL_INTERVAL_SECONDS: Final = 10.0


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
