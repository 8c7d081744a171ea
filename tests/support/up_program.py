"""`purveyor up` as a process that tests watch, kill and stop."""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.command_line import PROGRAM
from tests.support.waiting import wait_until


class Up:
    """The command, with what it said as JSON."""

    def __init__(self, data: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, "--data-dir", str(data), "up", "--json", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.news: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.news.append(json.loads(line))

    def says(self, event: str, part: str, times: int = 1) -> dict[str, Any]:
        """The piece of news, when it has come so often."""

        def found() -> dict[str, Any] | None:
            heard = [each for each in self.news if (each["event"], each["part"]) == (event, part)]
            assert len(heard) >= times or self.process.poll() is None, self.news
            return heard[times - 1] if len(heard) >= times else None

        told: dict[str, Any] = wait_until(found, seconds=240)
        return told

    def told(self, event: str) -> list[str]:
        """The parts of which an event was told, in order."""
        return [each["part"] for each in self.news if each["event"] == event]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.ends()

    def ends(self) -> int:
        code = self.process.wait(120)
        self._reader.join(120)
        return code

    @property
    def err(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.ends()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
