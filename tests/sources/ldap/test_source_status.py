from datetime import UTC, datetime, timedelta
from typing import Any

from purveyor.queues.status_board import Notice
from purveyor.sources.ldap.directory import Directory
from purveyor.sources.ldap.source_status import SourceActivity, SourceStatus, csn_time, merge_reports

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def notice(instance: str, state: str, *, age_seconds: float = 1, source: str = "people", **more: Any) -> Notice:
    at = NOW - timedelta(seconds=age_seconds)
    return Notice(f"source.{source}.{instance}", {"source": source, "state": state, **more}, at)


def test_the_process_that_follows_speaks_for_its_source() -> None:
    notices = [notice("a", "standby"), notice("b", "following", entries=3), notice("c", "standby")]
    (report,) = merge_reports(notices, NOW)
    assert (report.state, report.values["entries"], report.standby, report.is_silent) == ("following", 3, 2, False)


def test_a_process_that_died_is_forgotten_when_another_one_reports() -> None:
    (report,) = merge_reports([notice("a", "following", age_seconds=60), notice("b", "failed")], NOW)
    assert report.state == "failed"
    (alone,) = merge_reports([notice("a", "following", age_seconds=60)], NOW)
    assert (alone.state, alone.is_silent) == ("silent", True)


def test_each_source_has_one_report() -> None:
    reports = merge_reports([notice("a", "following", source="b"), notice("c", "following", source="a")], NOW)
    assert [report.source for report in reports] == ["a", "b"]


def test_a_notice_holds_no_password_and_says_when_the_activity_changed() -> None:
    seen: list[SourceActivity] = []
    directory = Directory(uri="ldap://a", base="dc=a", bind_dn="cn=reader", password="hidden")
    status = SourceStatus(directory, on_change=lambda each: seen.append(each.activity))
    status.begin_refresh()
    status.end_refresh()
    status.fail("the directory is away", None)
    status.fail("the directory is away", None)
    assert seen == [SourceActivity.REFRESHING, SourceActivity.FOLLOWING, SourceActivity.FAILED]
    assert status.to_json()["error"] == "the directory is away"
    assert "hidden" not in str(status.to_json())


def test_the_last_error_stays_known_with_its_time_when_the_source_works_again() -> None:
    status = SourceStatus(Directory(uri="ldap://a", base="dc=a"))
    status.fail("the directory is away", "start it")
    assert last_error(status) == "the directory is away"
    status.begin_refresh()
    status.end_refresh()
    assert status.error_at is not None
    assert last_error(status) == f"the directory is away ({status.error_at:%Y-%m-%d %H:%M:%S} UTC)"
    assert status.to_json()["fix"] is None
    assert last_error(SourceStatus(status.directory)) is None


def last_error(status: SourceStatus) -> str | None:
    (report,) = merge_reports([Notice("source.a.b", status.to_json(), NOW)], NOW)
    return report.last_error


def test_a_text_that_is_no_csn_has_no_time() -> None:
    assert csn_time("yesterday") is None
    assert csn_time("20260131120000Z") == datetime(2026, 1, 31, 12, tzinfo=UTC)
