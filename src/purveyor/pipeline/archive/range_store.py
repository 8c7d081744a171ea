"""Putting files into the archive so that they are there whole or not at all; see `layout` for what lies where.

The steps, and what a crash after each of them leaves:

1. Spark writes Parquet into a draft: a hidden directory. A crash leaves the draft; `tidy` removes it.
2. Its files are synced to disk and linked into a second draft under `events`. The same.
3. Under the lock the draft under `ranges` is renamed to its range. Now it is archived: our readers see it, and a
   retry of the batch finds that the archive reaches that far and does nothing.
4. The draft under `events` is renamed. A crash before leaves other programs without this range until `tidy`.
5. After a compaction, the ranges that the new one replaces leave `events`. A crash before leaves other programs with
   these events twice until `tidy`.
"""

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pyspark.sql import DataFrame

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
Pause = Callable[[str], None]


def _go_on(_step: str) -> None:
    """Nothing happens between two steps, but in tests."""


class Store:
    """The directories of one archive. `between` is called with the name of each step that was done.

    UnreadableRecord if a newer program wrote the archive.
    """

    def __init__(self, directory: Path, *, between: Pause = _go_on) -> None:
        check_format(directory)
        self.directory = directory
        self._events = directory / EVENTS
        self._ranges = directory / RANGES
        self._between = between

    def ranges(self) -> list[PositionRange]:
        """The ranges there are, those that a compaction has replaced among them."""
        return ranges_in(self._ranges)

    def files(self, wanted: PositionRange) -> list[Path]:
        """The files of a range."""
        return sorted((self._ranges / wanted.name).glob(_FILES))

    def size(self, wanted: PositionRange) -> int:
        """The bytes of a range."""
        return sum(path.stat().st_size for path in self.files(wanted))

    def snapshot_files(self, position: int) -> list[Path]:
        """The files of a snapshot."""
        return sorted((self.directory / SNAPSHOTS / f"{position:020}").glob(_FILES))

    def snapshot_size(self, position: int) -> int:
        """The bytes of a snapshot; 0 when there is none."""
        return sum(path.stat().st_size for path in self.snapshot_files(position))

    def add(self, rows: DataFrame, wanted: PositionRange) -> bool:
        """Archive a range that begins where the archive ends; False when somebody else was quicker."""
        with self._drafted(self._ranges, rows) as draft, self._linked(draft, self._events) as view, self._locked():
            if archived_until(self.directory) + 1 != wanted.first:
                return False
            self._rename(draft, self._ranges / wanted.name)
            self._rename(view, self._events / wanted.name)
        return True

    def replace(self, rows: DataFrame, parts: Sequence[PositionRange]) -> bool:
        """Put one range in the place of its parts; False when they are not all there any more."""
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
        """The objects as of a position; older snapshots than the last few are removed."""
        directory = self.directory / SNAPSHOTS
        target = directory / f"{position:020}"
        with self._drafted(directory, rows) as draft, self._locked():
            if not target.exists():
                self._rename(draft, target)
            names = sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
            for name in names[:-keep]:
                self._hide(directory / name)

    def tidy(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """Finish what a crash has interrupted, and remove what no query can be reading any more."""
        with self._locked():
            known = self.ranges()
            old = superseded(known)
            for path in self._hidden(grace_seconds):
                shutil.rmtree(path, ignore_errors=True)
            for stray in set(ranges_in(self._events)) - set(known):
                if not any(stray.first <= each.last and each.first <= stray.last for each in known):
                    self._link(self._events / stray.name, self._ranges)  # `events` was brought back from a backup
            for one in known:
                if one in old:
                    self._hide(self._events / one.name)
                elif not (self._events / one.name).exists():
                    self._link(self._ranges / one.name, self._events)
            for one in old:
                if all(self._age(other) > grace_seconds for other in known if other != one and other.holds(one)):
                    self._hide(self._ranges / one.name)

    def _hidden(self, grace_seconds: float) -> list[Path]:
        """Drafts that nobody writes any more: a living one is younger."""
        places = (self._events, self._ranges, self.directory / SNAPSHOTS)
        found = [path for place in places for path in place.glob(".*")]
        return [path for path in found if time.time() - path.stat().st_mtime > grace_seconds]

    def _age(self, one: PositionRange) -> float:
        return time.time() - (self._ranges / one.name).stat().st_mtime

    @contextlib.contextmanager
    def _drafted(self, parent: Path, rows: DataFrame) -> Iterator[Path]:
        """The rows as files in a hidden directory; whatever is left of it in the end is removed."""
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
            self._between("drafted")
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    @contextlib.contextmanager
    def _linked(self, source: Path, parent: Path) -> Iterator[Path]:
        """The same files in a hidden directory of another place."""
        parent.mkdir(parents=True, exist_ok=True)
        view = parent / f"{_DRAFT}{uuid.uuid4().hex}"
        try:
            view.mkdir()
            for path in source.glob(_FILES):
                os.link(path, view / path.name)
            sync_path(view)
            self._between("linked")
            yield view
        finally:
            shutil.rmtree(view, ignore_errors=True)

    def _link(self, source: Path, parent: Path) -> None:
        with self._linked(source, parent) as view:
            self._rename(view, parent / source.name)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One change of the directories at a time, also between processes."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / ".lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            check_format(self.directory)
            write_format(self.directory)
            yield

    def _rename(self, source: Path, target: Path) -> None:
        source.rename(target)
        sync_path(target.parent)
        self._between(f"renamed {target.parent.name}")

    def _hide(self, path: Path) -> None:
        """Gone for readers with one rename, and then for good."""
        hidden = path.with_name(f".gone-{uuid.uuid4().hex}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)
