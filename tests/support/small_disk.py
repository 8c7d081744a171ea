"""A small file system for tests that fill a disk: a tmpfs, where the system allows to mount one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """A mounted file system that can be filled and enlarged."""

    path: Path

    @property
    def _filler(self) -> Path:
        return self.path / "filler"

    def fill(self) -> None:
        """Fill the file system to the last byte with one file."""
        with self._filler.open("wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                return

    def clear(self) -> None:
        """Remove the file that fills the file system."""
        self._filler.unlink()

    def grow(self, size: str = "2g") -> None:
        """Enlarge the file system."""
        _run("mount", "-o", f"remount,size={size}", str(self.path))


@contextmanager
def small_file_system(path: Path, size: str) -> Iterator[SmallDisk]:
    """Mount a tmpfs of this size; skip the test where mounting is not allowed."""
    path.mkdir(parents=True, exist_ok=True)
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a disk cannot be filled here, because mounting a tmpfs is not allowed: {error}")
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "--lazy", str(path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
