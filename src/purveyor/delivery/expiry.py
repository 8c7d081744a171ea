"""Expire messages that exceed the retention time of their subscription, also without consumers.

Each request for messages applies the rule (`transitions.expire_old`); this loop applies it to all other subscriptions.
An expired message is acknowledged in the delivery state and counted there. So the writers of the queue still know its
position, and no message disappears in silence. An age limit of the stream would provide neither.
"""

import asyncio
import logging
from typing import Final

from purveyor.delivery.pull import PullService
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.errors import PurveyorError, UnknownSubscription, UnreadableRecord
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues.registry import Registered

_log = logging.getLogger(__name__)
_INTERVAL_SECONDS: Final = 30.0


class Expiry:
    """Expires old messages of all subscriptions. Any number of processes may run it."""

    def __init__(
        self, subscriptions: Subscriptions, pull: PullService, *, interval_seconds: float = _INTERVAL_SECONDS
    ) -> None:
        self._subscriptions = subscriptions
        self._pull = pull
        self._interval_seconds = interval_seconds

    async def run(self) -> None:
        """Expire messages periodically until cancelled; continue when the server is back."""
        while True:
            try:
                await self.once()
            except PurveyorError as error:
                _log.warning("expired messages cannot be searched for now, another attempt follows: %s", error)
            await asyncio.sleep(self._interval_seconds)

    async def once(self) -> dict[str, int]:
        """Expire the messages of every subscription with a retention time; return how many, by name."""
        expired: dict[str, int] = {}
        for registered in (await self._subscriptions.list()).subscriptions.values():
            if not has_expiring_messages(registered):
                continue
            try:
                count = await self._pull.expire(registered.name)
            except UnknownSubscription:
                continue
            except UnreadableRecord as error:  # without the delivery state nothing may expire
                _log.warning("messages are kept longer than their retention time: %s", error)
                continue
            if count:
                expired[registered.name] = count
                _log.warning(
                    "%d messages of subscription %s expired without an acknowledgement", count, registered.name
                )
        return expired


def has_expiring_messages(registered: Registered) -> bool:
    """Return whether messages of a subscription can expire. Pure.

    Not before its prefill is done: until then nothing is delivered, and the prefill depends on what is in the queue.
    """
    record, prefill = registered.record, registered.prefill
    if record.definition.retention_seconds is None or record.state is not RecordState.ACTIVE:
        return False
    if prefill is None:
        return not record.definition.request_prefill
    return prefill.status is PrefillStatus.DONE
