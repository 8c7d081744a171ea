"""Which parts run on a data directory, and where they listen: one small file for each process, in `running/`.

A part announces itself before it is ready (`announce`), and its file disappears when it stops. Programs on the same
machine read the files: `doctor`, the API (for the metrics of the other parts), and commands that need its address.

- The process writes a draft, locks it and renames it, so a reader sees a whole file whose owner holds the lock.
- The system gives the lock back when the process ends, however it ends. So a file without a lock is left over from a
  process that died; `running_parts` leaves it out, and the next process of the same part removes it.
- Only the owner of the data directory can read the files. They hold no secrets.
"""

import contextlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.file_lock import FileLock, LockOwner, is_locked

DIRECTORY: Final = "running"
"""The name of the directory in the data directory."""
NATS: Final = "nats"
API: Final = "api"
PIPELINE: Final = "pipeline"
PUSH: Final = "push"
LDAP: Final = "ldap"
_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPart:
    """A process that announced itself."""

    part: str
    """Its name: `nats`, `api`, `pipeline`, `push`, `ldap`, or that of another `purveyor serve` command."""
    pid: int
    host: str
    started_at: str
    url: str | None = None
    """Where clients on this machine reach it, such as `http://127.0.0.1:7777`; None if it has no clients."""
    metrics_url: str | None = None
    """Its page of metrics, which the API of the same data directory includes in its own; None if there is none."""
    worker: int | None = None
    """Its number among the processes that share its URL; None if it shares it with no other process."""
    is_alive: bool = True
    """False if the process died without removing its file."""


@contextlib.contextmanager
def announce(
    data_dir: Path, part: str, *, url: str | None = None, metrics_url: str | None = None, worker: int | None = None
) -> Iterator[None]:
    """Announce this process in the data directory until the end of the block.

    A process that cannot write its file, for example on a full disk, works without it.
    """
    directory = data_dir / DIRECTORY
    path = directory / f"{part}-{os.getpid()}-{uuid.uuid4().hex[:8]}.json"
    draft = FileLock(path.with_suffix(".draft"))
    try:
        _write(draft, path, part, url=url, metrics_url=metrics_url, worker=worker)
    except OSError as error:
        _log.warning("cannot announce %s in %s: %s", part, directory, error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            draft.release()


def running_parts(data_dir: Path, part: str | None = None) -> list[RunningPart]:
    """Return the processes that run on a data directory, the newest first; with `part`, only those of that part."""
    return [found for found in known_parts(data_dir, part) if found.is_alive]


def running_api(data_dir: Path) -> RunningPart | None:
    """Return the API that runs on a data directory, the newest if there are several; None if none runs."""
    return next((found for found in running_parts(data_dir, API) if found.url is not None), None)


def known_parts(data_dir: Path, part: str | None = None) -> list[RunningPart]:
    """Return the processes that run, and those that died and have not been started again; the newest first."""
    found = [
        known
        for path in (data_dir / DIRECTORY).glob(f"{part or '*'}-*.json")
        if (known := _read(path)) is not None and part in (None, known.part)
    ]
    return sorted(found, key=lambda each: each.started_at, reverse=True)


def _write(draft: FileLock, path: Path, part: str, **more: str | int | None) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in path.parent.glob(f"{part}-*.json"):
        with contextlib.suppress(OSError):
            if not is_locked(left):
                left.unlink(missing_ok=True)
    owner = LockOwner.this_process()
    values = {
        json_fields.VERSION: _VERSION,
        "part": part,
        "pid": owner.pid,
        "host": socket.gethostname(),
        "started_at": owner.started_at,
        **more,
    }
    draft.try_lock()
    os.write(draft.fd, json.dumps(values).encode())
    draft.path.replace(path)


def _read(path: Path) -> RunningPart | None:
    """Read one file; None if it disappeared, is damaged or has a version that this program does not know."""
    try:
        with path.open("rb") as file:
            values: dict[str, Any] = json_fields.parse(file.read(_MAX_BYTES), "file of a running part")
        if values.get(json_fields.VERSION) != _VERSION:
            return None
        return RunningPart(
            part=str(values["part"]),
            pid=int(values["pid"]),
            host=str(values["host"]),
            started_at=str(values["started_at"]),
            url=_text(values.get("url")),
            metrics_url=_text(values.get("metrics_url")),
            worker=None if values.get("worker") is None else int(values["worker"]),
            is_alive=is_locked(path),
        )
    except (OSError, InvalidInput, KeyError, TypeError, ValueError):
        return None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


__all__ = [
    "API",
    "LDAP",
    "NATS",
    "PIPELINE",
    "PUSH",
    "RunningPart",
    "announce",
    "known_parts",
    "running_api",
    "running_parts",
]
