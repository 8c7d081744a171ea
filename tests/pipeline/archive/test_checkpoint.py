"""The archive continues behind its last range with any checkpoint, and never over a gap."""

import shutil
from pathlib import Path

import pytest

from purveyor.model.errors import DataLost
from purveyor.pipeline.archive.layout import EVENTS, RANGES
from tests.support.archive import Archive, event
from tests.support.waiting import wait_until


def released(archive: Archive) -> None:
    """Archive everything, and wait until the stream has dropped it."""
    with archive.running():
        wait_until(lambda: archive.broker.floor(archive.stream, "archive") == archive.last())


def test_a_lost_an_older_and_a_damaged_checkpoint(archive: Archive, tmp_path: Path) -> None:
    checkpoint = archive.settings.checkpoint
    archive.publish(event("a"), event("b"))
    released(archive)
    shutil.copytree(checkpoint, tmp_path / "older")
    archive.publish(event("c"))
    released(archive)
    shutil.rmtree(checkpoint)
    archive.publish(event("d"))
    released(archive)
    shutil.rmtree(checkpoint)
    shutil.move(tmp_path / "older", checkpoint)
    archive.publish(event("e"))
    released(archive)
    newest = max((checkpoint / "commits").glob("[0-9]*"))
    newest.write_bytes(b"")
    newest.with_name(f".{newest.name}.crc").unlink(missing_ok=True)
    archive.publish(event("f"))
    released(archive)
    assert archive.positions() == archive.lying() == [1, 2, 3, 4, 5, 6]


def test_an_older_archive_is_filled_from_the_stream_as_long_as_that_holds_the_events(archive: Archive) -> None:
    archive.publish(event("a"))
    released(archive)
    archive.publish(event("b"), event("c"))
    archive.catch_up(hold_seconds=3600.0)
    remove_behind(archive, 1)
    archive.publish(event("d"))
    archive.catch_up(hold_seconds=3600.0)
    assert archive.positions() == archive.lying() == [1, 2, 3, 4]


def test_an_older_archive_whose_events_are_gone_stops_and_names_what_to_restore(archive: Archive) -> None:
    archive.publish(event("a"))
    released(archive)
    archive.publish(event("b"), event("c"))
    released(archive)
    remove_behind(archive, 1)
    archive.publish(event("d"))
    with pytest.raises(DataLost, match="positions 2 to 3 were archived once") as raised, archive.running():
        pass
    assert "restore the archive that reaches position 3" in str(raised.value.fix)


def remove_behind(archive: Archive, position: int) -> None:
    """Make the archive end at a position, as one that an older backup brought back."""
    for place in (EVENTS, RANGES):
        for path in (archive.directory / place).iterdir():
            if int(path.name.partition("-")[0]) > position:
                shutil.rmtree(path)
