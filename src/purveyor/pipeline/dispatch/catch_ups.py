"""Catch-up jobs that a dispatcher asks for: for a subscription that it understands again, and did not for a while.

A small gap the dispatcher fills itself, with the next batch. A job is asked for where the gap is too large for that,
and where no batch comes: an upgraded dispatcher must not wait for the next event to deliver those that were missed.
"""

import logging
import threading
import time
from typing import Final

from pyspark.sql.streaming.query import StreamingQuery

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import PublishOptions, outgoing, publish_many
from purveyor.model.control_events import JOB_SUBJECT, CatchUpJob, JobKind, job_id
from purveyor.model.errors import PurveyorError
from purveyor.pipeline.dispatch.batch_plan import takes_part
from purveyor.pipeline.running_parts import is_active
from purveyor.queues.catalogue import PREFILL
from purveyor.queues.registry import Registered, Snapshot, read_subscriptions

LOOK_SECONDS: Final = 2.0
"""How often a dispatcher without a batch looks at the registry."""
_log = logging.getLogger(__name__)


class CatchUps:
    """Asks for catch-up jobs on behalf of one dispatcher. `ask` is safe to call from several threads."""

    def __init__(self, address: Address, group: str) -> None:
        self._address = address
        self._group = group
        self._asked: dict[str, int] = {}

    def ask(self, found: Registered) -> None:
        """Put a job on `prefill`, once for each suspension. The id is that of a job an operator asks for."""
        if self._asked.get(found.incarnation) == found.dispatch_revision:
            return
        identity = job_id(found.incarnation, JobKind.CATCH_UP, found.dispatch_revision)
        job = CatchUpJob(name=found.name, incarnation=found.incarnation, job=identity)
        row = (JOB_SUBJECT, job.encode(), None, job.job)
        try:
            publish_many(self._address, outgoing([row]), PublishOptions(expected_stream=PREFILL.stream))
        except PurveyorError as error:
            _log.warning("the catch-up of subscription %s cannot be asked for: %s", found.name, error)
            return
        self._asked[found.incarnation] = found.dispatch_revision
        _log.info("subscription %s is understood again: its catch-up is asked for", found.name)

    def watch(self, query: StreamingQuery) -> None:
        """Look at the registry for as long as a query runs, in a thread."""
        threading.Thread(target=self._watch, args=(query,), name=f"catch-ups-{self._group}", daemon=True).start()

    def _watch(self, query: StreamingQuery) -> None:
        snapshot, seen = Snapshot(), dict[str, int]()
        while is_active(query):
            time.sleep(LOOK_SECONDS)
            try:
                snapshot = read_subscriptions(self._address, snapshot)
            except PurveyorError as error:
                _log.debug("the registry cannot be read: %s", error)
                continue
            waiting = {found.incarnation: found for found in snapshot.dispatched.values() if self._waits(found)}
            for found in waiting.values():
                if seen.get(found.incarnation) == found.dispatch_revision:  # else a batch may be at it
                    self.ask(found)
            seen = {incarnation: found.dispatch_revision for incarnation, found in waiting.items()}

    def _waits(self, found: Registered) -> bool:
        """Whether this group suspended it, and understands it now."""
        halted = found.suspended is not None and found.suspended.group == self._group
        return halted and found.record.begin is not None and takes_part(found)
