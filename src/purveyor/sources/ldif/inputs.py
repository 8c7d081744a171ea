"""Where records come from: files, standard input, or all the .ldif files of a directory, read in a thread.

Reading blocks (a slow pipe, a file that does not grow), so it has a thread of its own, which ends with the process: the
event loop stays free for Ctrl-C. A file that is followed is read again from its beginning when it was replaced
(rotated) or cut short; both are told as such, because what follows is another input.
"""

import asyncio
import io
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from stat import S_ISREG
from types import TracebackType
from typing import Self, TypeAlias

from purveyor.model.errors import InvalidInput
from purveyor.sources.ldif.record_messages import source_of, subject

CHUNK = 256 << 10
STDIN = "-"
_AHEAD = 4  # portions read before they are asked for
_LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Input:
    """One thing to read from beginning to end. No path is standard input; no size, not known beforehand."""

    name: str
    subject: str
    path: Path | None
    size: int | None = None


class Mark(Enum):
    """What happened in an input other than bytes."""

    END = "end"
    ROTATED = "rotated"
    CUT = "cut short"


Arrival: TypeAlias = bytes | Mark


def find_inputs(target: str, *, source: str | None = None) -> list[Input]:
    """What a word of the command line stands for, in the order of reading; InvalidInput names what cannot be read.

    All files are opened once before any is read, so that a directory does not end half way for a file that could have
    been seen to be unreadable.
    """
    if target == STDIN:
        return [Input("standard input", subject(source if source is not None else source_of(STDIN)), None)]
    path = Path(target)
    paths = [path]
    if path.is_dir():
        try:
            paths = sorted(found for found in path.iterdir() if found.suffix == ".ldif" and not found.is_dir())
        except OSError as error:
            raise _unreadable(path, error) from None
        if not paths:
            raise InvalidInput(f"no .ldif file in the directory {target}", fix="name a file, or check the directory")
    return [_file(found, source) for found in paths]


def _file(path: Path, source: str | None) -> Input:
    to = subject(source if source is not None else source_of(path.name))
    try:
        about = path.stat()
        if not S_ISREG(about.st_mode):
            return Input(str(path), to, path)  # a pipe, say: opening it twice would take something away
        with path.open("rb"):
            return Input(str(path), to, path, about.st_size)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path | str, error: OSError) -> InvalidInput:
    return InvalidInput(f"{path} cannot be read: {error.strerror or error}", fix="check the path and its permissions")


class Feed:
    """The portions of an input as they arrive. Use as an async context manager; leaving it ends the reading."""

    def __init__(self, given: Input, *, follow: bool = False) -> None:
        self._given = given
        self._follow = follow
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Arrival | InvalidInput] = asyncio.Queue()
        self._room = threading.Semaphore(_AHEAD)
        self._over = threading.Event()

    async def __aenter__(self) -> Self:
        threading.Thread(target=self._read, name=f"reads {self._given.name}", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._room.release()

    async def next(self, wait_seconds: float | None = None) -> Arrival | None:
        """The next portion or mark; None when there is none within the wait."""
        try:
            found = await asyncio.wait_for(self._arrived.get(), wait_seconds)
        except TimeoutError:
            return None
        self._room.release()
        if isinstance(found, InvalidInput):
            raise found
        return found

    # Below: in the thread.

    def _read(self) -> None:
        try:
            for arrival in self._arrivals():
                self._room.acquire()
                if self._over.is_set() or not self._hand_over(arrival):
                    return
        except OSError as error:
            self._hand_over(_unreadable(self._given.name, error))

    def _hand_over(self, arrival: Arrival | InvalidInput) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, arrival)
        except RuntimeError:  # the loop was closed while we read
            return False
        return True

    def _arrivals(self) -> Iterator[Arrival]:
        if self._given.path is None:
            yield from _until_end(_StandardInput())
        elif self._follow:
            yield from self._follow_file(self._given.path)
            return
        else:
            with self._given.path.open("rb", buffering=0) as file:
                yield from _until_end(file)
        yield Mark.END

    def _follow_file(self, path: Path) -> Iterator[Arrival]:
        while True:
            with path.open("rb", buffering=0) as file:
                while (change := _changed(file, path)) is None:
                    if chunk := file.read(CHUNK):
                        yield chunk
                    elif self._over.wait(_LOOK_SECONDS):
                        return
                if change is Mark.ROTATED:
                    yield from _until_end(file)  # what was written between the last look and the replacement
            yield change
            while not path.exists():  # replaced once more, this very moment
                if self._over.wait(_LOOK_SECONDS):
                    return


class _StandardInput:
    """Read below Python's buffer: a thread that dies inside of that takes its lock with it."""

    def read(self, size: int) -> bytes | None:
        try:
            return os.read(sys.stdin.fileno(), size)
        except io.UnsupportedOperation:  # no file, but an object in memory
            return sys.stdin.buffer.read(size)


def _until_end(file: _StandardInput | io.FileIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        yield chunk


def _changed(file: io.FileIO, path: Path) -> Mark | None:
    """Whether the open file is no longer what its path names. A path that names nothing may name something soon."""
    ours = os.fstat(file.fileno())
    try:
        named = path.stat()
    except OSError:
        named = ours
    if (named.st_dev, named.st_ino) != (ours.st_dev, ours.st_ino):
        return Mark.ROTATED
    return Mark.CUT if ours.st_size < file.tell() else None
