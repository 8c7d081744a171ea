"""The three reporters of the pipeline: JSON, lines and a live table."""

import dataclasses
import json
from datetime import UTC, datetime

import pytest

from purveyor.app.cli.serve_pipeline import JsonLines, Lines, LiveTable, reporter_for
from purveyor.pipeline.job_failures import Failure
from purveyor.pipeline.part_status import PartProgress, PartStatus, State

STARTING = PartStatus(name="dispatch", state=State.STARTING, since=datetime(2026, 1, 1, tzinfo=UTC))
RUNNING = dataclasses.replace(
    STARTING,
    state=State.RUNNING,
    progress=PartProgress(position=1200, lag=3, rows=30, rows_per_second=350.4, batch=7, batch_ms=84),
)
NEXT_BATCH = dataclasses.replace(RUNNING, progress=dataclasses.replace(RUNNING.progress, position=1230, batch=8))
WAITING = dataclasses.replace(RUNNING, state=State.WAITING, restarts=1, error=Failure("away \x1b[2J", fix="is it up?"))


def test_a_line_is_written_when_a_state_changes_and_not_for_each_batch(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    lines.report_step("ready", "dispatch")
    for status in (STARTING, STARTING, RUNNING, NEXT_BATCH, WAITING):
        lines.report_parts([status])
    assert capsys.readouterr().out.splitlines() == [
        "ready: dispatch",
        "dispatch   starting",
        "dispatch   running  at 1200, 3 behind, 350/s, 84 ms",
        "dispatch   waiting  at 1200, 3 behind, 350/s, 84 ms, 1 restarts  last error: away \\x1b[2J (is it up?)",
    ]


def test_every_batch_is_an_object_and_what_stays_the_same_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    lines = JsonLines()
    lines.report_step("ready", "dispatch")
    for status in (RUNNING, RUNNING, NEXT_BATCH, WAITING):
        lines.report_parts([status])
    reported = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in reported] == ["ready", "progress", "progress", "progress"]
    assert reported[1] == {
        "event": "progress",
        "part": "dispatch",
        "state": "running",
        "since": "2026-01-01T00:00:00.000+00:00",
        "position": 1200,
        "lag": 3,
        "rows": 30,
        "rows_per_second": 350.4,
        "batch": 7,
        "batch_ms": 84,
        "restarts": 0,
    }
    assert (reported[3]["state"], reported[3]["error"]) == ("waiting", "away \x1b[2J (is it up?)")


def test_a_terminal_shows_one_row_for_each_part(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    table = LiveTable()
    table.report_step("starting", "Spark on local[*]")
    table.report_parts([RUNNING])
    table.report_step("ready", "dispatch")
    table.report_parts([WAITING])
    table.close()
    out = capsys.readouterr().out
    assert out.startswith("starting: Spark on local[*]\n")
    assert "ready: dispatch\n" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("dispatch ")]
    assert row[:8] == ["dispatch", "waiting", "1200", "3", "350", "84", "ms", "1"]
    assert "\x1b[2J" not in out


def test_without_a_terminal_there_are_lines() -> None:
    with reporter_for(json=False) as reporter:
        assert isinstance(reporter, Lines)
    with reporter_for(json=True) as reporter:
        assert isinstance(reporter, JsonLines)
