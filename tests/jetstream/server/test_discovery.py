"""A program finds the server that the environment names, or the embedded server of the data directory."""

from pathlib import Path

import pytest

from purveyor.jetstream import connect
from purveyor.jetstream.address import Address, Tls
from purveyor.jetstream.server import discovery_environment, find_server_address
from purveyor.model.errors import InvalidConfig, ServerMissing, SetupError
from purveyor.queues import connect as connect_queues
from tests.support.command_line import url_of
from tests.support.nats_servers import OwnServer


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*discovery_environment(), "PURVEYOR_NATS_URL", "PURVEYOR_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))


async def test_connect_finds_the_embedded_server_of_the_data_directory(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ServerMissing, match="no embedded server runs on") as missing:
        async with connect():
            pass
    assert "PURVEYOR_NATS_URL" in (missing.value.fix or "")
    assert "PURVEYOR_DATA_DIR" in (missing.value.fix or "")
    assert str(tmp_path / "xdg" / "purveyor") in missing.value.message

    server = own_server(directory=tmp_path / "xdg" / "purveyor" / "nats")
    async with connect() as jetstream:
        assert jetstream.address.urls == server.address.urls
        await jetstream.streams.list()
    async with connect_queues() as queues:
        await queues.streams.list()

    monkeypatch.setenv("PURVEYOR_DATA_DIR", str(tmp_path / "other"))
    with pytest.raises(ServerMissing, match="other"):
        find_server_address()
    monkeypatch.setenv("PURVEYOR_DATA_DIR", str(tmp_path / "xdg" / "purveyor"))
    assert find_server_address() == server.address


async def test_a_url_in_the_environment_comes_before_the_data_directory(
    address: Address, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PURVEYOR_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(address))
    async with connect() as jetstream:
        assert jetstream.address.urls == address.urls


def test_the_variables_are_those_of_the_settings(tmp_path: Path) -> None:
    creds = tmp_path / "x.creds"
    creds.write_text("x")
    given = {
        "PURVEYOR_NATS_URL": "nats://a:1,b:2",
        "PURVEYOR_NATS_CREDENTIALS": str(creds),
        "PURVEYOR_NATS_INBOX": "_INBOX.me",
        "PURVEYOR_NATS_TLS_CA": "~/ca.pem",
        "PURVEYOR_NATS_TLS_CERT": "c.pem",
        "PURVEYOR_NATS_TLS_KEY": "k.pem",
        "PURVEYOR_NATS_TLS_HOSTNAME": "h",
    }
    found = find_server_address(given)
    assert (found.urls, found.credentials, found.inbox) == (("nats://a:1", "nats://b:2"), creds, "_INBOX.me")
    assert found.tls == Tls(Path.home() / "ca.pem", Path("c.pem"), Path("k.pem"), "h")
    assert discovery_environment({**given, "HOME": "/"}) == given
    assert Path(discovery_environment({"PURVEYOR_DATA_DIR": "data"})["PURVEYOR_DATA_DIR"]).is_absolute()


def test_a_wrong_variable_is_an_error_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="http://x"):
        find_server_address({"PURVEYOR_NATS_URL": "http://x"})
    with pytest.raises(SetupError, match="does not exist"):
        find_server_address({"PURVEYOR_NATS_URL": "nats://x", "PURVEYOR_NATS_CREDENTIALS": str(tmp_path / "none")})
    empty = {"PURVEYOR_NATS_URL": "", "PURVEYOR_DATA_DIR": str(tmp_path)}
    with pytest.raises(ServerMissing):
        find_server_address(empty)
