"""Subscriptions that this dispatcher does not understand, because a newer program wrote about them.

Before a batch goes past such a subscription, the first position that it will miss is noted in the registry, as a
suspension of this group of dispatchers. A crash before the note repeats the batch; after it nothing is lost, whoever
reads the note. When the dispatcher understands the subscription (it was upgraded, or the record was written again), the
subscription takes part in the next batch, after the gap before it is filled (see `roster`).

Where the dispatch state itself is not understood nothing is written: its `next` is there already, and tells the program
that wrote it where the gap begins.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.api_request import ask
from purveyor.jetstream.config import INCARNATION
from purveyor.model.errors import InvalidName, UnknownStream, WrongRevision
from purveyor.model.registration import DispatchState, Suspension
from purveyor.pipeline.dispatch.batch_plan import Span, first_missing
from purveyor.pipeline.dispatch.subscription_snapshot import Registrations
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.registry import Registered, Unreadable, update_dispatch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Stop:
    """A subscription to suspend: where, and why."""

    found: Registered | Unreadable
    position: int
    reason: str


class Unread:
    """Suspends what one dispatcher does not understand."""

    def __init__(self, address: Address, registrations: Registrations, group: str) -> None:
        self._address = address
        self._registrations = registrations
        self._group = group
        self._told: dict[str, str] = {}

    def suspend(self, covered: Mapping[str, int], batch: Span) -> None:
        """Note where each stops that is not understood. The snapshot is newer afterwards if others wrote meanwhile."""
        while not all(self._suspend(stop) for stop in self._stops(covered, batch)):
            self._registrations.refresh()

    def _stops(self, covered: Mapping[str, int], batch: Span) -> Iterator[_Stop]:
        snapshot = self._registrations.snapshot
        for found in snapshot.unreadable.values():
            if found.dispatched is not None or found.deleting:
                continue
            if found.dispatch_unreadable:
                self._tell(found.name, f"subscription {found.name} is left out from here on: {found.reason}")
            elif found.suspended is None:
                yield _Stop(found, first_missing(found, covered, batch), found.reason)
        for control in self._registrations.unread_control:
            for each in snapshot.dispatched.values():
                if each.record.begin is None and each.suspended is None and control.name in (None, each.name):
                    yield _Stop(each, control.position + 1, control.reason)

    def _suspend(self, stop: _Stop) -> bool:
        """Write the suspension; False if somebody else wrote since the snapshot was taken."""
        name = stop.found.name
        incarnation = stop.found.incarnation or self._owner_of_queue(name)
        if incarnation is None:
            self._tell(
                name, f"subscription {name} is left out, and has neither a readable record nor a queue: {stop.reason}"
            )
            return True
        reason = f"{stop.reason}; upgrade the dispatcher of group {self._group!r}"
        why = Suspension(position=stop.position, reason=reason, at=datetime.now(UTC), group=self._group)
        state = DispatchState(incarnation=incarnation, next=stop.position, suspended=why)
        try:
            update_dispatch(self._address, name, state, stop.found.dispatch_revision)
        except WrongRevision:
            return False
        _log.error("subscription %s is suspended at position %d: %s", name, stop.position, reason)
        return True

    def _owner_of_queue(self, name: str) -> str | None:
        """The incarnation that a queue was made for: where the record does not tell, it does."""
        try:
            config = ask(self._address, f"STREAM.INFO.{subscription_queue(name).stream}")["config"]
        except (UnknownStream, InvalidName):
            return None
        owner = (config.get("metadata") or {}).get(INCARNATION)
        return owner if isinstance(owner, str) else None

    def _tell(self, name: str, words: str) -> None:
        if self._told.get(name) != words:
            self._told[name] = words
            _log.error("%s", words)
