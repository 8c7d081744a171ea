"""Run a guide as a reader does: commands and Python blocks, in order, against real servers.

Guides that start `purveyor up` share one, as a reader does who follows several of them. Each Python block is a complete
program with names of its own, except in `ONE_PROGRAM`. A block that begins with the comment `# name.py` is a
file, which a later command runs.
"""

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
_PROGRAM = (sys.executable, "-m", "purveyor")
_PORT = re.compile(r"\b(?:7777|1[78][0-9]{3})\b")
"""The ports that guides use; such a number has no other meaning there."""
API_PORT = "7777"
ONE_PROGRAM = ("spark", "transform")
"""The guides that say that their Python blocks are one program."""
_RUN = ("console", "python")
_SPARK = re.compile(r"purveyor\.spark|serve pipeline|purveyor (up|demo|archive)\b")
_SHELL_CHARACTERS = set("|&;<>()$`\n")
_UP = re.compile(r"(?:env (?P<settings>(?:\S+=\S+ )+))?purveyor up &$")
_OF_THE_SHELL = ("_", "OLDPWD", "PWD", "SHLVL")
_EXPORT = re.compile(r"export (?P<name>PURVEYOR_\w+)=(?P<value>[\w.:,/-]+)$")
_FILE = re.compile(r"# (?P<name>[\w-]+\.py)$")


def commands(guide: Path) -> list[Step]:
    """Return all commands of a guide."""
    found = (block for block in blocks(guide.read_text(encoding="utf-8")) if block.language == "console")
    return [step for block in found for step in steps(block)]


def starts_its_server(guide: Path) -> bool:
    """Return whether the guide starts a server; other guides get one in PURVEYOR_NATS_URL."""
    return any(step.command.startswith("purveyor serve nats") for step in commands(guide))


def up_settings(step: Step) -> dict[str, str] | None:
    """Return the settings with which a command starts `purveyor up` in the background; None for any other command."""
    found = _UP.match(step.command)
    if found is None:
        return None
    return dict(word.split("=", 1) for word in shlex.split(found["settings"] or ""))


def exports(guide: Path) -> dict[str, str]:
    """Return the settings of Purveyor that the guide exports as they are."""
    found = (_EXPORT.match(step.command) for step in commands(guide))
    return {each["name"]: each["value"] for each in found if each}


def starts_up(guide: Path) -> bool:
    """Return whether the guide starts `purveyor up`."""
    return any(up_settings(step) is not None for step in commands(guide))


class RunningUp:
    """The `purveyor up` that the guides share: on a free port, with all settings that one of them gives it."""

    def __init__(self, directory: Path, guides: list[Path]) -> None:
        users = [guide for guide in guides if starts_up(guide)]
        found = [up_settings(step) for guide in users for step in commands(guide)] + [exports(guide) for guide in users]
        self.settings = {name: value for settings in found for name, value in (settings or {}).items()}
        self.data = directory / "data"
        self.port = str(free_port("127.0.0.1"))
        place = {"PURVEYOR_DATA_DIR": str(self.data), "PURVEYOR_API_PORT": self.port}
        environment = os.environ | self.settings | place | {"PYTHONPATH": str(_source())}
        environment.pop("PURVEYOR_NATS_URL", None)
        self._job = Background(shlex.join([*_PROGRAM, "up"]), directory, environment)
        self.output = self._job.expect(("...", "...all parts are ready...", "..."))

    def stop(self) -> None:
        self._job.stop()


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


def on_free_ports(text: str, api_port: str | None = None) -> str:
    """Replace the ports of a guide by free ones, so that it does not collide with another program."""
    chosen = {port: str(free_port("127.0.0.1")) for port in sorted(set(_PORT.findall(text)))}
    if api_port is not None:
        chosen[API_PORT] = api_port
    return _PORT.sub(lambda found: chosen[found[0]], text)


class GuideRunner:
    """Runs one guide. A plain `purveyor ...` command runs in this process, everything else in a shell."""

    def __init__(self, directory: Path, setenv: Callable[[str, str], None], up: RunningUp | None = None) -> None:
        self._directory = directory
        self._setenv = setenv
        self._up = up
        self._jobs: list[Background] = []
        self._names: dict[str, object] = {"__name__": "__main__"}
        self._python_output = ""
        programs = directory / "bin"
        programs.mkdir()
        for name, command in {"purveyor": _PROGRAM, "python": _PROGRAM[:1]}.items():
            script = programs / name
            script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            script.chmod(0o755)
        setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
        setenv("PYTHONPATH", str(_source()))
        setenv("PYTHONUNBUFFERED", "1")
        setenv("PURVEYOR_DATA_DIR", str(directory / "data" if up is None else up.data))

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
        api_port = None if self._up is None else self._up.port
        for block in blocks(on_free_ports(guide.read_text(encoding="utf-8"), api_port)):
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
        settings = up_settings(step)
        if settings is not None and self._up is not None:
            assert settings.items() <= self._up.settings.items(), f"{guide.name}:{step.line}: another value elsewhere"
            output = self._up.output
        elif step.in_background:
            self._jobs.append(Background(step.command.rstrip(" &"), self._directory, dict(os.environ)))
            output = self._jobs[-1].expect(step.expected)
        elif step.command == "wait $!":
            output = self._jobs[-1].finish(step.expected)
        elif step.command.startswith(("export ", "eval ")):
            code, output = self._run(f"{step.command}; env -0 > environment")
            for line in (self._directory / "environment").read_text().split("\0")[:-1]:
                name, _, value = line.partition("=")
                if os.environ.get(name) != value and name not in _OF_THE_SHELL:
                    self._setenv(name, value)
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
            and not {"\n", "$"} & set(command)
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
        file = _FILE.match(block.lines[0])
        if file is not None:
            (self._directory / file["name"]).write_text("\n".join(block.lines) + "\n")
            return
        if guide.stem not in ONE_PROGRAM:
            self._names = {"__name__": "__main__"}
        code = compile("\n" * block.line + "\n".join(block.lines), str(guide), "exec")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(code, self._names)
        self._python_output = output.getvalue()


def _source() -> Path:
    return Path(inspect.getfile(purveyor)).parent.parent


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
