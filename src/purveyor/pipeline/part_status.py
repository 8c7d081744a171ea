"""The status of each part of the pipeline: for the terminal, for `pipeline-status.json`, and for the status board.

A thread publishes the status on the board in NATS, from which the console reads it: a server that is away must not
block the pipeline. A status that cannot be published is dropped; the next one follows within seconds, and readers see
the age of the last one.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from purveyor.jetstream.address import Address
from purveyor.model.errors import PurveyorError
from purveyor.model.json_fields import Json
from purveyor.pipeline.job_failures import Failure
from purveyor.queues.status_board import STANDBY_PREFIX, post_notice

STATUS_FILE = "pipeline-status.json"
PUBLISH_INTERVAL_SECONDS: Final = 2.0
_LAST_PUBLISH_SECONDS: Final = 2.0


class State(Enum):
    """The life cycle of a part."""

    STARTING = "starting"
    RUNNING = "running"
    UNRESPONSIVE = "unresponsive"
    """Spark does not answer: its JVM hangs, or the process is suspended."""
    WAITING = "waiting"
    """It ended with an error, and starts again after a pause."""
    FAILED = "failed"
    """It cannot work with its settings."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartProgress:
    """Where a running part is, as of its last report. A worker without a position reports only how much it did."""

    position: int | None = None
    lag: int | None = None
    rows: int = 0
    rows_per_second: float = 0.0
    batch: int | None = None
    batch_ms: int | None = None

    @property
    def steps(self) -> tuple[int | None, int | None, int]:
        """Something that changes with every step of the part."""
        return self.position, self.batch, self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """One part: its state, its last progress, its last error (kept until it has run for a minute), its restarts."""

    name: str
    state: State
    since: datetime
    progress: PartProgress = PartProgress()
    error: Failure | None = None
    restarts: int = 0
    moved_at: datetime | None = None
    """When it made its last step; None before its first one."""

    def to_json(self) -> dict[str, Any]:
        """Return a flat object without unknown values."""
        known: dict[str, Any] = {
            "part": self.name,
            "state": self.state.value,
            "since": self.since.isoformat(timespec="milliseconds"),
            "position": self.progress.position,
            "moved_at": self.moved_at.isoformat(timespec="milliseconds") if self.moved_at is not None else None,
            "lag": self.progress.lag,
            "rows": self.progress.rows,
            "rows_per_second": round(self.progress.rows_per_second, 1),
            "batch": self.progress.batch,
            "batch_ms": self.progress.batch_ms,
            "restarts": self.restarts,
            "error": str(self.error) if self.error is not None else None,
        }
        return {key: value for key, value in known.items() if value is not None}

    def line(self) -> str:
        """Return a line for the terminal: `dispatch running at 1200, 0 behind, 350/s, 84 ms`."""
        progress, details = self.progress, []
        if progress.position is not None:
            details.append(f"at {progress.position}")
        if progress.lag is not None:
            details.append(f"{progress.lag} behind")
        if progress.batch_ms is not None:
            details.extend([f"{progress.rows_per_second:,.0f}/s", f"{progress.batch_ms} ms"])
        if self.restarts:
            details.append(f"{self.restarts} restarts")
        text = f"{self.name:<10} {self.state.value:<8} {', '.join(details)}"
        return f"{text}  last error: {self.error}" if self.error is not None else text.rstrip()


def status_path(data_dir: Path, label: str = "") -> Path:
    """Return the path of the status file; `label` distinguishes several pipelines on one data directory."""
    return data_dir / (f"pipeline-status-{label}.json" if label else STATUS_FILE)


def write_status(path: Path, about: Mapping[str, Any], parts: Sequence[PartStatus]) -> None:
    """Replace the status file as a whole: a reader sees this state or the one before, never half of one."""
    values = {"pid": os.getpid(), **about, "parts": [part.to_json() for part in parts]}
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    draft.replace(path)


def remove_status(path: Path) -> None:
    """Remove the status file of a pipeline that stopped.

    After a crash the file stays, with the id of the dead process.
    """
    path.unlink(missing_ok=True)


class StatusPublisher:
    """Publishes the status of one pipeline on the status board; of several waiting statuses only the newest."""

    def __init__(self, find_address: Callable[[], Address], key: str, *, replicas: int = 1) -> None:
        self._find_address = find_address
        self._key = key
        self._replicas = replicas
        self._newest: Json | None = None
        self._shown: tuple[object, ...] = ()
        self._wake = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="posting", daemon=True)

    def publish(self, about: Mapping[str, Any], parts: Sequence[PartStatus]) -> None:
        """Take the newest status. A change of a state is published at once, everything else at an interval."""
        self._newest = status_message(about, parts)
        seen = about.get("state"), *((part.state, part.error, part.restarts) for part in parts)
        if seen != self._shown:
            self._shown = seen
            self._wake.set()

    def _run(self) -> None:
        posted: Json | None = None
        while True:
            ended = self._over.is_set()
            newest = self._newest
            if newest is not None and newest is not posted:
                with contextlib.suppress(PurveyorError, OSError):
                    post_notice(self._find_address(), self._key, newest, replicas=self._replicas)
                    posted = newest
            if ended:
                return
            self._wake.wait(PUBLISH_INTERVAL_SECONDS)
            self._wake.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def end(self) -> None:
        """Publish that this process has stopped; `__exit__` waits for that."""
        if self._newest is not None:
            self._newest = {**self._newest, "stopped": True}
        self._over.set()
        self._wake.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._thread.join(_LAST_PUBLISH_SECONDS)


def status_key(label: str) -> str:
    """Return the board's key of a pipeline; the usual one has no label."""
    return f"pipeline.{label or 'all'}"


def standby_key(label: str) -> str:
    """Return the board's key of the standby of a pipeline.

    It has another prefix than pipelines: an earlier version would take it for a pipeline without parts.
    """
    return f"{STANDBY_PREFIX}.{label or 'all'}"


def status_message(about: Mapping[str, Any], parts: Sequence[PartStatus]) -> Json:
    """Return the published status: the process, its host, and each part."""
    values = {key: value for key, value in about.items() if value is not None}
    where = {"pid": os.getpid(), "host": socket.gethostname()}
    return {**where, **values, "parts": [part.to_json() for part in parts]}
