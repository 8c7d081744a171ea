"""Subscriptions that a dispatcher cannot write: it suspends them, and asks for a catch-up when it can write them again.

A suspension holds back one subscription and no other, and loses nothing: the registry has the first position that is
missing, and the subscription gets everything from there when it is resumed.

- `RejectedTargets`: a queue refused a message. A missing queue is created again; any other refusal suspends.
- `UnreadableSubscriptions`: a newer program wrote the record. Before a batch goes past such a subscription, the
  dispatcher notes the first position that the subscription will miss, as a suspension of its group. A crash before the
  note repeats the batch; after it nothing is lost, whichever program reads the note. When a dispatcher understands the
  record (it was upgraded, or the record was written again), the subscription takes part in the next batch, after the
  gap before it is filled (see `batch_plan`). If the dispatch state itself is not understood, the dispatcher writes
  nothing: the program that wrote it reads from its `next` where the gap begins.
- `CatchUpRequests`: asks for a catch-up job where the gap is too large for the dispatcher, and where no batch comes: an
  upgraded dispatcher must not wait for the next event to deliver those that were missed.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from pyspark.sql.streaming.query import StreamingQuery

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import Refusal, RefusalKind
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.jetstream.config import INCARNATION
from purveyor.model.control_events import CatchUpJob, JobKind, job_id
from purveyor.model.errors import InvalidName, PurveyorError, Unavailable, UnknownStream, WrongRevision
from purveyor.model.registration import UNKNOWN_INCARNATION, DispatchState, Suspension
from purveyor.pipeline.archive.layout import PositionRange
from purveyor.pipeline.dispatch.batch_plan import (
    PlannedTarget,
    SubscriptionTracker,
    first_missing_position,
    is_dispatchable,
)
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.registry import Registered, Snapshot, Unreadable
from purveyor.queues.sync_client import put_job_once, read_subscriptions, restore_queue, update_dispatch
from purveyor.spark.progress import is_active

_log = logging.getLogger(__name__)
REGISTRY_POLL_SECONDS: Final = 2.0
"""How often a dispatcher without a batch reads the registry."""


def suspension_reason(refusal: Refusal) -> str:
    """Return the reason that operators read."""
    return refusal.reason if refusal.kind is RefusalKind.OTHER else f"{refusal.kind.value}: {refusal.reason}"


@dataclass(frozen=True, slots=True)
class RejectionResult:
    """The targets to write again, and those that are stopped, with the position."""

    again: tuple[PlannedTarget, ...]
    stopped: tuple[tuple[PlannedTarget, int], ...]


class RejectedTargets:
    """Handles targets whose queue refused a message."""

    def __init__(self, address: Address, tracker: SubscriptionTracker, *, replicas: int = 1) -> None:
        self._address = address
        self._tracker = tracker
        self._replicas = replicas

    def settle(self, refusals: Iterable[tuple[PlannedTarget, Refusal]], *, again: bool) -> RejectionResult:
        """Create missing queues again and suspend the other targets.

        With `again` false, a missing queue is suspended too.
        """
        retry, stopped = [], []
        for target, refusal in refusals:
            if self._tracker.find_current(target.name, target.incarnation) is None:
                _log.info("subscription %s is gone: its events are dropped", target.name)
            elif again and refusal.kind is RefusalKind.MISSING_STREAM and self._create_queue_again(target):
                retry.append(target)
                continue
            else:
                self._suspend(target, refusal)
            stopped.append((target, refusal.position))
        return RejectionResult(tuple(retry), tuple(stopped))

    def _create_queue_again(self, target: PlannedTarget) -> bool:
        try:
            restore_queue(self._address, target.name, target.incarnation, replicas=self._replicas)
        except Unavailable:
            raise
        except PurveyorError as error:
            _log.warning("the queue of subscription %s was missing and cannot be created again: %s", target.name, error)
            return False
        _log.warning("the queue of subscription %s was missing and is created again", target.name)
        return True

    def _suspend(self, target: PlannedTarget, refusal: Refusal) -> None:
        why = suspension_reason(refusal)
        state = DispatchState(
            incarnation=target.incarnation,
            next=refusal.position,
            suspended=Suspension(position=refusal.position, reason=why, at=datetime.now(UTC)),
        )
        while True:
            found = self._tracker.find_current(target.name, target.incarnation)
            if found is None or not is_dispatchable(found):
                return  # deleted, or another group was faster: its note stays
            try:
                update_dispatch(self._address, target.name, state, found.dispatch_revision)
            except WrongRevision:
                continue
            _log.error("subscription %s is suspended at position %d: %s", target.name, refusal.position, why)
            return


@dataclass(frozen=True, slots=True)
class _PendingSuspension:
    """A subscription to suspend: where, and why."""

    found: Registered | Unreadable
    position: int
    reason: str


class UnreadableSubscriptions:
    """Suspends subscriptions that one dispatcher does not understand."""

    def __init__(self, address: Address, tracker: SubscriptionTracker, group: str) -> None:
        self._address = address
        self._tracker = tracker
        self._group = group
        self._logged: dict[str, str] = {}

    def suspend(self, written_up_to: Mapping[str, int], batch: PositionRange) -> None:
        """Suspend each subscription that is not understood.

        Refresh the snapshot if another process wrote in the meantime.
        """
        while not all(self._suspend(stop) for stop in self._stops(written_up_to, batch)):
            self._tracker.refresh()

    def _stops(self, written_up_to: Mapping[str, int], batch: PositionRange) -> Iterator[_PendingSuspension]:
        snapshot = self._tracker.snapshot
        for found in snapshot.unreadable.values():
            if found.dispatched is not None or found.deleting:
                continue
            if found.dispatch_unreadable:
                self._log_once(found.name, f"subscription {found.name} is left out from here on: {found.reason}")
            elif found.suspended is None:
                yield _PendingSuspension(found, first_missing_position(found, written_up_to, batch), found.reason)
        for control in self._tracker.unreadable_control_events:
            for each in snapshot.dispatched.values():
                if each.record.begin is None and each.suspended is None and control.name in (None, each.name):
                    yield _PendingSuspension(each, control.position + 1, control.reason)

    def _suspend(self, stop: _PendingSuspension) -> bool:
        """Write the suspension; return False if another process wrote since the snapshot was taken."""
        name = stop.found.name
        incarnation = stop.found.incarnation or self._owner_of_queue(name) or UNKNOWN_INCARNATION
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
        """Return the incarnation that a queue was created for, where the record does not name it."""
        try:
            config = request_api(self._address, f"STREAM.INFO.{subscription_queue(name).stream}")["config"]
        except (UnknownStream, InvalidName):
            return None
        owner = (config.get("metadata") or {}).get(INCARNATION)
        return owner if isinstance(owner, str) else None

    def _log_once(self, name: str, text: str) -> None:
        if self._logged.get(name) != text:
            self._logged[name] = text
            _log.error("%s", text)


class CatchUpRequests:
    """Requests catch-up jobs for one dispatcher. `request` is safe to call from several threads."""

    def __init__(self, address: Address, group: str) -> None:
        self._address = address
        self._group = group
        self._requested: dict[str, int] = {}

    def request(self, found: Registered) -> None:
        """Put a job on `prefill`, once for each suspension. Its id equals that of a job that an operator requests."""
        if self._requested.get(found.incarnation) == found.dispatch_revision:
            return
        identity = job_id(found.incarnation, JobKind.CATCH_UP, found.dispatch_revision)
        job = CatchUpJob(name=found.name, incarnation=found.incarnation, job=identity)
        try:
            put_job_once(self._address, job)
        except PurveyorError as error:
            _log.warning("the catch-up of subscription %s cannot be requested: %s", found.name, error)
            return
        self._requested[found.incarnation] = found.dispatch_revision
        _log.info("subscription %s is understood again: its catch-up is requested", found.name)

    def start_watching(self, query: StreamingQuery) -> None:
        """Poll the registry in a thread while a query runs."""
        threading.Thread(target=self._watch, args=(query,), name=f"catch-ups-{self._group}", daemon=True).start()

    def _watch(self, query: StreamingQuery) -> None:
        snapshot, seen = Snapshot(), dict[str, int]()
        while is_active(query):
            time.sleep(REGISTRY_POLL_SECONDS)
            try:
                snapshot = read_subscriptions(self._address, snapshot)
            except PurveyorError as error:
                _log.debug("the registry cannot be read: %s", error)
                continue
            waiting = {
                found.incarnation: found for found in snapshot.dispatched.values() if self._needs_catch_up(found)
            }
            for found in waiting.values():
                if seen.get(found.incarnation) == found.dispatch_revision:  # else a batch may be handling it
                    self.request(found)
            seen = {incarnation: found.dispatch_revision for incarnation, found in waiting.items()}

    def _needs_catch_up(self, found: Registered) -> bool:
        """Return whether this group suspended the subscription, and understands it now."""
        halted = found.suspended is not None and found.suspended.group == self._group
        return halted and found.record.begin is not None and is_dispatchable(found)
