"""Protects the checkpoint of a query from a loss of power, and reads Spark's logs in it.

Spark writes offsets, commits and state without a sync: after a loss of power, files of the last seconds can be empty or
missing, although the NATS server has dropped their messages. Therefore:

1. `sync` flushes every file of the checkpoint that changed, and then the directories.
2. It writes to `synced.json` the last batch that was committed before step 1.
3. Then the caller moves the durable of the query: the stream drops only messages whose batch is on the disk.

A crash between two steps leaves the durable behind, and the stream keeps more than it needs. After a restart of the
machine, `roll_back` removes the log entries of later batches, because their files may be damaged. Spark runs these
batches again from the state of the synced one. The stream still has their messages.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from purveyor.model.errors import Unavailable
from purveyor.model.json_fields import Json, Kind, text, whole
from purveyor.spark.offsets import Offset

SYNCED_NAME: Final = "synced.json"
SYNCED: Final = Kind("note of the synced batch", ("boot", "batch"))
LOGS: Final = ("offsets", "commits")
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_STATE_FILE: Final = re.compile(r"\.?(?P<number>\d+)($|[._])")
_UNKNOWN_BOOT: Final = "unknown"
_CLOCK_SLACK_SECONDS: Final = 2.0
"""How much older than the clock the time of a file can be that was written just now."""


@dataclass(frozen=True, slots=True)
class SyncedBatch:
    """The last batch that is on the disk, and the boot of the machine during which it was flushed."""

    batch: int
    boot: str

    def dump(self) -> bytes:
        """Encode the record."""
        return SYNCED.dump({"boot": self.boot, "batch": self.batch})

    @classmethod
    def parse(cls, data: bytes) -> "SyncedBatch":
        """Decode the record; raise UnreadableRecord if a newer program wrote it or it is damaged."""

        def build(given: Json) -> "SyncedBatch":
            SYNCED.check(given)
            return cls(whole(given, "batch", SYNCED.what), text(given, "boot", SYNCED.what))

        return SYNCED.read(data, build)


def boot_id() -> str:
    """Return the id of the current boot of the machine."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return _UNKNOWN_BOOT


class CheckpointFiles:
    """The files of one checkpoint on this machine, for the process that moves the durable."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._synced_at = 0.0
        self._noted: SyncedBatch | None = None

    def sync(self) -> None:
        """Flush what changed since the last call, and record the last committed batch.

        Raise Unavailable if that fails.
        """
        began = time.time()
        try:
            batch = newest_batch(self._directory / "commits")
            if batch is None:
                return
            for path in _changed(self._directory, self._synced_at - _CLOCK_SLACK_SECONDS):
                with contextlib.suppress(FileNotFoundError):  # Spark removed an old file meanwhile
                    sync_path(path)
            note = SyncedBatch(batch, boot_id())
            if note != self._noted:
                _write_synced(self._directory / SYNCED_NAME, note.dump())
                self._noted = note
        except OSError as error:
            raise Unavailable(
                f"the checkpoint {self._directory} cannot be flushed to the disk: {error.strerror or error}",
                fix="see whether the disk is full or broken; the messages stay in their queue until then",
            ) from error
        self._synced_at = began


def roll_back(directory: Path) -> list[int]:
    """Forget the batches that may be damaged because the machine restarted; return their numbers.

    A checkpoint without `synced.json` stays as it is: no durable was moved for it, or an older version wrote it.
    """
    try:
        synced = SyncedBatch.parse((directory / SYNCED_NAME).read_bytes())
    except FileNotFoundError:
        return []
    if synced.boot == boot_id() != _UNKNOWN_BOOT:
        return []
    removed: set[int] = set()
    for log in reversed(LOGS):  # commits first: a batch without offsets must not count as done
        for path in sorted(_entries(directory / log), key=lambda each: int(each.name), reverse=True):
            if int(path.name) > synced.batch:
                path.unlink()
                path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
                removed.add(int(path.name))
        if removed:
            sync_path(directory / log)
    for path in (directory / "state").rglob("*"):  # else a later start could take a snapshot of the forgotten batches
        if path.is_file() and _is_of_later_batch(path, synced.batch):
            path.unlink()
    return sorted(removed)


def _is_of_later_batch(path: Path, batch: int) -> bool:
    """Return whether a file of the state, by its name, belongs to a batch after the given one.

    Batch N makes version N + 1 of a state store, and an entry N in the log of an operator. A checksum file begins with
    a dot.

    >>> names = ("4.changelog", "5.zip", ".5.zip.crc", "000009-90cc.sst", "_metadata/v2/3", "_metadata/v2/4")
    >>> [_is_of_later_batch(Path(name), 3) for name in names]
    [False, True, True, False, False, True]
    """
    name = _STATE_FILE.match(path.name)
    if name is None:
        return False
    return int(name["number"]) > (batch if path.parent.parent.name == "_metadata" else batch + 1)


def newest_batch(log: Path) -> int | None:
    """Return the highest batch number in a log of Spark; None if the log is empty."""
    return max((int(path.name) for path in _entries(log)), default=None)


def batch_end(checkpoint: Path, batch: int) -> Offset:
    """Return the end of a batch from Spark's log of offsets. Spark writes the entry before it first runs the batch."""
    lines = (checkpoint / "offsets" / str(batch)).read_text(encoding="utf-8").splitlines()
    return Offset.from_json(json.loads(lines[-1]))


def committed_offset(checkpoint: Path) -> Offset | None:
    """Return the end of the last committed batch; None if there is none."""
    batch = newest_batch(checkpoint / "commits")
    return None if batch is None else batch_end(checkpoint, batch)


def sync_path(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _entries(log: Path) -> list[Path]:
    try:
        return [path for path in log.iterdir() if path.name.isdigit()]
    except FileNotFoundError:
        return []


def _changed(directory: Path, since: float) -> Iterator[Path]:
    """Yield the files that changed, and then the directories that changed: lower ones before upper ones."""
    files, directories = [], []
    for parent, _, names in os.walk(directory, topdown=False):
        directories.append(Path(parent))
        files += [Path(parent, name) for name in names]
    for path in (*files, *directories, directory.parent):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            if max(found.st_mtime, found.st_ctime) >= since:
                yield path


def _write_synced(path: Path, data: bytes) -> None:
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(path)
    sync_path(path.parent)
