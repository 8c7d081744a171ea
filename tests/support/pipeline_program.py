"""`purveyor serve pipeline` as a process that tests watch and kill."""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.support.command_line import PROGRAM
from tests.support.processes import descendants, environment
from tests.support.waiting import PATIENCE_SECONDS, wait_until


class Pipeline:
    """The command in its own process group, with its output."""

    def __init__(self, data: Path, *arguments: str, url: str = "") -> None:
        self.data = data
        self.process = subprocess.Popen(
            [*PROGRAM, "--data-dir", str(data), "serve", "pipeline", "--master", "local[2]", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A warm-up at each start would cost the tests seconds; a standby warms up in any case.
            env=environment(PURVEYOR_NATS_URL=url, PURVEYOR_WARM_UP="false"),
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.err = ""
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.err = self.process.stderr.read()

    def wait_for(self, begin: str, times: int = 1) -> str:
        """Wait until a line with this beginning has been printed `times` times, and return it."""

        def found() -> list[str]:
            assert self.process.poll() is None or self.count(begin) >= times, (self.lines, self.err)
            return [line for line in self.lines if line.startswith(begin)]

        return str(wait_until(lambda: len(found()) >= times and found(), seconds=300)[times - 1])

    def count(self, begin: str) -> int:
        return sum(line.startswith(begin) for line in self.lines)

    def status(self) -> dict[str, Any]:
        (path,) = wait_until(lambda: list(self.data.glob("pipeline-status*.json")))
        return {part["part"]: part for part in json.loads(path.read_text())["parts"]}

    def ends(self) -> int:
        code = self.process.wait(PATIENCE_SECONDS)
        for reader in self._readers:
            reader.join(PATIENCE_SECONDS)
        return code

    def engine(self) -> int:
        """Return the process id of the JVM."""
        below = descendants(self.process.pid, "org.apache.spark.deploy.SparkSubmit")
        (found,) = [pid for pid in below if _program(pid).endswith("java")]
        return found

    def kill_program(self) -> None:
        """Kill only the program with SIGKILL: its JVM learns of that later."""
        self.process.kill()
        self.ends()

    def kill(self) -> None:
        """Kill the process group with SIGKILL: the program, its JVM, and other children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.ends()

    def close(self) -> None:
        self.kill()
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()


def _program(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
