"""Runs a guide as its reader would: commands and Python, in order, against a real server."""

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
from purveyor.jetstream.server.readiness import free_port
from tests.docs.markdown import Block, Step, blocks, matches, steps

_PATIENCE_SECONDS = 120
_PORT = re.compile(r"\b1[78][0-9]{3}\b")
"""The ports of guides. Theirs alone: a number like that means nothing else there."""
_RUN = ("console", "python")
_SPARK = re.compile(r"purveyor\.spark|serve pipeline|purveyor (up|demo|archive)\b")
_SHELL_CHARACTERS = set("|&;<>()$`\n")


def starts_its_server(guide: Path) -> bool:
    """Whether the guide begins with a server of its own; the others are given one in PURVEYOR_NATS_URL."""
    found = (block for block in blocks(guide.read_text(encoding="utf-8")) if block.language == "console")
    return any(step.command.startswith("purveyor serve nats") for block in found for step in steps(block))


class Background:
    """A command that goes on while the guide does; what it says is collected."""

    def __init__(self, command: str, directory: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._said = ""
        self._shown = 0
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._said += line
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def expect(self, expected: tuple[str, ...]) -> str:
        """Wait until what it said since the last time is as promised; returns what it said."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        with self._news:
            while not matches(expected, self._said[self._shown :]):
                if time.monotonic() > deadline or (self.process.poll() is not None and not self._reader.is_alive()):
                    break
                self._news.wait(0.2)
            said = self._said[self._shown :]
            self._shown = len(self._said)
        return said

    def finish(self, expected: tuple[str, ...]) -> str:
        """Wait for its end; what it said since the last time."""
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
    """Whether a block that is run starts Spark."""
    played = ("\n".join(block.lines) for block in blocks(guide.read_text("utf-8")) if block.language in _RUN)
    return any(_SPARK.search(text) for text in played)


def on_free_ports(text: str) -> str:
    """A guide with ports that are free here in place of those that it names, so that it meets no other program."""
    chosen = {port: free_port("127.0.0.1") for port in sorted(set(_PORT.findall(text)))}
    return _PORT.sub(lambda found: str(chosen[found[0]]), text)


class GuideRunner:
    """One guide, from top to bottom. `purveyor ...` alone runs in this process, everything else in a shell."""

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

    def play(self, guide: Path) -> int:
        """Run every block; AssertionError names the line that does not do what it says. Returns how many steps."""
        played = 0
        previous = ""
        for block in blocks(on_free_ports(guide.read_text(encoding="utf-8"))):
            if block.language == "console":
                for step in steps(block):
                    self._step(guide, step)
                    played += 1
            elif block.language == "python":
                self._python(guide, block)
                played += 1
            elif block.language in ("", "text") and previous == "python":
                _check(guide, block.line, "the Python block above", block.lines, self._python_output)
            previous = block.language
        return played

    def _step(self, guide: Path, step: Step) -> None:
        code = 0
        if step.in_background:
            self._jobs.append(Background(step.command.rstrip(" &"), self._directory, dict(os.environ)))
            said = self._jobs[-1].expect(step.expected)
        elif step.command == "wait":
            said = self._jobs[-1].finish(step.expected)
        else:
            code, said = self._run(step.command)
        _check(guide, step.line, step.command, step.expected, said)
        fails = any(line.startswith("error:") for line in step.expected)
        assert (code != 0) == fails, f"{guide.name}:{step.line}: {step.command!r} ended with {code}\n{said}"

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
    """A `purveyor` command without a process of its own: its exit code and its output as a terminal shows it."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = run(argv)
    output.flush()
    said = output.buffer.getvalue().decode()
    return code, said


def _check(guide: Path, line: int, what: str, expected: tuple[str, ...], actual: str) -> None:
    promised = "\n".join(expected)
    assert matches(expected, actual), f"{guide.name}:{line}: {what}\n--- promised\n{promised}\n--- seen\n{actual}"
