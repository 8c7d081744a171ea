"""An import: reads inputs, parses records, assigns ids, and stores them block by block, in order.

This module connects `inputs`, `ldif_parser` and `queue_store`, and counts and reports. Memory holds a few portions of
the input and one block.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, assert_never

from purveyor.model.errors import InvalidInput
from purveyor.sources.ldif.inputs import Input, InputChange, InputReader
from purveyor.sources.ldif.ldif_parser import LdifParser
from purveyor.sources.ldif.queue_store import Block, BlockResult, RecordIdChain, RecordStore
from purveyor.sources.ldif.records import BrokenRecord, Record

_IDLE_SECONDS = 0.2  # without new input for this long, the importer stores a block that is not full
_STOP_TIMEOUT_SECONDS = 2.0  # for the block that is being stored at a stop
_MAX_BROKEN_AT_START = 100

T = TypeVar("T")


@dataclass(slots=True)
class ImportCounts:
    """The counts of an import. `added + known + broken` are all processed records."""

    files: int = 0
    added: int = 0
    known: int = 0
    broken: int = 0
    position: int | None = None
    """The sequence in the queue of the last stored record."""
    unanswered: int = 0
    """Records that were being stored at the stop, without a response of the server: the next import finds out."""
    stopped: bool = False
    """Whether `stop` was called before the end."""

    @property
    def records(self) -> int:
        """All processed records."""
        return self.added + self.known + self.broken

    def add(self, stored: BlockResult) -> None:
        """Add the outcome of a block."""
        self.added += stored.added
        self.known += stored.known
        self.broken += len(stored.broken)
        self.position = stored.position if stored.position is not None else self.position


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportListener:
    """Callbacks of an import."""

    on_bytes: Callable[[int], None] = _ignore
    """Called with the number of bytes of each portion."""
    on_broken: Callable[[Input, BrokenRecord], None] = _ignore
    """Called for each broken record."""
    on_change: Callable[[Input, InputChange], None] = _ignore
    """Called when a followed file was rotated or truncated."""


@dataclass(slots=True)
class _OpenInput:
    """The state of one input. A file that is rotated is several inputs in a row."""

    parser: LdifParser
    chain: RecordIdChain = field(default_factory=RecordIdChain)
    block: Block = field(default_factory=Block)


class _Stopped(Exception):
    """The stop timeout is over and a block is still being stored."""


class Importer:
    """Imports inputs into a store, until they end or `stop` is called."""

    def __init__(self, store: RecordStore, *, follow: bool = False, listener: ImportListener | None = None) -> None:
        self._store = store
        self._follow = follow
        self._listener = listener or ImportListener()
        self._stop = asyncio.Event()
        self.counts = ImportCounts()

    def stop(self) -> None:
        """End soon: finish the block that is being stored if the server responds, and drop incomplete records."""
        self._stop.set()

    async def run(self, inputs: Sequence[Input]) -> ImportCounts:
        """Import one input after the other. After an error `counts` is current, too."""
        try:
            for given in inputs:
                if self._stop.is_set():
                    break
                self.counts.files += 1
                await self._import(given)
        except _Stopped:
            pass
        self.counts.stopped = self._stop.is_set()
        return self.counts

    async def _import(self, given: Input) -> None:
        reading = self._begin()
        async with InputReader(given, follow=self._follow) as reader:
            while not self._stop.is_set():
                arrived = await self._until_stop(reader.next(_IDLE_SECONDS if reading.block.waiting else None))
                if arrived is None:
                    await self._store_block(reading, given)
                elif isinstance(arrived, bytes):
                    self._listener.on_bytes(len(arrived))
                    await self._add_records(reading, given, reading.parser.feed(arrived))
                else:
                    await self._finish(reading, given, arrived)
                    if arrived is InputChange.END:
                        return
                    self._listener.on_change(given, arrived)
                    reading = self._begin()
            await self._store_block(reading, given)

    def _begin(self) -> _OpenInput:
        return _OpenInput(LdifParser(max_record_bytes=self._store.max_record_bytes))

    async def _add_records(self, reading: _OpenInput, given: Input, found: Iterable[Record | BrokenRecord]) -> None:
        for item in found:
            if self._stop.is_set():
                return
            reading.block.append(reading.chain.append(item))
            if reading.block.is_full or reading.block.is_heavy:
                await self._store_block(reading, given)
            if reading.block.is_full:
                reading.block = Block()

    async def _finish(self, reading: _OpenInput, given: Input, change: InputChange) -> None:
        """Store the rest of an input that has ended."""
        match change:
            case InputChange.END | InputChange.ROTATED:
                await self._add_records(reading, given, reading.parser.close())
            case InputChange.TRUNCATED:
                # The rest of an incomplete record will never come.
                await self._add_records(
                    reading, given, reading.parser.abandon("the file was truncated before the end of the record")
                )
            case _:
                assert_never(change)
        await self._store_block(reading, given)

    async def _store_block(self, reading: _OpenInput, given: Input) -> None:
        block = reading.block
        if not block.waiting:
            return
        _require_ldif(reading, given)
        storing = asyncio.ensure_future(self._store.put(block, given.subject))
        try:
            await self._until_stop(_wait_done(storing))
            if not storing.done():
                await asyncio.wait({storing}, timeout=_STOP_TIMEOUT_SECONDS)
            if not storing.done():
                self.counts.unanswered = len(block.waiting)
                raise _Stopped
        finally:
            storing.cancel()
        stored = storing.result()
        self.counts.add(stored)
        for broken in stored.broken:
            self._listener.on_broken(given, broken)

    async def _until_stop(self, work: Awaitable[T]) -> T | None:
        """Return the result of the work, or None if `stop` is called first."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, stopping):
                task.cancel()


async def _wait_done(task: "asyncio.Future[BlockResult]") -> None:
    await asyncio.wait({task})


def _require_ldif(reading: _OpenInput, given: Input) -> None:
    """Raise InvalidInput if no record at the beginning is valid: a photo or an archive would fill the dead letters."""
    waiting = reading.block.waiting
    if reading.chain.length != len(waiting):
        return  # not the beginning
    broken = [each.item for each in waiting if isinstance(each.item, BrokenRecord)]
    binary = any(b"\0" in item.raw for item in broken)
    if len(waiting) == len(broken) and (binary or len(broken) >= _MAX_BROKEN_AT_START):
        raise InvalidInput(
            f"{given.name} does not look like LDIF: its first {len(broken)} records are all broken "
            f"(line {broken[0].line}: {broken[0].reason})",
            fix="nothing of it was imported; is it compressed, or another format?",
        )
