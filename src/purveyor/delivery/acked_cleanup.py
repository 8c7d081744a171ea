"""Delete acknowledged messages from the queue of a subscription, many at once.

Deleting is not part of the acknowledgement: the delivery state already says that a message is acknowledged. If this
process dies before it deletes a message, the next process that opens the subscription does it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from typing import Final

from purveyor.jetstream.config import INCARNATION
from purveyor.model.delivery_state import DeliveryState, SubjectKind
from purveyor.model.errors import PurveyorError, Refused, UnknownMessage, UnknownStream
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues

_log = logging.getLogger(__name__)
_DELAY_SECONDS: Final = 0.05
_MIN_INTERVAL_SECONDS: Final = 1.0
_PARALLEL_DELETES: Final = 100


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
        await asyncio.sleep(max(_DELAY_SECONDS, self._ended_at + _MIN_INTERVAL_SECONDS - now))
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
