"""What the dispatcher knows about the subscriptions, updated with two small requests per batch.

A subscription begins at the position of its control event. The API stores the record, then the event, then the event's
position in the record; the dispatcher may reach the event before that last step, or find that it never happened. So
before each batch it asks for the newest control event: every one up to the end of the batch is settled in the registry
when the snapshot is taken, and no event behind it can be missed. It remembers a control event that it does not
understand: the subscription may begin there (see `suspensions`).
"""

import contextlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import ReadOptions, read_range
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model import json_fields
from purveyor.model.control_events import CONTROL_EVENT, CONTROL_SUBJECT, ControlEvent, ControlKind
from purveyor.model.errors import InvalidInput, PurveyorError, UnknownMessage, UnknownSubscription, UnreadableRecord
from purveyor.model.registration import RecordState
from purveyor.queues.client import Queues
from purveyor.queues.registry import Registered, Registry, Snapshot
from purveyor.queues.subscription_queues import remove_queue
from purveyor.queues.sync_client import read_subscriptions, run_sync, settle_begin

STREAM: Final = "stream:incoming"
ABANDONED_SECONDS: Final = 10.0
"""After this time the dispatcher completes a deletion that another process began."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnreadableControlEvent:
    """A control event that the dispatcher does not understand. `name` is None if even that cannot be read."""

    name: str | None
    position: int
    reason: str


class SubscriptionTracker:
    """The subscriptions as of the last update."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._control_seen = 0
        self._deleting: dict[str, float] = {}
        self.snapshot = Snapshot()
        self.unreadable_control_events: list[UnreadableControlEvent] = []

    def update(self) -> Snapshot:
        """Read all subscriptions, with every beginning that lies before now."""
        newest = self._newest_control()
        self.refresh()
        if newest > self._control_seen:
            self._settle(self._control_seen + 1, newest)
            self._control_seen = newest
        self._end_deletions()
        return self.snapshot

    def refresh(self) -> Snapshot:
        """Read what changed."""
        self.snapshot = read_subscriptions(self._address, self.snapshot)
        return self.snapshot

    def find_current(self, name: str, incarnation: str) -> Registered | None:
        """Return a subscription as it is now, if it is still that incarnation and not being deleted."""
        found = self.refresh().dispatched.get(name)
        if found is None or found.incarnation != incarnation or found.record.state is RecordState.DELETING:
            return None
        return found

    def _newest_control(self) -> int:
        try:
            answer = request_api(self._address, f"STREAM.MSG.GET.{STREAM}", {"last_by_subj": CONTROL_SUBJECT})
        except UnknownMessage:
            return 0
        return int(answer["message"]["seq"])

    def _settle(self, first: int, last: int) -> None:
        settled = False
        options = ReadOptions(subjects=(CONTROL_SUBJECT,), columns=("sequence", "data"))
        for batch in read_range(self._address, STREAM, first, last, options):
            for row in batch.to_pylist():
                settled |= self._settle_one(row["sequence"], row["data"])
        if settled:
            self.refresh()

    def _settle_one(self, position: int, data: bytes) -> bool:
        """Note where a subscription begins; return whether the registry has to be read again."""
        try:
            event = CONTROL_EVENT.read(data, ControlEvent.from_json)
        except UnreadableRecord as error:
            _log.error("the control event at position %d cannot be read: %s", position, error)
            reason = f"its control event at position {position} is not understood: {error.message}"
            self.unreadable_control_events.append(UnreadableControlEvent(_subscription_name_in(data), position, reason))
            return False
        found = self.snapshot.dispatched.get(event.name)
        if event.kind is not ControlKind.ADDED or found is None or found.incarnation != event.incarnation:
            return False  # deleted since, or a deletion: the registry has that
        if found.record.begin is not None:
            return False
        with contextlib.suppress(UnknownSubscription):  # deleted, or written again by a newer program
            settle_begin(self._address, found, position)
        return True

    def _end_deletions(self) -> None:
        """Complete deletions that were begun and abandoned: otherwise their queue and keys would stay forever."""
        deleting = {
            found.incarnation: found
            for found in self.snapshot.subscriptions.values()
            if found.record.state is RecordState.DELETING
        }
        now = time.monotonic()
        self._deleting = {incarnation: self._deleting.get(incarnation, now) for incarnation in deleting}
        for incarnation, since in self._deleting.items():
            if now - since >= ABANDONED_SECONDS:
                found = deleting[incarnation]
                try:
                    run_sync(self._address, partial(_end_deletion, found))
                except PurveyorError as error:  # another process completes it, or the next update does
                    _log.warning("the deletion of subscription %s could not be ended: %s", found.name, error)
                else:
                    _log.info("ended the deletion of subscription %s", found.name)


def _subscription_name_in(data: bytes) -> str | None:
    """Return the subscription that a control event is about, whatever else it contains."""
    try:
        name = json_fields.parse(data, CONTROL_EVENT.what).get("name")
    except InvalidInput:
        return None
    return name if isinstance(name, str) else None


async def _end_deletion(found: Registered, queues: Queues) -> None:
    registry = await Registry.open(queues)
    await remove_queue(queues, found.name, found.incarnation)
    await registry.remove(found)
