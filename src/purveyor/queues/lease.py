"""A lease in a key-value bucket: the right of one process to do something, while it renews the lease.

A lease does not expire by a clock that two machines would have to share. Its holder renews it while it works, and each
renewal is a new revision of the key; a process that sees the same revision for long enough, by its own clock, takes the
lease over by compare-and-set. A holder that was suspended meanwhile finds another revision, and its lease lost.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from purveyor.jetstream.key_value import Bucket
from purveyor.model.errors import LeaseLost, Unavailable, WrongRevision

SeenRevisions: TypeAlias = dict[str, tuple[int, float]]
"""For each key the revision of its lease, and since when it is unchanged, by the clock of this process."""
RENEWALS_PER_LEASE: Final = 4
"""How often a lease is renewed in the time after which others take it over."""


class HeldLease:
    """A lease that this process holds, until another process takes it. `value` returns what a renewal writes."""

    def __init__(self, bucket: Bucket, key: str, revision: int, value: Callable[[], bytes]) -> None:
        self.bucket = bucket
        self.key = key
        self.revision = revision
        self.renewed_at = time.monotonic()
        self.busy = asyncio.Lock()
        """Held while the revision may change."""
        self._value = value
        self._lost = False

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the lease, as far as this one knows."""
        return self._lost

    def lose(self) -> None:
        """Note that another process has taken the lease."""
        self._lost = True

    def check(self) -> None:
        """Raise LeaseLost if another process has taken the lease."""
        if self._lost:
            raise LeaseLost(f"another instance holds the lease {self.key!r}", fix="wait for it")

    async def keep_renewed(self, every_seconds: float) -> None:
        """Renew the lease until the task is cancelled or the lease is lost."""
        while not self._lost:
            await asyncio.sleep(every_seconds)
            await self.renew()

    async def renew(self) -> None:
        """Renew the lease once."""
        async with self.busy:
            try:
                self.revision = await self.bucket.update(self.key, self._value(), self.revision)
                self.renewed_at = time.monotonic()
            except WrongRevision:
                await self._find_out()
            except Unavailable:
                pass  # the server is away, for the others too

    async def _find_out(self) -> None:
        """Find out whether another process wrote the newest revision, or this one did and the answer was lost."""
        with contextlib.suppress(Unavailable):
            newest = await self.bucket.newest(self.key)
            if newest is not None and not newest.deleted and newest.value == self._value():
                self.revision, self.renewed_at = newest.revision, time.monotonic()
            else:
                self._lost = True

    async def release(self, value: bytes | None = None) -> None:
        """Release the lease, so that another process can take it at once: delete its key, or write a last value."""
        async with self.busy:
            with contextlib.suppress(WrongRevision, Unavailable):
                if value is None:
                    await self.bucket.delete(self.key, revision=self.revision)
                else:
                    await self.bucket.update(self.key, value, self.revision)


def is_abandoned(seen: SeenRevisions, key: str, revision: int, seconds: float) -> bool:
    """Return whether this process has seen the lease unchanged for long enough; note its revision in `seen`."""
    known, since = seen.get(key, (0, 0.0))
    if known != revision:
        seen[key] = (revision, time.monotonic())
        return False
    return time.monotonic() - since >= seconds
