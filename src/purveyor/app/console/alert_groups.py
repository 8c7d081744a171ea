"""All alerts of a snapshot, ranked and grouped: many subscriptions with the same problem are one line. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from purveyor.app.console.alerts import Alert, Kind, Level, pipeline_alerts, queue_alerts, server_alerts, source_alerts
from purveyor.app.console.formatting import format_number
from purveyor.app.console.snapshot import SystemSnapshot
from purveyor.app.console.subscription_alerts import subscription_alerts
from purveyor.app.console.time_series import History

_OF_MANY: Final = {
    Kind.PART_MISSING: "{} parts of the pipeline do not run",
    Kind.PART_FAILS: "{} parts of the pipeline fail",
    Kind.PART_STILL: "{} parts of the pipeline do not move",
    Kind.SOURCE_STOPPED: "{} sources do not follow their directories",
    Kind.SUSPENDED: "{} subscriptions are suspended",
    Kind.UNREADABLE: "{} subscriptions have unreadable records",
    Kind.NOT_PUSHED: "{} subscriptions are not pushed",
    Kind.PREFILL_FAILED: "{} prefills failed",
    Kind.EXPIRING: "Messages of {} subscriptions expire unread",
    Kind.NO_CONSUMER: "{} subscriptions have no active consumer",
    Kind.INTERRUPTED: "{} subscriptions are only partly registered or deleted",
    Kind.MIGRATION: "{} queues are being migrated",
    Kind.PAUSED: "{} subscriptions are paused",
    Kind.FILLING: "{} prefills or replays run",
}
"""The title of a group; the kinds that are missing here have at most one alert."""


@dataclass(frozen=True, slots=True)
class AlertGroup:
    """Alerts of one kind and level, the one with the most waiting messages first."""

    alerts: tuple[Alert, ...]

    @property
    def kind(self) -> Kind:
        """What is wrong."""
        return self.alerts[0].kind

    @property
    def level(self) -> Level:
        """The urgency of each of the alerts."""
        return self.alerts[0].level

    @property
    def id(self) -> str:
        """The id of the group: it stays while alerts join and leave."""
        return f"{self.kind.name.lower()}-{self.level.name.lower()}"

    @property
    def title(self) -> str:
        """The title: that of the only alert, or the number of alerts."""
        if len(self.alerts) == 1:
            return self.alerts[0].title
        return _OF_MANY.get(self.kind, f"{{}} times: {self.alerts[0].title}").format(format_number(len(self.alerts)))


def all_alerts(snapshot: SystemSnapshot, history: History) -> Iterator[Alert]:
    """Yield all alerts. While the server does not answer, only that one: the rest is unknown."""
    if snapshot.problem is not None:
        yield from server_alerts(snapshot)
        return
    yield from pipeline_alerts(snapshot, history)
    yield from source_alerts(snapshot)
    yield from queue_alerts(snapshot, history)
    yield from subscription_alerts(snapshot, history)


def ranked(found: Iterable[Alert]) -> list[Alert]:
    """Return alerts by urgency, then by impact, then by the number of messages that wait because of them."""
    return sorted(found, key=lambda alert: (-alert.level, alert.kind, -alert.waiting, alert.about))


def group_alerts(found: Iterable[Alert]) -> list[AlertGroup]:
    """Return alerts as groups, by rank."""
    return [AlertGroup(tuple(each)) for _, each in groupby(ranked(found), key=lambda alert: (alert.level, alert.kind))]
