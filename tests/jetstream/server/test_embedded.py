"""The embedded server is a real one: it starts, comes back when it dies, keeps its data and its port, and stops."""

import asyncio
import errno
import itertools
import os
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from nats.js import JetStreamContext

from purveyor.jetstream.server import (
    EmbeddedServer,
    EventKind,
    RestartPolicy,
    ServerEvent,
    ServerOptions,
    find_running_server,
    supervisor,
)
from purveyor.jetstream.server.config import Permissions
from purveyor.jetstream.server.server_checks import free_port
from purveyor.model.errors import ServerFailed, ServerMissing, SetupError, StoreInUse
from tests.jetstream.server.processes import Events, jetstream_of, kill, store_one, stored
from tests.support.killing import alive
from tests.support.nats_servers import FAST, OwnServer
from tests.support.waiting import wait_until

TWO_DEATHS = ServerOptions(sync="2m", restart=RestartPolicy(max_deaths=2))


async def test_jetstream_answers_as_soon_as_start_returns(own_server: OwnServer) -> None:
    server = await asyncio.to_thread(own_server, ServerOptions())
    assert await store_one(server.address, "S", b"one") == 1
    assert server.pid is not None
    assert alive(server.pid)
    await asyncio.to_thread(server.stop)


async def test_the_data_and_the_port_are_there_in_the_next_run(own_server: OwnServer, tmp_path: Path) -> None:
    first = own_server(directory=tmp_path / "nats")
    await store_one(first.address, "S", b"one")
    first.stop()
    second = own_server(directory=tmp_path / "nats")
    assert second.address == first.address
    assert await stored(second.address, "S") == [b"one"]


async def test_killed_it_comes_back_on_the_same_port_with_its_data(own_server: OwnServer) -> None:
    events = Events()
    server = own_server(on_event=events)
    events.next(EventKind.STARTED)
    address, killed = server.address, server.pid
    await store_one(address, "S", b"one")
    kill(killed)
    assert "SIGKILL" in events.next(EventKind.DIED).detail
    assert events.next(EventKind.RESTARTED).pid == server.pid != killed
    assert (server.address, server.restarts, server.failure) == (address, 1, None)
    assert await stored(address, "S") == [b"one"]
    found = find_running_server(server.directory)
    assert found == address
    assert (server.directory / "nats.pid").read_text() == f"{server.pid}\n"


def test_it_gives_up_after_repeated_deaths_and_can_be_started_again(own_server: OwnServer) -> None:
    events = Events()
    server = own_server(TWO_DEATHS, on_event=events)
    events.next(EventKind.STARTED)
    kill(server.pid)
    events.next(EventKind.DIED)
    events.next(EventKind.RESTARTED)
    kill(server.pid)
    events.next(EventKind.DIED)
    assert "died 2 times" in events.next(EventKind.FAILED).detail
    assert isinstance(server.failure, ServerFailed)
    assert server.pid is None
    assert find_running_server(server.directory) is None
    server.start()
    assert find_running_server(server.directory) == server.address
    assert "failed" not in repr(server)


def test_a_server_that_cannot_restart_fails_with_its_log(own_server: OwnServer) -> None:
    events = Events()
    server = own_server(TWO_DEATHS, on_event=events)
    events.next(EventKind.STARTED)
    store = server.directory / "jetstream"
    store.rename(server.directory / "elsewhere")
    store.write_text("no directory")
    kill(server.pid)
    events.next(EventKind.DIED)
    events.next(EventKind.DIED)
    assert "not a directory" in events.next(EventKind.FAILED).detail


def test_stop_leaves_nothing_behind_and_may_be_repeated(own_server: OwnServer) -> None:
    events = Events()
    server = own_server(on_event=events)
    pid = events.next(EventKind.STARTED).pid
    server.stop()
    server.stop()
    events.next(EventKind.STOPPED)
    assert pid is not None
    assert not alive(pid)
    assert server.pid is None
    assert not (server.directory / "nats.pid").exists()


def test_a_server_that_does_not_stop_in_time_is_killed(own_server: OwnServer) -> None:
    server = own_server(ServerOptions(sync="2m", stop_seconds=0.2))
    pid = server.pid
    kill(pid, signal.SIGSTOP)  # it cannot even see the SIGTERM
    server.stop()
    assert pid is not None
    assert not alive(pid)


def test_stop_during_the_pause_before_a_restart(own_server: OwnServer) -> None:
    events = Events()
    patient = RestartPolicy(first_pause_seconds=600, max_pause_seconds=600)
    server = own_server(ServerOptions(sync="2m", restart=patient), on_event=events)
    events.next(EventKind.STARTED)
    kill(server.pid)
    events.next(EventKind.DIED)
    server.stop()
    events.next(EventKind.STOPPED)


def test_a_listener_may_stop_the_server(own_server: OwnServer, tmp_path: Path) -> None:
    events: list[ServerEvent] = []

    def listen(event: ServerEvent) -> None:
        events.append(event)
        if event.kind is EventKind.DIED:
            server.stop()

    server = own_server(on_event=listen)
    kill(server.pid)
    wait_until(lambda: len(events) == 3)
    assert [event.kind for event in events] == [EventKind.STARTED, EventKind.DIED, EventKind.STOPPED]


def test_a_listener_that_fails_is_logged_and_harms_nothing(
    own_server: OwnServer, caplog: pytest.LogCaptureFixture
) -> None:
    def listen(_event: ServerEvent) -> None:
        raise RuntimeError("no")

    server = own_server(on_event=listen)
    assert find_running_server(server.directory) == server.address
    assert "a listener failed" in caplog.text


def test_a_second_start_names_the_owner(own_server: OwnServer) -> None:
    server = own_server()
    for other in (server, EmbeddedServer(server.directory)):
        with pytest.raises(StoreInUse) as caught:
            other.start()
        assert f"process {os.getpid()}" in caught.value.message
        assert str(server.address) in caught.value.message
    assert find_running_server(server.directory) == server.address, "the first is not disturbed"


def test_files_are_for_the_owner_only(own_server: OwnServer) -> None:
    reader = Permissions(user="reader", purpose="reads a stream", publish=("$JS.API.STREAM.INFO.>",))
    directory = own_server(ServerOptions(sync="2m", users=(reader,))).directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "jetstream").stat().st_mode) == 0o700
    names = ["nats.conf", "nats.json", "nats.lock", "nats.log", "nats.pid", "password", "password.reader"]
    assert sorted(path.name for path in directory.iterdir() if path.is_file()) == names
    assert {stat.S_IMODE((directory / name).stat().st_mode) for name in names} == {0o600}


def test_another_password_is_refused(nats_server: EmbeddedServer) -> None:
    with socket.create_connection(nats_server.address.hosts()[0], timeout=60) as connection:
        connection.sendall(b'CONNECT {"user": "purveyor", "pass": "wrong"}\r\nPING\r\n')
        with connection.makefile("rb") as lines:
            answers = lines.read()
    assert b"Authorization Violation" in answers
    assert b"PONG" not in answers


def test_a_port_taken_between_runs_gives_way_to_another(own_server: OwnServer, tmp_path: Path) -> None:
    first = own_server(directory=tmp_path / "nats")
    first.stop()
    with socket.create_server(first.address.hosts()[0]):
        second = own_server(directory=tmp_path / "nats")
    assert second.address.hosts() != first.address.hosts()


def test_a_port_taken_just_before_the_server_listens_gives_way_to_another(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as thief:
        stolen = thief.getsockname()[1]
        ports = iter([stolen])
        monkeypatch.setattr(supervisor, "free_port", lambda host: next(ports, None) or free_port(host))
        server = own_server()
    assert server.address.hosts()[0][1] != stolen
    assert find_running_server(server.directory) == server.address


def test_a_requested_port_that_is_taken_is_an_error(own_server: OwnServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerFailed, match=f"port {port} on 127.0.0.1 is taken"):
            own_server(ServerOptions(port=port))


def test_a_host_of_another_machine_is_an_error(own_server: OwnServer) -> None:
    with pytest.raises(SetupError, match=r"no server can listen on 192\.0\.2\.1"):
        own_server(ServerOptions(host="192.0.2.1"))


@pytest.mark.parametrize("name", ['a "quoted" \\ name', "it's $HOME", "ünïcödé # no comment", "jetstream"])
def test_odd_directory_names_work(own_server: OwnServer, tmp_path: Path, name: str) -> None:
    server = own_server(directory=tmp_path / name)
    assert (tmp_path / name / "jetstream").is_dir()
    assert find_running_server(tmp_path / name) == server.address


def test_paths_that_cannot_be_a_store_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "nats.lock").mkdir()
    for place in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300), tmp_path / "blocked"):
        with pytest.raises(SetupError, match="cannot be used for the NATS server") as caught:
            EmbeddedServer(place).start()
        assert caught.value.fix


def test_a_directory_without_write_permission_is_an_error(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):
        closed = Path("/sys")  # root may write everywhere, but not there
    with pytest.raises(SetupError, match="cannot be used for the NATS server") as caught:
        EmbeddedServer(closed / "nats").start()
    assert os.strerror(errno.EACCES) in caught.value.message or os.strerror(errno.EPERM) in caught.value.message


def test_a_failed_start_shows_the_log_and_frees_the_store(tmp_path: Path, own_server: OwnServer) -> None:
    directory = tmp_path / "nats"
    directory.mkdir()
    (directory / "jetstream").touch()  # a file where the server wants its store
    server = EmbeddedServer(directory, FAST)
    with pytest.raises(ServerFailed, match="exited with code 1") as caught:
        server.start()
    assert "Can't start JetStream" in caught.value.message
    assert server.failure is caught.value
    (directory / "jetstream").unlink()
    own_server(directory=directory)


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "nats-server"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n[ $1 = --version ] && echo v2.99.0 || exec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    server = EmbeddedServer(tmp_path / "nats", ServerOptions(start_seconds=0.3, stop_seconds=5))
    with pytest.raises(ServerFailed, match=r"did not answer within 0\.3 s"):
        server.start()


def test_before_the_start_there_is_no_address(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    with pytest.raises(ServerMissing, match="was not started"):
        _ = server.address
    assert (server.pid, server.restarts, server.failure) == (None, 0, None)
    server.stop()


def test_the_password_is_in_no_repr(own_server: OwnServer) -> None:
    server = own_server()
    password = (server.directory / "password").read_text().strip()
    assert password == server.address.password
    assert password not in repr(server) + repr(server.address) + repr(vars(server)) + repr(vars(server._supervisor))


async def test_what_was_acknowledged_survives_being_killed(own_server: OwnServer) -> None:
    events = Events()
    server = own_server(ServerOptions(), on_event=events)
    events.next(EventKind.STARTED)
    acknowledged: list[bytes] = []

    async def publish(jetstream: JetStreamContext, life: int) -> None:
        for number in itertools.count():
            text = b"%d.%d" % (life, number)
            await jetstream.publish("S", text)
            acknowledged.append(text)

    def more_than(count: int) -> Callable[[], bool]:
        return lambda: len(acknowledged) > count

    for life in range(3):
        connection, jetstream = await jetstream_of(server.address)
        await jetstream.add_stream(name="S", subjects=["S"])
        publishing = asyncio.create_task(publish(jetstream, life))
        await asyncio.to_thread(wait_until, more_than(len(acknowledged) + 50))
        kill(server.pid)  # while messages are on their way
        await asyncio.to_thread(events.next, EventKind.DIED)
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        await connection.close()
        await asyncio.to_thread(events.next, EventKind.RESTARTED)
    found = await stored(server.address, "S")
    assert [text for text in found if text in set(acknowledged)] == acknowledged
