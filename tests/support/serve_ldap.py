"""`purveyor serve ldap` as a process that tests watch, kill and stop."""

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


class ServeLdap:
    """The process of the command, with the events that it has printed."""

    def __init__(self, data: Path, *arguments: str, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, "--data-dir", str(data), "serve", "ldap", "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def wait_for(self, event: str, times: int = 1) -> dict[str, Any]:
        """Wait until an event has been printed `times` times, and return it."""

        def found() -> dict[str, Any] | None:
            printed = [each for each in self.events if each["event"] == event]
            assert len(printed) >= times or self.process.poll() is None, (self.events, self.err())
            return printed[times - 1] if len(printed) >= times else None

        result: dict[str, Any] = wait_until(found, what=f"the event {event!r} of serve ldap")
        return result

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(120)
        self._reader.join(120)
        return code

    def command_line(self) -> str:
        """Return the command line as every user of the machine sees it."""
        return Path(f"/proc/{self.process.pid}/cmdline").read_text()

    def err(self) -> str:
        """Return what an ended process has written to standard error."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def close(self) -> None:
        self.stop(signal.SIGKILL)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
