"""The inputs of an import: files, standard input, or all the .ldif files of a directory, read in a thread.

Reads block (a slow pipe, a file that does not grow), so a thread does them, which ends with the process: the event loop
stays free for Ctrl-C. The reader follows a file from its beginning again when the file was replaced (rotated) or
truncated, and reports both, because what follows is another input.
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
from purveyor.sources.ldif.records import default_source_name, source_subject

CHUNK_BYTES = 256 << 10
STDIN = "-"
_READ_AHEAD_CHUNKS = 4
_POLL_INTERVAL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Input:
    """One input. Without a path it is standard input; without a size, the size is not known beforehand."""

    name: str
    subject: str
    path: Path | None
    size: int | None = None


class InputChange(Enum):
    """A change of an input: its end, or a followed file that is another one now."""

    END = "end"
    ROTATED = "rotated"
    TRUNCATED = "truncated"


Arrival: TypeAlias = bytes | InputChange


def find_inputs(target: str, *, source: str | None = None) -> list[Input]:
    """Return the inputs of a command-line argument, in the order of reading; InvalidInput names an unreadable one.

    This opens all files once before any is read, so that an unreadable file does not end the import of a directory
    half way.
    """
    if target == STDIN:
        return [
            Input("standard input", source_subject(source if source is not None else default_source_name(STDIN)), None)
        ]
    path = Path(target)
    paths = [path]
    if path.is_dir():
        try:
            paths = sorted(found for found in path.iterdir() if found.suffix == ".ldif" and not found.is_dir())
        except OSError as error:
            raise _unreadable(path, error) from None
        if not paths:
            raise InvalidInput(f"no .ldif file in the directory {target}", fix="name a file, or check the directory")
    return [_file_input(found, source) for found in paths]


def _file_input(path: Path, source: str | None) -> Input:
    subject = source_subject(source if source is not None else default_source_name(path.name))
    try:
        status = path.stat()
        if not S_ISREG(status.st_mode):
            return Input(str(path), subject, path)  # a pipe, for example: a second open would lose data
        with path.open("rb"):
            return Input(str(path), subject, path, status.st_size)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path | str, error: OSError) -> InvalidInput:
    return InvalidInput(f"{path} cannot be read: {error.strerror or error}", fix="check the path and its permissions")


class InputReader:
    """Reads the portions of an input as they arrive. An async context manager; its exit ends the reading."""

    def __init__(self, given: Input, *, follow: bool = False) -> None:
        self._given = given
        self._follow = follow
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Arrival | InvalidInput] = asyncio.Queue()
        self._room = threading.Semaphore(_READ_AHEAD_CHUNKS)
        self._closed = threading.Event()

    async def __aenter__(self) -> Self:
        threading.Thread(target=self._read, name=f"reads {self._given.name}", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._room.release()

    async def next(self, wait_seconds: float | None = None) -> Arrival | None:
        """Return the next portion or change; None if none arrives within the wait."""
        try:
            found = await asyncio.wait_for(self._arrived.get(), wait_seconds)
        except TimeoutError:
            return None
        self._room.release()
        if isinstance(found, InvalidInput):
            raise found
        return found

    # The methods below run in the thread.

    def _read(self) -> None:
        try:
            for arrival in self._arrivals():
                self._room.acquire()
                if self._closed.is_set() or not self._deliver(arrival):
                    return
        except OSError as error:
            self._deliver(_unreadable(self._given.name, error))

    def _deliver(self, arrival: Arrival | InvalidInput) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, arrival)
        except RuntimeError:  # the loop was closed during the read
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
        yield InputChange.END

    def _follow_file(self, path: Path) -> Iterator[Arrival]:
        while True:
            with path.open("rb", buffering=0) as file:
                while (change := _find_change(file, path)) is None:
                    if chunk := file.read(CHUNK_BYTES):
                        yield chunk
                    elif self._closed.wait(_POLL_INTERVAL_SECONDS):
                        return
                if change is InputChange.ROTATED:
                    yield from _until_end(file)  # what was written between the last check and the replacement
            yield change
            while not path.exists():  # it is being replaced again
                if self._closed.wait(_POLL_INTERVAL_SECONDS):
                    return


class _StandardInput:
    """Standard input, read below Python's buffer: a thread that ends inside of that never releases its lock."""

    def read(self, size: int) -> bytes | None:
        try:
            return os.read(sys.stdin.fileno(), size)
        except io.UnsupportedOperation:  # not a file, but an object in memory
            return sys.stdin.buffer.read(size)


def _until_end(file: _StandardInput | io.FileIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


def _find_change(file: io.FileIO, path: Path) -> InputChange | None:
    """Return how the open file differs from the file at its path. A missing path may be there again soon."""
    opened = os.fstat(file.fileno())
    try:
        named = path.stat()
    except OSError:
        named = opened
    if (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino):
        return InputChange.ROTATED
    return InputChange.TRUNCATED if opened.st_size < file.tell() else None
