from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.app.cli.parsers import (
    parse_duration,
    parse_headers,
    parse_list,
    parse_moment,
    parse_size,
    parse_start,
    parse_time,
)
from purveyor.app.cli.render import format_duration
from purveyor.jetstream.config import Deliver
from purveyor.model.errors import InvalidHeader, InvalidInput

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("2m", timedelta(minutes=2)),
        ("1h30m", timedelta(minutes=90)),
        ("1.5s", timedelta(seconds=1.5)),
        ("7d", timedelta(days=7)),
        ("250us", timedelta(microseconds=250)),
        ("0", timedelta(0)),
        ("0s", timedelta(0)),
    ],
)
def test_durations(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["", "5", "m", "-5s", "5 s", "5sx", "1e3s", "five", "9999999999w", "2m-1s"])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="duration"):
        parse_duration(text)


@given(st.timedeltas(min_value=timedelta(seconds=1), max_value=timedelta(days=1000)))
def test_a_duration_that_is_shown_can_be_typed(duration: timedelta) -> None:
    assert abs(parse_duration(format_duration(duration)) - duration) <= timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("10MB", 10_000_000), ("1GiB", 2**30), ("1k", 1000), ("1.5KiB", 1536), ("none", -1), ("-1", -1)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "1XB", "-2", "1ib", "9999999999TiB"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="size"):
        parse_size(text)


def test_starts_of_consumers() -> None:
    assert parse_start("all", NOW).policy is Deliver.ALL
    assert parse_start("last", NOW).policy is Deliver.LAST
    assert parse_start("new", NOW).policy is Deliver.NEW
    assert parse_start("subject", NOW).policy is Deliver.LAST_PER_SUBJECT
    assert parse_start("10", NOW).sequence == 10
    assert parse_start("2m", NOW).time == NOW - timedelta(minutes=2)
    assert parse_start("2026-11-15T12:00:00Z", NOW).time == NOW
    assert parse_start("2026-11-15T13:00:00+01:00", NOW).time == NOW


@pytest.mark.parametrize("text", ["", "0", "first", "2026-13-45T00:00:00Z", "2026-11-15T12:00:00", "-3"])
def test_an_invalid_start_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_start(text, NOW)


def test_a_moment_is_a_duration_from_now_or_a_time() -> None:
    assert parse_moment("10m", NOW) == NOW + timedelta(minutes=10)
    assert parse_moment("2030-01-01T00:00:00Z", NOW) == datetime(2030, 1, 1, tzinfo=UTC)


def test_a_time_needs_a_zone() -> None:
    with pytest.raises(InvalidInput, match="no zone"):
        parse_time("2026-11-15T12:00:00")


def test_a_header_keeps_all_its_values_and_colons() -> None:
    assert parse_headers(["Tag: a", "Tag:b", "Url:http://x:1"]) == {"Tag": ["a", "b"], "Url": ["http://x:1"]}
    with pytest.raises(InvalidHeader):
        parse_headers(["no colon"])


def test_lists_are_repeated_or_separated_by_commas() -> None:
    assert parse_list(["a,b.*", " c ", ""]) == ("a", "b.*", "c")
    assert parse_list(None) == ()
