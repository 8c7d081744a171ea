"""One process holds a file lock at a time, and a note in the file names it."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from purveyor.model.file_lock import FileLock, LockOwner, PendingLock, is_locked, read_owner, record_lock_holder
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


def test_a_pending_lock_is_taken_when_it_is_free(path: Path) -> None:
    first = FileLock(path)
    first.lock()
    pending = PendingLock(path)
    assert not pending.wait(0.05)
    first.release()
    assert pending.wait(PATIENCE_SECONDS)
    lock = pending.take()
    assert lock.is_held
    assert not FileLock(path).try_lock()
    lock.release()


def test_an_abandoned_wait_leaves_the_lock_to_others(path: Path) -> None:
    first, second = FileLock(path), FileLock(path)
    first.lock()
    pending = PendingLock(path)
    pending.abandon()
    first.release()
    wait_until(second.try_lock)
    second.release()


def test_the_holder_of_a_record_lock_is_found_if_it_has_the_file_open(path: Path) -> None:
    assert record_lock_holder(path) is None
    path.touch()
    assert record_lock_holder(path) is None
    code = (
        "import fcntl, sys, time\n"
        "held = open(sys.argv[1], 'r+'); fcntl.lockf(held, fcntl.LOCK_EX); print('held', flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert record_lock_holder(path) == other.pid
        other.kill()
        other.wait(PATIENCE_SECONDS)
    assert record_lock_holder(path) is None
