"""The work after an acknowledgement: delete the message from its queue, and prefetch the next one.

Deleting is not part of the acknowledgement: the delivery state already says that a message is acknowledged. If this
process dies before it deletes a message, the next process that opens the subscription does it. Many messages are
deleted at once.

Prefetch: the write that acknowledges a message also leases the next one to the same instance. A consumer in ordered
delivery loops: next, ok, next, ok. If it loops quickly, one write of the delivery state serves both of its requests:
the consumer gets the prefetched message without another write. If it does not ask soon, the lease is cancelled without
counting a delivery.

The state records that a lease was prefetched. If this process dies, or the consumer changes to another process, no
record says whether the message was delivered. Then an expired lease counts as a delivery, and a lease that its own
instance replaces by asking again does not. So at most one delivery of a message is not counted, the first.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from purveyor.jetstream.config import INCARNATION
from purveyor.model.delivery_state import DeliveryState, Lease, SubjectKind
from purveyor.model.errors import PurveyorError, Refused, UnknownMessage, UnknownStream
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues

_log = logging.getLogger(__name__)
_DELETE_DELAY_SECONDS: Final = 0.05
_MIN_DELETE_INTERVAL_SECONDS: Final = 1.0
_PARALLEL_DELETES: Final = 100
_CLAIM_SECONDS: Final = 0.1
"""How soon an instance asks after an acknowledgement to be worth a prefetch."""


class AckedCleanup:
    """Deletes the acknowledged messages of one incarnation of a subscription.

    `read_state` returns the delivery state as this process knows it, or None while it has to be read again.
    """

    def __init__(
        self, queues: Queues, name: str, incarnation: str, read_state: Callable[[], DeliveryState | None]
    ) -> None:
        self._queues = queues
        self._name = name
        self._incarnation = incarnation
        self._read_state = read_state
        self._stream = subscription_queue(name).stream
        self._acked: dict[SubjectKind, set[int]] = {kind: set() for kind in SubjectKind}
        self._purged_once = False
        self._ended_at = float("-inf")
        self.task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no deletion is under way."""
        return self.task is None or self.task.done()

    def add(self, kind: SubjectKind, sequences: Collection[int]) -> None:
        """Delete these messages with the next round."""
        self._acked[kind].update(sequences)

    def schedule(self) -> None:
        """Start a round soon, if there is anything to delete."""
        if not self.is_idle:
            return
        # If nothing was ever acknowledged, nothing can be left behind: thousands of idle subscriptions cost nothing.
        state = self._read_state()
        may_have_leftovers = (
            not self._purged_once and state is not None and any(state.acked(kind).last for kind in SubjectKind)
        )
        if may_have_leftovers or any(self._acked.values()):
            self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Delete all that is due. After a failure, the next acknowledgement starts another round.

        The delay and the interval between rounds let one round delete many messages under load.
        """
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(max(_DELETE_DELAY_SECONDS, self._ended_at + _MIN_DELETE_INTERVAL_SECONDS - now))
        try:
            while await self._delete_batch():
                pass
        except UnknownStream:
            self._acked = {kind: set() for kind in SubjectKind}
        except PurveyorError as error:
            _log.warning("acknowledged messages of subscription %s are not deleted yet: %s", self._name, error)
        finally:
            self._ended_at = asyncio.get_running_loop().time()

    async def _delete_batch(self) -> bool:
        """Purge up to the floor of each subject and delete some messages above it; return whether more are left."""
        streams, state = self._queues.streams, self._read_state()
        if state is None:
            return False  # when the state is read again, another round starts
        config = (await streams.raw_info(self._stream))["config"]  # raw: called often, and one field is needed
        if (config.get("metadata") or {}).get(INCARNATION) != self._incarnation:
            raise UnknownStream(f"the queue of subscription {self._name!r} belongs to another incarnation now")
        for kind in SubjectKind:
            floor, acked = state.acked(kind).floor, self._acked[kind]
            below = {sequence for sequence in acked if sequence <= floor}
            above = sorted(acked - below)[:_PARALLEL_DELETES]
            if below or (floor and not self._purged_once):
                await streams.purge(self._stream, subject=f"{self._name}.{kind.value}", before_sequence=floor + 1)
            await asyncio.gather(*(self._delete(sequence) for sequence in above))
            self._acked[kind] -= below.union(above)
        self._purged_once = True
        return any(self._acked.values())

    async def _delete(self, sequence: int) -> None:
        with contextlib.suppress(UnknownMessage, Refused):  # it is deleted already
            await self._queues.streams.delete_message(self._stream, sequence)


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
        """Return whether this process delivered a prefetched lease; the stored state does not record it."""
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
