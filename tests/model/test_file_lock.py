"""One process holds a file lock at a time, and a note in the file names it."""

import json
import os
import threading
from pathlib import Path

import pytest

from purveyor.model.file_lock import FileLock, LockOwner, is_locked, read_owner
from tests.support.waiting import PATIENCE_SECONDS, wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.lock"


def test_a_held_lock_is_refused_to_others_until_it_is_released(path: Path) -> None:
    first, second = FileLock(path), FileLock(path)
    assert not is_locked(path)
    assert first.try_lock()
    assert first.try_lock(), "it is held already"
    assert is_locked(path)
    assert not second.try_lock()
    assert not second.wait(0.05)
    first.release()
    first.release()
    assert second.wait(0)
    second.release()
    assert not is_locked(path)


def test_lock_blocks_until_the_lock_is_free(path: Path) -> None:
    first, taken = FileLock(path), threading.Event()
    first.lock()

    def take() -> None:
        with FileLock(path):
            taken.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert not taken.wait(0.05)
    first.release()
    wait_until(taken.is_set)
    thread.join(PATIENCE_SECONDS)


def test_the_note_names_the_holder_and_goes_with_it(path: Path) -> None:
    lock = FileLock(path)
    assert lock.try_lock()
    assert lock.owner() is None
    owner = lock.write_owner()
    assert FileLock(path).owner() == owner
    assert (owner.pid, owner.is_alive) == (os.getpid(), True)
    assert not FileLock(path).wait(600, give_up=lambda found: found == owner)
    lock.release()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x", "since": ""}', '"x"'])
def test_a_damaged_note_is_no_note(path: Path, text: str) -> None:
    path.write_text(text)
    assert read_owner(path) is None


def test_the_note_of_an_older_release_is_understood(path: Path) -> None:
    path.write_text(json.dumps({"pid": 1, "since": "2026-01-01"}))
    assert read_owner(path) == LockOwner(1, None, "2026-01-01")


def test_a_symbolic_link_is_not_followed(tmp_path: Path, path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"x\.lock"):
        FileLock(path).try_lock()
