"""An import: inputs are read, cut into records, chained, and stored block by block, in order.

Nothing here knows how a record looks or where it goes; this is the flow between `inputs`, `ldif`, `chain` and `store`,
and what is told of it on the way. Memory holds a few portions of the input and one block.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, assert_never

from purveyor.model.errors import InvalidInput
from purveyor.sources.ldif.inputs import Feed, Input, Mark
from purveyor.sources.ldif.queue_store import Store, Stored
from purveyor.sources.ldif.record_ids import Block, Chain
from purveyor.sources.ldif.records import Broken, Record
from purveyor.sources.ldif.stream_parser import Parser

_IDLE_SECONDS = 0.2  # nothing more has come for so long: what is complete goes out, though its block is not full
_GRACE_SECONDS = 2.0  # for the block under way, when the import is told to stop
_NOT_LDIF = 100

T = TypeVar("T")


@dataclass(slots=True)
class Tally:
    """What an import has come to. `added + known + broken` are all records that were dealt with."""

    files: int = 0
    added: int = 0
    known: int = 0
    broken: int = 0
    position: int | None = None
    """The sequence in the queue of the last record sent."""
    unanswered: int = 0
    """Records that were under way when it was stopped and the server did not answer: the next import will know."""
    stopped: bool = False
    """It was told to stop before the end."""

    @property
    def records(self) -> int:
        """All that were dealt with."""
        return self.added + self.known + self.broken

    def count(self, stored: Stored) -> None:
        """Add what became of a block."""
        self.added += stored.added
        self.known += stored.known
        self.broken += len(stored.broken)
        self.position = stored.position if stored.position is not None else self.position


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who is told what, as it happens."""

    on_bytes: Callable[[int], None] = _ignore
    """So many more were read."""
    on_broken: Callable[[Input, Broken], None] = _ignore
    """A record was parked."""
    on_mark: Callable[[Input, Mark], None] = _ignore
    """A followed file was rotated or cut."""


@dataclass(slots=True)
class _Reading:
    """One input on its way: from a file that is rotated several follow one another."""

    parser: Parser
    chain: Chain = field(default_factory=Chain)
    block: Block = field(default_factory=Block)


class _Stopped(Exception):
    """The grace is over and a block is still under way."""


class Importer:
    """Reads inputs into a store, until they end or `stop` is called."""

    def __init__(self, store: Store, *, follow: bool = False, listener: Listener | None = None) -> None:
        self._store = store
        self._follow = follow
        self._listener = listener or Listener()
        self._stop = asyncio.Event()
        self.tally = Tally()

    def stop(self) -> None:
        """End soon: what is under way is finished if the server lets us, what is half read is left."""
        self._stop.set()

    async def run(self, inputs: Sequence[Input]) -> Tally:
        """Import one input after the other. The tally is current when it fails, too."""
        try:
            for given in inputs:
                if self._stop.is_set():
                    break
                self.tally.files += 1
                await self._import(given)
        except _Stopped:
            pass
        self.tally.stopped = self._stop.is_set()
        return self.tally

    async def _import(self, given: Input) -> None:
        reading = self._begin()
        async with Feed(given, follow=self._follow) as feed:
            while not self._stop.is_set():
                arrived = await self._or_stop(feed.next(_IDLE_SECONDS if reading.block.waiting else None))
                if arrived is None:
                    await self._settle(reading, given)
                elif isinstance(arrived, bytes):
                    self._listener.on_bytes(len(arrived))
                    await self._take(reading, given, reading.parser.feed(arrived))
                else:
                    await self._finish(reading, given, arrived)
                    if arrived is Mark.END:
                        return
                    self._listener.on_mark(given, arrived)
                    reading = self._begin()
            await self._settle(reading, given)

    def _begin(self) -> _Reading:
        return _Reading(Parser(most_bytes=self._store.most_bytes))

    async def _take(self, reading: _Reading, given: Input, found: Iterable[Record | Broken]) -> None:
        for item in found:
            if self._stop.is_set():
                return
            reading.block.append(reading.chain.append(item))
            if reading.block.full or reading.block.heavy:
                await self._settle(reading, given)
            if reading.block.full:
                reading.block = Block()

    async def _finish(self, reading: _Reading, given: Input, mark: Mark) -> None:
        """The input has ended, one way or the other."""
        match mark:
            case Mark.END | Mark.ROTATED:
                await self._take(reading, given, reading.parser.close())
            case Mark.CUT:
                # The rest of a record that was half there will never come.
                await self._take(reading, given, reading.parser.abandon("the file was cut before the end of it"))
            case _:
                assert_never(mark)
        await self._settle(reading, given)

    async def _settle(self, reading: _Reading, given: Input) -> None:
        block = reading.block
        if not block.waiting:
            return
        _refuse_what_is_not_ldif(reading, given)
        storing = asyncio.ensure_future(self._store.put(block, given.subject))
        try:
            await self._or_stop(_finished(storing))
            if not storing.done():
                await asyncio.wait({storing}, timeout=_GRACE_SECONDS)
            if not storing.done():
                self.tally.unanswered = len(block.waiting)
                raise _Stopped
        finally:
            storing.cancel()
        stored = storing.result()
        self.tally.count(stored)
        for broken in stored.broken:
            self._listener.on_broken(given, broken)

    async def _or_stop(self, work: Awaitable[T]) -> T | None:
        """Wait for the work or for being told to stop, whatever comes first."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, stopping):
                task.cancel()


async def _finished(task: "asyncio.Future[Stored]") -> None:
    await asyncio.wait({task})


def _refuse_what_is_not_ldif(reading: _Reading, given: Input) -> None:
    """A photo or an archive would fill the dead letters with its pieces."""
    waiting = reading.block.waiting
    if reading.chain.length != len(waiting):
        return  # not its beginning
    broken = [link.item for link in waiting if isinstance(link.item, Broken)]
    binary = any(b"\0" in item.raw for item in broken)
    if len(waiting) == len(broken) and (binary or len(broken) >= _NOT_LDIF):
        raise InvalidInput(
            f"{given.name} does not look like LDIF: its first {len(broken)} records are all broken "
            f"(line {broken[0].line}: {broken[0].reason})",
            fix="nothing of it was imported; is it packed, or another format?",
        )
