"""Wait for something to do without asking again and again: a bell per subscription that somebody waits for.

It is rung by what this process does, by changes of the registry (`gate`), and by the messages that others send to the
queue or the book of the subscription. For those the server is asked to pass on one message and no more, so that a
queue under load costs a waiting process nothing. A message rings when it is sent, and can be read when it is stored:
so the bell rings a few times more. Bells are a courtesy: who waits looks by himself from time to time as well.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from purveyor.delivery.lease_rules import Kind
from purveyor.jetstream.connection import Connection, Subscription
from purveyor.queues.registry import ACKNOWLEDGED

_ECHOES: Final = (0.0, 0.02, 0.1, 0.5)
_BOOK_SECONDS: Final = 0.05
_GLANCE_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 10.0


class Bell:
    """Of one subscription, while somebody waits for it."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        # Not `<name>.*`: who is allowed that for any name is allowed `$JS.>` too. Who puts back dead letters writes
        # so in the book.
        kinds = (Kind.PREFILL, Kind.MAIN)
        self._subjects: dict[str, tuple[float, ...]] = {f"{name}.{kind.value}": _ECHOES for kind in kinds}
        self._subjects[f"$KV.{ACKNOWLEDGED}.{name}"] = (_BOOK_SECONDS,)
        self._listening: dict[str, Subscription] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._arming = asyncio.Lock()
        self._rung = asyncio.Event()
        self.waiters = 0

    async def arm(self) -> asyncio.Event:
        """Listen; the event is set when there may be something new since now."""
        async with self._arming:
            for subject, delays in self._subjects.items():
                if subject not in self._listening:
                    self._listening[subject] = await self._connection.listen_once(
                        subject,
                        lambda subject=subject, delays=delays: self._heard(subject, delays),  # type: ignore[misc]
                    )
        return self._rung

    def _heard(self, subject: str, delays: tuple[float, ...]) -> None:
        self._listening.pop(subject, None)
        self._timers = {timer for timer in self._timers if not timer.cancelled() and timer.when() > self._now()}
        for delay in delays:
            if delay:
                self._timers.add(asyncio.get_running_loop().call_later(delay, self.ring))
            else:  # not a timer: uvloop gives a handle that has no time
                asyncio.get_running_loop().call_soon(self.ring)

    def ring(self) -> None:
        """Wake all who wait."""
        rung, self._rung = self._rung, asyncio.Event()
        rung.set()

    async def wait(self, rung: asyncio.Event, seconds: float) -> None:
        """Return when it rings, when the time is over, or when it is time to look anyway."""
        generation, begun = self._connection.generation, self._now()
        end = begun + min(seconds, _LOOK_SECONDS)
        while not rung.is_set() and self._now() < end and self._connection.generation == generation:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(rung.wait(), min(end - self._now(), _GLANCE_SECONDS))

    async def close(self) -> None:
        """Listen no more."""
        for timer in self._timers:
            timer.cancel()
        listening, self._listening = self._listening, {}
        for subscription in listening.values():
            await subscription.close()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class Bells:
    """The bells of one process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._bells: dict[str, Bell] = {}

    @contextlib.asynccontextmanager
    async def waiting(self, name: str) -> AsyncIterator[Bell]:
        """A bell for as long as the block lasts; all who wait for one subscription share it."""
        bell = self._bells.setdefault(name, Bell(self._connection, name))
        bell.waiters += 1
        try:
            yield bell
        finally:
            bell.waiters -= 1
            if not bell.waiters and self._bells.get(name) is bell:
                del self._bells[name]
                await bell.close()

    def ring(self, name: str) -> None:
        """Wake those who wait for a subscription, if any."""
        bell = self._bells.get(name)
        if bell is not None:
            bell.ring()
