"""One nats-server process: started so that it cannot outlive its parent, watched, and ended in order.

On Linux a small launcher asks the kernel for a SIGTERM when the parent dies (also by kill -9), and then becomes
nats-server: the server closes its store cleanly and goes. The kernel means the parent *thread*: whoever calls `start`
has to live as long as the process. Elsewhere there is no such request; the lock on the store then tells of the orphan.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from purveyor.jetstream.server.files import Files
from purveyor.jetstream.server.unfinished_batches import drop_unfinished_batches
from purveyor.model.errors import ServerFailed

# Go's garbage collector runs when the heap has doubled; a broker's live heap is small beside what passes through it, so
# that is a sixth of its time. Letting it grow fivefold costs some memory and gives most of that time back.
_ENVIRONMENT = {"GOGC": "400"}

# Run by `python -I -S`: nothing but the standard library, and no environment of ours. A function run between fork and
# exec would do the same without a launcher, but is not safe in a process with threads.
_LAUNCHER = """\
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGTERM = 1, 15
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(SIGTERM), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
    sys.exit("launcher: prctl: " + os.strerror(ctypes.get_errno()))
if os.getppid() != int(sys.argv[1]):
    sys.exit("launcher: the parent is gone already")
os.execv(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """A command whose process is sent a SIGTERM when the thread that starts it ends, however it ends (on Linux)."""
    if sys.platform != "linux" or not sys.executable:
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


class ServerProcess:
    """A child that is nats-server. Not for several threads: the one that starts it waits for it and ends it."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    @classmethod
    def start(cls, binary: Path, files: Files, lock: int) -> "ServerProcess":
        """Start it on the configuration in `files`; it inherits the lock on the store."""
        drop_unfinished_batches(files.directory / "jetstream")
        command = tied([str(binary), "-c", str(files.config)])
        log = files.open_log()
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=files.directory,
                env={**_ENVIRONMENT, **os.environ},  # whoever sets it knows better
                pass_fds=(lock,),
                umask=0o077,
                start_new_session=True,  # Ctrl-C in a terminal is for the parent, which then ends the server in order
            )
        except OSError as error:
            raise ServerFailed(f"{binary} cannot be started: {error}", fix="see whether it runs by hand") from error
        finally:
            os.close(log)
        return cls(child)

    @property
    def pid(self) -> int:
        """Its process id: the launcher becomes the server, so this never changes."""
        return self._child.pid

    def ended(self) -> str | None:
        """How it ended, or None while it runs."""
        code = self._child.poll()
        return None if code is None else describe_exit(code)

    def end(self, grace_seconds: float) -> None:
        """Let it close its store and go; kill it if that takes longer than the grace."""
        if self._child.poll() is None:
            self._child.terminate()
        deadline = time.monotonic() + grace_seconds
        while self._child.poll() is None and (left := deadline - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(left)
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()


def describe_exit(code: int) -> str:
    """How a process ended, for people.

    >>> describe_exit(-9), describe_exit(1)
    ('killed by SIGKILL', 'exited with code 1')
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


__all__ = ["ServerProcess", "describe_exit", "tied"]
