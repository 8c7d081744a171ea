"""The migrations of one process: begin one, take part in one, bring one forward, see one through.

Every step looks at the stream first and does what comes next, so it does not matter who did the step before, or whether
that one is still alive. What must happen once (delete and make anew) happens under the lease; see `fence`.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from pathlib import Path

from purveyor.jetstream.api import Api
from purveyor.jetstream.codec import Json, from_wire
from purveyor.jetstream.config import Retention, StreamInfo
from purveyor.jetstream.key_value import Bucket, Services
from purveyor.jetstream.maintenance import BUCKET, STREAM_PREFIX, record_key
from purveyor.model.errors import (
    AlreadyExists,
    ConfigRefused,
    InvalidName,
    LeaseLost,
    MigrationNeeded,
    NotFound,
    PermissionDenied,
    UnknownKey,
    UnknownStream,
    WrongRevision,
)
from purveyor.queues.catalogue import DEAD_LETTERS, Queue
from purveyor.queues.migration import recreate
from purveyor.queues.migration.drain import SHARED, Parking, Stuck, is_stuck, seen_stuck
from purveyor.queues.migration.lease import Lease, Leases, Seen, make_bucket
from purveyor.queues.migration.plan import Live, Plan, Strategy, plan_queue
from purveyor.queues.migration.positions import acknowledge_up_to, passed_by_all
from purveyor.queues.migration.record import QueueStatus, Record, position_key
from purveyor.queues.migration.snapshot import Snapshots
from purveyor.queues.migration.steps import Options, Progress, Step
from purveyor.queues.migration.target_config import (
    declared_durables,
    replaced,
    target_config,
    target_durables,
)

_log = logging.getLogger("purveyor.migration")
_ATTEMPTS = 20
_TELL_SECONDS = 5.0
_LOOK_SECONDS = 0.2
_SEEN: dict[tuple[str, ...], Seen] = {}
"""What this process has seen of leases, by server: it outlives a connection."""


class Migrations:
    """See the module."""

    def __init__(self, api: Api, services: Services, options: Options | None = None) -> None:
        self.options = options or Options()
        self._api = api
        self._services = services
        self._streams, self._consumers = services.streams, services.consumers
        self._bucket = Bucket(BUCKET, services)
        seen = _SEEN.setdefault(api.connection.address.urls, {})
        self._leases = Leases(self._bucket, self.options.lease_seconds, seen)
        self._sealed_since: dict[str, float] = {}
        self._told: dict[str, tuple[int, float]] = {}
        self._stuck: dict[str, Stuck] = {}
        self._hindrances: dict[str, MigrationNeeded] = {}

    def with_options(self, options: Options) -> "Migrations":
        """The same with other options."""
        return Migrations(self._api, self._services, options)

    # Looking

    async def live(self, stream: str) -> Live | None:
        """A queue as the server has it; None if it is not there."""
        try:
            raw = await self._streams.raw_info(stream)
            consumers = await self._consumers.every(stream)
        except UnknownStream:
            return None
        return Live(from_wire(StreamInfo, raw), tuple(consumers), raw["config"], str(raw["created"]))

    async def plan(self, queue: Queue, *, replicas: int = 1) -> Plan:
        """What applying would do."""
        return plan_queue(queue, await self.live(queue.stream), replicas=replicas)

    async def record(self, queue: str) -> Record | None:
        """The record of the last migration of a queue, done or not."""
        found = await self._load(queue)
        return found[0] if found else None

    async def under_way(self, queue: str) -> Record | None:
        """The record of a migration that is not done; none for one who may not look."""
        try:
            found = await self.record(queue)
        except PermissionDenied:
            return None
        return found if found is not None and not found.done else None

    # Beginning and taking part

    async def begin(self, queue: Queue, *, replicas: int = 1, strategy: Strategy | None = None) -> QueueStatus:
        """Begin a migration, or take part in the one under way, and bring it forward once.

        Raises InvalidInput if the way asked for is not open, MigrationNeeded if it takes a snapshot and there is no
        place for one.
        """
        for _ in range(_ATTEMPTS):
            found = await self._load(queue.name)
            if found is not None and not found[0].done:
                await self._take_part(queue, found, strategy)
                return await self.advance(queue.name)
            live = await self.live(queue.stream)  # after the record: if that is still the same, so is what we see here
            plan = plan_queue(queue, live, replicas=replicas)
            if live is None or not plan.migrates:
                return QueueStatus.READY
            way = plan.by(strategy)
            if way is Strategy.SNAPSHOT and self.options.archives is None:
                raise MigrationNeeded(
                    f"queue {queue.name!r}: {'; '.join(plan.why)}; it takes a snapshot: "
                    f"{plan.hindrance(Strategy.DRAIN) or 'asked for'}",
                    fix=f"run `purveyor queues apply {queue.name}`; see docs/guides/migration.md",
                )
            await make_bucket(self._api, replicas)
            record = self._new_record(queue, live, way, replicas)
            try:
                await self._bucket.update(record_key(queue.name), record.encode(), found[1] if found is not None else 0)
            except WrongRevision:
                continue  # somebody else begins it at this moment
            self.options.on_step(Step.RECORDED)
            return await self.advance(queue.name)
        raise MigrationNeeded(f"queue {queue.name!r}: its migration is begun again and again", fix="try again")

    def _new_record(self, queue: Queue, live: Live, way: Strategy, replicas: int) -> Record:
        record = Record(
            queue=queue.name,
            stream=queue.stream,
            strategy=way,
            created=live.created,
            target=target_config(live, queue, replicas=replicas),
            durables=target_durables(live, queue),
            keepers=tuple(reader.durable for reader in queue.readers if reader.keeps_newest),
        )
        if way is Strategy.SNAPSHOT:
            record = dataclasses.replace(record, archive=self._snapshots.place(record))
        return record

    async def _take_part(self, queue: Queue, found: tuple[Record, int], strategy: Strategy | None) -> None:
        """See that our durables are made too, and switch to a snapshot if that is wanted now."""
        record, revision = found
        wanted = record.joined(declared_durables(queue))
        if strategy is Strategy.SNAPSHOT and record.strategy is Strategy.DRAIN:
            if self.options.archives is None:
                raise MigrationNeeded("a snapshot needs a place on disk", fix="name one")
            wanted = dataclasses.replace(wanted, strategy=strategy, archive=self._snapshots.place(record))
        if wanted != record:
            with contextlib.suppress(WrongRevision):  # seen at the next look
                await self._bucket.update(record_key(queue.name), wanted.encode(), revision)

    async def join(self, queue: str, durables: tuple[Json, ...]) -> None:
        """Have these durables made with the new stream."""
        for _ in range(_ATTEMPTS):
            found = await self._load(queue)
            if found is None or found[0].done or (wanted := found[0].joined(durables)) == found[0]:
                return
            with contextlib.suppress(WrongRevision):
                await self._bucket.update(record_key(queue), wanted.encode(), found[1])
                return

    async def passed(self, queue: str, durable: str, sequence: int) -> QueueStatus:
        """A reader by position has taken in everything up to a sequence of the sealed stream."""
        await self._bucket.put(position_key(queue, durable), str(sequence).encode())
        return await self.advance(queue)

    # Going on

    async def finish(self, queue: str) -> None:
        """Bring it forward until it is done, however long the readers take.

        MigrationNeeded if it takes an archive that is not on this machine, and nobody else works on it.
        """
        status = await self.advance(queue)
        while status is not QueueStatus.READY:
            if queue in self._hindrances:
                raise self._hindrances[queue]
            await asyncio.sleep(_LOOK_SECONDS)
            status = await self.advance(queue)

    async def advance(self, queue: str) -> QueueStatus:
        """Do what can be done now: nothing, if the stream has still to be drained or somebody else is at it."""
        found = await self._load(queue)
        if found is None or found[0].done:
            return QueueStatus.READY
        record = await self._sealed(*found)
        if record is None:
            return QueueStatus.SEALED_FOR_MIGRATION
        try:
            return await self._bring_forward(record)
        except LeaseLost:
            return QueueStatus.SEALED_FOR_MIGRATION

    async def _sealed(self, record: Record, revision: int) -> Record | None:
        """The record, with the last sequence of the old stream; None if somebody else wrote it meanwhile."""
        if record.last_sequence is not None:
            return record
        raw = await self._find(record)
        if raw is None or str(raw["created"]) != record.created:
            return record  # not ours any more: told further on
        try:
            await self._seal(record, raw)
        except ConfigRefused:
            if not (await self._streams.info(record.stream)).config.sealed:
                raise  # else somebody else sealed it between our look and our change
        self._sealed_since[record.queue] = time.monotonic()
        last = (await self._streams.info(record.stream)).state.last_seq
        sealed = dataclasses.replace(record, last_sequence=last)
        try:
            await self._bucket.update(record_key(record.queue), sealed.encode(), revision)
        except WrongRevision:
            return None
        self.options.on_step(Step.SEALED)
        return sealed

    async def _seal(self, record: Record, raw: Json) -> None:
        if not raw["config"].get("sealed"):
            await self._let_go_of_limits(record, raw)
            await self._streams.update(record.stream, {"sealed": True, "allow_direct": True})
            _log.info("Stream '%s' sealed for migration", record.stream)
        elif not raw["config"].get("allow_direct"):
            await self._streams.update(record.stream, {"allow_direct": True})

    async def _let_go_of_limits(self, record: Record, raw: Json) -> None:
        """A stream with limits never drains: it becomes one of interest first, with its readers there before."""
        if record.strategy is Strategy.DRAIN and raw["config"]["retention"] == Retention.LIMITS.value:
            for durable in record.durables:
                await recreate.make_durable(self._api, record.stream, durable)
            await self._streams.update(record.stream, {"retention": Retention.INTEREST})

    async def _bring_forward(self, record: Record) -> QueueStatus:
        raw = await self._find(record)
        old = raw is not None and str(raw["created"]) == record.created
        if raw is not None and not old and not recreate.goes_on(raw["config"], record.created):
            _log.warning("stream '%s' was made anew by somebody else: its migration is over", record.stream)
            return await self._done(record)
        if record.strategy is Strategy.SNAPSHOT and await self._is_hindered(record, raw):
            return QueueStatus.SEALED_FOR_MIGRATION
        if raw is not None and old and record.strategy is Strategy.DRAIN:
            info = from_wire(StreamInfo, raw)
            if info.state.messages and not await self._can_be_emptied(record, info):
                return QueueStatus.SEALED_FOR_MIGRATION
        async with self._leases.hold(record.queue) as lease:
            if lease is None:
                return QueueStatus.SEALED_FOR_MIGRATION
            return await self._under_lease(record, lease)

    async def _is_hindered(self, record: Record, raw: Json | None) -> bool:
        """Whether another machine has to go on; said in the log unless one is at it."""
        hindrance = self._snapshots.hindrance(record, raw)
        before = self._hindrances.pop(record.queue, None)
        if hindrance is None:
            return False
        if await self._leases.is_free(record.queue):
            self._hindrances[record.queue] = hindrance
            if str(before) != str(hindrance):
                _log.warning("%s", hindrance)
        return True

    async def _can_be_emptied(self, record: Record, info: StreamInfo) -> bool:
        """Whether something can be done about what is left: readers by position have all passed some, or it hangs."""
        self._tell_remaining(record, info.state.messages)
        work_queue = info.config.retention is Retention.WORK_QUEUE
        if work_queue and await passed_by_all(self._bucket, record) >= info.state.first_seq:
            return True
        try:
            consumers = await self._consumers.every(record.stream)
        except UnknownStream:
            return False  # another instance has removed it and makes it again: the next look finds that
        if not is_stuck(consumers):
            self._stuck.pop(record.queue, None)
            return False
        now = time.monotonic()
        stuck = self._stuck[record.queue] = seen_stuck(self._stuck.get(record.queue), info, now)
        return now - stuck.since >= self.options.stuck_seconds

    async def _under_lease(self, record: Record, lease: Lease) -> QueueStatus:
        found = await self._load(record.queue)
        if found is None or found[0].done:
            return QueueStatus.READY
        record = found[0]
        raw = await self._find(record)
        if raw is not None and str(raw["created"]) == record.created:
            if record.strategy is Strategy.SNAPSHOT:
                record = await self._archive(record)
            elif not await self._empty(record):
                return QueueStatus.SEALED_FOR_MIGRATION
            else:
                self.options.on_step(Step.DRAINED)
                _log.info("Sealed stream '%s' is empty, completing migration", record.stream)
            await self._wait_for_publishers(record)
            lease.check()
            await lease.delete_stream(self._api, self._services.publisher, self._streams, record.created)
            self.options.on_step(Step.DELETED)
            raw = None
        if raw is None or recreate.is_parked(raw["config"], record):
            await self._make(record, lease)
            self.options.on_step(Step.CREATED)
        await recreate.finish(self._api, record, self.options.on_step)
        if record.strategy is Strategy.SNAPSHOT:
            await self._snapshots.resume(record)
        return await self._done(record)

    async def _archive(self, record: Record) -> Record:
        record, path = await self._claim_place(record)
        await self._snapshots.pause(record)
        self.options.on_step(Step.PAUSED)
        await self._snapshots.take(record, path)
        self.options.on_step(Step.ARCHIVED)
        return record

    async def _claim_place(self, record: Record) -> tuple[Record, Path]:
        """Note in the record where the archive goes, before it is begun."""
        place = self._snapshots.place(record)
        for _ in range(_ATTEMPTS):
            found = await self._load(record.queue)
            if found is None or found[0].done:
                break
            wanted = dataclasses.replace(found[0], archive=place)
            with contextlib.suppress(WrongRevision):  # a reader joins at this moment
                await self._bucket.update(record_key(record.queue), wanted.encode(), found[1])
                return wanted, Path(place.path)
        raise LeaseLost(f"the migration of {record.queue!r} is over, or its record changes all the time")

    async def _make(self, record: Record, lease: Lease) -> None:
        if record.strategy is Strategy.DRAIN:
            await recreate.create(self._api, record)
            return

        async def clear() -> None:
            await lease.clear(self._api, self._services.publisher)

        path = self._snapshots.find(record)
        if path is None:  # it was there when we looked
            raise LeaseLost(f"the archive of {record.queue!r} is gone from this machine")
        await self._snapshots.bring_back(record, path, clear)

    async def _empty(self, record: Record) -> bool:
        """Whether the sealed stream holds no message, after what can be done about those that it holds."""
        info = await self._streams.info(record.stream)
        if info.state.messages and info.config.retention is Retention.WORK_QUEUE:
            passed = await passed_by_all(self._bucket, record)
            if passed >= info.state.first_seq:
                await acknowledge_up_to(self._services, record.stream, passed)
                info = await self._streams.info(record.stream)
        consumers = await self._consumers.every(record.stream)
        if not info.state.messages or not is_stuck(consumers):
            return not info.state.messages
        earlier = replaced(consumers, ({"durable_name": SHARED}, *record.durables))
        if earlier and info.config.retention is Retention.WORK_QUEUE:
            # Given up by a reader of before: those of now have not tried. Without its durable the messages are new.
            for name in earlier:
                await self._consumers.remove(record.stream, name)
            return False
        with contextlib.suppress(AlreadyExists):
            await self._streams.add(DEAD_LETTERS.config(replicas=int(record.target["num_replicas"])))
        parked = await Parking(self._services).park(record.stream)
        _log.warning("%d messages of stream '%s' that nobody could process are parked", parked, record.stream)
        return not (await self._streams.info(record.stream)).state.messages

    async def _wait_for_publishers(self, record: Record) -> None:
        since = self._sealed_since.setdefault(record.queue, time.monotonic())
        await asyncio.sleep(max(since + self.options.grace_seconds - time.monotonic(), 0))

    async def _done(self, record: Record) -> QueueStatus:
        """Say so, with the durables of whoever joined meanwhile."""
        for _ in range(_ATTEMPTS):
            found = await self._load(record.queue)
            if found is None or found[0].done:
                return QueueStatus.READY
            now, revision = found
            if now.durables != record.durables:
                await recreate.finish(self._api, now, lambda _step: None)
                record = now
            try:
                await self._bucket.update(
                    record_key(record.queue), dataclasses.replace(now, done=True).encode(), revision
                )
            except WrongRevision:
                continue
            self._sealed_since.pop(record.queue, None)
            self._told.pop(record.queue, None)
            self._snapshots.forget_earlier(record)
            _log.info("Migration completed for '%s'", record.stream)
            self.options.on_step(Step.DONE)
            return QueueStatus.READY
        return QueueStatus.SEALED_FOR_MIGRATION

    def _tell_remaining(self, record: Record, messages: int) -> None:
        self.options.on_progress(Progress(record.queue, "to drain", (record.last_sequence or 0), messages))
        before, at = self._told.get(record.queue, (-1, -_TELL_SECONDS))
        if messages != before and time.monotonic() - at >= _TELL_SECONDS:
            self._told[record.queue] = (messages, time.monotonic())
            _log.info("Stream '%s' sealed with %d messages remaining to drain", record.stream, messages)

    @property
    def _snapshots(self) -> Snapshots:
        return Snapshots(self._api, self._streams, self._consumers, self.options)

    async def _find(self, record: Record) -> Json | None:
        try:
            return await self._streams.raw_info(record.stream)
        except UnknownStream:
            return None

    async def _load(self, queue: str) -> tuple[Record, int] | None:
        try:
            found = await self._bucket.get(record_key(queue))
        except (UnknownKey, NotFound, InvalidName):
            return None  # no migration was ever begun
        return Record.decode(found.value), found.revision


def queue_of(stream: str) -> str | None:
    """The queue that a stream is of; None for a stream that is no queue.

    >>> queue_of("stream:incoming"), queue_of("ORDERS")
    ('incoming', None)
    """
    return stream.removeprefix(STREAM_PREFIX) if stream.startswith(STREAM_PREFIX) else None
