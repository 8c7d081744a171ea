"""Other programs read the files of the archive without Purveyor."""

from pathlib import Path

import duckdb
import pyarrow.parquet as pq

from purveyor.pipeline.archive.layout import EVENTS
from purveyor.pipeline.archive.maintenance import compact
from tests.support.archive import Archive, event

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "archive.md"


def in_the_guide(beginning: str) -> str:
    """The query of the guide that begins like that."""
    lines = GUIDE.read_text().splitlines()
    return next(line for line in lines if line.startswith(beginning))


def ask(archive: Archive, query: str) -> list[tuple[object, ...]]:
    with duckdb.connect() as connection:
        return connection.execute(query.replace("archive/events", str(archive.directory / EVENTS))).fetchall()


def test_duckdb_answers_the_queries_of_the_guide(archive: Archive) -> None:
    archive.publish(event("1"), event("2"), event("1", old={"id": "1"}), event("a", topic="groups/group"), "no JSON")
    archive.catch_up()

    counted = ask(archive, in_the_guide("select topic, operation, count(*)"))
    assert counted == [("groups/group", "create", 1), ("users/user", "create", 2), ("users/user", "delete", 1)]
    found = ask(archive, in_the_guide("select position, decode(data)"))
    assert sorted(found) == [(1, "1"), (2, "2"), (3, None)]
    (broken,) = ask(archive, "select kind, decode(data) from 'archive/events/*/*.parquet' where position = 5")
    assert broken[0] != "event"
    assert broken[1] == "no JSON"


def test_duckdb_reads_an_archive_whose_files_were_merged(archive: Archive) -> None:
    for first in (1, 4, 7, 10):
        archive.add(first, first + 2, *(event(str(first + number)) for number in range(3)))
    assert compact(archive.spark, archive.store, fan_in=4) == 4
    rows = ask(archive, "select position, key from 'archive/events/*/*.parquet' order by position")
    assert rows == [(number, str(number)) for number in range(1, 13)]


def test_arrow_reads_the_directory_as_pandas_has_it_read(archive: Archive) -> None:
    """`pandas.read_parquet` hands the path to this function, and turns the table into a frame."""
    archive.publish(event("1"), event("2"), event("a", topic="groups/group"), "no JSON")
    archive.catch_up()
    rows = pq.read_table(archive.directory / EVENTS).sort_by("position").to_pylist()
    assert [(row["position"], row["topic"], row["key"]) for row in rows[:3]] == [
        (1, "users/user", "1"),
        (2, "users/user", "2"),
        (3, "groups/group", "a"),
    ]
    assert rows[3]["kind"] != "event"
    assert rows[3]["data"] == b"no JSON"
    one = pq.read_table(archive.directory / EVENTS, filters=[("topic", "=", "groups/group")])
    assert one.column("position").to_pylist() == [3]
