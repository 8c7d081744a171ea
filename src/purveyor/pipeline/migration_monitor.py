"""Migrations while the pipeline runs: report them to operators, and advance them until no queue is sealed.

The queries drain a sealed queue and try to complete its migration, but they do so in processes of Spark whose events
this process does not receive. So the service ensures all queues itself, once a second, while a migration runs, and
reports what the queries did.
"""

import queue
import time
from collections.abc import Callable
from typing import Final

from purveyor.model.errors import Unavailable
from purveyor.queues.migration.events import (
    EventListener,
    MigrationCompleted,
    MigrationEvent,
    OperationResumed,
    StreamDrained,
    StreamDraining,
    StreamSealed,
)

_POLL_INTERVAL_SECONDS: Final = 1.0


class MigrationMonitor:
    """Ensures the queues until all of them are ready, and reports each event of their migrations once.

    `ensure` advances all queues, sends the events to the listener that it is given, and returns whether all are ready.
    `report` receives the word `migration` and the text of an event.
    """

    def __init__(self, ensure: Callable[[EventListener], bool], report: Callable[[str, str], None]) -> None:
        self._ensure = ensure
        self._report = report
        self._events: queue.SimpleQueue[MigrationEvent] = queue.SimpleQueue()
        self._is_ready = True
        self._sealed: set[str] = set()
        self._poll_at = 0.0
        self._last_reported: MigrationEvent | None = None

    def ensure(self) -> None:
        """Bring all queues to their declaration, or a step nearer. Raises the error that makes it impossible."""
        is_ready = self._ensure(self._events.put)
        self._report_events()
        if is_ready and not self._is_ready:
            for stream in sorted(self._sealed):  # a query completed its migration
                self._handle(StreamDrained(stream))
                self._handle(MigrationCompleted(stream))
            self._handle(OperationResumed())
        self._is_ready = is_ready

    def poll(self) -> None:
        """Report new events, and ensure the queues again if it is time."""
        self._report_events()
        if not self._is_ready and time.monotonic() >= self._poll_at:
            self._poll_at = time.monotonic() + _POLL_INTERVAL_SECONDS
            try:
                self.ensure()
            except Unavailable:
                return  # the parts report that the server is away

    def _report_events(self) -> None:
        while not self._events.empty():
            self._handle(self._events.get())

    def _handle(self, event: MigrationEvent) -> None:
        match event:
            case StreamSealed(stream) | StreamDraining(stream):
                self._sealed.add(stream)
            case MigrationCompleted(stream):
                self._sealed.discard(stream)
            case _:
                pass
        if event != self._last_reported:  # each poll has a new connection, which does not know the last event
            self._last_reported = event
            self._report("migration", str(event))
