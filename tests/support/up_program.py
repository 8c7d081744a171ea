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
from tests.support.processes import descendants
from tests.support.waiting import PATIENCE_SECONDS, wait_until


class Up:
    """The process of the command, with the events that it has printed."""

    def __init__(self, data: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, "--data-dir", str(data), "up", "--json", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PURVEYOR_WARM_UP": "false", **(environment or {})},  # it would cost the tests seconds
        )
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def wait_for(self, event: str, part: str, times: int = 1) -> dict[str, Any]:
        """Wait until the event of a part has been printed `times` times, and return it."""

        def found() -> dict[str, Any] | None:
            found_events = [each for each in self.events if (each["event"], each["part"]) == (event, part)]
            assert len(found_events) >= times or self.process.poll() is None, self.events
            return found_events[times - 1] if len(found_events) >= times else None

        printed: dict[str, Any] = wait_until(found, seconds=240)
        return printed

    def parts_with(self, event: str) -> list[str]:
        """Return the parts that have printed an event, in order."""
        return [each["part"] for each in self.events if each["event"] == event]

    def pid_of(self, word: str) -> int:
        """Return the process that `up` started for a part, by a word of its command line."""
        return next(pid for pid in descendants(self.process.pid, word) if os.getsid(pid) == pid)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.ends()

    def ends(self) -> int:
        code = self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
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
