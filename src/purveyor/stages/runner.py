"""A stage at work in one process: messages come in from its sources, wait in lanes, and go through in groups.

As many workers as the stage's concurrency take groups; a message stays held from its arrival to its acknowledgement,
and its source is told in between that it is being worked on. A stage that keeps order works in one instance at a time:
the owner. The others stand by at its seat.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from purveyor.model import metrics
from purveyor.model.errors import PurveyorError, Unavailable
from purveyor.queues.client import Queues
from purveyor.stages.crash_points import Point, reach
from purveyor.stages.endpoint import Stage
from purveyor.stages.key_scheduler import Lanes
from purveyor.stages.leader_lock import Seat
from purveyor.stages.processor import GROUP_SECONDS, Again, OwnerLost, Processor
from purveyor.stages.relay import Relay
from purveyor.stages.source import Incoming, Source
from purveyor.stages.sql_store import SqlStore

log = logging.getLogger("purveyor.stages")

_SMALLEST_WINDOW: Final = 64
_LARGEST_WINDOW: Final = 768
_LOOK_SECONDS: Final = 0.005
_STAND_BY_SECONDS: Final = 0.2
_WATCH_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What all stages of a process share."""

    store: SqlStore
    queues: Queues
    relay: Relay
    instance: str
    grace: timedelta
    """How long a new owner waits after one that did not say goodbye: it may still be alive and not know."""


@dataclass(slots=True)
class _Held:
    source: Source
    since: float


class Runner:
    """See the module. `run` until cancelled; `stop` before that lets what has begun come to its end."""

    def __init__(self, stage: Stage, sources: Sequence[Source], parts: Parts) -> None:
        self.stage = stage
        self._sources = sources
        self._parts = parts
        self._ordered = stage.options.retry.ordered
        self._window = min(max(_SMALLEST_WINDOW, stage.options.concurrency * 48), _LARGEST_WINDOW)
        self._processor = Processor(stage, parts.store, parts.queues, parts.relay, self._finish)
        self._lanes = Lanes(ordered=self._ordered)
        self._news = asyncio.Event()
        self._held: dict[Incoming, _Held] = {}
        self._seen: set[tuple[int, int]] = set()
        self._begun: list[float] = []
        """When the groups began that are being worked on."""
        self._gate = asyncio.Lock()
        self._stopping = False
        self.ready = asyncio.Event()
        """Set while messages are taken."""

    async def run(self) -> None:
        """Work, until cancelled. A broker or database that is away is waited for."""
        while not self._stopping:
            try:
                if self._ordered:
                    await self._own()
                else:
                    await self._work()
            except* OwnerLost as lost:
                log.warning("stage %s: %s", self.stage.id, lost.exceptions[0])
            except* Exception as errors:
                log.warning("stage %s pauses: %s", self.stage.id, errors.exceptions[0], exc_info=errors.exceptions[0])
                await asyncio.sleep(_PAUSE_SECONDS)
            finally:
                self.ready.clear()
                self._forget()

    async def stop(self, patience_seconds: float) -> None:
        """Begin nothing more, and give back what was not begun; returns when the rest is through, or time is up."""
        self._stopping = True
        for message in self._lanes.drain():
            held = self._held.pop(message, None)
            if held is not None and not self._ordered:  # in order, the next owner asks for everything again
                with contextlib.suppress(PurveyorError):
                    await held.source.later(message, timedelta(0))
        give_up = time.monotonic() + patience_seconds
        while (self._begun or self._held) and time.monotonic() < give_up:  # noqa: ASYNC110 - at the end of all
            await asyncio.sleep(0.01)

    async def _own(self) -> None:
        """Stand by until this instance is the owner, then work."""
        seat = await self._parts.store.seat("stage", self.stage.id)
        epoch = 0
        try:
            while not await seat.take():  # noqa: ASYNC110 - the lock of another process rings no bell
                await asyncio.sleep(_STAND_BY_SECONDS)
            async with self._parts.store.transaction() as transaction:
                epoch, before = await self._parts.store.statements.take_over(
                    transaction.connection, self.stage.id, self._parts.instance
                )
            if before:
                log.info("stage %s: %s takes over from %s", self.stage.id, self._parts.instance, before)
                await asyncio.sleep(self._parts.grace.total_seconds())
            for source in self._sources:
                await source.restart()
            self._processor.epoch = epoch
            async with asyncio.TaskGroup() as group:
                group.create_task(_watch(seat))
                group.create_task(self._work())
        finally:
            with contextlib.suppress(Exception):
                await self._parts.store.statements.lay_down(seat.connection, self.stage.id, epoch)
            await seat.close()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                await source.grant(self._window)
                group.create_task(self._receive(source))
            for _ in range(self.stage.options.concurrency):
                group.create_task(self._worker(group))
            group.create_task(self._keep_alive())
            self.ready.set()

    async def _receive(self, source: Source) -> None:
        async for messages in source.batches():
            fresh: list[Incoming] = []
            for message in messages:
                place = (id(source), message.sequence)
                if place in self._seen or self._stopping:
                    continue  # delivered again though we hold it: our word that we work on it came too late
                self._seen.add(place)
                self._held[message] = _Held(source, time.monotonic())
                fresh.append(message)
            reach(Point.RECEIVED)
            if len(fresh) < len(messages):
                await source.grant(len(messages) - len(fresh))
            self._lanes.add(fresh)
            self._news.set()

    async def _worker(self, group: asyncio.TaskGroup) -> None:
        while not self._stopping:
            messages = await self._next_group()
            began = time.monotonic()
            self._begun.append(began)
            try:
                again = await self._processor.process(messages)
            finally:
                self._begun.remove(began)
            metrics.STAGE_SECONDS.add(time.monotonic() - began, self.stage.id)
            await self._after(messages, again, group)

    async def _next_group(self) -> list[Incoming]:
        """Messages for a worker. Where handlers are quick, few workers with large groups get more done than many.

        A worker that is busy for longer than a group should be does not count: others may begin beside it.
        """
        while True:
            if self._lanes.available and self._may_begin():
                return self._lanes.take(self._processor.pace.group)
            async with self._gate:  # one looks for all
                if not self._lanes.available:
                    self._news.clear()
                    await self._news.wait()
                elif not self._may_begin():
                    await asyncio.sleep(_LOOK_SECONDS)

    def _may_begin(self) -> bool:
        quick = time.monotonic() - GROUP_SECONDS
        at_work = sum(1 for began in self._begun if began > quick)
        return at_work < max(2, self.stage.options.concurrency * 4 // self._processor.pace.group)

    async def _after(self, messages: Sequence[Incoming], again: Sequence[Again], group: asyncio.TaskGroup) -> None:
        blocked: set[str | None] = set()
        failed = sum(1 for item in again if item.delay is not None)
        if failed:
            metrics.STAGE_MESSAGES.add(self.stage.id, "again", by=failed)
        if self._ordered:
            self._lanes.put_back([item.message for item in again])
            for item in again:
                if item.delay is not None:
                    blocked.add(item.message.key)
                    group.create_task(self._release_later(item.message.key, item.delay))
        else:
            self._lanes.put_back([item.message for item in again if item.delay is None])
            for item in again:
                if item.delay is not None:
                    await self._answer_later(item.message, item.delay)
        self._lanes.release({message.key for message in messages} - blocked)
        if self._lanes.available:
            self._news.set()

    async def _release_later(self, key: str | None, delay: timedelta) -> None:
        await asyncio.sleep(delay.total_seconds())
        self._lanes.release([key])
        self._news.set()

    async def _answer_later(self, message: Incoming, delay: timedelta) -> None:
        held = self._drop(message)
        if held is not None:
            with contextlib.suppress(Unavailable):  # it comes again by itself
                await held.source.later(message, delay)
            await held.source.grant(1)

    async def _finish(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge (9), and make room for as many."""
        metrics.STAGE_MESSAGES.add(self.stage.id, "finished", by=len(messages))
        by_source: dict[int, tuple[Source, list[Incoming]]] = {}
        for message in messages:
            held = self._drop(message)
            if held is not None:
                by_source.setdefault(id(held.source), (held.source, []))[1].append(message)
        for source, its in by_source.values():
            with contextlib.suppress(Unavailable):  # they come again, and the inbox knows them
                await source.done(its)
            await source.grant(len(its))

    def _drop(self, message: Incoming) -> _Held | None:
        held = self._held.pop(message, None)
        if held is not None:
            self._seen.discard((id(held.source), message.sequence))
        return held

    async def _keep_alive(self) -> None:
        """Say of everything held for a while that it is being worked on."""
        pause = min(source.patience for source in self._sources).total_seconds() / 3
        while True:
            await asyncio.sleep(pause)
            old = time.monotonic() - pause / 2
            for source in self._sources:
                its = [message for message, held in self._held.items() if held.source is source and held.since < old]
                with contextlib.suppress(Unavailable):
                    await source.working(its)

    def _forget(self) -> None:
        """What is held is nobody's any more: it comes again."""
        self._lanes = Lanes(ordered=self._ordered)
        self._held.clear()
        self._seen.clear()
        self._processor.epoch = None


async def _watch(seat: Seat) -> None:
    while await seat.alive():  # noqa: ASYNC110 - a lost connection rings no bell
        await asyncio.sleep(_WATCH_SECONDS)
    raise OwnerLost("the connection that says who owns the stage is lost")
