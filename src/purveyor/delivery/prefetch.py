"""Prefetch: the write that acknowledges a message also leases the next one to the same instance.

A consumer in ordered delivery loops: next, ok, next, ok. If it loops quickly, one write of the delivery state serves
both of its requests: the consumer gets the prefetched message without another write. If it does not ask soon, the lease
is cancelled without counting a delivery.

The state records that a lease was prefetched. If this process dies, or the consumer changes to another process, nothing
tells whether the message was delivered. Then an expired lease counts as a delivery, and a lease that its own instance
replaces by asking again does not. So at most one delivery of a message is not counted, the first.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from purveyor.model.delivery_state import Lease

_CLAIM_SECONDS: Final = 0.1
"""How soon an instance asks after an acknowledgement to be worth a prefetch."""


class PrefetchedLease(NamedTuple):
    """A prefetched lease, and how often its message was delivered, this delivery included."""

    lease: Lease
    deliveries: int


class Prefetcher:
    """The prefetched lease of one state writer. `cancel` is called with the id of a lease that was not claimed."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._prefetched: PrefetchedLease | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._quick_instance: str | None = None
        self._last_ack: tuple[str, float] | None = None
        self._delivered_id: str | None = None

    def is_worthwhile(self, instance: str) -> bool:
        """Return whether an instance asks soon after it acknowledges."""
        return self._quick_instance == instance

    def record_ack(self, instance: str, prefetched: PrefetchedLease | None) -> None:
        """Record an acknowledgement of an instance, and the lease that was prefetched for it."""
        loop = asyncio.get_running_loop()
        self._last_ack = instance, loop.time()
        if prefetched is not None:
            self._clear()
            self._prefetched = prefetched
            self._timer = loop.call_later(_CLAIM_SECONDS, self._on_timeout)

    def take(self, instance: str) -> PrefetchedLease | None:
        """Take the lease that was prefetched for an instance. The prefetcher holds none afterwards."""
        last_ack, self._last_ack = self._last_ack, None
        if last_ack is not None and last_ack[0] == instance:
            is_soon = asyncio.get_running_loop().time() - last_ack[1] < _CLAIM_SECONDS
            self._quick_instance = instance if is_soon else None
        prefetched = self._prefetched
        if prefetched is None or prefetched.lease.instance != instance:
            return None
        self._clear()
        return prefetched

    def mark_delivered(self, prefetched: PrefetchedLease) -> None:
        """Record that a lease was delivered."""
        self._delivered_id = prefetched.lease.id

    def was_delivered(self, lease: Lease) -> bool:
        """Return whether this process delivered a prefetched lease; the stored state does not tell."""
        return lease.id == self._delivered_id

    def close(self) -> str | None:
        """Return the id of the lease to cancel, if there is one, and hold none."""
        prefetched = self._prefetched
        self._clear()
        return None if prefetched is None else prefetched.lease.id

    def _on_timeout(self) -> None:
        prefetched = self._prefetched
        self._clear()
        self._quick_instance = None
        if prefetched is not None:
            self._cancel(prefetched.lease.id)

    def _clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._prefetched = self._timer = None
