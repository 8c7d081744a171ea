"""`purveyor serve api` as its user sees it: its lines, its files, its exit codes."""

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from purveyor.delivery.dead_letters.service import open_dead_letters
from purveyor.jetstream.address import Address
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import connect
from tests.support.certificates import self_signed
from tests.support.command_line import PROGRAM, Cli, invoke, url_of
from tests.support.nats_servers import OwnServer
from tests.support.waiting import PATIENCE_SECONDS, wait_until

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, address: Address) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
        started.append(
            subprocess.Popen(
                [*PROGRAM, "--data-dir", str(tmp_path / "data"), "serve", "api", "--port", "0", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PURVEYOR_NATS_URL": url_of(address), **environment},
            )
        )
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_it_says_where_it_listens_and_where_the_passwords_are_and_stops_cleanly(start: Start, tmp_path: Path) -> None:
    api = start("--json")
    ready = json.loads(line(api))
    assert ready["event"] == "ready"
    file = Path(ready["passwords"])
    assert file == tmp_path / "data" / "passwords.toml"
    passwords = tomllib.loads(file.read_text())
    assert not any(password in json.dumps(ready) for password in passwords.values())
    with httpx.Client(base_url=ready["url"], auth=("admin", passwords["admin_password"])) as admin:
        assert admin.get("/readyz").status_code == 200
        assert admin.get("/v1/subscriptions").status_code == 200
        assert "server" not in admin.get("/healthz").headers
        api.send_signal(signal.SIGTERM)
        out, err = api.communicate(timeout=PATIENCE_SECONDS)
    assert (api.returncode, err) == (0, "")
    assert json.loads(out)["event"] == "stopped"


def test_how_long_dead_letters_are_kept_is_what_was_set_last(start: Start, own_server: OwnServer) -> None:
    address = own_server().address

    async def kept(before: timedelta | None = None) -> timedelta:
        async with connect(address) as queues, open_dead_letters(queues) as letters:
            if before is not None:
                await letters.set_retention(before)
            return (await queues.streams.info(DEAD_LETTERS.stream)).config.max_age

    assert asyncio.run(kept(timedelta(days=30))) == timedelta(days=30)
    api = start("--json", PURVEYOR_NATS_URL=url_of(address), PURVEYOR_DEAD_LETTER_DAYS="0.5")
    url = json.loads(line(api))["url"]
    with httpx.Client(base_url=url) as anybody:
        wait_until(lambda: anybody.get("/readyz").status_code == 200)
    assert asyncio.run(kept()) == timedelta(hours=12)


def test_it_speaks_tls(start: Start, tmp_path: Path) -> None:
    self_signed(tmp_path, "api")
    api = start("--tls-cert", "api.pem", "--tls-key", "api.key")
    ready = line(api)
    assert ready.startswith("ready: API at https://127.0.0.1:")
    url = ready.split()[3].rstrip(",")
    trusting = ssl.create_default_context(cafile=str(tmp_path / "api.pem"))
    with httpx.Client(base_url=url, verify=trusting) as anybody:
        assert anybody.get("/healthz").status_code == 200


def test_others_reach_it_only_with_passwords_that_were_set(cli: Cli, start: Start) -> None:
    cli("serve", "api", "--host", "0.0.0.0", "--port", "0").refused("not every password", "PURVEYOR_ADMIN_PASSWORD")
    names = ("ADMIN", "EVENTS", "PREFILL")
    api = start("--host", "0.0.0.0", **{f"PURVEYOR_{name}_PASSWORD": f"{name}-secret" for name in names})
    assert line(api).startswith("ready: API at http://0.0.0.0:")
    api.send_signal(signal.SIGINT)
    out, err = api.communicate(timeout=PATIENCE_SECONDS)
    assert (api.returncode, out) == (0, "stopped: the API\n")
    assert "unencrypted" in err
    assert "secret" not in err


def test_mistakes_are_reported_before_anything_starts(cli: Cli, tmp_path: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with taken:
        port = str(taken.getsockname()[1])
        cli("serve", "api", "--port", port).refused("cannot listen", port)
    cli("serve", "api", "--port", "99999").refused("--port")
    cli("serve", "api", "--tls-cert", "x.pem").refused("without its key")
    cli("serve", "api", "--tls-cert", "x.pem", "--tls-key", "y.key").refused("x.pem")
    Path("broken.pem").write_text("no certificate")
    cli("serve", "api", "--tls-cert", "broken.pem", "--tls-key", "broken.pem").refused("broken.pem")


def test_without_a_server_it_says_how_to_start_one() -> None:
    invoke("--data-dir", "data", "serve", "api").refused("no NATS server", "purveyor serve nats")
