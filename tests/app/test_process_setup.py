"""Files of Purveyor are readable by their owner only, whatever the umask of the shell is."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from purveyor.app.process_setup import private_umask, restrict_permissions
from tests.support.command_line import invoke


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    for path in (made, made / "archive", made / "archive" / "ranges", made / "checkpoints", made / "logs"):
        path.mkdir()
        path.chmod(0o755)
    return made


def test_the_directories_at_the_top_are_closed_and_nothing_below_is_touched(data: Path) -> None:
    (data / "pipeline-status.json").touch()
    restrict_permissions(data)
    assert {name: mode(data / name) for name in ("", "archive", "checkpoints", "logs")} == {
        "": 0o700, "archive": 0o700, "checkpoints": 0o700, "logs": 0o700,
    }  # fmt: skip
    assert mode(data / "archive" / "ranges") == 0o755


def test_a_directory_that_holds_something_else_stays_open(data: Path) -> None:
    (data / "website").mkdir()
    restrict_permissions(data)
    assert mode(data) == 0o755
    assert mode(data / "archive") == 0o700


def test_no_directory_and_a_file_in_its_place_are_no_matter(tmp_path: Path) -> None:
    restrict_permissions(tmp_path / "none")
    (tmp_path / "file").touch()
    restrict_permissions(tmp_path / "file")
    (tmp_path / "archive").touch()
    restrict_permissions(tmp_path)


def test_children_inherit_the_mask_and_the_block_ends_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with private_umask():
            subprocess.run([sys.executable, "-c", f"open({str(tmp_path / 'inside')!r}, 'w')"], check=True)
        (tmp_path / "outside").touch()
    finally:
        os.umask(before)
    assert (mode(tmp_path / "inside"), mode(tmp_path / "outside")) == (0o600, 0o644)


@pytest.mark.parametrize("command", [("up", "--port", "99999"), ("serve", "pipeline", "--parts", "none")])
def test_a_command_that_is_refused_leaves_the_mask_as_it_was(tmp_path: Path, command: tuple[str, ...]) -> None:
    before = os.umask(0o022)
    try:
        invoke("--data-dir", str(tmp_path / "data"), *command).refused()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
