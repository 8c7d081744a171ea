"""What a part of the pipeline is doing, as data: for the terminal, for `pipeline-status.json`, for the console."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from purveyor.pipeline.error_summary import Failure

STATUS_FILE = "pipeline-status.json"


class State(Enum):
    """The life of a part."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    """It ended with an error and is started again after a pause."""
    FAILED = "failed"
    """It cannot work as it is set up."""
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Where a running part is, as of its last report. A worker without a position tells only how much it did."""

    position: int | None = None
    lag: int | None = None
    rows: int = 0
    rows_per_second: float = 0.0
    batch: int | None = None
    batch_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """One part: its state, its last reading, its last error (kept until it has run for a minute), its restarts."""

    name: str
    state: State
    since: datetime
    reading: Reading = Reading()
    error: Failure | None = None
    restarts: int = 0

    def to_json(self) -> dict[str, Any]:
        """Flat, with nothing that is not known."""
        known: dict[str, Any] = {
            "part": self.name,
            "state": self.state.value,
            "since": self.since.isoformat(timespec="milliseconds"),
            "position": self.reading.position,
            "lag": self.reading.lag,
            "rows": self.reading.rows,
            "rows_per_second": round(self.reading.rows_per_second, 1),
            "batch": self.reading.batch,
            "batch_ms": self.reading.batch_ms,
            "restarts": self.restarts,
            "error": str(self.error) if self.error is not None else None,
        }
        return {key: value for key, value in known.items() if value is not None}

    def line(self) -> str:
        """For people: `dispatch   running  at 1200, 0 behind, 350/s, 84 ms`."""
        reading, told = self.reading, []
        if reading.position is not None:
            told.append(f"at {reading.position}")
        if reading.lag is not None:
            told.append(f"{reading.lag} behind")
        if reading.batch_ms is not None:
            told.extend([f"{reading.rows_per_second:,.0f}/s", f"{reading.batch_ms} ms"])
        if self.restarts:
            told.append(f"{self.restarts} restarts")
        words = f"{self.name:<10} {self.state.value:<8} {', '.join(told)}"
        return f"{words}  last error: {self.error}" if self.error is not None else words.rstrip()


def status_path(data_dir: Path, label: str = "") -> Path:
    """Where a pipeline tells its status; `label` tells apart several on one data directory."""
    return data_dir / (f"pipeline-status-{label}.json" if label else STATUS_FILE)


def write_status(path: Path, about: Mapping[str, Any], parts: Sequence[PartStatus]) -> None:
    """Replace the status file whole: a reader sees this state or the one before, never half of one."""
    told = {"pid": os.getpid(), **about, "parts": [part.to_json() for part in parts]}
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")
    draft.replace(path)


def remove_status(path: Path) -> None:
    """Nothing runs any more. After a crash the file stays, with the process id of the dead."""
    path.unlink(missing_ok=True)
