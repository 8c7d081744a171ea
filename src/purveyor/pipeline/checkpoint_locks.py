"""One process per checkpoint: two queries on one would both believe in it and tear it.

Two locks guard it. An flock held by this process: whoever finds it taken stands by and takes over when it is free. And
one held by the JVM: when this process is killed the JVM ends a moment later, and until then its queries still write.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from pyspark.sql import SparkSession

from purveyor.model.errors import StoreInUse

_PAUSE_SECONDS = 0.2

GoOn = Callable[[], bool]


class Locks:
    """The locks of some checkpoints, taken all together or not at all: nobody holds one while waiting for another."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory = directory
        self._names = sorted(names)
        self._held: list[int] = []

    def take(self) -> StoreInUse | None:
        """Try once; who is in the way, if somebody is."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for name in self._names:
            fd = os.open(self._path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refused = self._in_use(name, fd)
                os.close(fd)
                self.release()
                return refused
            self._held.append(fd)
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "since": _now()}).encode(), 0)
        return None

    def wait(self, go_on: GoOn, on_wait: Callable[[StoreInUse], None]) -> bool:
        """Stand by until they are free; `on_wait` hears of each owner once. False if told to stop before."""
        told = ""
        while go_on():
            refused = self.take()
            if refused is None:
                return True
            if refused.message != told:
                told = refused.message
                on_wait(refused)
            time.sleep(_PAUSE_SECONDS)
        return False

    def release(self) -> None:
        """Give them back."""
        for fd in self._held:
            os.ftruncate(fd, 0)
            os.close(fd)
        self._held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.lock"

    def _in_use(self, name: str, fd: int) -> StoreInUse:
        try:
            owner = json.loads(os.pread(fd, 4096, 0))
            who, fix = f"process {owner['pid']}, since {owner['since']}", f"stop it with: kill {owner['pid']}"
        except (ValueError, KeyError, TypeError):
            who, fix = "another process", f"find it with: fuser {self._path(name)}"
        return StoreInUse(f"part {name} of the pipeline on {self._directory.parent} is run by {who}", fix=fix)


class EngineLocks:
    """The same for the JVM. They are held until it ends, if only this object is kept: Java closes what nobody knows."""

    def __init__(self, spark: SparkSession, directory: Path, names: Sequence[str]) -> None:
        self._jvm = spark.sparkContext._jvm  # noqa: SLF001 - the only way to a class of Java
        self._directory = directory
        self._names = sorted(names)
        self._held: list[object] = []

    def wait(self, go_on: GoOn, on_wait: Callable[[str], None]) -> bool:
        """Until no earlier engine is left. False if told to stop before."""
        assert self._jvm is not None
        for name in self._names:
            channel = self._jvm.java.io.RandomAccessFile(
                str(self._directory / f"{name}.engine.lock"), "rw"
            ).getChannel()
            told = False
            while (lock := channel.tryLock()) is None:
                if not go_on():
                    return False
                if not told:
                    on_wait(name)
                    told = True
                time.sleep(_PAUSE_SECONDS)
            self._held += [channel, lock]
        return True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
