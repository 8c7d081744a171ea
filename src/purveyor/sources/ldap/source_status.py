"""The status of a source: what a process does for it, for the status board, the console, the CLI and the metrics.

Each process writes a notice of its own, so a source with a standby has two. `merge_reports` makes one of them.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final

from purveyor.model.json_fields import Json
from purveyor.queues.client import Queues
from purveyor.queues.status_board import SILENT_SECONDS, Notice, read_notices
from purveyor.sources.ldap.directory import Directory

NOTICE_PREFIX: Final = "source"
"""The prefix of the notices on the status board."""
_CSN_TIME: Final = "%Y%m%d%H%M%S"


class SourceActivity(Enum):
    """What a process does for a source."""

    CONNECTING = "connecting"
    """It connects to the NATS server or the directory."""
    STANDBY = "standby"
    """Another process follows the directory; this one takes over if that one stops."""
    REFRESHING = "refreshing"
    """It compares the directory with what it knew."""
    FOLLOWING = "following"
    """It writes each change as it happens."""
    FAILED = "failed"
    """It tries again after a pause; `error` says why."""
    STOPPED = "stopped"


_ACTIVE: Final = frozenset({SourceActivity.REFRESHING, SourceActivity.FOLLOWING})


@dataclass(slots=True)
class SourceStatus:
    """The status of a source in this process. The runner changes it as it works."""

    directory: Directory
    on_change: "Callable[[SourceStatus], None]" = lambda _: None
    """Called when the activity has changed."""
    activity: SourceActivity = SourceActivity.CONNECTING
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    mode: str | None = None
    epoch: int | None = None
    entries: int | None = None
    """The entries of the directory, as far as they are known."""
    read: int = 0
    """The entries that the running or last refresh has reported."""
    refresh_started: float = 0.0
    refresh_seconds: float | None = None
    records: int = 0
    """The records that the queue has acknowledged since this process began."""
    waiting: int = 0
    """The records that the queue has not acknowledged yet."""
    parked: int = 0
    last_change: datetime | None = None
    """When the last change that was read happened in the directory."""
    lag_seconds: float | None = None
    """How long the last change took from the directory into the queue, by their clocks."""
    error: str | None = None
    """The last error; it stays known when the source works again."""
    fix: str | None = None
    """How to correct it, until the source works again."""
    error_at: datetime | None = None
    instance: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    @property
    def key(self) -> str:
        """The key of its notice."""
        return f"{NOTICE_PREFIX}.{self.directory.source}.{self.instance}"

    @property
    def is_active(self) -> bool:
        """Whether this process reads the directory."""
        return self.activity in _ACTIVE

    @property
    def is_refreshing(self) -> bool:
        """Whether a refresh is under way."""
        return self.activity is SourceActivity.REFRESHING

    @property
    def rate(self) -> float:
        """The entries per second of the running or last refresh."""
        seconds = self.refresh_seconds
        if seconds is None:
            seconds = time.monotonic() - self.refresh_started if self.refresh_started else 0.0
        return self.read / seconds if seconds > 0 else 0.0

    def enter(self, activity: SourceActivity) -> None:
        """Note what the process does from now on."""
        if activity is not self.activity:
            self.activity, self.since = activity, datetime.now(UTC)
            self.on_change(self)

    def begin_refresh(self) -> None:
        """Note that a refresh begins."""
        self.read, self.refresh_started, self.refresh_seconds = 0, time.monotonic(), None
        self.enter(SourceActivity.REFRESHING)

    def end_refresh(self) -> None:
        """Note that the refresh is complete."""
        self.refresh_seconds = time.monotonic() - self.refresh_started
        self.fix = None
        self.enter(SourceActivity.FOLLOWING)

    def fail(self, message: str, fix: str | None) -> None:
        """Note an error."""
        self.error, self.fix, self.error_at = message, fix, datetime.now(UTC)
        self.enter(SourceActivity.FAILED)

    def to_json(self) -> Json:
        """Return the notice."""
        directory = self.directory
        return {
            "source": directory.source,
            "kind": "ldap",
            "uri": directory.uri,
            "base": directory.base,
            "filter": directory.filter,
            "state": self.activity.value,
            "since": self.since.isoformat(),
            "mode": self.mode,
            "epoch": self.epoch,
            "entries": self.entries,
            "refreshed": self.read,
            "entries_per_second": round(self.rate),
            "records": self.records,
            "waiting": self.waiting,
            "dead_letters": self.parked,
            "last_change": None if self.last_change is None else self.last_change.isoformat(),
            "lag_seconds": None if self.lag_seconds is None else round(self.lag_seconds, 3),
            "error": self.error,
            "fix": self.fix,
            "error_at": None if self.error_at is None else self.error_at.isoformat(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }


def csn_time(csn: str) -> datetime | None:
    """Return the time of a CSN; None if it is not one.

    >>> csn_time("20261119041842.123456Z#000000#001#000000").isoformat()
    '2026-11-19T04:18:42.123456+00:00'
    """
    whole, _, rest = csn.partition("Z")[0].partition(".")
    try:
        at = datetime.strptime(whole, _CSN_TIME).replace(tzinfo=UTC)
        return at + timedelta(microseconds=int(rest[:6].ljust(6, "0")) if rest else 0)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """A source as its processes report it."""

    source: str
    values: Mapping[str, Any]
    """The notice of the process that follows the directory, or of the newest one."""
    at: datetime | None
    standby: int = 0
    """The number of processes that stand by."""
    is_silent: bool = False
    """The process has not reported for long: it hangs or died."""

    @property
    def state(self) -> str:
        """What the process does; `silent` if it does not report."""
        return "silent" if self.is_silent else str(self.values.get("state") or "unknown")

    @property
    def last_change(self) -> datetime | None:
        """When the last change that was read happened in the directory."""
        try:
            return datetime.fromisoformat(str(self.values.get("last_change")))
        except ValueError:
            return None

    @property
    def last_error(self) -> str | None:
        """The last error, with its time if the source works again."""
        error, at = self.values.get("error"), self.values.get("error_at")
        if error is None or at is None or self.state == SourceActivity.FAILED.value:
            return error
        return f"{error} ({datetime.fromisoformat(at):%Y-%m-%d %H:%M:%S} UTC)"

    def to_json(self) -> Json:
        """Return the form of listings."""
        return {
            **self.values,
            "state": self.state,
            "standby": self.standby,
            "reported_at": None if self.at is None else self.at.isoformat(),
        }


def merge_reports(notices: Iterable[Notice], now: datetime) -> list[SourceReport]:
    """Return one report for each source: of its active process, else of the newest; sorted by name."""
    by_source: dict[str, list[Notice]] = {}
    for notice in notices:
        name = str(notice.value.get("source") or notice.key.split(".")[1])
        by_source.setdefault(name, []).append(notice)
    return [_merge(name, found, now) for name, found in sorted(by_source.items())]


def _merge(name: str, notices: list[Notice], now: datetime) -> SourceReport:
    def is_silent(notice: Notice) -> bool:
        return notice.at is not None and (now - notice.at).total_seconds() > SILENT_SECONDS

    def rank(notice: Notice) -> tuple[bool, bool, bool, datetime]:
        state = notice.value.get("state")
        is_active = state in {each.value for each in _ACTIVE}
        at = notice.at or datetime.min.replace(tzinfo=UTC)
        return not is_silent(notice), is_active, state != SourceActivity.STANDBY.value, at

    best = max(notices, key=rank)
    standby = sum(
        1
        for notice in notices
        if notice is not best and not is_silent(notice) and notice.value.get("state") == SourceActivity.STANDBY.value
    )
    return SourceReport(source=name, values=best.value, at=best.at, standby=standby, is_silent=is_silent(best))


async def read_sources(queues: Queues, now: datetime) -> list[SourceReport]:
    """Return the sources that processes report on the status board."""
    return merge_reports(await read_notices(queues, NOTICE_PREFIX), now)
