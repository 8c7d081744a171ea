"""Compaction and snapshots change the files of the archive, never its content, not even when they break half-way."""

from pathlib import Path

import pytest

from purveyor.pipeline.archive.layout import EVENTS, RANGES, SNAPSHOTS, snapshots_in
from purveyor.pipeline.archive.maintenance import compact, snapshot, snapshot_if_worthwhile
from purveyor.pipeline.archive.range_store import RangeStore
from purveyor.pipeline.archive.reader import events, objects_at
from tests.support.archive import Archive, event


class Crash(Exception):
    """Stands for a kill at a named step."""


@pytest.fixture
def filled(archive: Archive) -> Archive:
    """Four ranges, the third of them without a row."""
    archive.add(1, 2, event("a"), event("b"))
    archive.add(3, 3, event("c", topic="groups/group"))
    archive.add(4, 6)
    archive.add(7, 7, event("d"))
    archive.source = type(archive.source)(None, archive.directory)
    return archive


ROWS = [1, 2, 3, 7]


def test_neighbours_become_one_range_in_order(filled: Archive) -> None:
    assert compact(filled.spark, filled.store, fan_in=4) == 4
    assert filled.ranges() == [(1, 7)]
    assert filled.lying() == filled.positions() == ROWS
    (file,) = (filled.directory / EVENTS).rglob("*.parquet")
    rows = filled.spark.read.parquet(str(file)).collect()
    assert [(row.topic, row.position) for row in rows] == [
        ("groups/group", 3),
        ("users/user", 1),
        ("users/user", 2),
        ("users/user", 7),
    ]
    assert compact(filled.spark, filled.store, fan_in=4) == 0


def test_few_ranges_are_not_merged(filled: Archive) -> None:
    assert compact(filled.spark, filled.store) == 0
    assert len(filled.ranges()) == 4


def test_the_archive_continues_behind_a_compacted_range(filled: Archive) -> None:
    compact(filled.spark, filled.store, fan_in=4)
    filled.add(8, 9, event("e"), event("f"))
    assert filled.ranges() == [(1, 7), (8, 9)]
    assert filled.lying() == filled.positions() == [*ROWS, 8, 9]


def test_a_query_that_was_planned_before_still_reads_its_files(filled: Archive) -> None:
    planned = events(filled.spark, filled.source, 1, 7)
    compact(filled.spark, filled.store, fan_in=4)
    filled.store.clean_up()
    assert sorted(row.position for row in planned.collect()) == ROWS
    filled.store.clean_up(grace_seconds=-1)
    assert [path.name for path in (filled.directory / RANGES).iterdir()] == [f"{1:020}-{7:020}"]
    assert filled.positions() == filled.lying() == ROWS


@pytest.mark.parametrize("step", ["drafted", "linked", f"renamed {RANGES}", f"renamed {EVENTS}"])
def test_a_compaction_that_breaks_at_any_step_loses_and_doubles_nothing(filled: Archive, step: str) -> None:
    def fail(done: str) -> None:
        if done == step:
            raise Crash(done)

    with pytest.raises(Crash):
        compact(filled.spark, RangeStore(filled.directory, on_step=fail), fan_in=4)
    assert filled.positions() == ROWS
    filled.store.clean_up()
    assert filled.positions() == filled.lying() == ROWS
    compact(filled.spark, filled.store, fan_in=4)
    assert filled.ranges() == [(1, 7)]
    assert filled.positions() == filled.lying() == ROWS


def test_two_compactions_at_once_replace_a_range_once(filled: Archive) -> None:
    def meanwhile(done: str) -> None:
        if done == "drafted":
            compact(filled.spark, filled.store, fan_in=4)

    assert compact(filled.spark, RangeStore(filled.directory, on_step=meanwhile), fan_in=4) == 0
    assert filled.ranges() == [(1, 7)]
    assert filled.positions() == filled.lying() == ROWS


def test_an_archive_of_which_only_the_events_were_saved_is_taken_over(filled: Archive, tmp_path: Path) -> None:
    (filled.directory / RANGES).rename(tmp_path / "lost")
    filled.store.clean_up()
    assert filled.positions() == filled.lying() == ROWS


def test_a_snapshot_is_of_what_is_archived_and_the_last_two_are_kept(filled: Archive) -> None:
    assert snapshot(filled.spark, filled.store) == 7
    assert snapshot(filled.spark, filled.store) == 7
    filled.add(8, 8, event("a", old={"id": "a"}))
    assert snapshot(filled.spark, filled.store) == 8
    filled.add(9, 9, event("a", {"id": "a", "again": True}))
    assert snapshot(filled.spark, filled.store) == 9
    assert snapshots_in(filled.directory) == [8, 9]
    state = {position: objects_at(filled.spark, filled.source, position) for position in (7, 8, 9)}
    assert {at: sorted(row.position for row in rows.collect()) for at, rows in state.items()} == {
        7: [1, 2, 3, 7],
        8: [2, 3, 7],
        9: [2, 3, 7, 9],
    }
    assert not list((filled.directory / SNAPSHOTS).glob(".*"))


def test_an_empty_or_small_archive_needs_no_snapshot(archive: Archive) -> None:
    assert snapshot(archive.spark, archive.store) == 0
    archive.add(1, 1, event("a"))
    assert snapshot_if_worthwhile(archive.spark, archive.store) is None
    assert snapshots_in(archive.directory) == []
