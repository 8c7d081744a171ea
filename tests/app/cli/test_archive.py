"""`purveyor archive`: SQL queries with and without a server, on an archive of any size; errors without a traceback."""

import subprocess
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from purveyor.pipeline.archive.layout import PositionRange
from purveyor.pipeline.archive.range_store import RangeStore
from purveyor.pipeline.archive.sql import error_sentence, to_json_value
from purveyor.pipeline.archive.writer import archive_range
from tests.support.archive import as_read, event
from tests.support.command_line import PROGRAM, invoke, url_of
from tests.support.nats_servers import OwnServer
from tests.support.processes import environment
from tests.support.spark_session import spark

__all__ = ["spark"]


@pytest.fixture
def data(tmp_path: Path, spark: SparkSession) -> Path:
    """A data directory whose archive has three events, one of them a deletion, and a message that is no event."""
    ada = {"id": "ada", "mail": "ada@example.com", "age": 36}
    texts = [
        event("ada", ada, attributes={"site": "north"}),
        event("bob"),
        event("bob", old={"id": "bob"}),
        "no event",
    ]
    archive_range(RangeStore(tmp_path / "data" / "archive"), as_read(spark, texts), PositionRange(1, len(texts)))
    return tmp_path / "data"


def test_events_objects_and_messages_are_tables(data: Path) -> None:
    def ask(sql: str) -> list[object]:
        return invoke("--data-dir", str(data), "archive", "query", sql, "--json").ok().objects

    assert ask("select topic, operation, count(*) as n from events group by all order by operation") == [
        {"topic": "users/user", "operation": "create", "n": 2},
        {"topic": "users/user", "operation": "delete", "n": 1},
    ]
    assert ask("select position, key, new:mail::string as mail, new:age::int + 1 as next, new from objects") == [
        {
            "position": 1,
            "key": "ada",
            "mail": "ada@example.com",
            "next": 37,
            "new": {"age": 36, "id": "ada", "mail": "ada@example.com"},
        }
    ]
    assert ask("select position, data, ts from messages where kind = 'invalid'") == [
        {"position": 4, "data": "no event", "ts": None}
    ]
    assert ask("select ts from events where position = 1") == [{"ts": "2026-01-31T12:00:00+00:00"}]


def test_a_result_is_a_table_with_a_note_if_there_are_more_rows(data: Path) -> None:
    asked = ("--data-dir", str(data), "archive", "query", "select position, key from events order by position")
    assert invoke(*asked).ok().out.splitlines() == ["POSITION  KEY", "1         ada", "2         bob", "3         bob"]
    first = invoke(*asked, "--limit", "2")
    assert (first.code, first.err) == (0, "only the first 2 rows are shown: raise --limit for more\n")
    assert first.out.splitlines() == ["POSITION  KEY", "1         ada", "2         bob"]


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("selct 1", "Syntax error at or near 'selct' (line 1, column 1)"),
        ("select * from evnts", "`evnts` cannot be found"),
        ("select nothing from events", "`nothing`"),
        ("select cast('x' as int) from events", "'x'"),
        ("", "Syntax error"),
    ],
)
def test_an_invalid_query_fails_with_one_line(data: Path, sql: str, said: str) -> None:
    invoke("--data-dir", str(data), "archive", "query", sql).refused(said)


def test_an_archive_that_is_empty_or_not_there_has_empty_tables(tmp_path: Path, spark: SparkSession) -> None:
    where = ("--data-dir", str(tmp_path / "nothing"))
    assert invoke(*where, "archive", "query", "select count(*) as n from events").ok().out.splitlines() == ["N", "0"]
    assert invoke(*where, "archive", "query", "select * from objects", "--json").ok().out == ""
    assert invoke(*where, "archive", "snapshot").ok().out == "The archive is empty: nothing to do\n"
    assert invoke(*where, "archive", "compact").ok().out == "Nothing to merge: 0 ranges\n"


def test_messages_not_archived_yet_are_read_from_the_server(
    tmp_path: Path, spark: SparkSession, own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own_server()
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(server.address))
    count = ("--data-dir", str(tmp_path), "--timeout", "1s", "archive", "query", "select count(*) as n from events")
    assert invoke(*count, "--json").ok().json == {"n": 0}
    invoke("publish", "--realm", "shop", "--topic", "orders", "--key", "1", "--new", '{"id": 1}').ok()
    assert invoke(*count, "--json").ok().json == {"n": 1}
    server.stop()
    alone = invoke(*count, "--json")
    assert (alone.code, alone.json) == (0, {"n": 0})
    assert "messages that are not archived yet are left out" in alone.err


def test_a_snapshot_is_made_of_the_archive(data: Path) -> None:
    assert invoke("--data-dir", str(data), "archive", "snapshot").ok().out == "Snapshot at position 4\n"
    made = invoke("--data-dir", str(data), "archive", "snapshot", "--json").ok().json
    assert made["position"] == 4
    assert made["bytes"] > 0


def test_the_program_prints_only_the_result(data: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "--data-dir", str(data), "archive", "query", "select count(*) as n from events", "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"n": 3}\n', "")


def test_the_error_is_the_message_of_spark_without_its_code() -> None:
    assert error_sentence("[A_B.C] Wrong. SQLSTATE: 42 ; line 1 pos 14;\n'Project [*]\n") == "Wrong (line 1, column 15)"
    assert error_sentence("something else\nat java") == "something else"
    assert to_json_value(bytearray(b"\xff")) == "/w=="
