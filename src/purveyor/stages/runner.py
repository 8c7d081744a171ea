"""A stage at work in one process: receives messages from its sources, schedules them, and processes them in groups.

The stage has as many workers as its concurrency; each takes a group of messages. A message stays held from its arrival
to its acknowledgement, and the runner extends its ack wait in between. A stage that keeps order works in one instance
at a time: the owner, which holds a leader lock. The other instances wait for that lock.

`KeyScheduler` has the order in which a stage works on the messages that it holds; no clock, no I/O. In parallel, any
message is ready: interactive ones first, then by age. In order, each key has a queue: the scheduler gives out its
messages one group at a time, in the order in which they came, and while the first of them waits for its next attempt
all behind it wait. Messages without a key share one queue.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from purveyor.model import metrics
from purveyor.model.errors import PurveyorError, Unavailable
from purveyor.queues.client import Queues
from purveyor.stages.crash_points import CrashPoint, reach
from purveyor.stages.endpoint import Stage
from purveyor.stages.processor import GROUP_SECONDS, OwnershipLost, Processor, Unprocessed
from purveyor.stages.relay import Relay
from purveyor.stages.source import Incoming, Source
from purveyor.stages.sql_dialects import LeaderLock, acquire
from purveyor.stages.sql_store import SqlStore
from purveyor.stages.task_cancellation import end_tasks, run_together

log = logging.getLogger("purveyor.stages")

_MIN_HELD_MESSAGES: Final = 64
_MAX_HELD_MESSAGES: Final = 768
_HELD_MESSAGES_PER_WORKER: Final = 48
_GROUP_POLL_SECONDS: Final = 0.005
_LEADER_POLL_SECONDS: Final = 0.2
_OWNERSHIP_CHECK_SECONDS: Final = 1.0
_RESTART_DELAY_SECONDS: Final = 1.0


@dataclass(slots=True)
class _KeyQueue:
    waiting: deque[Incoming] = field(default_factory=deque)
    busy: bool = False
    ready: bool = False


class KeyScheduler:
    """The waiting messages of one stage in one process."""

    def __init__(self, *, ordered: bool) -> None:
        self._ordered = ordered
        self._interactive: deque[Incoming] = deque()
        self._plain: deque[Incoming] = deque()
        self._queues: dict[str | None, _KeyQueue] = {}
        self._ready_keys: deque[str | None] = deque()
        self._ready_interactive_keys: deque[str | None] = deque()

    @property
    def has_ready(self) -> bool:
        """Whether `take` would return a message."""
        return bool(self._interactive or self._plain or self._ready_keys or self._ready_interactive_keys)

    def add(self, messages: Iterable[Incoming]) -> None:
        """Add messages that have arrived."""
        for message in messages:
            if self._ordered:
                self._queues.setdefault(message.key, _KeyQueue()).waiting.append(message)
                self._make_ready(message.key)
            else:
                (self._interactive if message.interactive else self._plain).append(message)

    def take(self, limit: int) -> list[Incoming]:
        """Take up to `limit` messages to process one after the other; their keys are busy until `release`."""
        taken: list[Incoming] = []
        while not self._ordered and len(taken) < limit and (self._interactive or self._plain):
            taken.append((self._interactive or self._plain).popleft())
        while len(taken) < limit and (self._ready_interactive_keys or self._ready_keys):
            key = (self._ready_interactive_keys or self._ready_keys).popleft()
            queue = self._queues[key]
            queue.ready, queue.busy = False, True
            while queue.waiting and len(taken) < limit:
                taken.append(queue.waiting.popleft())
        return taken

    def put_back(self, messages: Sequence[Incoming]) -> None:
        """Put messages that failed or were not processed back to the front."""
        for message in reversed(messages):
            if self._ordered:
                self._queues.setdefault(message.key, _KeyQueue()).waiting.appendleft(message)
            else:
                (self._interactive if message.interactive else self._plain).appendleft(message)

    def release(self, keys: Iterable[str | None]) -> None:
        """Make the next messages of these keys ready."""
        for key in set(keys) if self._ordered else ():
            queue = self._queues.get(key)
            if queue is None:
                continue
            queue.busy = False
            if queue.waiting:
                self._make_ready(key)
            else:
                del self._queues[key]

    def drain(self) -> list[Incoming]:
        """Take out all waiting messages."""
        left = [*self._interactive, *self._plain, *(item for queue in self._queues.values() for item in queue.waiting)]
        self._interactive.clear()
        self._plain.clear()
        self._ready_keys.clear()
        self._ready_interactive_keys.clear()
        self._queues.clear()
        return left

    def _make_ready(self, key: str | None) -> None:
        queue = self._queues[key]
        if not queue.busy and not queue.ready and queue.waiting:
            queue.ready = True
            interactive = any(message.interactive for message in queue.waiting)
            (self._ready_interactive_keys if interactive else self._ready_keys).append(key)


@dataclass(frozen=True, slots=True)
class StageServices:
    """The objects that all stages of a process share."""

    store: SqlStore
    queues: Queues
    relay: Relay
    instance: str
    grace: timedelta
    """How long a new owner waits after one that did not sign off: it may still be alive and not know."""


@dataclass(slots=True)
class _Held:
    source: Source
    since: float


class Runner:
    """The runner of one stage. `run` it until cancelled; `stop` before that finishes the groups that have begun."""

    def __init__(self, stage: Stage, sources: Sequence[Source], services: StageServices) -> None:
        self.stage = stage
        self._sources = sources
        self._services = services
        self._ordered = stage.options.retry.ordered
        self._max_held = min(
            max(_MIN_HELD_MESSAGES, stage.options.concurrency * _HELD_MESSAGES_PER_WORKER), _MAX_HELD_MESSAGES
        )
        self._processor = Processor(stage, services.store, services.queues, services.relay, self._finish)
        self._scheduler = KeyScheduler(ordered=self._ordered)
        self._message_ready = asyncio.Event()
        self._held: dict[Incoming, _Held] = {}
        self._seen: set[tuple[int, int]] = set()
        self._group_starts: list[float] = []
        """The start times of the groups in work."""
        self._next_group_lock = asyncio.Lock()
        self._delays: set[asyncio.Task[None]] = set()
        """The delays of messages that wait for their next attempt, in order."""
        self._stopping = False
        self.ready = asyncio.Event()
        """Set while the stage takes messages."""

    async def run(self) -> None:
        """Process messages until cancelled; wait while the broker or the database is unavailable."""
        while not self._stopping:
            try:
                if self._ordered:
                    await self._work_as_owner()
                else:
                    await self._work()
            except OwnershipLost as lost:
                log.warning("stage %s: %s", self.stage.id, lost)
            except Exception as error:
                log.warning("stage %s pauses: %s", self.stage.id, error, exc_info=error)
                await asyncio.sleep(_RESTART_DELAY_SECONDS)
            finally:
                self.ready.clear()
                self._forget_held()

    async def stop(self, patience_seconds: float) -> None:
        """Begin no more groups and give back the waiting messages; return when the rest is done, or time is up."""
        self._stopping = True
        for message in self._scheduler.drain():
            held = self._held.pop(message, None)
            if held is not None and not self._ordered:  # in order, the next owner restarts the source
                with contextlib.suppress(PurveyorError):
                    await held.source.retry(message, timedelta(0))
        deadline = time.monotonic() + patience_seconds
        while (self._group_starts or self._held) and time.monotonic() < deadline:  # noqa: ASYNC110 - only at the end
            await asyncio.sleep(0.01)

    async def _work_as_owner(self) -> None:
        """Wait until this instance is the owner, then work."""
        lock = await self._services.store.leader_lock("stage", self.stage.id)
        epoch = 0
        try:
            await acquire(lock, _LEADER_POLL_SECONDS)
            async with self._services.store.transaction() as transaction:
                epoch, former_owner = await self._services.store.statements.take_over(
                    transaction.connection, self.stage.id, self._services.instance
                )
            if former_owner:
                log.info("stage %s: %s takes over from %s", self.stage.id, self._services.instance, former_owner)
                await asyncio.sleep(self._services.grace.total_seconds())
            for source in self._sources:
                await source.restart()
            self._processor.epoch = epoch
            await run_together([_watch_ownership(lock), self._work()])
        finally:
            with contextlib.suppress(Exception):
                await self._services.store.statements.sign_off(lock.connection, self.stage.id, epoch)
            await lock.close()

    async def _work(self) -> None:
        for source in self._sources:
            await source.grant(self._max_held)
        receivers = [self._receive(source) for source in self._sources]
        workers = [self._process_groups() for _ in range(self.stage.options.concurrency)]
        self.ready.set()
        try:
            await run_together([*receivers, *workers, self._extend_held()])
        finally:
            await end_tasks(self._delays)

    async def _receive(self, source: Source) -> None:
        async for messages in source.batches():
            fresh: list[Incoming] = []
            for message in messages:
                delivery = (id(source), message.sequence)
                if delivery in self._seen or self._stopping:
                    continue  # delivered again though this process holds it: its extension came too late
                self._seen.add(delivery)
                self._held[message] = _Held(source, time.monotonic())
                fresh.append(message)
            reach(CrashPoint.RECEIVED)
            if len(fresh) < len(messages):
                await source.grant(len(messages) - len(fresh))
            self._scheduler.add(fresh)
            self._message_ready.set()

    async def _process_groups(self) -> None:
        while not self._stopping:
            messages = await self._next_group()
            began = time.monotonic()
            self._group_starts.append(began)
            try:
                unprocessed = await self._processor.process(messages)
            finally:
                self._group_starts.remove(began)
            metrics.STAGE_SECONDS.add(time.monotonic() - began, self.stage.id)
            await self._reschedule(messages, unprocessed)

    async def _next_group(self) -> list[Incoming]:
        """Return messages for a worker. With fast handlers a few workers with large groups do more than many workers.

        A worker that is busy for longer than a group should take does not count: others may begin beside it.
        """
        while True:
            if self._scheduler.has_ready and self._may_begin():
                return self._scheduler.take(self._processor.group_size.limit)
            async with self._next_group_lock:  # one worker polls for all
                if not self._scheduler.has_ready:
                    self._message_ready.clear()
                    await self._message_ready.wait()
                elif not self._may_begin():
                    await asyncio.sleep(_GROUP_POLL_SECONDS)

    def _may_begin(self) -> bool:
        oldest = time.monotonic() - GROUP_SECONDS
        running = sum(1 for began in self._group_starts if began > oldest)
        return running < max(2, self.stage.options.concurrency * 4 // self._processor.group_size.limit)

    async def _reschedule(self, messages: Sequence[Incoming], unprocessed: Sequence[Unprocessed]) -> None:
        blocked: set[str | None] = set()
        failed = sum(1 for item in unprocessed if item.delay is not None)
        if failed:
            metrics.STAGE_MESSAGES.add(self.stage.id, "again", by=failed)
        if self._ordered:
            self._scheduler.put_back([item.message for item in unprocessed])
            for item in unprocessed:
                if item.delay is not None:
                    blocked.add(item.message.key)
                    delay = asyncio.create_task(self._release_after(item.message.key, item.delay))
                    self._delays.add(delay)
                    delay.add_done_callback(self._delays.discard)
        else:
            self._scheduler.put_back([item.message for item in unprocessed if item.delay is None])
            for item in unprocessed:
                if item.delay is not None:
                    await self._give_back(item.message, item.delay)
        self._scheduler.release({message.key for message in messages} - blocked)
        if self._scheduler.has_ready:
            self._message_ready.set()

    async def _release_after(self, key: str | None, delay: timedelta) -> None:
        await asyncio.sleep(delay.total_seconds())
        self._scheduler.release([key])
        self._message_ready.set()

    async def _give_back(self, message: Incoming, delay: timedelta) -> None:
        held = self._drop(message)
        if held is not None:
            with contextlib.suppress(Unavailable):  # the source delivers it again after its ack wait
                await held.source.retry(message, delay)
            await held.source.grant(1)

    async def _finish(self, messages: Sequence[Incoming]) -> None:
        """Acknowledge messages (9), and grant the source as many new ones."""
        metrics.STAGE_MESSAGES.add(self.stage.id, "finished", by=len(messages))
        by_source: dict[int, tuple[Source, list[Incoming]]] = {}
        for message in messages:
            held = self._drop(message)
            if held is not None:
                by_source.setdefault(id(held.source), (held.source, []))[1].append(message)
        for source, finished in by_source.values():
            with contextlib.suppress(Unavailable):  # the source delivers them again, and the inbox drops them
                await source.ack(finished)
            await source.grant(len(finished))

    def _drop(self, message: Incoming) -> _Held | None:
        held = self._held.pop(message, None)
        if held is not None:
            self._seen.discard((id(held.source), message.sequence))
        return held

    async def _extend_held(self) -> None:
        """Extend the ack wait of the messages that this process has held for a while."""
        interval_seconds = min(source.ack_wait for source in self._sources).total_seconds() / 3
        while True:
            await asyncio.sleep(interval_seconds)
            since = time.monotonic() - interval_seconds / 2
            for source in self._sources:
                old = [message for message, held in self._held.items() if held.source is source and held.since < since]
                with contextlib.suppress(Unavailable):
                    await source.extend(old)

    def _forget_held(self) -> None:
        """Forget all held messages: the source delivers them again."""
        self._scheduler = KeyScheduler(ordered=self._ordered)
        self._held.clear()
        self._seen.clear()
        self._processor.epoch = None


async def _watch_ownership(lock: LeaderLock) -> None:
    while await lock.is_held():  # noqa: ASYNC110 - a lost connection sends no notification
        await asyncio.sleep(_OWNERSHIP_CHECK_SECONDS)
    raise OwnershipLost("the connection that holds the lock of the stage is lost")
