"""Messages that nobody acknowledges in time expire, also those of a subscription that nobody asks for.

The rule is applied wherever messages are handed out (`hands.lapse`); here somebody goes round and applies it to all
others. A message that expires is acknowledged in the book, where it is counted: its position stays known to those who
write the queue, and none goes in silence. An age limit of the stream would do neither.
"""

import asyncio
import logging
from typing import Final

from purveyor.delivery.pull import Pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.errors import PurveyorError, UnknownSubscription, UnreadableRecord
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues.registry import Registered

_log = logging.getLogger(__name__)
_EVERY_SECONDS: Final = 30.0


class Expiry:
    """See the module. Any number of processes may do it."""

    def __init__(self, subscriptions: Subscriptions, pull: Pull, *, every_seconds: float = _EVERY_SECONDS) -> None:
        self._subscriptions = subscriptions
        self._pull = pull
        self._every_seconds = every_seconds

    async def run(self) -> None:
        """Now and then, until cancelled; a server that is away is waited for."""
        while True:
            try:
                await self.once()
            except PurveyorError as error:
                _log.warning("what is to expire is looked for again soon: %s", error)
            await asyncio.sleep(self._every_seconds)

    async def once(self) -> dict[str, int]:
        """Look at every subscription that keeps messages for a time only; how many expired, by its name."""
        expired: dict[str, int] = {}
        for found in (await self._subscriptions.list()).subscriptions.values():
            if not may_expire(found):
                continue
            try:
                count = await self._pull.expire(found.name)
            except UnknownSubscription:
                continue
            except UnreadableRecord as error:  # nothing expires before somebody understands what was delivered
                _log.warning("messages are kept longer than they should be: %s", error)
                continue
            if count:
                expired[found.name] = count
                _log.warning("%d messages of subscription %s expired: nobody acknowledged them", count, found.name)
        return expired


def may_expire(found: Registered) -> bool:
    """Whether messages of a subscription can expire. Pure.

    Not before its prefill is done: until then nothing is delivered, and the prefill goes by what lies in the queue.
    """
    if found.record.definition.retention_seconds is None or found.record.state is not RecordState.ACTIVE:
        return False
    if found.prefill is None:
        return not found.record.definition.request_prefill
    return found.prefill.status is PrefillStatus.DONE
