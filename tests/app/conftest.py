"""Fixtures of the command line, which runs in this process against the shared server."""

import os
from pathlib import Path

import pytest

from purveyor.jetstream.address import Address
from tests.support.command_line import SOURCE, Cli, invoke, url_of


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove all settings from the environment, and change to a directory without a settings file."""
    for name in [name for name in os.environ if name.startswith("PURVEYOR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli(address: Address, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Return a function that runs `purveyor` against the shared server."""
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(address))
    return invoke


@pytest.fixture
def stream(cli: Cli, unique: str) -> str:
    """Add a stream with the subjects `<its name>.>`."""
    cli("stream", "add", unique, "--subjects", f"{unique}.>").ok()
    return unique
