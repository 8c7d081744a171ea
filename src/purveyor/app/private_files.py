"""Keeps what the parts write from other users of the machine: events, passwords and logs are for their owner alone."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PRIVATE_UMASK: Final = 0o077
_DIRECTORIES: Final = ("archive", "checkpoints", "logs", "migrations", "nats", "spark")
_FILES: Final = (
    "*.lock",
    "console.secret",
    "passwords.toml",
    "push.key",
    "pipeline-status*.json",
    ".pipeline-status*.draft",
)


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Files that this process and its children make are for their owner alone, as long as the block lasts."""
    before = os.umask(PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def tighten(data_dir: Path) -> None:
    """Close the directories that an earlier version, or somebody's `mkdir`, left open to others.

    Only those at the top are changed, because nothing below them can be reached then. The data directory itself is
    changed if it holds nothing but what is ours. What belongs to somebody else stays as it is: `doctor` tells that.
    """
    for path in (data_dir, *(data_dir / name for name in _DIRECTORIES)):
        with contextlib.suppress(FileNotFoundError, PermissionError, NotADirectoryError):
            mode = path.stat().st_mode
            loose = stat.S_ISDIR(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO)
            if loose and (path != data_dir or _holds_only_ours(path)):
                path.chmod(stat.S_IMODE(mode) & ~(stat.S_IRWXG | stat.S_IRWXO))


def _holds_only_ours(data_dir: Path) -> bool:
    return all(
        path.name in _DIRECTORIES or any(path.match(pattern) for pattern in _FILES) for path in data_dir.iterdir()
    )
