"""How much disk the store of an embedded server may use, and when the server has to restart because of it.

Two facts about nats-server make this necessary. It takes 75 % of the space that is free at its start as its limit, and
does not count its stored messages: a restart on a disk that is two thirds full would refuse every message. And a stream
whose write has failed for lack of space refuses all later writes until the server restarts, even if there is space
again. So the supervisor sets the limit at each start, and checks the disk while the server runs.

The limit leaves a reserve for other data on the disk: the archive, checkpoints, logs.
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
"""More than a fast disk writes between two checks of the supervisor."""
_NEARLY_FULL_SHARE: Final = 0.9
"""The share of its limit from which a store counts as full: a large message may not fit any more."""
_WORTHWHILE_FACTOR: Final = 1.1
"""A restart for a larger limit must raise it by at least this factor."""


@dataclass(frozen=True, slots=True)
class Space:
    """The file system of a store."""

    total_bytes: int
    free_bytes: int

    @classmethod
    def read(cls, directory: Path) -> "Space":
        """Read the disk usage from the system."""
        usage = shutil.disk_usage(directory)
        return cls(usage.total, usage.free)

    @property
    def floor_bytes(self) -> int:
        """With less free space than this, writes may have failed already."""
        return min(self.total_bytes // 20, _FLOOR_BYTES)

    def limit_bytes(self, stored_bytes: int) -> int:
        """Return the limit for a store of this size.

        >>> Space(total_bytes=400_000, free_bytes=100_000).limit_bytes(250_000)
        330000
        """
        reserve = min(self.total_bytes // 20, _RESERVE_BYTES, self.free_bytes // 4)
        return max(stored_bytes + self.free_bytes - reserve, 1)


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of a store, and whether the user chose it: then it never rises by itself."""

    size_bytes: int
    chosen: bool = False


class DiskStatus(Enum):
    """The result of a check of the disk."""

    FINE = "fine"
    FULL = "full"
    """The server refuses publishers, or will do so soon."""
    ROOM_AGAIN = "room again"
    """The server has to restart to use the free space."""


@dataclass(frozen=True, slots=True)
class DiskCheck:
    """The result of a check, its explanation, and whether the disk has been full since the server started."""

    status: DiskStatus
    detail: str = ""
    disk_was_full: bool = False


def check_disk(space: Space, stored_bytes: int | None, limit: Limit, *, disk_was_full: bool) -> DiskCheck:
    """Evaluate the disk usage. Pure. `stored_bytes` is None if it is unknown."""
    if space.free_bytes < space.floor_bytes:
        return DiskCheck(DiskStatus.FULL, f"the disk is full: {_mib(space.free_bytes)} are free", disk_was_full=True)
    if disk_was_full:
        if space.free_bytes < 2 * space.floor_bytes:
            return DiskCheck(
                DiskStatus.FULL, f"the disk is nearly full: {_mib(space.free_bytes)} are free", disk_was_full=True
            )
        return DiskCheck(DiskStatus.ROOM_AGAIN, f"the disk was full, {_mib(space.free_bytes)} are free again")
    if stored_bytes is None or stored_bytes < _NEARLY_FULL_SHARE * limit.size_bytes:
        return DiskCheck(DiskStatus.FINE)
    was, reachable = _mib(limit.size_bytes), space.limit_bytes(stored_bytes)
    if reachable >= _WORTHWHILE_FACTOR * limit.size_bytes and not limit.chosen:
        return DiskCheck(DiskStatus.ROOM_AGAIN, f"the limit of the store rises from {was} to {_mib(reachable)}")
    return DiskCheck(DiskStatus.FULL, f"the store holds {_mib(stored_bytes)}, and its limit is {was}")


def size_of(directory: Path) -> int:
    """Return the size of all files below a directory. Files that vanish in the meantime do not count."""
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


__all__ = ["DiskCheck", "DiskStatus", "Limit", "Space", "check_disk", "size_of"]
