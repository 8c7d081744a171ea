"""The next message, kept for the one who has just acknowledged: one write of the book serves both of its requests.

The loop of a consumer in ordered delivery is next, ok, next, ok. Where it goes round quickly, the write that notes an
acknowledgement leases the next message too, ahead of being asked for; the consumer who then asks gets it without any
write. One who does not ask in a moment has it taken back, as if it had not been.

That a lease was given ahead stands in the book. If this process dies, or the consumer goes to another, nobody can tell
whether the message was handed out: when such a lease runs out it counts as a delivery, and when its own instance asks
again it does not. So of all deliveries of a message one at most is not counted, the first.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from purveyor.delivery.state import Lease

_MOMENT_SECONDS: Final = 0.1


class Kept(NamedTuple):
    """A lease given ahead, and how often its message was delivered, this time counted."""

    lease: Lease
    deliveries: int


class Ahead:
    """What one desk keeps; `give_back` is called with the id of a lease that nobody asked for."""

    def __init__(self, give_back: Callable[[str], None]) -> None:
        self._give_back = give_back
        self._kept: Kept | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._quick: str | None = None
        self._acknowledged: tuple[str, float] | None = None
        self._handed_out: str | None = None

    def pays(self, instance: str) -> bool:
        """Whether an instance asks soon after it has acknowledged."""
        return self._quick == instance

    def acknowledged(self, instance: str, kept: Kept | None) -> None:
        """An instance has acknowledged, and something was kept for it or not."""
        loop = asyncio.get_running_loop()
        self._acknowledged = instance, loop.time()
        if kept is not None:
            self._forget()
            self._kept = kept
            self._timer = loop.call_later(_MOMENT_SECONDS, self._over)

    def claim(self, instance: str) -> Kept | None:
        """What was kept for the instance that asks. Whatever it gets then, nothing is kept any more."""
        acknowledged, self._acknowledged = self._acknowledged, None
        if acknowledged is not None and acknowledged[0] == instance:
            soon = asyncio.get_running_loop().time() - acknowledged[1] < _MOMENT_SECONDS
            self._quick = instance if soon else None
        kept = self._kept
        if kept is None or kept.lease.instance != instance:
            return None
        self._forget()
        return kept

    def hand_out(self, kept: Kept) -> None:
        """It goes to the one who has claimed it."""
        self._handed_out = kept.lease.id

    def was_handed_out(self, lease: Lease) -> bool:
        """Whether a lease that was given ahead has been handed out by us; the book does not tell."""
        return lease.id == self._handed_out

    def close(self) -> str | None:
        """Keep nothing; the lease that is to be given back, if any."""
        kept = self._kept
        self._forget()
        return None if kept is None else kept.lease.id

    def _over(self) -> None:
        kept = self._kept
        self._forget()
        self._quick = None
        if kept is not None:
            self._give_back(kept.lease.id)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._kept = self._timer = None
