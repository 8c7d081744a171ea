"""Locks that allow one process per checkpoint: two queries on one checkpoint would destroy it.

Each checkpoint has two locks. This process holds a file lock; another process that finds it taken waits and takes over
when it is free. The JVM holds a second one: when this process is killed the JVM ends a moment later, and until then its
queries still write.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pyspark.sql import SparkSession

from purveyor.model.errors import StoreInUse
from purveyor.model.file_lock import FileLock
from purveyor.spark.pyspark_internals import jvm

_POLL_INTERVAL_SECONDS = 0.2

ShouldContinue = Callable[[], bool]


class CheckpointLocks:
    """The file locks of some checkpoints, taken all together or not at all: a waiting process holds none of them."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory = directory
        self._names = sorted(names)
        self._held: list[FileLock] = []

    def take(self) -> StoreInUse | None:
        """Try once to take all locks; return the owner of one that is taken."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for name in self._names:
            lock = FileLock(self._directory / f"{name}.lock")
            if not lock.try_lock():
                self.release()
                return self._in_use(name, lock)
            self._held.append(lock)
            lock.write_owner()
        return None

    def wait(self, should_continue: ShouldContinue, on_wait: Callable[[StoreInUse], None]) -> bool:
        """Wait until the locks are free; call `on_wait` once for each owner. Return False if the wait is stopped."""
        reported = ""
        while should_continue():
            refused = self.take()
            if refused is None:
                return True
            if refused.message != reported:
                reported = refused.message
                on_wait(refused)
            time.sleep(_POLL_INTERVAL_SECONDS)
        return False

    def release(self) -> None:
        """Release all locks."""
        for lock in self._held:
            lock.release()
        self._held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _in_use(self, name: str, lock: FileLock) -> StoreInUse:
        owner = lock.owner()
        if owner is None:
            who, fix = "another process", f"find it with: fuser {lock.path}"
        else:
            who, fix = f"process {owner.pid}, since {owner.started_at}", f"stop it with: kill {owner.pid}"
        return StoreInUse(f"part {name} of the pipeline on {self._directory.parent} is run by {who}", fix=fix)


class EngineLocks:
    """The locks of the JVM, which holds them until it ends. Keep this object: Java closes files without a reference."""

    def __init__(self, spark: SparkSession, directory: Path, names: Sequence[str]) -> None:
        self._java = jvm(spark)
        self._directory = directory
        self._names = sorted(names)
        self._held: list[object] = []

    def wait(self, should_continue: ShouldContinue, on_wait: Callable[[str], None]) -> bool:
        """Wait until no earlier JVM holds the locks. Return False if `should_continue` ends the wait."""
        for name in self._names:
            channel = self._java.java.io.RandomAccessFile(
                str(self._directory / f"{name}.engine.lock"), "rw"
            ).getChannel()
            reported = False
            while (lock := channel.tryLock()) is None:
                if not should_continue():
                    return False
                if not reported:
                    on_wait(name)
                    reported = True
                time.sleep(_POLL_INTERVAL_SECONDS)
            self._held += [channel, lock]
        return True
