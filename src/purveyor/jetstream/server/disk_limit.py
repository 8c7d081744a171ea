"""How much disk the store of an embedded server may use, and when the server has to restart because of it.

Two facts about nats-server make this necessary. It takes 75 % of the space that is free at its start as its limit, and
does not count what is stored already: a restart on a disk that is two thirds full would refuse every message. And a
stream whose write has failed for want of space refuses all later writes until the server restarts, also when there is
room again. So the supervisor sets the limit at each start, and looks at the disk while the server runs.

The limit leaves a reserve for what else lies on the disk: the archive, checkpoints, logs.
"""

import os
import shutil
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

_MIB: Final = 1024 * 1024
_RESERVE_BYTES: Final = 1024 * _MIB
_FLOOR_BYTES: Final = 64 * _MIB
"""More than a fast disk takes between two looks of the supervisor."""
_NEARLY: Final = 0.9
"""The share of its limit from which on a store counts as full: one large message may not fit any more."""
_WORTHWHILE: Final = 1.1
"""A restart for a larger limit must bring at least this factor."""


@dataclass(frozen=True, slots=True)
class Space:
    """The file system of a store."""

    total_bytes: int
    free_bytes: int

    @classmethod
    def of(cls, directory: Path) -> "Space":
        """Ask the system."""
        usage = shutil.disk_usage(directory)
        return cls(usage.total, usage.free)

    @property
    def floor_bytes(self) -> int:
        """With less free space than this, writes may have failed already."""
        return min(self.total_bytes // 20, _FLOOR_BYTES)

    def limit_bytes(self, stored_bytes: int) -> int:
        """The limit for a store that holds this much now.

        >>> Space(total_bytes=400_000, free_bytes=100_000).limit_bytes(250_000)
        330000
        """
        reserve = min(self.total_bytes // 20, _RESERVE_BYTES, self.free_bytes // 4)
        return max(stored_bytes + self.free_bytes - reserve, 1)


@dataclass(frozen=True, slots=True)
class Limit:
    """How much a store may hold, and whether the user chose it: then it never rises by itself."""

    size_bytes: int
    chosen: bool = False


class Verdict(Enum):
    """What a look at the disk says."""

    FINE = "fine"
    FULL = "full"
    """Publishers are refused, or will be soon."""
    ROOM_AGAIN = "room again"
    """The server has to restart to use the room that there is now."""


@dataclass(frozen=True, slots=True)
class Look:
    """A verdict, the words for it, and whether the disk has been full since the server started."""

    verdict: Verdict
    detail: str = ""
    disk_was_full: bool = False


def judge(space: Space, stored_bytes: int | None, limit: Limit, *, disk_was_full: bool) -> Look:
    """Judge one look at the disk. Pure. `stored_bytes` is None while the server does not say it."""
    if space.free_bytes < space.floor_bytes:
        return Look(Verdict.FULL, f"the disk is full: {_mib(space.free_bytes)} are free", disk_was_full=True)
    if disk_was_full:
        if space.free_bytes < 2 * space.floor_bytes:
            return Look(Verdict.FULL, f"the disk is nearly full: {_mib(space.free_bytes)} are free", disk_was_full=True)
        return Look(Verdict.ROOM_AGAIN, f"the disk was full, {_mib(space.free_bytes)} are free again")
    if stored_bytes is None or stored_bytes < _NEARLY * limit.size_bytes:
        return Look(Verdict.FINE)
    was, reachable = _mib(limit.size_bytes), space.limit_bytes(stored_bytes)
    if reachable >= _WORTHWHILE * limit.size_bytes and not limit.chosen:
        return Look(Verdict.ROOM_AGAIN, f"the limit of the store rises from {was} to {_mib(reachable)}")
    return Look(Verdict.FULL, f"the store holds {_mib(stored_bytes)}, and its limit is {was}")


def size_of(directory: Path) -> int:
    """The bytes of all files below a directory. Files that vanish meanwhile count nothing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size  # noqa: PTH116, PTH118 - thousands of files
            except OSError:
                continue
    return total


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f} MiB"


__all__ = ["Limit", "Look", "Space", "Verdict", "judge", "size_of"]
