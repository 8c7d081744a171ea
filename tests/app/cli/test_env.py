"""`purveyor env`: what other programs need to reach the running system, without a password on a terminal."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from purveyor.app.cli.env import NAMES
from purveyor.app.running_parts import API, announce
from purveyor.app.settings import PREFIX, Settings
from purveyor.jetstream.server import EmbeddedServer
from tests.support.command_line import PROGRAM, Cli, invoke, on_terminal, url_of
from tests.support.nats_servers import OwnServer


@pytest.fixture
def server(own_server: OwnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedServer:
    """Run an embedded server on a data directory whose path needs quoting."""
    data_dir = tmp_path / "my data's"
    monkeypatch.setenv("PURVEYOR_DATA_DIR", str(data_dir))
    return own_server(directory=data_dir / "nats")


def test_a_shell_evaluates_it_and_programs_find_the_server(server: EmbeddedServer) -> None:
    data_dir = server.directory.parent
    with announce(data_dir, API, url="http://127.0.0.1:7778"):
        shown = invoke("env").ok().out
        assert invoke("env", "--json").ok().json == {
            "PURVEYOR_DATA_DIR": str(data_dir),
            "PURVEYOR_NATS_URL": url_of(server.address),
            "PURVEYOR_API_URL": "http://127.0.0.1:7778",
        }
    assert all(line.startswith("export PURVEYOR_") for line in shown.splitlines())
    program = f"{shlex.join(PROGRAM)} --json stream ls && printenv PURVEYOR_API_URL PURVEYOR_DATA_DIR"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    unset = shlex.quote(invoke("env", "--unset").ok().out)
    script = f"eval {shlex.quote(shown)}; {program}; eval {unset}; env"
    done = subprocess.run(["/bin/sh", "-c", script], env=clean, capture_output=True, text=True, check=True)
    listed, url, directory, *rest = done.stdout.splitlines()
    assert json.loads(listed) == []
    assert (url, directory) == ("http://127.0.0.1:7778", str(data_dir))
    assert not [line for line in rest if line.startswith(PREFIX)], "--unset removes every variable"
    assert "PURVEYOR_API_URL" not in invoke("env").ok().out, "no API runs any more"


@pytest.mark.filterwarnings("ignore:.*use of forkpty.*:DeprecationWarning")
def test_a_terminal_shows_no_password(server: EmbeddedServer) -> None:
    password = str(server.address.password)
    for flags in ((), ("--json",)):
        code, seen = on_terminal("env", *flags)
        assert code == 0
        assert password not in seen
        assert "PURVEYOR_DATA_DIR" in seen
        assert "eval" in seen
    code, seen = on_terminal("env", "--show-secrets")
    assert (code, password in seen) == (0, True)


def test_a_server_of_your_own_has_its_files_named(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    creds, ca = tmp_path / "my.creds", tmp_path / "ca.pem"
    creds.write_text("x")
    ca.write_text("x")
    monkeypatch.setenv("PURVEYOR_NATS_URL", "tls://nats.example:4222")
    monkeypatch.setenv("PURVEYOR_NATS_CREDENTIALS", str(creds))
    monkeypatch.setenv("PURVEYOR_NATS_TLS_CA", str(ca))
    monkeypatch.setenv("PURVEYOR_API_URL", "https://api.example")
    found = cli("env", "--json").ok().json
    assert found["PURVEYOR_NATS_URL"] == "tls://nats.example:4222"
    assert (found["PURVEYOR_NATS_CREDENTIALS"], found["PURVEYOR_NATS_TLS_CA"]) == (str(creds), str(ca))
    assert found["PURVEYOR_API_URL"] == "https://api.example"
    assert "x" not in found.values()


def test_without_a_server_it_says_what_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_DATA_DIR", str(tmp_path / "none"))
    assert "purveyor serve nats" in invoke("env").refused("no NATS server").err
    assert invoke("env", "--unset").ok().out.startswith("unset PURVEYOR_DATA_DIR ")


def test_every_variable_is_a_setting() -> None:
    assert {name.lower() for name in NAMES} <= {*Settings.model_fields}
