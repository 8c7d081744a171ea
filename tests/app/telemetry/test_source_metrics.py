"""What a source reports on `/metrics`."""

from datetime import UTC, datetime

from purveyor.app.telemetry.source_metrics import read_source_metrics
from purveyor.sources.ldap.directory import Directory
from purveyor.sources.ldap.source_status import SourceActivity, SourceStatus

PEOPLE = Directory(uri="ldaps://ldap.example", base="ou=people,dc=example", source="people", password="s3cret")
CHANGED = datetime(2026, 11, 19, 12, tzinfo=UTC)


def values(status: SourceStatus) -> dict[str, tuple[tuple[str, ...], float]]:
    """Return labels and value of each metric that has one."""
    return {
        each.metric.name.removeprefix("purveyor_source_"): found
        for each in read_source_metrics([status])
        for found in each.values.items()
    }


def test_a_source_reports_where_it_reads_its_last_change_and_its_last_error() -> None:
    status = SourceStatus(PEOPLE)
    status.fail("the directory is away", "start it")
    failed = values(status)
    assert failed["up"][1] == 0
    assert failed["last_error_timestamp_seconds"][1] >= CHANGED.timestamp()
    assert "last_change_timestamp_seconds" not in failed
    status.mode, status.entries, status.last_change, status.lag_seconds = "accesslog", 7, CHANGED, 0.25
    status.begin_refresh()
    status.end_refresh()
    found = values(status)
    assert list(found["info"][0]) == ["people", "ldaps://ldap.example", "ou=people,dc=example", "accesslog"]
    assert found["last_change_timestamp_seconds"][1] == CHANGED.timestamp()
    assert found["last_error_timestamp_seconds"][1] == failed["last_error_timestamp_seconds"][1], "it stays known"
    assert (found["up"][1], found["entries"][1], found["lag_seconds"][1]) == (1, 7, 0.25)
    assert "s3cret" not in str(found)


def test_a_source_that_stands_by_says_nothing_about_the_directory() -> None:
    status = SourceStatus(PEOPLE, activity=SourceActivity.STANDBY, entries=7, last_change=CHANGED)
    assert set(values(status)) == {"up", "records_total", "info"}
