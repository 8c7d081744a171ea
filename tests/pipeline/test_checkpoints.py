"""A checkpoint that is lost, damaged, older or ahead: each part continues with nothing lost, or names the fix."""

import shutil
from pathlib import Path

import pytest

from purveyor.model.errors import DataLost
from purveyor.pipeline.checkpoints import (
    REPLACED,
    Continue,
    FoundCheckpoint,
    StartOver,
    archive_rule,
    dispatch_rule,
    read_checkpoint,
    set_aside,
    transform_rule,
)
from purveyor.spark.offsets import Offset, StreamView

PATH = Path("/data/checkpoints/part")
STREAM = StreamView(name="stream:incoming", created="then", first=50, last=100, messages=51)
EMPTY = StreamView(name="stream:incoming", created="then", first=101, last=100, messages=0)


def at(sequence: int, created: str = "then") -> FoundCheckpoint:
    return FoundCheckpoint(PATH, Offset("stream:incoming", created, sequence))


NONE = FoundCheckpoint(PATH)
DAMAGED = FoundCheckpoint(PATH, damage="it cannot be read")


@pytest.mark.parametrize(
    ("found", "view", "floor"), [(NONE, STREAM, 80), (NONE, STREAM, None), (at(49), STREAM, 49), (at(100), EMPTY, 100)]
)
def test_dispatch_continues_with_a_checkpoint_that_fits_the_stream(
    found: FoundCheckpoint, view: StreamView, floor: int | None
) -> None:
    assert dispatch_rule(found, view, floor) == Continue()


@pytest.mark.parametrize(
    ("found", "view", "floor"),
    [(DAMAGED, STREAM, 80), (at(20), STREAM, 80), (at(101), STREAM, 80), (at(20), EMPTY, 100)],
)
def test_dispatch_replaces_a_checkpoint_if_the_stream_has_all_that_is_to_be_done(
    found: FoundCheckpoint, view: StreamView, floor: int | None
) -> None:
    assert isinstance(dispatch_rule(found, view, floor), StartOver)


@pytest.mark.parametrize("floor", [20, 48, None])
def test_dispatch_stops_if_events_were_removed_before_they_were_dispatched(floor: int | None) -> None:
    with pytest.raises(DataLost, match=r"positions 21 to 49 .* were removed before they were dispatched") as raised:
        dispatch_rule(at(20), STREAM, floor)
    assert "subscription replay NAME --from 21 --to 49" in str(raised.value.fix)


@pytest.mark.parametrize("rule", [dispatch_rule, transform_rule, archive_rule(Path("/data/archive"), 60)])
def test_a_stream_that_was_created_again_stops_the_part(rule: object) -> None:
    assert callable(rule)
    with pytest.raises(DataLost, match="deleted and created again") as raised:
        rule(at(60, "before"), STREAM, 60)
    assert "restore the NATS store" in str(raised.value.fix)


@pytest.mark.parametrize(("found", "reached"), [(NONE, 0), (NONE, 70), (at(70), 70), (at(60), 70), (at(49), 49)])
def test_the_archive_continues_with_a_checkpoint_that_fits(found: FoundCheckpoint, reached: int) -> None:
    assert archive_rule(Path("/data/archive"), reached)(found, STREAM, 49) == Continue()


@pytest.mark.parametrize(("found", "reached"), [(DAMAGED, 70), (at(80), 70), (at(20), 70), (at(120), 70), (at(60), 0)])
def test_the_archive_begins_behind_its_last_range_if_the_checkpoint_differs(
    found: FoundCheckpoint, reached: int
) -> None:
    assert isinstance(archive_rule(Path("/data/archive"), reached)(found, STREAM, 49), StartOver)


def test_an_archive_that_is_ahead_of_an_older_store_takes_no_new_event_for_an_archived_one() -> None:
    with pytest.raises(DataLost, match=r"reaches position 120, and .* ends at 100") as raised:
        archive_rule(Path("/data/archive"), 120)(NONE, STREAM, 49)
    assert "move /data/archive and /data/checkpoints/part away" in str(raised.value.fix)


def test_an_older_archive_is_not_continued_with_a_gap() -> None:
    with pytest.raises(DataLost, match="positions 31 to 49 were archived once"):
        archive_rule(Path("/data/archive"), 30)(NONE, STREAM, 49)


def test_positions_that_were_purged_before_they_were_archived_do_not_stop_the_archive() -> None:
    assert archive_rule(Path("/data/archive"), 30)(NONE, STREAM, 30) == Continue()


@pytest.mark.parametrize(("found", "floor"), [(NONE, None), (NONE, 0), (at(49), 49), (at(70), 49)])
def test_the_transform_continues_with_its_directories(found: FoundCheckpoint, floor: int | None) -> None:
    assert transform_rule(found, STREAM, floor) == Continue()


def test_the_transform_without_its_checkpoint_warns_that_the_directories_are_empty() -> None:
    decision = transform_rule(NONE, STREAM, 49)
    assert isinstance(decision, Continue)
    assert "Import each directory again" in str(decision.warning)


def test_a_damaged_checkpoint_of_the_transform_is_replaced_while_the_stream_has_every_message() -> None:
    assert isinstance(transform_rule(DAMAGED, STREAM, 0), StartOver)


@pytest.mark.parametrize(
    ("found", "message"), [(at(20), "21 to 49"), (at(120), "older NATS store"), (DAMAGED, "damaged")]
)
def test_the_transform_stops_where_its_directories_are_not_those_of_the_stream(
    found: FoundCheckpoint, message: str
) -> None:
    with pytest.raises(DataLost, match=message) as raised:
        transform_rule(found, STREAM, 49)
    assert f"move {PATH} away, start the pipeline and import each directory again" in str(raised.value.fix)


def test_the_last_checkpoints_that_were_set_aside_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "part"
    made = []
    for number in range(5):
        path.mkdir()
        (path / str(number)).touch()
        made.append(set_aside(path))
    assert sorted(tmp_path.iterdir()) == sorted(made[-3:])
    assert all(REPLACED in each.name for each in made)


@pytest.mark.parametrize("torn", ["metadata", "offsets/1", "commits/0"])
def test_a_file_that_a_power_cut_emptied_is_damage(tmp_path: Path, torn: str) -> None:
    files = {
        "metadata": '{"id":"x"}',
        "offsets/0": 'v1\n{}\n{"stream":"s","created":"c","sequence":3,"lost":0}',
        "offsets/1": 'v1\n{}\n{"stream":"s","created":"c","sequence":5,"lost":0}',
        "commits/0": 'v1\n{"nextBatchWatermarkMs":0}',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_checkpoint(tmp_path) == FoundCheckpoint(tmp_path, Offset("s", "c", 3))
    (tmp_path / torn).write_text("")
    assert read_checkpoint(tmp_path).damage is not None
    shutil.rmtree(tmp_path)
    assert read_checkpoint(tmp_path) == FoundCheckpoint(tmp_path)
