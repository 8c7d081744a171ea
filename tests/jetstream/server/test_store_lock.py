"""A store has one owner, held by the lock and explained by the files."""

import json
import os
import stat
from pathlib import Path

import pytest

from purveyor.jetstream.server import find_running_server
from purveyor.jetstream.server.files import LOG_LIMIT_BYTES, Files, PortFile, StoreLock, lock_store
from purveyor.model.errors import SetupError, StoreInUse
from purveyor.model.file_lock import LockOwner


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path / "store")
    files.prepare()
    return files


def ports_of(held: StoreLock, port: int = 4333) -> PortFile:
    return PortFile(f"nats://127.0.0.1:{port}", port, 4242, held.owner.pid, "purveyor", held.owner.started_at)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_second_claim_names_the_owner_its_start_and_its_address(files: Files) -> None:
    held = lock_store(files)
    files.write_ports(ports_of(held))
    with pytest.raises(StoreInUse) as caught:
        lock_store(files)
    held.release()
    for part in (str(files.directory), str(os.getpid()), held.owner.started_at, "nats://127.0.0.1:4333"):
        assert part in caught.value.message
    assert f"kill {os.getpid()}" in str(caught.value.fix)


def test_a_released_store_is_free_at_once(files: Files) -> None:
    for _ in range(3):
        lock_store(files, wait_seconds=0).release()


def test_a_released_store_has_no_owner_note(files: Files) -> None:
    held = lock_store(files)
    assert str(os.getpid()) in files.lock.read_text()
    held.release()
    assert files.lock.read_text() == ""


def test_releasing_twice_does_not_touch_a_later_owner(files: Files) -> None:
    first = lock_store(files)
    first.release()
    second = lock_store(files)
    first.release()
    with pytest.raises(StoreInUse):
        lock_store(files)
    second.release()


def test_a_store_whose_owner_is_gone_but_not_its_server_is_explained(files: Files) -> None:
    held = lock_store(files)
    gone = LockOwner(held.owner.pid, "1", held.owner.started_at)  # the pid lives, but as another process
    os.ftruncate(held.fd, 0)
    os.pwrite(held.fd, json.dumps({"pid": gone.pid, "birth": gone.birth, "started_at": gone.started_at}).encode(), 0)
    files.write_ports(ports_of(held))
    assert not gone.is_alive
    with pytest.raises(StoreInUse, match="process 4242, still holds the store") as caught:
        lock_store(files, wait_seconds=0)
    assert "kill 4242" in str(caught.value.fix)
    held.release()


def test_an_owner_without_a_note_yet_is_reported_as_unknown(files: Files) -> None:
    held = lock_store(files)
    os.ftruncate(held.fd, 0)
    with pytest.raises(StoreInUse, match="left no note"):
        lock_store(files, wait_seconds=0)
    held.release()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_does_not_keep_the_store(files: Files) -> None:
    held = lock_store(files)
    asks, says = os.pipe()
    hears, tells = os.pipe()
    child = os.fork()
    if child == 0:  # lives until the pipe closes, and must not hold the lock meanwhile
        os.close(says)
        os.write(tells, b"!")
        os.read(asks, 1)
        os._exit(0)
    os.read(hears, 1)
    held.release()
    lock_store(files, wait_seconds=0).release()
    for end in (says, asks, hears, tells):
        os.close(end)
    os.waitpid(child, 0)


def test_running_goes_by_the_lock_and_not_by_what_the_files_say(files: Files) -> None:
    assert find_running_server(files.directory) is None
    password = files.ensure_password()
    held = lock_store(files)
    assert find_running_server(files.directory) is None, "owned, but not started yet"
    files.write_ports(ports_of(held))
    found = find_running_server(files.directory)
    assert found is not None
    assert (found.urls, found.user, found.password) == (("nats://127.0.0.1:4333",), "purveyor", password)
    assert password not in repr(found)
    held.release()
    assert files.port.exists()
    assert find_running_server(files.directory) is None, "the pid lives on, the lock does not"


def test_running_ignores_the_port_file_of_the_run_before(files: Files) -> None:
    files.ensure_password()
    first = lock_store(files)
    files.write_ports(PortFile("nats://127.0.0.1:4333", 4333, 1, 1, "purveyor", "2020-01-01"))
    assert find_running_server(files.directory) is None
    first.release()


@pytest.mark.parametrize("where", ["nothing", "file", "file/below"])
def test_running_on_a_place_that_is_no_store_is_none(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    assert find_running_server(tmp_path / where) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"url": 1}', "\udcff", '"x"'])
def test_a_damaged_port_file_is_an_error_for_readers_and_ignored_by_the_next_start(files: Files, text: str) -> None:
    held = lock_store(files)
    files.port.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SetupError, match=r"nats\.json is damaged"):
        find_running_server(files.directory)
    assert files.last_port() is None
    held.release()


@pytest.mark.parametrize("text", [b"", b"\n", b"\xff\xfe", b"a\x00b"])
def test_a_damaged_password_file_is_an_error(files: Files, text: bytes) -> None:
    files.password.write_bytes(text)
    with pytest.raises(SetupError, match="password"):
        files.ensure_password()


def test_the_password_is_made_once_and_is_private(files: Files) -> None:
    password = files.ensure_password()
    assert len(password) >= 32
    files.password.chmod(0o644)
    assert files.ensure_password() == password
    assert mode(files.password) == 0o600


def test_an_own_directory_is_closed_to_others(tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    wide.mkdir(mode=0o755)
    Files(wide).prepare()
    assert mode(wide) == 0o700


def test_a_directory_with_other_things_in_it_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    (shared / "thesis.txt").touch()
    Files(shared).prepare()
    assert mode(shared) == 0o755


def test_a_directory_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    common = tmp_path / "common"
    common.mkdir()
    (common / "thesis.txt").touch()
    common.chmod(0o1777)
    with pytest.raises(SetupError, match="every user may write"):
        Files(common).prepare()


def test_a_large_log_is_rotated_while_the_server_writes_to_it(files: Files) -> None:
    log = files.open_log()
    os.write(log, b"x" * (LOG_LIMIT_BYTES + 1))
    files.trim_log()
    os.write(log, b"after\n")
    os.close(log)
    assert files.log.read_bytes() == b"after\n"
    assert files.log.with_name("nats.log.1").stat().st_size == LOG_LIMIT_BYTES + 1
    assert mode(files.log.with_name("nats.log.1")) == 0o600


def test_the_tail_of_the_log_is_what_came_since(files: Files) -> None:
    files.log.write_text("old\n")
    since = files.log_size()
    with files.log.open("a") as log:
        log.write("".join(f"line {n}\n" for n in range(50)))
    assert files.log_tail(since, lines=2) == "line 48\nline 49"
    assert "old" not in files.log_tail(since, lines=1000)
