"""`purveyor serve api` with several processes on one port, and what it prints."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from purveyor.app.running_parts import API, RunningPart, running_parts
from purveyor.jetstream.address import Address
from tests.support.command_line import PROGRAM, url_of
from tests.support.waiting import PATIENCE_SECONDS, wait_until

PASSWORDS = {f"PURVEYOR_{name}_PASSWORD": f"{name.lower()}-secret" for name in ("ADMIN", "EVENTS", "PREFILL")}


class Workers:
    """A `serve api` with workers, and what it prints."""

    def __init__(self, data: Path, address: Address, *arguments: str, **environment: str) -> None:
        self.data = data
        self.process = subprocess.Popen(
            [*PROGRAM, "--data-dir", str(data), "serve", "api", "--port", "0", "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PURVEYOR_NATS_URL": url_of(address), **PASSWORDS, **environment},
        )
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url: str = self.wait_for("ready")["url"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def wait_for(self, name: str, number: int = 1) -> dict[str, Any]:
        """Wait for the event of this number with a name."""

        def found() -> dict[str, Any] | None:
            assert self.process.poll() is None, self.events
            return next(iter([each for each in self.events if each["event"] == name][number - 1 :]), None)

        return wait_until(found, what=f"{name} {number}")

    def parts(self) -> dict[int, RunningPart]:
        """Return the workers that run, by number."""
        return {each.worker: each for each in running_parts(self.data, API) if each.worker is not None}

    def end(self, how: signal.Signals) -> str:
        """Send a signal, wait for the end, and return what was written to standard error."""
        self.process.send_signal(how)
        self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
