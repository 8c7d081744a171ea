"""The command line as a test drives it: in this process, against the shared server."""

import os
from pathlib import Path

import pytest

from purveyor.jetstream.address import Address
from tests.support.command_line import SOURCE, Cli, invoke, url_of


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings but those of the test, and a directory without a settings file."""
    for name in [name for name in os.environ if name.startswith("PURVEYOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli(address: Address, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `purveyor` against the shared server, whose address is in the environment."""
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(address))
    return invoke


@pytest.fixture
def stream(cli: Cli, unique: str) -> str:
    """A stream that takes `<its name>.>`."""
    cli("stream", "add", unique, "--subjects", f"{unique}.>").ok()
    return unique
