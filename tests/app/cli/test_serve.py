import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from purveyor.jetstream.server import find_running_server
from tests.support.certificates import self_signed
from tests.support.command_line import PROGRAM, invoke, url_of
from tests.support.waiting import PATIENCE_SECONDS, wait_until

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `purveyor serve nats` in a process of its own, on a data directory of its own."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> "subprocess.Popen[str]":
        command = [*PROGRAM, "--data-dir", str(tmp_path / "data"), "serve", "nats", "--sync", "2m", *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def event(process: "subprocess.Popen[str]") -> Any:
    return json.loads(line(process))


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_and_stops_cleanly(start: Start, tmp_path: Path, stop: signal.Signals) -> None:
    server = start()
    ready = line(server)
    assert ready.startswith("ready: NATS at nats://127.0.0.1:")
    address = find_running_server(tmp_path / "data" / "nats")
    assert address is not None
    assert address.password
    assert str(address) in ready
    assert str(tmp_path / "data" / "nats") in ready
    assert address.password not in ready
    server.send_signal(stop)
    out, err = server.communicate(timeout=PATIENCE_SECONDS)
    assert (server.returncode, err) == (0, "")
    assert out.startswith("stopped: ")
    assert find_running_server(tmp_path / "data" / "nats") is None


def test_other_commands_find_it_and_a_second_one_names_the_owner_of_the_store(start: Start, tmp_path: Path) -> None:
    server = start()
    line(server)
    data = ("--data-dir", str(tmp_path / "data"))
    invoke(*data, "stream", "add", "ORDERS").ok()
    assert invoke(*data, "stream", "ls").ok().out.splitlines()[1].startswith("ORDERS")
    second = start()
    out, err = second.communicate(timeout=PATIENCE_SECONDS)
    assert (second.returncode, out) == (1, "")
    assert err.splitlines()[0].startswith("error: ")
    assert str(server.pid) in err
    assert "Traceback" not in err


def test_no_secret_shows_in_the_list_of_processes(start: Start, tmp_path: Path) -> None:
    server = start("--json")
    pid = event(server)["pid"]
    address = find_running_server(tmp_path / "data" / "nats")
    assert address is not None
    assert address.password
    for process in (pid, server.pid):
        assert address.password not in Path(f"/proc/{process}/cmdline").read_text()


def test_a_server_that_dies_is_started_again(start: Start) -> None:
    server = start("--json")
    ready = event(server)
    assert ready["event"] == "ready"
    os.kill(ready["pid"], signal.SIGKILL)
    died, again = event(server), event(server)
    assert (died["event"], again["event"]) == ("died", "restarted")
    assert died["detail"]
    assert again["pid"] not in (None, ready["pid"])
    server.terminate()
    assert json.loads(server.communicate(timeout=PATIENCE_SECONDS)[0])["event"] == "stopped"
    assert server.returncode == 0


def test_it_speaks_tls_by_settings(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = self_signed(tmp_path, "nats", "DNS:nats.example")
    monkeypatch.setenv("PURVEYOR_NATS_SERVER_TLS_CERT", str(cert))
    data = ("--data-dir", str(tmp_path / "data"))
    invoke(*data, "serve", "nats").refused("nats_server_tls_cert without nats_server_tls_key")
    monkeypatch.setenv("PURVEYOR_NATS_SERVER_TLS_KEY", str(key))
    monkeypatch.setenv("PURVEYOR_NATS_TLS_HOSTNAME", "nats.example")
    server = start("--json")
    event(server)
    invoke(*data, "stream", "add", "ORDERS").ok()

    address = find_running_server(tmp_path / "data" / "nats")
    assert address is not None
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(address).replace("nats://", "tls://"))
    invoke("--timeout", "1s", "stream", "ls").refused("no NATS server answers")
    monkeypatch.setenv("PURVEYOR_NATS_TLS_CA", str(cert))
    assert invoke("stream", "ls", "--json").ok().json[0]["config"]["name"] == "ORDERS"


def test_each_component_finds_its_own_user_and_the_rest_the_one_that_may_do_everything(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("--subscription-user", "ox")
    data = ("--data-dir", str(tmp_path / "data"))
    Path("people.ldif").write_text("dn: dc=example,dc=org\nobjectClass: domain\ndc: example\n")
    wait_until(lambda: find_running_server(tmp_path / "data" / "nats") is not None)
    (tmp_path / "data" / "nats" / "password.intake").rename(tmp_path / "kept")
    invoke(*data, "import", "people.ldif").refused("no user 'intake'")
    (tmp_path / "kept").rename(tmp_path / "data" / "nats" / "password.intake")
    invoke(*data, "import", "people.ldif").ok()
    invoke(*data, "stream", "rm", "stream:ldif", "--yes").ok()

    bound = find_running_server(tmp_path / "data" / "nats", "subscription-ox")
    assert bound is not None
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(bound))
    monkeypatch.setenv("PURVEYOR_NATS_INBOX", bound.inbox)
    invoke("stream", "info", "stream:other").refused("may not publish to '$js.api.stream.info.stream:other'")


def test_a_bad_option_is_refused(tmp_path: Path) -> None:
    data = ("--data-dir", str(tmp_path / "data"))
    invoke(*data, "serve", "nats", "--sync", "soon").refused("sync", "'soon'", "--sync")
    invoke(*data, "serve", "nats", "--port", "99999").refused("99999")
    invoke(*data, "serve", "nats", "--subscription-user", "a.b").refused("subscription-user", "a.b")
    invoke(*data, "serve", "nats", "--subscription-user", "incoming").refused("reserved")
