"""Nothing outlives its owner: a server goes with its parent, and its store is free for the next one at once."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from purveyor.jetstream.server import find_running_server
from purveyor.jetstream.server.files import Files, lock_store
from purveyor.model.errors import StoreInUse
from tests.jetstream.server.processes import Supervisor, kill, store_one, stored
from tests.support.killing import alive
from tests.support.nats_servers import OwnServer
from tests.support.waiting import PATIENCE_SECONDS, wait_until

Supervise = Callable[..., Supervisor]

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")


@linux
async def test_a_killed_parent_takes_its_server_along(
    supervise: Supervise, own_server: OwnServer, tmp_path: Path
) -> None:
    other = supervise(tmp_path / "nats")
    server = int(other.answer()["server"])
    address = find_running_server(tmp_path / "nats")
    assert address is not None
    await store_one(address, "S", b"one")
    kill(other.pid)
    other.process.wait()  # a signal is only sent by kill: until it arrives the parent owns the store, rightly
    next_one = own_server(directory=tmp_path / "nats")  # at once: waits for the dying server by itself
    assert not alive(server)
    assert next_one.address == address
    assert await stored(next_one.address, "S") == [b"one"]


@linux
def test_the_store_is_owned_until_the_server_is_gone_too(
    supervise: Supervise, own_server: OwnServer, tmp_path: Path
) -> None:
    other = supervise(tmp_path / "nats")
    server = int(other.answer()["server"])
    kill(server, signal.SIGSTOP)  # it cannot see yet that its parent died
    kill(other.pid)
    other.process.wait()
    with pytest.raises(StoreInUse, match=f"its server, process {server}, still holds the store"):
        lock_store(Files(tmp_path / "nats"), wait_seconds=0.1)
    kill(server, signal.SIGCONT)
    own_server(directory=tmp_path / "nats")
    assert not alive(server)


@linux
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGABRT])
def test_a_parent_that_ends_by_any_signal_takes_its_server_along(
    supervise: Supervise, tmp_path: Path, how: signal.Signals
) -> None:
    other = supervise(tmp_path / "nats")
    server = int(other.answer()["server"])
    kill(other.pid, how)
    wait_until(lambda: not alive(server))
    wait_until(lambda: find_running_server(tmp_path / "nats") is None)


def test_a_parent_that_forgets_to_stop_takes_its_server_along(supervise: Supervise, tmp_path: Path) -> None:
    other = supervise(tmp_path / "nats", "forget")
    server = int(other.answer()["server"])
    other.go_on()
    assert other.process.wait(PATIENCE_SECONDS) == 0
    assert not alive(server)


@linux
def test_ctrl_c_in_the_terminal_reaches_the_parent_alone(supervise: Supervise, tmp_path: Path) -> None:
    other = supervise(tmp_path / "nats")
    server = int(other.answer()["server"])
    assert os.getpgid(server) != os.getpgid(other.pid)


def test_another_process_is_refused_and_the_error_names_the_owner(
    supervise: Supervise, own_server: OwnServer, tmp_path: Path
) -> None:
    server = own_server(directory=tmp_path / "nats")
    refused = supervise(tmp_path / "nats").answer()
    assert refused["error"] == "StoreInUse"
    assert f"process {os.getpid()}" in str(refused["message"])
    assert str(server.address) in str(refused["message"])


def test_of_processes_that_race_exactly_one_wins(supervise: Supervise, tmp_path: Path) -> None:
    for attempt in range(3):
        directory = tmp_path / f"nats-{attempt}"
        racers = [supervise(directory, "ready") for _ in range(4)]
        for racer in racers:
            racer.answer()
        for racer in racers:
            racer.go_on()
        answers = [racer.answer() for racer in racers]
        assert sorted(str(answer.get("error", "won")) for answer in answers) == ["StoreInUse"] * 3 + ["won"]
        winner = next(racer for racer, answer in zip(racers, answers, strict=True) if "url" in answer)
        for answer in answers:
            assert "url" in answer or f"process {winner.pid}" in str(answer["message"])
        winner.close()


@linux
def test_no_secret_in_any_command_line_or_log(own_server: OwnServer) -> None:
    server = own_server()
    password = server.address.password
    assert password
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            shown = (directory / "cmdline").read_bytes() + (directory / "comm").read_bytes()
        except OSError:
            continue  # ended meanwhile
        assert password.encode() not in shown
    assert password not in (server.directory / "nats.log").read_text()
    assert password not in (server.directory / "nats.json").read_text()
    assert password.encode() not in Path(f"/proc/{server.pid}/environ").read_bytes()


@linux
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_of_the_parent_can_neither_stop_the_server_nor_keep_the_store(
    own_server: OwnServer, tmp_path: Path
) -> None:
    server = own_server(directory=tmp_path / "nats")
    child = os.fork()
    if child == 0:
        server.stop()
        os._exit(0)
    os.waitpid(child, 0)
    assert find_running_server(tmp_path / "nats") == server.address
