import io
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.cells import cell_len

from purveyor.app.cli import render
from purveyor.app.cli.output import escape, to_jsonable
from purveyor.jetstream.config import Retention


def test_text_cannot_play_with_the_terminal() -> None:
    assert escape("a\x1b]0;title\x07b\r\n") == r"a\x1b]0;title\x07b\r\n"
    assert "\x1b" not in render.format_payload(b"red \x1b[31m")
    assert "\udcff" not in escape("bad \udcff header")


def test_payloads_are_text_or_a_dump() -> None:
    assert render.format_payload("größer\n\tals".encode()) == "größer\n\tals"
    dump = render.format_payload(bytes(range(256)) + b"more")
    assert dump.startswith("(260 bytes that are not text)")
    assert "000010  10 11 12" in dump
    assert dump.endswith("... and 4 more")


def test_json_has_seconds_times_and_words() -> None:
    value = {
        "max_age": timedelta(minutes=2),
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "kind": Retention.WORK_QUEUE,
        "nothing": None,
        "path": Path("x"),
        "many": ("a", timedelta(seconds=1)),
        "bad": "\udcff",
    }
    assert to_jsonable(value) == {
        "max_age_seconds": 120.0,
        "at": "2026-01-01T00:00:00+00:00",
        "kind": "workqueue",
        "path": "x",
        "many": ["a", 1.0],
        "bad": "\ufffd",
    }


def test_a_payload_in_json_is_text_or_base64() -> None:
    assert render.payload_fields(b"text") == {"data": "text"}
    assert render.payload_fields(b"\xff\x00") == {"data_base64": "/wA="}


def test_a_table_for_a_pipe_neither_wraps_nor_pads() -> None:
    long = "x" * 500
    lines = render.format_table(("NAME", "TEXT"), [("a", long), ("[bold]b", "short")]).splitlines()
    assert len(lines) == 3
    assert long in lines[1]
    assert "[bold]b" in lines[2]
    assert all(line == line.rstrip() for line in lines)


def test_nothing_of_a_table_in_a_pipe_is_cut() -> None:
    huge = "x" * 300_000
    lines = render.format_table(("NAME", "TEXT", "END"), [("a", huge, 1), ("b", "y", 2)]).splitlines()
    assert lines[1].split() == ["a", huge, "1"]
    assert len(lines[2]) < 1000, "a huge cell does not move the columns of other rows"


class OnTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [20, 40, 61, 79, 80, 100, 130, 300])
def test_a_table_on_a_terminal_fits_and_loses_nothing(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("sys.stdout", OnTerminal())
    monkeypatch.setenv("COLUMNS", str(width))
    columns = ("NAME", "TOPICS", "STATE", "BEGIN", "BACKLOG", "PREFILL")
    rows = [
        (f"subscription-{'n' * 51}", ["udm:users/user", "udm:groups/.*", "größe:漢字"], "active", 123456, 7, "done"),
        ("ox", ["udm:users/user"], "suspended", 1, 0, None),
    ]
    text = re.sub(r"\x1b\[[0-9;]*m", "", render.format_table(columns, rows, wrap=("TOPICS",)))
    cells = [*columns, *(render.format_value(cell) for row in rows for cell in row)]
    for ch in set("".join(cells)) - {" ", ":", *"".join(columns)}:
        assert text.count(ch) == "".join(cells).count(ch), ch
    if width >= 79:
        assert all(cell_len(line) <= width for line in text.splitlines())
        assert text.split()[: len(columns)] == list(columns)
        assert "123456" in text, "numbers are not wrapped"
    if width >= 130:
        assert f"subscription-{'n' * 51}" in text
    if width <= 40:
        assert "BACKLOG: 7" in text, "where it does not fit, each row is a block"
    assert render.format_table(columns, [], wrap=("TOPICS",))


def test_sizes_and_durations() -> None:
    assert render.format_size(1024**2 * 3) == "3.0 MiB (3145728 B)"
    assert render.format_size(1024**5) == "1024.0 TiB (1125899906842624 B)"
    assert render.format_duration(timedelta(0)) == "0s"
    assert render.format_duration(timedelta(days=1, seconds=1)) == "1d1s"
    assert render.format_duration(timedelta(microseconds=1500)) == "1.5ms"
