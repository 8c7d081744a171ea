"""Run the command line in the process of the test, or on a pseudo-terminal."""

import contextlib
import io
import json
import os
import pty
import select
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import purveyor
from purveyor.app.cli.main import run
from purveyor.jetstream.address import Address

SOURCE = Path(purveyor.__file__).parent.parent


PROGRAM = (sys.executable, "-c", "from purveyor.app.cli import main; main()")


@dataclass(frozen=True)
class Outcome:
    """The exit code and the output of a command."""

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
        """Assert exit code 1 and one error line with these words, at most one fix, and no other output."""
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
    """Run a command line in this process; standard input is not a terminal."""
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
    """Return the URL of an address with its password."""
    scheme, _, host = address.urls[0].partition("://")
    return f"{scheme}://{address.user}:{address.password}@{host}"


_PATIENCE_SECONDS = 5.0


def on_terminal(*argv: str, until: bytes = b"", type_in: bytes = b"") -> tuple[int, str]:
    """Run the program on a pseudo-terminal; type `type_in` once `until` is seen.

    It is typed again if nothing happens, as a person would: a Ctrl-C in the moment between the question and the wait
    for its answer is noted by Python and looked at only when something else ends that wait.
    """
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover - another process
        os.execv(PROGRAM[0], [*PROGRAM, *argv])
    seen, asked = b"", False
    try:
        while True:
            quiet = not select.select([terminal], [], [], _PATIENCE_SECONDS)[0]
            if not quiet:
                chunk = os.read(terminal, 4096)
                if not chunk:
                    break
                seen += chunk
            if type_in and until in seen and (quiet or not asked):
                os.write(terminal, type_in)
                asked = True
    except OSError:
        pass  # how the end of a terminal looks on Linux
    finally:
        os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen.decode()
