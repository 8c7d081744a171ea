"""The checkpoints of the parts: one process at a time uses each, and each fits the queues and the archive.

**Locks.** Two queries on one checkpoint would destroy it, so each checkpoint has two locks. This process holds a file
lock; another process that finds it taken waits and takes over when it is free. The JVM holds a second one: when this
process is killed the JVM ends a moment later, and until then its queries still write. The process that has the file
locks kills a JVM that holds the second ones: the process that started that JVM is gone.

**Recovery.** When a part starts, `recover` decides whether its checkpoint fits.

A checkpoint can be lost, damaged, older than its stream (an operator restored a backup of the checkpoint) or ahead of
it (an operator restored a backup of the NATS store). What each part does then:

- Dispatch keeps no state. The queues of the subscriptions show what they have, and the stream keeps what the
  dispatcher's durable has not passed. So dispatch sets the checkpoint aside and begins with the oldest message of the
  stream; it skips messages that a queue already has.
- The archive continues behind its last range. It stops if the archive and the stream do not belong together: otherwise
  it would take new events for archived ones, or leave a gap in the history that prefill and audit do not see.
- The transform keeps the directories in its checkpoint and nowhere else, so it stops and says what to do. Without any
  checkpoint it begins with empty directories.

The rules are pure functions; `recover` asks the server and acts.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pyspark.sql import SparkSession

from purveyor.model.errors import DataLost, StoreInUse, UnreadableRecord
from purveyor.model.file_lock import FileLock, PendingLock, record_lock_holder
from purveyor.spark.checkpoint_files import batch_end, committed_offset, newest_batch, roll_back
from purveyor.spark.offsets import Offset, StreamView, check_identity, lost_range
from purveyor.spark.options import ReadSettings
from purveyor.spark.pyspark_internals import jvm
from purveyor.spark.stream_control import StreamControl

_POLL_INTERVAL_SECONDS = 0.2
_UNREPORTED_SECONDS = 1.0
"""A JVM that was killed is gone within this time, so a shorter wait is not reported."""
_ENDING_POLL_SECONDS = 0.02
"""Between two looks at the lock of a JVM that was killed."""

ShouldContinue = Callable[[], bool]


class CheckpointLocks:
    """The file locks of some checkpoints, taken all together or not at all: a waiting process holds none of them."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory = directory
        self._names = sorted(names)
        self._held: list[FileLock] = []
        self._refused = directory

    def take(self) -> StoreInUse | None:
        """Try once to take all locks; return the owner of one that is taken."""
        return self._take({})

    def wait(self, should_continue: ShouldContinue, on_wait: Callable[[StoreInUse], None]) -> bool:
        """Wait until the locks are free; call `on_wait` once for each owner. Return False if the wait is stopped.

        A thread waits in the kernel for the lock that was refused, so this returns at the moment when it is free.
        `should_continue` is asked several times a second, and may raise an error.
        """
        reported = ""
        freed: dict[Path, FileLock] = {}
        while should_continue():
            refused = self._take(freed)
            if refused is None:
                return True
            if refused.message != reported:
                reported = refused.message
                on_wait(refused)
            freed = self._wait_for_refused(should_continue)
        for lock in freed.values():
            lock.release()
        return False

    def _take(self, freed: Mapping[Path, FileLock]) -> StoreInUse | None:
        """Take all locks; those in `freed` are held already."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._held += freed.values()
        for name in self._names:
            path = self._directory / f"{name}.lock"
            lock = freed.get(path) or FileLock(path)
            if not lock.try_lock():
                self.release()
                self._refused = path
                return self._in_use(name, lock)
            if lock not in self._held:
                self._held.append(lock)
            lock.write_owner()
        return None

    def _wait_for_refused(self, should_continue: ShouldContinue) -> dict[Path, FileLock]:
        """Wait for the lock that was refused last, and return it; nothing if the wait is stopped."""
        pending = PendingLock(self._refused)
        try:
            while not pending.wait(_POLL_INTERVAL_SECONDS):
                if not should_continue():
                    pending.abandon()
                    return {}
        except BaseException:
            pending.abandon()
            raise
        lock = pending.take()
        return {self._refused: lock} if lock.is_held else {}

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
        """Wait until no earlier JVM holds the locks. Return False if `should_continue` ends the wait.

        Call this only with the file locks of these checkpoints: it kills a JVM of this machine that has outlived the
        process that started it.
        """
        for name in self._names:
            path = self._directory / f"{name}.engine.lock"
            channel = self._java.java.io.RandomAccessFile(str(path), "rw").getChannel()
            killed: set[int] = set()
            report_at, reported = time.monotonic() + _UNREPORTED_SECONDS, False
            while (lock := channel.tryLock()) is None:
                if not should_continue():
                    return False
                if not reported and time.monotonic() >= report_at:
                    on_wait(name)
                    reported = True
                holder = record_lock_holder(path)
                if holder is not None and holder not in killed:
                    killed.add(holder)
                    _kill(holder)
                time.sleep(_ENDING_POLL_SECONDS if killed else _POLL_INTERVAL_SECONDS)
            self._held += [channel, lock]
        return True


def _kill(engine: int) -> None:
    """Kill a JVM whose driver is gone: this process needs its checkpoints."""
    _log.warning("process %d, an engine that has outlived its pipeline, is killed", engine)
    with contextlib.suppress(ProcessLookupError):
        os.kill(engine, signal.SIGKILL)


REPLACED: Final = ".replaced-"
"""The text between the name of a part and a number, in the name of a checkpoint that was set aside."""
_KEPT_REPLACED: Final = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint on the disk: its offset, or why it cannot be read. With neither, it has committed nothing."""

    path: Path
    offset: Offset | None = None
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class StartOver:
    """Set the checkpoint aside and start without one, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Continue:
    """Start with the checkpoint that is there. `warning` is for the operator."""

    warning: str | None = None


Decision = StartOver | Continue
Rule = Callable[[FoundCheckpoint, StreamView, int | None], Decision]
"""Decides by the checkpoint, the stream, and the sequence that the durable has passed (None: there is no durable)."""


def recover(path: Path, settings: ReadSettings, rule: Rule) -> None:
    """Prepare the checkpoint of a part for a start. Raise DataLost if an operator must decide."""
    if removed := roll_back(path):
        _log.warning("batches %s of %s were not on the disk when the machine stopped: they run again", removed, path)
    control = StreamControl(settings)
    match rule(read_checkpoint(path), control.view(), control.floor()):
        case StartOver(reason):
            aside = set_aside(path)
            _log.warning("%s begins with a new checkpoint: %s (the old one is %s)", path.name, reason, aside)
        case Continue(warning):
            if warning is not None:
                _log.warning("%s: %s", path.name, warning)


def read_checkpoint(path: Path) -> FoundCheckpoint:
    """Read what Spark will read when the query starts."""
    try:
        metadata = path / "metadata"
        if metadata.exists():
            json.loads(metadata.read_text(encoding="utf-8"))
        newest = newest_batch(path / "offsets")
        if newest is not None:
            batch_end(path, newest)
        done = newest_batch(path / "commits")
        if done is not None and not (path / "commits" / str(done)).read_text(encoding="utf-8").startswith("v"):
            return FoundCheckpoint(path, damage=f"the entry {done} of its log of commits is damaged")
        return FoundCheckpoint(path, committed_offset(path))
    except UnreadableRecord:
        raise
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        return FoundCheckpoint(path, damage=f"it cannot be read ({error!r})")


def set_aside(path: Path) -> Path:
    """Rename a checkpoint, and remove the oldest ones that were set aside before."""
    aside = path.with_name(f"{path.name}{REPLACED}{time.time_ns()}")
    path.rename(aside)
    for old in sorted(path.parent.glob(f"{path.name}{REPLACED}*"))[:-_KEPT_REPLACED]:
        shutil.rmtree(old, ignore_errors=True)
    return aside


def dispatch_rule(found: FoundCheckpoint, view: StreamView, floor: int | None) -> Decision:
    """Start over if the stream still has everything that the dispatcher has not done."""
    if found.damage is not None:
        return StartOver(found.damage)
    if found.offset is None:
        return Continue()
    _check_identity(found, view, f"restore the NATS store that {found.path} belongs to: {_RESTORE}")
    if found.offset.sequence > view.last:
        return StartOver(_ahead_reason(found.offset, view))
    gone = lost_range(found.offset, view)
    if gone is not None and floor is not None and floor >= gone.last:
        return StartOver(f"it is at {found.offset.sequence}, and a later one has dispatched up to {floor}")
    if gone is not None:
        raise DataLost(
            f"positions {gone} of stream {view.name!r} were removed before they were dispatched",
            fix=f"move {found.path} away to go on with position {view.begins}; the archive may have the events: "
            f"`purveyor subscription replay NAME --from {gone.first} --to {gone.last}` delivers them",
        )
    return Continue()


def archive_rule(directory: Path, reached: int) -> Rule:
    """Return the rule for an archive that holds every position up to `reached`; 0 if it is empty."""

    def rule(found: FoundCheckpoint, view: StreamView, floor: int | None) -> Decision:
        anew = f"or move {directory} and {found.path} away: a new archive begins, and prefill knows no older events"
        if found.offset is not None:
            _check_identity(found, view, f"restore the NATS store that belongs to {directory}; {anew}")
        if reached > view.last:
            raise DataLost(
                f"the archive reaches position {reached}, and stream {view.name!r} ends at {view.last}: an older NATS "
                "store was restored, and its next events would have positions that the archive already has",
                fix=f"restore the NATS store and {directory} of one moment; {anew}",
            )
        passed = view.begins - 1
        if 0 < reached < passed and floor is not None and floor >= passed:
            raise DataLost(
                f"the archive ends at position {reached}, and stream {view.name!r} begins at {view.begins}: positions "
                f"{reached + 1} to {passed} were archived once and are not in this archive",
                fix=f"restore the archive that reaches position {passed}; {anew}",
            )
        if found.damage is not None:
            return StartOver(found.damage)
        if found.offset is None:
            return Continue()
        if found.offset.sequence > view.last:
            return StartOver(_ahead_reason(found.offset, view))
        if found.offset.sequence > reached:
            return StartOver(f"it is at {found.offset.sequence}, and the archive ends at {reached}")
        if lost_range(found.offset, view) is not None:
            return StartOver(f"it is at {found.offset.sequence}, and the archive reaches {reached}")
        return Continue()

    return rule


def transform_rule(found: FoundCheckpoint, view: StreamView, floor: int | None) -> Decision:
    """Stop if the directories in the checkpoint do not fit the next message of the stream."""
    again = (
        f"or move {found.path} away, start the pipeline and import each directory again: "
        "its entries come as new ones, without their old values"
    )
    if found.damage is not None:
        if not floor:
            return StartOver(found.damage)  # the stream has every message still
        raise DataLost(f"{found.path} is damaged: {found.damage}", fix=f"restore it from a backup; {again}")
    if found.offset is None:
        if not floor:
            return Continue()
        return Continue(
            f"there is no checkpoint, and messages up to {floor} of {view.name} were transformed with one: the "
            "directories begin empty. Import each directory again; until then changes of entries that are not known "
            "become dead letters"
        )
    _check_identity(found, view, f"restore the NATS store that {found.path} belongs to; {again}")
    if found.offset.sequence > view.last:
        raise DataLost(_ahead_reason(found.offset, view), fix=f"{_RESTORE}; {again}")
    gone = lost_range(found.offset, view)
    if gone is not None:
        raise DataLost(
            f"the checkpoint of the transform is at {found.offset.sequence}, and messages {gone} of {view.name} are "
            "gone: a later checkpoint has transformed them, or they were purged",
            fix=f"restore the newest checkpoint; {again}",
        )
    return Continue()


_RESTORE: Final = "restore the NATS store and the checkpoints of one moment"


def _ahead_reason(offset: Offset, view: StreamView) -> str:
    where = f"the checkpoint is at {offset.sequence}, and stream {view.name!r} ends at {view.last}"
    return f"{where}: an older NATS store was restored"


def _check_identity(found: FoundCheckpoint, view: StreamView, fix: str) -> None:
    assert found.offset is not None
    try:
        check_identity(found.offset, view)
    except DataLost as error:
        raise DataLost(error.message, fix=fix) from error
