"""A lock between processes: an flock on a file, which the system gives back when the process ends, however it ends.

A holder may write a note about itself into the file. The note only explains a refusal to a user; the lock alone
decides. The system uses pids again, so the note also has the start time of the process.
"""

import contextlib
import fcntl
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self

POLL_INTERVAL_SECONDS: Final = 0.02
_MOST_NOTE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class LockOwner:
    """The process that holds a lock, as its note says. The field names are the ones in the file."""

    pid: int
    birth: str | None
    """When the system started that process, in clock ticks since boot: distinguishes it from a later one of the pid."""
    started_at: str
    """When it took the lock."""

    @classmethod
    def this_process(cls) -> "LockOwner":
        """Describe this process, from now on."""
        return cls(os.getpid(), _start_time(os.getpid()), datetime.now(UTC).isoformat(timespec="milliseconds"))

    @property
    def is_alive(self) -> bool:
        """Whether that very process still runs."""
        if self.birth is not None:
            return _start_time(self.pid) == self.birth
        return process_exists(self.pid)


def process_exists(pid: int) -> bool:
    """Return whether a process of this machine has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_owner(path: Path) -> LockOwner | None:
    """Read the note in a lock file; None if there is none (yet)."""
    try:
        with path.open("rb") as file:
            fields = json.loads(file.read(_MOST_NOTE_BYTES))
        birth = fields.get("birth")
        since = fields["started_at"] if "started_at" in fields else fields["since"]  # an older release wrote `since`
        return LockOwner(int(fields["pid"]), None if birth is None else str(birth), str(since))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class FileLock:
    """An exclusive lock on a file, held from `try_lock`, `wait` or `lock` until `release`.

    A process that inherits `fd` on purpose (`pass_fds`) holds the lock too, until it ends. A plain fork does not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._has_note = False

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd is not None

    @property
    def fd(self) -> int:
        """The descriptor that holds the lock."""
        if self._fd is None:
            raise ValueError(f"{self.path} is not locked")
        return self._fd

    def try_lock(self) -> bool:
        """Take the lock if it is free; True if it is held afterwards. Raises OSError if the file cannot be opened."""
        return self._fd is not None or self._acquire(fcntl.LOCK_EX | fcntl.LOCK_NB)

    def lock(self) -> None:
        """Take the lock, and block the thread until it is free."""
        if self._fd is None:
            self._acquire(fcntl.LOCK_EX)

    def wait(self, timeout_seconds: float, *, give_up: Callable[[LockOwner | None], bool] | None = None) -> bool:
        """Take the lock within a time; False if it is still taken, or as soon as `give_up` says so of its owner."""
        deadline = time.monotonic() + timeout_seconds
        while not self.try_lock():
            if (give_up is not None and give_up(self.owner())) or time.monotonic() >= deadline:
                return False
            time.sleep(POLL_INTERVAL_SECONDS)
        return True

    def owner(self) -> LockOwner | None:
        """Read the note of the process that holds the lock; None if it has written none (yet)."""
        return read_owner(self.path)

    def write_owner(self) -> LockOwner:
        """Write a note about this process, which holds the lock."""
        owner = LockOwner.this_process()
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, json.dumps(asdict(owner)).encode(), 0)
        self._has_note = True
        return owner

    def release(self) -> None:
        """Release the lock. The note goes first, so that it never names a process that no longer holds the lock."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        _held.discard(self)
        try:
            if self._has_note:
                self._has_note = False
                os.ftruncate(fd, 0)
        finally:
            os.close(fd)

    def __enter__(self) -> Self:
        self.lock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _acquire(self, operation: int) -> bool:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, operation)
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                return False
            raise
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        _held.add(self)
        return True


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on a file. Needs no permission to write; a missing file is not locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class PendingLock:
    """A wait for a lock in a thread that the kernel wakes at the moment when the lock is free.

    Every `PendingLock` ends with `take` or `abandon`: else its thread would take the lock later and keep it.
    """

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(path)
        self._guard = threading.Lock()
        self._is_abandoned = False
        self._over = threading.Event()
        threading.Thread(target=self._run, name=f"waits-for-{path.name}", daemon=True).start()

    def wait(self, timeout_seconds: float) -> bool:
        """Return whether the wait is over: `take` returns the lock then."""
        return self._over.wait(timeout_seconds)

    def take(self) -> FileLock:
        """Return the lock, which is held unless the file could not be opened."""
        self._over.wait()
        return self._lock

    def abandon(self) -> None:
        """Give up; the thread releases the lock at once when it gets it."""
        with self._guard:
            self._is_abandoned = True
            self._lock.release()

    def _run(self) -> None:
        try:
            self._lock.lock()
        except OSError:  # the caller tries again, and sees the reason
            pass
        finally:
            with self._guard:
                if self._is_abandoned:
                    self._lock.release()
            self._over.set()


_held: set[FileLock] = set()


def _forget_in_fork() -> None:
    # A plain fork (multiprocessing) copies the descriptor, and the copy would keep the lock held after this process.
    for held in tuple(_held):
        held._has_note = False  # noqa: SLF001 - the note is the parent's
        held.release()


os.register_at_fork(after_in_child=_forget_in_fork)


_POSIX_LOCK: Final = struct.Struct("hhqqi4x")
"""The structure `flock` of Linux on a 64-bit machine: type, whence, start, length, process."""


def record_lock_holder(path: Path) -> int | None:
    """Return the process of this machine that holds a POSIX record lock on a whole file, as Java takes them.

    None if the lock is free, or if its holder is not a process that this one can see with the file open: on a shared
    file system the holder may run on another machine, where the same number is another process.
    """
    if not sys.platform.startswith("linux") or struct.calcsize("P") != 8:
        return None
    try:
        with path.open("rb+") as file:
            wanted = _POSIX_LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _POSIX_LOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, wanted))
            identity = os.fstat(file.fileno())
    except OSError:
        return None
    if kind == fcntl.F_UNLCK or pid <= 0 or pid == os.getpid():
        return None
    return pid if _has_open(pid, identity) else None


def _has_open(pid: int, identity: os.stat_result) -> bool:
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for each in descriptors:
        with contextlib.suppress(OSError):  # it was closed in the meantime
            if os.path.samestat(each.stat(), identity):
                return True
    return False


def _start_time(pid: int) -> str | None:
    """Return the start time of a process, in clock ticks since boot; None if it has ended, or without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the process name before it may contain spaces and brackets
    return None if fields[0] in "ZX" else fields[19]  # a zombie holds nothing any more


__all__ = [
    "FileLock",
    "LockOwner",
    "PendingLock",
    "is_locked",
    "process_exists",
    "read_owner",
    "record_lock_holder",
]
