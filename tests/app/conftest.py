"""The command line as a test drives it: in this process, against the shared server."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import purveyor
from purveyor.app.cli.main import run
from purveyor.jetstream.address import Address

SOURCE = Path(purveyor.__file__).parent.parent
PROGRAM = (sys.executable, "-c", "from purveyor.app.cli import main; main()")


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def objects(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    def ok(self) -> "Outcome":
        assert (self.code, self.err) == (0, ""), self
        return self

    def refused(self, *words: str) -> "Outcome":
        """One error line with these words in it, at most one fix, exit code 1, nothing else."""
        lines = self.err.splitlines()
        assert self.code == 1, self
        assert self.out == "", self
        assert lines[0].startswith("error: "), self
        assert [line.split(":")[0] for line in lines[1:]] in ([], ["fix"]), self
        assert "Traceback" not in self.err
        for word in words:
            assert word in self.err, self
        return self


Cli = Callable[..., Outcome]


def invoke(*argv: str, stdin: bytes = b"") -> Outcome:
    """Run a command line here; standard input is not a terminal."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    given = io.TextIOWrapper(io.BytesIO(stdin))
    before, sys.stdin = sys.stdin, given
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(argv)
    finally:
        sys.stdin = before
    return Outcome(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


def url_of(address: Address) -> str:
    """With its password, as it would stand in the environment."""
    scheme, _, host = address.urls[0].partition("://")
    return f"{scheme}://{address.user}:{address.password}@{host}"


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
