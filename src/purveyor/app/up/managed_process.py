"""Keeps one part running: starts its process, tells what it says, starts it again when it dies, ends it in order.

The process cannot outlive this one: on Linux it is told when its parent dies, also by kill -9.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from purveyor.app.up.exit_rules import Again, Backoff, Life, Past, after
from purveyor.app.up.processes import Part
from purveyor.jetstream.server.process import describe_exit, tied
from purveyor.model.errors import ServerFailed

_LONGEST_LINE: Final = 1 << 20
_KEPT_LINES: Final = 20
LOG: Final = "log"
"""A line of JSON that a part logged: it is passed on as it is."""


@dataclass(frozen=True, slots=True)
class News:
    """What happened to a part: for people `detail`, for programs also the rest of what it said."""

    part: str
    event: str
    detail: str
    more: Mapping[str, Any] = field(default_factory=dict)


Tell = Callable[[News], None]


class Keeper:
    """One part. `run` until `stop`; made in the thread that starts processes, which must be the main one."""

    def __init__(
        self, part: Part, tell: Tell, *, backoff: Backoff | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.part = part
        self.ready = asyncio.Event()
        """It has come up once, at least."""
        self._tell = tell
        self._backoff = backoff or Backoff()
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._came_up = False
        self._complaints: deque[str] = deque(maxlen=_KEPT_LINES)
        self._troubles: dict[str, str] = {}

    @property
    def pid(self) -> int | None:
        """Its process, if it has one at the moment."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def run(self) -> None:
        """Until it is stopped; ServerFailed, with its own words, if it cannot be started at all."""
        past = Past()
        while not self._stopping.is_set():
            life = await self._live()
            if self._stopping.is_set():
                break
            past, decision = after(past, life, self._backoff)
            why = self._complaint() or describe_exit(life.code)
            if not isinstance(decision, Again):
                raise ServerFailed(f"{self.part.name} did not start: {why}", fix=self._fix())
            self._say("died", f"{why}; starting again in {decision.pause_seconds:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), decision.pause_seconds)

    async def stop(self) -> None:
        """Ask it to end; one that does not in its time is killed, with all that it has started."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self.part.grace_seconds)
        except TimeoutError:
            self._say("killed", f"it did not end within {self.part.grace_seconds:g} s")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End it at once, with all that it has started: it has a session of its own."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            _kill_group(self._process.pid)

    async def _live(self) -> Life:
        """One life of its process."""
        self._came_up = False
        self._complaints.clear()
        began = time.monotonic()
        process = self._process = await asyncio.create_subprocess_exec(
            *tied(self.part.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C in a terminal is for us, who end the parts in order
            limit=_LONGEST_LINE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            asyncio.create_task(_each_line(process.stdout, self._heard)),
            asyncio.create_task(_each_line(process.stderr, self._complained)),
        ]
        code = await process.wait()
        _kill_group(process.pid)  # what it started and left, a JVM say: it would work on for a moment
        await asyncio.wait(readers, timeout=1)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        return Life(code, time.monotonic() - began, self._came_up)

    def _heard(self, line: str) -> None:
        try:
            said = dict(json.loads(line))
            event = str(said.pop("event"))
        except (ValueError, TypeError, KeyError):
            self._say("said", line)
            return
        if event == "progress":
            self._progress(said)
            return
        if event == "ready":
            self._came_up = True
            self.ready.set()
        self._say(event, str(said.pop("detail", "")), said)

    def _progress(self, said: Mapping[str, Any]) -> None:
        """Of the many readings of the pipeline only a new error is news here."""
        name, error = str(said.get("part")), str(said.get("error") or "")
        if error and error != self._troubles.get(name):
            self._say("trouble", f"{name} {said.get('state')}: {error}", said)
        self._troubles[name] = error

    def _complained(self, line: str) -> None:
        if line.startswith('{"'):
            self._say(LOG, line)
            return
        self._complaints.append(line)
        if not line.startswith(("error: ", "fix: ")):
            self._say("note", line)

    def _complaint(self) -> str:
        """The error that it ended with, in its own words."""
        return next((line.removeprefix("error: ") for line in self._complaints if line.startswith("error: ")), "")

    def _fix(self) -> str | None:
        return next((line.removeprefix("fix: ") for line in self._complaints if line.startswith("fix: ")), None)

    def _say(self, event: str, detail: str, more: Mapping[str, Any] | None = None) -> None:
        self._tell(News(self.part.name, event, detail, more or {}))


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


async def _each_line(stream: asyncio.StreamReader, heard: Callable[[str], None]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than any line of ours: what is left of it comes as the next one
            continue
        if not line:
            return
        heard(line.decode(errors="replace").rstrip("\r\n"))
