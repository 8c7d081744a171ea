"""Keeps one part of the pipeline running: starts it, watches it, says why it ended, starts it again.

A part is a name and a function that starts something: a streaming query or a worker. One that fails is started again
after a pause that grows, for ever, because what is away (a server, a worker, an executor) comes back. Only an error
that no attempt can mend ends it for good.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol

from purveyor.pipeline.backoff import Backoff
from purveyor.pipeline.error_summary import Failure, explain
from purveyor.pipeline.part_status import PartStatus, Reading, State

_LOOK_SECONDS = 0.2
_ENDED = Failure("it ended without an error")


class Running(Protocol):
    """A part that was started."""

    def alive(self) -> bool:
        """Whether it still works."""

    def failure(self) -> BaseException | None:
        """What it ended with."""

    def read(self) -> Reading | None:
        """Where it is; None until it has made its first step."""

    def stop(self, patience_seconds: float) -> None:
        """End it after what it is doing, or in the middle of that when the patience is over."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something to keep running."""

    name: str
    start: Callable[[], Running]


Listener = Callable[[PartStatus], None]


class Keeper:
    """One part, in a thread of its own: a start may wait long for a server, and the others must not wait with it."""

    def __init__(self, part: Part, *, backoff: Backoff | None = None, on_change: Listener | None = None) -> None:
        self._part = part
        self._backoff = backoff or Backoff()
        self._tell = on_change or (lambda _: None)
        self._status = PartStatus(name=part.name, state=State.STARTING, since=datetime.now(UTC))
        self._stopping = threading.Event()
        self._patience_seconds = 0.0
        self._thread = threading.Thread(target=self._keep, name=f"keeper-{part.name}", daemon=True)

    @property
    def status(self) -> PartStatus:
        """What the part is doing."""
        return self._status

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, patience_seconds: float = 10.0) -> None:
        """Ask the part to end; `join` waits for it."""
        self._patience_seconds = patience_seconds
        self._stopping.set()

    def join(self, timeout_seconds: float) -> bool:
        """Whether it has ended within that time."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _keep(self) -> None:
        while not self._stopping.is_set():
            begun = time.monotonic()
            self._become(State.STARTING)
            failure = self._run_once()
            if failure is None:
                break
            if failure.permanent:
                self._become(State.FAILED, error=failure)
                return
            self._backoff = self._backoff.failed(time.monotonic() - begun)
            self._become(State.WAITING, error=failure, restarts=self._status.restarts + 1)
            self._stopping.wait(self._backoff.pause_seconds)
        self._become(State.STOPPED)

    def _run_once(self) -> Failure | None:
        """None when it was stopped because we asked for it."""
        try:
            running = self._part.start()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told and tried again
            return explain(error)
        try:
            return self._watch(running)
        except Exception as error:  # noqa: BLE001 - as above
            return explain(error)

    def _watch(self, running: Running) -> Failure | None:
        well_after = time.monotonic() + self._backoff.healthy_seconds
        while running.alive():
            if self._stopping.wait(_LOOK_SECONDS):
                running.stop(self._patience_seconds)
                return None
            reading = running.read()
            if reading is not None:
                error = None if time.monotonic() >= well_after else self._status.error
                self._become(State.RUNNING, reading=reading, error=error)
        error_found = running.failure()
        if self._stopping.is_set():
            return None
        return explain(error_found) if error_found is not None else _ENDED

    def _become(
        self, state: State, *, reading: Reading | None = None, error: Failure | None = None, restarts: int | None = None
    ) -> None:
        before = self._status
        kept = error if error is not None or state is State.RUNNING else before.error
        status = replace(
            before,
            state=state,
            since=before.since if state is before.state else datetime.now(UTC),
            reading=reading or before.reading,
            error=kept,
            restarts=before.restarts if restarts is None else restarts,
        )
        if status != before:
            self._status = status
            self._tell(status)
