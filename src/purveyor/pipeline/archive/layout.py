"""Where the archive lies: ranges of positions as names of directories, and which of them tell the truth. Pure.

    archive/events/<first>-<last>/*.parquet   what other programs read, every position once
    archive/ranges/<first>-<last>/*.parquet   the same files under a second name, for our own readers
    archive/snapshots/<position>/*.parquet    the objects as of a position
    archive/format.json                       the version of all this; absent in archives from before it was written

A range is there whole or not at all: its directory is filled under a hidden name and renamed. Ranges join without a
gap, because each begins where the archive ended; a position in a range that has no row was removed from the stream
before it could be archived. Compaction replaces neighbours by one range over all of them. A query that was planned
before still needs the old files, so they stay in `ranges` for a time: there a range that lies within another is
superseded, and `cover` passes over it. In `events` they are gone at once.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from purveyor.model.stored_record import Kind

EVENTS, RANGES, SNAPSHOTS = "events", "ranges", "snapshots"
FORMAT = "format.json"
ARCHIVE = Kind("archive")
_RANGE_NAME = re.compile(r"\d{20}-\d{20}")
_SNAPSHOT_NAME = re.compile(r"\d{20}")


@dataclass(frozen=True, slots=True, order=True)
class PositionRange:
    """Positions from first to last, both included."""

    first: int
    last: int

    @property
    def name(self) -> str:
        """Its directory.

        >>> PositionRange(1, 250).name
        '00000000000000000001-00000000000000000250'
        """
        return f"{self.first:020}-{self.last:020}"

    def holds(self, other: "PositionRange") -> bool:
        """Whether it covers all of another."""
        return self.first <= other.first and other.last <= self.last


@dataclass(frozen=True, slots=True)
class Piece:
    """What to read of a range: positions from `first` to `last` of it."""

    range: PositionRange
    first: int
    last: int


def parse_range(name: str) -> PositionRange | None:
    """The range that a directory is named after; None for anything else.

    >>> parse_range("00000000000000000001-00000000000000000250")
    PositionRange(first=1, last=250)
    >>> parse_range("_temporary")
    """
    if not _RANGE_NAME.fullmatch(name):
        return None
    first, last = (int(part) for part in name.split("-"))
    return PositionRange(first, last) if 1 <= first <= last else None


def parse_snapshot(name: str) -> int | None:
    """The position that a snapshot's directory is named after; None for anything else."""
    return int(name) if _SNAPSHOT_NAME.fullmatch(name) else None


def cover(ranges: Iterable[PositionRange], first: int, last: int) -> list[Piece]:
    """What to read for positions first..last, each position from one range only, in order.

    Of ranges that begin together the longest counts, and what lies within another is passed over. Two ranges that only
    overlap (somebody mixed two archives) are read one after the other, the second from where the first ends.

    >>> ranges = [PositionRange(1, 4), PositionRange(5, 9), PositionRange(1, 9), PositionRange(10, 12)]
    >>> [(piece.range.name[-3:], piece.first, piece.last) for piece in cover(ranges, 3, 11)]
    [('009', 3, 9), ('012', 10, 11)]
    """
    pieces: list[Piece] = []
    done = first - 1
    for found in sorted(ranges, key=lambda each: (each.first, -each.last)):
        begin, end = max(found.first, done + 1), min(found.last, last)
        if begin <= end:
            pieces.append(Piece(found, begin, end))
            done = end
    return pieces


def superseded(ranges: Iterable[PositionRange]) -> list[PositionRange]:
    """Ranges that lie within another one: left behind by a compaction."""
    known = set(ranges)
    return sorted(one for one in known if any(other != one and other.holds(one) for other in known))


def until(ranges: Iterable[PositionRange]) -> int:
    """The last position that the ranges reach; 0 when there are none."""
    return max((each.last for each in ranges), default=0)


def ranges_in(directory: Path) -> list[PositionRange]:
    """The ranges of a directory, in order of position."""
    return sorted(found for name in _names(directory) if (found := parse_range(name)) is not None)


def snapshots_in(archive: Path) -> list[int]:
    """The positions of which there are snapshots, in order."""
    return sorted(found for name in _names(archive / SNAPSHOTS) if (found := parse_snapshot(name)) is not None)


def check_format(archive: Path) -> None:
    """Raise UnreadableRecord if a newer program wrote the archive: nothing of it is read or changed then."""
    try:
        text = (archive / FORMAT).read_bytes()
    except FileNotFoundError:
        return
    ARCHIVE.read(text, ARCHIVE.check, str(archive))


def write_format(archive: Path) -> None:
    """Say the version of an archive that does not say it."""
    path = archive / FORMAT
    if not path.exists():
        draft = path.with_name(f".{FORMAT}.draft")
        draft.write_bytes(ARCHIVE.dump({}))
        draft.replace(path)


def archived_until(directory: Path) -> int:
    """The last position that the archive in this directory has taken in; 0 when it has none."""
    return until(ranges_in(directory / RANGES))


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []
