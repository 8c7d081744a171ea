"""A timer that goes off once, at the soonest of the times that it was set to."""

import asyncio
from collections.abc import Callable


class Alarm:
    """See the module."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._at = float("inf")
        self._handle: asyncio.Handle | None = None

    def set(self, seconds: float) -> None:
        """Go off in so long, unless it does so sooner anyway."""
        at = self._loop.time() + seconds
        if at < self._at:
            self.stop()
            self._at = at
            self._handle = self._loop.call_later(seconds, self._off)

    def stop(self) -> None:
        """Do not go off."""
        if self._handle is not None:
            self._handle.cancel()
        self._at, self._handle = float("inf"), None

    def _off(self) -> None:
        self._at, self._handle = float("inf"), None
        self._call()
