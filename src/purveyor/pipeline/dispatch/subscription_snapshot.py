"""What the dispatcher knows of the subscriptions, kept up to date with two small questions per batch.

A subscription begins at the position of its control event. Whoever adds one stores the record, then the event, then the
event's position in the record; the dispatcher may come to the event before that last step, or find it never done. So
before each batch it asks for the newest control event: whatever lies at or before the end of the batch is settled in
the registry by the time the snapshot is taken, and no event behind it can be missed. A control event that it does not
understand it keeps in mind: the subscription that it is about may begin there (see `unreadable`).
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Final

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import ReadOptions, read_range
from purveyor.jetstream.bulk.net.api_request import ask
from purveyor.model import json_fields
from purveyor.model.control_events import CONTROL_EVENT, CONTROL_SUBJECT, ControlEvent, ControlKind
from purveyor.model.errors import InvalidInput, PurveyorError, UnknownMessage, UnknownSubscription, UnreadableRecord
from purveyor.model.registration import RecordState
from purveyor.queues.client import connect
from purveyor.queues.registry import Registered, Registry, Snapshot, read_subscriptions, settle_begin
from purveyor.queues.subscriptions import remove_queue

STREAM: Final = "stream:incoming"
ABANDONED_SECONDS: Final = 10.0
"""After this time a deletion is taken to be abandoned by the one who began it, and ended here."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnreadControl:
    """A control event that is not understood. `name` is None if even that cannot be read."""

    name: str | None
    position: int
    reason: str


class Registrations:
    """The subscriptions as of the last look."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._control_seen = 0
        self._deleting: dict[str, float] = {}
        self.snapshot = Snapshot()
        self.unread_control: list[UnreadControl] = []

    def look(self) -> Snapshot:
        """All subscriptions, with every beginning that lies before now."""
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

    def current(self, name: str, incarnation: str) -> Registered | None:
        """A subscription as it is now, if it is still that one and is not being deleted."""
        found = self.refresh().dispatched.get(name)
        if found is None or found.incarnation != incarnation or found.record.state is RecordState.DELETING:
            return None
        return found

    def _newest_control(self) -> int:
        try:
            answer = ask(self._address, f"STREAM.MSG.GET.{STREAM}", {"last_by_subj": CONTROL_SUBJECT})
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
        """Note where a subscription begins; whether the registry has to be read again."""
        try:
            event = CONTROL_EVENT.read(data, ControlEvent.from_json)
        except UnreadableRecord as error:
            _log.error("the control event at position %d cannot be read: %s", position, error)
            reason = f"its control event at position {position} is not understood: {error.message}"
            self.unread_control.append(UnreadControl(_name_in(data), position, reason))
            return False
        found = self.snapshot.dispatched.get(event.name)
        if event.kind is not ControlKind.ADDED or found is None or found.incarnation != event.incarnation:
            return False  # ended since, or an ending: the registry tells
        if found.record.begin is not None:
            return False
        with contextlib.suppress(UnknownSubscription):  # gone, or written again by a newer program: which, it tells
            settle_begin(self._address, found, position)
        return True

    def _end_deletions(self) -> None:
        """End deletions that were begun and left: their queue and keys would stay for ever."""
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
                    asyncio.run(_end_deletion(self._address, found))
                except PurveyorError as error:  # somebody else is at it; seen again at the next look if not
                    _log.warning("the deletion of subscription %s could not be ended: %s", found.name, error)
                else:
                    _log.info("ended the deletion of subscription %s", found.name)


def _name_in(data: bytes) -> str | None:
    """The subscription that a control event is about, whatever else it says."""
    try:
        name = json_fields.parse(data, CONTROL_EVENT.what).get("name")
    except InvalidInput:
        return None
    return name if isinstance(name, str) else None


async def _end_deletion(address: Address, found: Registered) -> None:
    async with connect(address, name="purveyor-dispatch") as queues:
        registry = await Registry.open(queues)
        await remove_queue(queues, found.name, found.incarnation)
        await registry.remove(found)
