"""Adds files to the archive so that a range is there completely or not at all; `layout` has the directories.

The steps, and what a crash after each of them leaves:

1. Spark writes Parquet into a draft: a hidden directory. A crash leaves the draft; `clean_up` removes it.
2. Its files are synced to disk and linked into a second draft under `events`. The same.
3. Under the lock the draft under `ranges` is renamed to its range. Now it is archived: Purveyor's readers see it, and a
   retry of the batch finds that the archive reaches that far and does nothing.
4. The draft under `events` is renamed. A crash before leaves other programs without this range until `clean_up`.
5. After a compaction, the ranges that the new one replaces are removed from `events`. A crash before leaves other
   programs with these events twice until `clean_up`.
"""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pyspark.sql import DataFrame

from purveyor.model.file_lock import FileLock
from purveyor.pipeline.archive.layout import (
    EVENTS,
    RANGES,
    SNAPSHOTS,
    PositionRange,
    archived_until,
    check_format,
    ranges_in,
    superseded,
    write_format,
)
from purveyor.spark.checkpoint_files import sync_path

GRACE_SECONDS = 3600.0
"""How long a query may still read files that a compaction has replaced."""

_DRAFT = ".draft-"
_ROW_GROUP_BYTES = 8 << 20
_FILES = "*.parquet"
OnStep = Callable[[str], None]


def _ignore_step(_step: str) -> None:
    """Do nothing between two steps; tests replace it."""


class RangeStore:
    """The directories of one archive. It calls `on_step` with the name of each completed step.

    Raises UnreadableRecord if a newer program wrote the archive.
    """

    def __init__(self, directory: Path, *, on_step: OnStep = _ignore_step) -> None:
        check_format(directory)
        self.directory = directory
        self._events = directory / EVENTS
        self._ranges = directory / RANGES
        self._on_step = on_step

    def ranges(self) -> list[PositionRange]:
        """Return all ranges, also those that a compaction has replaced."""
        return ranges_in(self._ranges)

    def files(self, wanted: PositionRange) -> list[Path]:
        """Return the files of a range."""
        return sorted((self._ranges / wanted.name).glob(_FILES))

    def size(self, wanted: PositionRange) -> int:
        """Return the size of a range in bytes."""
        return sum(path.stat().st_size for path in self.files(wanted))

    def snapshot_files(self, position: int) -> list[Path]:
        """Return the files of a snapshot."""
        return sorted((self.directory / SNAPSHOTS / f"{position:020}").glob(_FILES))

    def snapshot_size(self, position: int) -> int:
        """Return the size of a snapshot in bytes; 0 if there is none."""
        return sum(path.stat().st_size for path in self.snapshot_files(position))

    def add(self, rows: DataFrame, wanted: PositionRange) -> bool:
        """Archive a range that begins where the archive ends; return False if another process was faster."""
        with self._drafted(self._ranges, rows) as draft, self._linked(draft, self._events) as view, self._locked():
            if archived_until(self.directory) + 1 != wanted.first:
                return False
            self._rename(draft, self._ranges / wanted.name)
            self._rename(view, self._events / wanted.name)
        return True

    def replace(self, rows: DataFrame, parts: Sequence[PositionRange]) -> bool:
        """Replace ranges by one over all of them; return False if they are not all there any more."""
        whole = PositionRange(parts[0].first, parts[-1].last)
        with self._drafted(self._ranges, rows) as draft, self._linked(draft, self._events) as view, self._locked():
            if not set(parts) <= set(self.ranges()) - set(superseded(self.ranges())):
                return False
            os.utime(draft)  # the grace begins now
            self._rename(draft, self._ranges / whole.name)
            self._rename(view, self._events / whole.name)
            for part in parts:
                self._hide(self._events / part.name)
        return True

    def add_snapshot(self, rows: DataFrame, position: int, *, keep: int) -> None:
        """Add the objects as of a position; remove all but the last `keep` snapshots."""
        directory = self.directory / SNAPSHOTS
        target = directory / f"{position:020}"
        with self._drafted(directory, rows) as draft, self._locked():
            if not target.exists():
                self._rename(draft, target)
            names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
            for name in names[:-keep]:
                self._hide(directory / name)

    def clean_up(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """Complete what a crash has interrupted, and remove files that no query can be reading any more."""
        with self._locked():
            known = self.ranges()
            old = superseded(known)
            for path in self._hidden(grace_seconds):
                shutil.rmtree(path, ignore_errors=True)
            for stray in set(ranges_in(self._events)) - set(known):
                if not any(stray.first <= each.last and each.first <= stray.last for each in known):
                    self._link(self._events / stray.name, self._ranges)  # an operator restored `events` from a backup
            for one in known:
                if one in old:
                    self._hide(self._events / one.name)
                elif not (self._events / one.name).exists():
                    self._link(self._ranges / one.name, self._events)
            for one in old:
                if all(self._age(other) > grace_seconds for other in known if other != one and other.contains(one)):
                    self._hide(self._ranges / one.name)

    def _hidden(self, grace_seconds: float) -> list[Path]:
        """Return drafts that no process writes any more: a live one is younger."""
        directories = (self._events, self._ranges, self.directory / SNAPSHOTS)
        found = [path for directory in directories for path in directory.glob(".*")]
        return [path for path in found if time.time() - path.stat().st_mtime > grace_seconds]

    def _age(self, one: PositionRange) -> float:
        return time.time() - (self._ranges / one.name).stat().st_mtime

    @contextlib.contextmanager
    def _drafted(self, parent: Path, rows: DataFrame) -> Iterator[Path]:
        """Write the rows to a hidden directory; remove what is left of it at the end of the block."""
        parent.mkdir(parents=True, exist_ok=True)
        draft = parent / f"{_DRAFT}{uuid.uuid4().hex}"
        spark_writes = draft / "_spark"
        try:
            rows.write.options(
                **{
                    "parquet.block.size": str(_ROW_GROUP_BYTES),
                    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
                    "compression": "zstd",
                }
            ).parquet(str(spark_writes))
            for number, path in enumerate(sorted(spark_writes.glob(_FILES))):
                path.rename(draft / f"part-{number:05}.parquet")
            shutil.rmtree(spark_writes)
            for path in (*draft.glob(_FILES), draft):
                sync_path(path)
            self._on_step("drafted")
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    @contextlib.contextmanager
    def _linked(self, source: Path, parent: Path) -> Iterator[Path]:
        """Link the same files into a hidden directory elsewhere."""
        parent.mkdir(parents=True, exist_ok=True)
        view = parent / f"{_DRAFT}{uuid.uuid4().hex}"
        try:
            view.mkdir()
            for path in source.glob(_FILES):
                os.link(path, view / path.name)
            sync_path(view)
            self._on_step("linked")
            yield view
        finally:
            shutil.rmtree(view, ignore_errors=True)

    def _link(self, source: Path, parent: Path) -> None:
        with self._linked(source, parent) as view:
            self._rename(view, parent / source.name)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Allow one change of the directories at a time, also between processes."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(self.directory / ".lock"):
            check_format(self.directory)
            write_format(self.directory)
            yield

    def _rename(self, source: Path, target: Path) -> None:
        source.rename(target)
        sync_path(target.parent)
        self._on_step(f"renamed {target.parent.name}")

    def _hide(self, path: Path) -> None:
        """Hide a directory from readers with one rename, and then remove it."""
        hidden = path.with_name(f".gone-{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)
