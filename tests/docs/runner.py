"""Run a guide as a reader does: commands and Python blocks, in order, against a real server."""

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import purveyor
from purveyor.app.cli.main import run
from purveyor.jetstream.server.server_checks import free_port
from tests.docs.markdown import Block, Step, blocks, matches, steps

_PATIENCE_SECONDS = 120
_PORT = re.compile(r"\b1[78][0-9]{3}\b")
"""The ports that guides use; such a number has no other meaning there."""
_RUN = ("console", "python")
_SPARK = re.compile(r"purveyor\.spark|serve pipeline|purveyor (up|demo|archive)\b")
_SHELL_CHARACTERS = set("|&;<>()$`\n")


def starts_its_server(guide: Path) -> bool:
    """Return whether the guide starts a server; other guides get one in PURVEYOR_NATS_URL."""
    found = (block for block in blocks(guide.read_text(encoding="utf-8")) if block.language == "console")
    return any(step.command.startswith("purveyor serve nats") for block in found for step in steps(block))


class Background:
    """A command in the background, with its output."""

    def __init__(self, command: str, directory: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._output = ""
        self._checked = 0
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._output += line
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def expect(self, expected: tuple[str, ...]) -> str:
        """Wait until the output since the last call is as expected; return that output."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        with self._changed:
            while not matches(expected, self._output[self._checked :]):
                if time.monotonic() > deadline or (self.process.poll() is not None and not self._reader.is_alive()):
                    break
                self._changed.wait(0.2)
            output = self._output[self._checked :]
            self._checked = len(self._output)
        return output

    def finish(self, expected: tuple[str, ...]) -> str:
        """Wait for the end of the command; return the output since the last call."""
        self.process.wait(_PATIENCE_SECONDS)
        self._reader.join(_PATIENCE_SECONDS)
        return self.expect(expected)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(_PATIENCE_SECONDS)
        self._reader.join(_PATIENCE_SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()


def runs_spark(guide: Path) -> bool:
    """Return whether a block of the guide starts Spark."""
    texts = ("\n".join(block.lines) for block in blocks(guide.read_text("utf-8")) if block.language in _RUN)
    return any(_SPARK.search(text) for text in texts)


def on_free_ports(text: str) -> str:
    """Replace the ports of a guide by free ones, so that it does not collide with another program."""
    chosen = {port: free_port("127.0.0.1") for port in sorted(set(_PORT.findall(text)))}
    return _PORT.sub(lambda found: str(chosen[found[0]]), text)


class GuideRunner:
    """Runs one guide. A plain `purveyor ...` command runs in this process, everything else in a shell."""

    def __init__(self, directory: Path, setenv: Callable[[str, str], None]) -> None:
        self._directory = directory
        self._jobs: list[Background] = []
        self._names: dict[str, object] = {"__name__": "__guide__"}
        self._python_output = ""
        programs = directory / "bin"
        programs.mkdir()
        script = programs / "purveyor"
        script.write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "from purveyor.app.cli import main; main()" "$@"\n'
        )
        script.chmod(0o755)
        source = Path(inspect.getfile(purveyor)).parent.parent
        setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        setenv("PYTHONPATH", str(source))
        setenv("PURVEYOR_DATA_DIR", str(directory / "data"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in reversed(self._jobs):
            job.stop()

    def run(self, guide: Path) -> int:
        """Run every block and return the number of steps; AssertionError names the line with another output."""
        steps_run = 0
        previous = ""
        for block in blocks(on_free_ports(guide.read_text(encoding="utf-8"))):
            if block.language == "console":
                for step in steps(block):
                    self._step(guide, step)
                    steps_run += 1
            elif block.language == "python":
                self._python(guide, block)
                steps_run += 1
            elif block.language in ("", "text") and previous == "python":
                _check(guide, block.line, "the Python block above", block.lines, self._python_output)
            previous = block.language
        return steps_run

    def _step(self, guide: Path, step: Step) -> None:
        code = 0
        if step.in_background:
            self._jobs.append(Background(step.command.rstrip(" &"), self._directory, dict(os.environ)))
            output = self._jobs[-1].expect(step.expected)
        elif step.command == "wait":
            output = self._jobs[-1].finish(step.expected)
        else:
            code, output = self._run(step.command)
        _check(guide, step.line, step.command, step.expected, output)
        fails = any(line.startswith("error:") for line in step.expected)
        assert (code != 0) == fails, f"{guide.name}:{step.line}: {step.command!r} ended with {code}\n{output}"

    def _run(self, command: str) -> tuple[int, str]:
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        if (
            words[0] == "purveyor"
            and not any(word and set(word) <= _SHELL_CHARACTERS for word in words)
            and "\n" not in command
        ):
            return in_process(shlex.split(command)[1:])
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=self._directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
        return done.returncode, done.stdout

    def _python(self, guide: Path, block: Block) -> None:
        code = compile(
            "\n" * block.line + "\n".join(block.lines), str(guide), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            result = eval(code, self._names)
            if inspect.iscoroutine(result):
                asyncio.run(result)
        self._python_output = output.getvalue()


def in_process(argv: list[str]) -> tuple[int, str]:
    """Run a `purveyor` command in this process; return its exit code and its output as a terminal shows it."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run(argv)
    output.flush()
    return code, output.buffer.getvalue().decode()


def _check(guide: Path, line: int, what: str, expected: tuple[str, ...], actual: str) -> None:
    expected_text = "\n".join(expected)
    assert matches(expected, actual), (
        f"{guide.name}:{line}: {what}\n--- expected\n{expected_text}\n--- actual\n{actual}"
    )
