"""The observation of a running deployment through its NATS server: one reading, for `doctor` and for `/readyz`.

`observe` reads and decides nothing; `conditions` decides. The time of an observation is that of the server, which also
stamps messages and notices, so that a wrong clock of this machine does not look like a part that is silent.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from purveyor.delivery.push.push_reports import PushProblem, read_problems
from purveyor.jetstream.api import clock_offset_seconds
from purveyor.jetstream.streams import StreamUsage
from purveyor.model.errors import PermissionDenied, UnknownStream
from purveyor.queues.backlog import Backlog, FirstSeen, read_backlogs
from purveyor.queues.client import Queues
from purveyor.queues.registry import Snapshot
from purveyor.queues.status_board import STANDBY_PREFIX, Notice, read_notices
from purveyor.sources.ldap.source_status import SourceReport, read_sources

PIPELINE: Final = "pipeline"
PUSH: Final = "push"
"""The prefixes of the notices on the status board."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The last report of a process on the status board."""

    pid: int | None
    host: str
    at: datetime
    stopped: bool
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name the process: `process 4711 on host`."""
        return f"process {self.pid} on {self.host}"

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """The parts of a pipeline."""
        parts = self.values.get("parts")
        return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A deployment at one time."""

    at: datetime
    snapshot: Snapshot
    problems: Mapping[str, PushProblem]
    usages: Mapping[str, StreamUsage]
    backlogs: Sequence[Backlog]
    pipelines: Sequence[Report]
    push_workers: Sequence[Report]
    sources: Sequence[SourceReport] = ()
    standbys: Sequence[Report] = ()
    """The pipelines that wait to take over."""

    def age_seconds(self, since: datetime | None) -> float:
        """Return how long ago something was; 0 if it is unknown."""
        return 0.0 if since is None else max((self.at - since).total_seconds(), 0.0)


async def observe(
    queues: Queues, snapshot: Snapshot, usages: Sequence[StreamUsage], first_seen: FirstSeen | None = None
) -> Observation:
    """Read the state of a deployment. Raise PermissionDenied if these credentials may not.

    `first_seen`: see `read_backlogs`.
    """
    offset_seconds = 0.0
    if usages:
        with contextlib.suppress(PermissionDenied, UnknownStream):  # then the clock of this machine has to do
            offset_seconds = await clock_offset_seconds(queues, usages[0].stream) or 0.0
    now = datetime.now(UTC) + timedelta(seconds=offset_seconds)
    return Observation(
        at=now,
        snapshot=snapshot,
        problems=await read_problems(queues, [*snapshot.subscriptions.values()]),
        usages={usage.stream: usage for usage in usages},
        backlogs=await read_backlogs(queues, usages, first_seen),
        pipelines=[_report(each) for each in await read_notices(queues, PIPELINE)],
        push_workers=[_report(each) for each in await read_notices(queues, PUSH)],
        sources=await read_sources(queues, now),
        standbys=[_report(each) for each in await read_notices(queues, STANDBY_PREFIX)],
    )


def _report(notice: Notice) -> Report:
    pid = notice.value.get("pid")
    return Report(
        pid=pid if isinstance(pid, int) else None,
        host=str(notice.value.get("host") or "an unknown host"),
        at=notice.at or datetime.fromtimestamp(0, UTC),
        stopped=notice.value.get("stopped") is True,
        values=notice.value,
    )


def suspended_process(pid: int | None) -> int | None:
    """Return the process, or the first of its descendants, that a signal such as SIGSTOP suspended; None if none is."""
    return next((each for each in _with_descendants(pid) if _state(each) == "T"), None) if pid is not None else None


def _with_descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:  # grows while it is read
        try:
            for children in Path(f"/proc/{each}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        except (OSError, ValueError):
            continue
    return found


def _state(pid: int) -> str | None:
    """Return the state of a process in one letter; None if it has ended, or without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]
