"""The layout of the archive: ranges of positions as names of directories, and which of them are valid. Pure.

    archive/events/<first>-<last>/*.parquet   what other programs read, every position once
    archive/ranges/<first>-<last>/*.parquet   the same files under a second name, for Purveyor's own readers
    archive/snapshots/<position>/*.parquet    the objects as of a position
    archive/format.json                       the version of the layout; absent in the oldest archives

A range is there completely or not at all: its directory is filled under a hidden name and renamed. Ranges join without
a gap, because each begins where the archive ended; a position in a range that has no row was removed from the stream
before it could be archived. Compaction replaces neighbours by one range over all of them. A query that was planned
before still needs the old files, so they stay in `ranges` for a time: a range within another one is superseded, and
`select_ranges` skips it. In `events` they are removed at once.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from purveyor.model.json_fields import Kind

EVENTS, RANGES, SNAPSHOTS = "events", "ranges", "snapshots"
FORMAT = "format.json"
ARCHIVE = Kind("archive")
SCHEMA = (
    "position bigint, stored timestamp, subject string, kind string, realm string, topic string, key string, "
    "id string, publisher_name string, ts timestamp, operation string, headers map<string,array<string>>, data binary"
)
"""The archive's columns, as DDL of Spark."""
ORDER = ("realm", "topic", "position")
"""The order of the rows in a file, so that a query for one topic skips the rest."""
COLUMNS = tuple(field.split()[0] for field in SCHEMA.split(", "))
EVENT, CONTROL, INVALID = "event", "control", "invalid"
"""The values of column `kind`. A message that is not an event is archived unchanged, so that people can look at it."""
_RANGE_NAME = re.compile(r"\d{20}-\d{20}")
_SNAPSHOT_NAME = re.compile(r"\d{20}")


@dataclass(frozen=True, slots=True, order=True)
class PositionRange:
    """Positions from first to last, both included."""

    first: int
    last: int

    def __len__(self) -> int:
        return max(self.last - self.first + 1, 0)

    @property
    def name(self) -> str:
        """The name of its directory.

        >>> PositionRange(1, 250).name
        '00000000000000000001-00000000000000000250'
        """
        return f"{self.first:020}-{self.last:020}"

    def contains(self, other: "PositionRange") -> bool:
        """Return whether it covers all of another range."""
        return self.first <= other.first and other.last <= self.last


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a range to read: positions from `first` to `last`."""

    range: PositionRange
    first: int
    last: int


def parse_range(name: str) -> PositionRange | None:
    """Return the range in the name of a directory; None for any other name.

    >>> parse_range("00000000000000000001-00000000000000000250")
    PositionRange(first=1, last=250)
    >>> parse_range("_temporary")
    """
    if not _RANGE_NAME.fullmatch(name):
        return None
    first, last = (int(part) for part in name.split("-"))
    return PositionRange(first, last) if 1 <= first <= last else None


def parse_snapshot(name: str) -> int | None:
    """Return the position in the name of a snapshot's directory; None for any other name."""
    return int(name) if _SNAPSHOT_NAME.fullmatch(name) else None


def select_ranges(ranges: Iterable[PositionRange], first: int, last: int) -> list[Piece]:
    """Select the ranges to read for positions first..last, each position from one range only, in order.

    Of ranges that begin together the longest counts, and a range within another is skipped. Two ranges that only
    overlap (an operator mixed two archives) are read one after the other, the second from where the first ends.

    >>> ranges = [PositionRange(1, 4), PositionRange(5, 9), PositionRange(1, 9), PositionRange(10, 12)]
    >>> [(piece.range.name[-3:], piece.first, piece.last) for piece in select_ranges(ranges, 3, 11)]
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
    """Return the ranges within another one: a compaction has replaced them."""
    known = set(ranges)
    return sorted(one for one in known if any(other != one and other.contains(one) for other in known))


def end_position(ranges: Iterable[PositionRange]) -> int:
    """Return the last position of the ranges; 0 if there are none."""
    return max((each.last for each in ranges), default=0)


def ranges_in(directory: Path) -> list[PositionRange]:
    """Return the ranges in a directory, in order of position."""
    return sorted(found for name in _names(directory) if (found := parse_range(name)) is not None)


def snapshots_in(archive: Path) -> list[int]:
    """Return the positions of the snapshots, in order."""
    return sorted(found for name in _names(archive / SNAPSHOTS) if (found := parse_snapshot(name)) is not None)


def check_format(archive: Path) -> None:
    """Raise UnreadableRecord if a newer program wrote the archive: nothing of it is read or changed then."""
    try:
        text = (archive / FORMAT).read_bytes()
    except FileNotFoundError:
        return
    ARCHIVE.read(text, ARCHIVE.check, str(archive))


def write_format(archive: Path) -> None:
    """Write the version into an archive that has none."""
    path = archive / FORMAT
    if not path.exists():
        draft = path.with_name(f".{FORMAT}.draft")
        draft.write_bytes(ARCHIVE.dump({}))
        draft.replace(path)


def archived_until(directory: Path) -> int:
    """Return the last archived position of the archive in this directory; 0 if it is empty."""
    return end_position(ranges_in(directory / RANGES))


def _names(directory: Path) -> list[str]:
    try:
        return [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []
