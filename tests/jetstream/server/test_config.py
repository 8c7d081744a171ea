"""Options are checked before anything starts, and written so that the server reads what was meant."""

from pathlib import Path

import pytest

from purveyor.jetstream.server.config import Identity, ServerOptions, check_sync, client_url, render
from purveyor.model.errors import InvalidConfig

ADA = Identity("purveyor-1", "ada", "s3cret")


def test_the_rendered_configuration() -> None:
    options = ServerOptions(host="::1", sync="2m", max_payload=4096, max_file_store=10**9)
    assert render(options, 4333, Path("/data/a b"), ADA) == (
        "# Written at every start of the server; changes made here are lost.\n"
        'server_name: "purveyor-1"\n'
        'host: "::1"\n'
        "port: 4333\n"
        "max_payload: 4096\n"
        "authorization {\n"
        "  users: [\n"
        '    { user: "ada", password: "s3cret" }\n'
        "  ]\n"
        "}\n"
        "jetstream {\n"
        '  store_dir: "/data/a b"\n'
        '  sync_interval: "2m"\n'
        "  max_file_store: 1000000000\n"
        "}\n"
    )


def test_every_write_is_synced_by_default() -> None:
    assert 'sync_interval: "always"' in render(ServerOptions(), 4222, Path("/data"), ADA)


@pytest.mark.parametrize("sync", ["always", "2m", "500ms", "1h30m", "0.5s"])
def test_sync_takes_always_or_a_duration(sync: str) -> None:
    assert check_sync(sync) == sync


@pytest.mark.parametrize("sync", ["", "never", "2", "2 m", "0s", "0h0m", "-1s", "2m }", "2m\n", "٣s"])
def test_other_syncs_are_refused(sync: str) -> None:
    with pytest.raises(InvalidConfig, match="invalid sync"):
        ServerOptions(sync=sync)


@pytest.mark.parametrize(
    "options",
    [
        {"port": 0},
        {"port": 65536},
        {"host": ""},
        {"host": "a b"},
        {"host": "a\nb"},
        {"max_payload": 10},
        {"max_payload": 65 * 1024 * 1024},
        {"max_file_store": 0},
        {"start_seconds": 0},
        {"stop_seconds": -1},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidConfig):
        ServerOptions(**options)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("directory", ["/data/a\nb", "/data/a\udce9"])
def test_a_directory_that_the_file_cannot_hold_is_refused(directory: str) -> None:
    with pytest.raises(InvalidConfig, match="store directory"):
        render(ServerOptions(), 4222, Path(directory), ADA)


def test_the_password_shows_in_no_repr_and_no_error() -> None:
    assert "s3cret" not in repr(ADA)
    with pytest.raises(InvalidConfig) as caught:
        render(ServerOptions(), 4222, Path("/data"), Identity("purveyor-1", "ada", "s3cret\n"))
    assert "s3cret" not in str(caught.value)


def test_a_wildcard_host_is_reached_by_loopback() -> None:
    assert client_url("0.0.0.0", 4222) == "nats://127.0.0.1:4222"
    assert client_url("::", 4222) == "nats://[::1]:4222"
    assert client_url("localhost", 4222) == "nats://localhost:4222"
