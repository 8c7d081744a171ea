"""Setup of long-running processes: private files, a fast event loop, and less work for the garbage collector.

Events, passwords and logs must be readable by their owner only, so processes create files with a private umask.
"""

import asyncio
import contextlib
import gc
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

PRIVATE_UMASK: Final = 0o077
_DIRECTORIES: Final = ("archive", "checkpoints", "logs", "migrations", "nats", "running", "spark")
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
    """Create files for their owner only, in this process and its children, until the end of the block."""
    before = os.umask(PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)


def restrict_permissions(data_dir: Path) -> None:
    """Close directories that an earlier version, or an operator's `mkdir`, left open to other users.

    It changes only the top directories: then other users cannot reach anything below them. It changes the data
    directory itself only if that holds nothing but Purveyor's files. Directories of other owners stay as they are;
    `doctor` reports them.
    """
    for path in (data_dir, *(data_dir / name for name in _DIRECTORIES)):
        with contextlib.suppress(FileNotFoundError, PermissionError, NotADirectoryError):
            mode = path.stat().st_mode
            is_open = stat.S_ISDIR(mode) and mode & (stat.S_IRWXG | stat.S_IRWXO)
            if is_open and (path != data_dir or _holds_only_own_files(path)):
                path.chmod(stat.S_IMODE(mode) & ~(stat.S_IRWXG | stat.S_IRWXO))


def _holds_only_own_files(data_dir: Path) -> bool:
    return all(
        path.name in _DIRECTORIES or any(path.match(pattern) for pattern in _FILES) for path in data_dir.iterdir()
    )


_GC_THRESHOLD: Final = 20_000
"""The number of new objects that starts a collection of the young generation: those of some requests."""


def event_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the loop factory for `asyncio.Runner`: uvloop's, if uvloop is installed."""
    try:
        import uvloop  # noqa: PLC0415 - not on every system
    except ImportError:
        return None
    return uvloop.new_event_loop


def freeze_imports() -> None:
    """Exclude imported modules, which live as long as the process, from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
