"""A checkpoint is on the disk before the durable moves, and after a power cut all other batches run again."""

import json
import os
from pathlib import Path

import pytest

from purveyor.model.errors import Unavailable, UnreadableRecord
from purveyor.spark import checkpoint_files
from purveyor.spark.checkpoint_files import SYNCED_NAME, CheckpointFiles, roll_back
from purveyor.spark.offsets import Offset
from purveyor.spark.options import read_settings
from purveyor.spark.readers import JetStreamStreamReader
from purveyor.spark.stream_control import StreamControl
from tests.support.broker import Broker


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint whose batches 0 to 3 are committed; batch 4 has begun."""
    made = tmp_path / "checkpoint"
    for number in range(5):
        write(made / "offsets" / str(number))
        write(made / "offsets" / f".{number}.crc")
        write(made / "state" / "0" / "0" / f"{number + 1}.changelog")
    for number in range(4):
        write(made / "commits" / str(number))
    return made


def write(path: Path, data: bytes = b"v1\n{}") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


class Flushed:
    """Which paths were flushed to the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        real = os.fsync

        def fsync(handle: int) -> None:
            self.paths.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
            real(handle)

        monkeypatch.setattr(os, "fsync", fsync)


def test_every_file_and_then_every_directory_is_flushed_before_the_note_is_written(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = Flushed(monkeypatch)
    CheckpointFiles(checkpoint).sync()
    files = {str(path) for path in checkpoint.rglob("*") if path.is_file() and path.name != SYNCED_NAME}
    directories = {str(path) for path in (checkpoint, *checkpoint.rglob("*")) if path.is_dir()}
    assert set(flushed.paths[: len(files)]) == files
    assert directories <= set(flushed.paths[len(files) : -2])
    assert flushed.paths[-2:] == [str(checkpoint / f".{SYNCED_NAME}.draft"), str(checkpoint)]
    assert json.loads((checkpoint / SYNCED_NAME).read_bytes())["batch"] == 3


def test_what_has_not_changed_is_not_flushed_again(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "_CLOCK_SLACK_SECONDS", -3600)  # as if an hour had passed
    files = CheckpointFiles(checkpoint)
    files.sync()
    flushed = Flushed(monkeypatch)
    files.sync()
    assert flushed.paths == []


def test_nothing_is_noted_before_a_batch_is_committed(tmp_path: Path) -> None:
    write(tmp_path / "offsets" / "0")
    CheckpointFiles(tmp_path).sync()
    assert not (tmp_path / SYNCED_NAME).exists()


def test_after_a_power_cut_the_batches_behind_the_note_are_forgotten(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CheckpointFiles(checkpoint).sync()
    before = names(checkpoint)
    write(checkpoint / "commits" / "4", b"")  # as a power cut leaves it
    write(checkpoint / "offsets" / "5", b"")
    write(checkpoint / "state" / "0" / "0" / "6.zip")
    write(checkpoint / "state" / "0" / "0" / ".6.zip.crc")
    monkeypatch.setattr(checkpoint_files, "boot_id", lambda: "another boot")
    assert roll_back(checkpoint) == [4, 5]
    assert names(checkpoint) == before - {"offsets/4", "offsets/.4.crc", "state/0/0/5.changelog"}
    assert roll_back(checkpoint) == []


def test_after_a_crash_of_the_program_alone_nothing_is_forgotten(checkpoint: Path) -> None:
    CheckpointFiles(checkpoint).sync()
    before = names(checkpoint)
    assert roll_back(checkpoint) == []
    assert names(checkpoint) == before


def test_a_checkpoint_of_an_older_version_is_left_alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "boot_id", lambda: "another boot")
    assert roll_back(checkpoint) == []


def test_where_the_system_does_not_tell_a_boot_each_start_counts_as_one(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoint_files, "_BOOT_ID", tmp_path / "none")
    CheckpointFiles(checkpoint).sync()
    assert roll_back(checkpoint) == [4]


def test_a_note_of_a_newer_version_stops_the_part(checkpoint: Path) -> None:
    write(checkpoint / SYNCED_NAME, b'{"version": 9, "batch": 1, "boot": "x"}')
    with pytest.raises(UnreadableRecord, match="version 9"):
        roll_back(checkpoint)


@pytest.fixture
def queue(broker: Broker, unique: str) -> str:
    broker.make(unique, retention="interest")
    broker.durable(unique, "spark")
    broker.numbers(unique, 1, 10)
    return unique


def test_a_durable_does_not_move_while_its_checkpoint_cannot_be_flushed(
    broker: Broker, queue: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"servers": broker.url, "stream": queue, "durable": "spark", "syncCheckpoint": str(checkpoint)}
    control = StreamControl(read_settings(options))
    offset = Offset(queue, broker.created(queue), 4)

    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(Unavailable, match="cannot be flushed to the disk: Input/output error"):
            control.move_durable(offset)
    assert broker.floor(queue, "spark") == 0
    control.move_durable(offset)
    assert broker.floor(queue, "spark") == 4
    assert (checkpoint / SYNCED_NAME).exists()


def test_a_durable_is_held_back_until_the_time_is_over(broker: Broker, queue: str) -> None:
    options = {"servers": broker.url, "stream": queue, "durable": "spark", "idleWaitMillis": "0"}
    held = JetStreamStreamReader(read_settings({**options, "holdSeconds": "3600"}))
    start = held.initialOffset()
    end = {**start, "sequence": 10}
    held.commit({**start, "sequence": 4})
    held.latestOffset(end, held.getDefaultReadLimit())
    assert broker.floor(queue, "spark") == 0
    at_once = JetStreamStreamReader(read_settings(options))
    at_once.latestOffset(end, at_once.getDefaultReadLimit())
    assert broker.floor(queue, "spark") == 10
