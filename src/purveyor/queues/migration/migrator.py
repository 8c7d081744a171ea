"""The migrator of one process: begins migrations, joins running ones, and advances them until they are done.

Every step inspects the stream first and does what comes next, so it does not matter which instance did the step before,
or whether that instance is still alive. What must happen once (delete and create again) happens under the lease.
"""

import asyncio
import contextlib
import dataclasses
import time
from pathlib import Path

from purveyor.jetstream.api import Api, Json
from purveyor.jetstream.config import Retention, StreamInfo, from_wire
from purveyor.jetstream.key_value import Bucket, BucketServices
from purveyor.jetstream.maintenance import BUCKET, record_key
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
from purveyor.queues.catalogue import DEAD_LETTERS, Queue, find_keepers
from purveyor.queues.lease import SeenRevisions
from purveyor.queues.migration import recreate
from purveyor.queues.migration.drain import (
    SHARED_DURABLE,
    StuckMessageParker,
    StuckMessages,
    acknowledge_up_to,
    is_stuck,
    lowest_reader_position,
    track_stuck,
)
from purveyor.queues.migration.events import (
    MigrationCompleted,
    MigrationOptions,
    MigrationWarning,
    OperationResumed,
    Progress,
    Step,
    StreamDrained,
    StreamDraining,
    StreamSealed,
)
from purveyor.queues.migration.lease import Lease, Leases, create_bucket
from purveyor.queues.migration.plan import LiveQueue, Plan, Strategy, plan_queue
from purveyor.queues.migration.record import QueueStatus, Record, position_key
from purveyor.queues.migration.recreate import (
    declared_durables,
    replaced_consumers,
    target_config,
    target_durables,
)
from purveyor.queues.migration.snapshot import Snapshots

_ATTEMPTS = 20
_REPORT_INTERVAL_SECONDS = 5.0
_POLL_INTERVAL_SECONDS = 0.2
_SEEN_LEASES: dict[tuple[str, ...], SeenRevisions] = {}
"""The leases that this process has seen, by server: they outlive a connection."""


class Migrator:
    """Runs the migrations of the queues of one server."""

    def __init__(self, api: Api, services: BucketServices, options: MigrationOptions | None = None) -> None:
        self.options = options or MigrationOptions()
        self._api = api
        self._services = services
        self._streams, self._consumers = services.streams, services.consumers
        self._bucket = Bucket(BUCKET, services)
        seen = _SEEN_LEASES.setdefault(api.connection.address.urls, {})
        self._leases = Leases(self._bucket, self.options.lease_seconds, seen)
        self._sealed_since: dict[str, float] = {}
        self._reported: dict[str, tuple[int, float]] = {}
        self._stuck: dict[str, StuckMessages] = {}
        self._obstacles: dict[str, MigrationNeeded] = {}

    def with_options(self, options: MigrationOptions) -> "Migrator":
        """Return a migrator with other options."""
        return Migrator(self._api, self._services, options)

    async def inspect(self, stream: str) -> LiveQueue | None:
        """Read a queue from the server; None if it does not exist."""
        try:
            raw = await self._streams.raw_info(stream)
            consumers = await self._consumers.list_complete(stream)
        except UnknownStream:
            return None
        return LiveQueue(from_wire(StreamInfo, raw), tuple(consumers), raw["config"], str(raw["created"]))

    async def plan(self, queue: Queue, *, replicas: int = 1) -> Plan:
        """Plan what `apply` would do to a queue."""
        return plan_queue(queue, await self.inspect(queue.stream), replicas=replicas)

    async def record(self, queue: str) -> Record | None:
        """Return the record of the last migration of a queue, done or not."""
        found = await self._load(queue)
        return found[0] if found else None

    async def find_running(self, queue: str) -> Record | None:
        """Return the record of a running migration; None if none runs, or the user may not read records."""
        try:
            found = await self.record(queue)
        except PermissionDenied:
            return None
        return found if found is not None and not found.done else None

    async def begin(self, queue: Queue, *, replicas: int = 1, strategy: Strategy | None = None) -> QueueStatus:
        """Begin a migration, or join the running one, and advance it once.

        Raises InvalidInput if the requested strategy is impossible, MigrationNeeded if the queue needs a snapshot and
        there is no directory for one.
        """
        for _ in range(_ATTEMPTS):
            found = await self._load(queue.name)
            if found is not None and not found[0].done:
                await self._join_running(queue, found, strategy)
                return await self.advance(queue.name)
            live = await self.inspect(queue.stream)  # after the record: if that is still the same, this is too
            plan = plan_queue(queue, live, replicas=replicas)
            if live is None or not plan.needs_migration:
                return QueueStatus.READY
            chosen = plan.choose_strategy(strategy)
            if chosen is Strategy.SNAPSHOT and self.options.archives is None:
                raise MigrationNeeded(
                    f"queue {queue.name!r}: {'; '.join(plan.why)}; it needs a snapshot: "
                    f"{plan.obstacle(Strategy.DRAIN) or 'as requested'}",
                    fix=f"run `purveyor queues apply {queue.name}`; see docs/guides/migration.md",
                )
            await create_bucket(self._api, replicas)
            record = self._new_record(queue, live, chosen, replicas)
            try:
                await self._bucket.update(record_key(queue.name), record.encode(), found[1] if found is not None else 0)
            except WrongRevision:
                continue  # another instance begins it at this moment
            self.options.on_step(Step.RECORDED)
            return await self.advance(queue.name)
        raise MigrationNeeded(
            f"queue {queue.name!r}: other instances begin its migration all the time", fix="try again"
        )

    def _new_record(self, queue: Queue, live: LiveQueue, strategy: Strategy, replicas: int) -> Record:
        durables = {*(each.durable for each in queue.readers), *(each.name for each in live.consumers)}
        record = Record(
            queue=queue.name,
            stream=queue.stream,
            strategy=strategy,
            created=live.created,
            target=target_config(live, queue, replicas=replicas),
            durables=target_durables(live, queue),
            keepers=find_keepers(queue, sorted(durables)),
        )
        if strategy is Strategy.SNAPSHOT:
            record = dataclasses.replace(record, archive=self._snapshots.new_location(record))
        return record

    async def _join_running(self, queue: Queue, found: tuple[Record, int], strategy: Strategy | None) -> None:
        """Add the durables of this instance to the record, and switch to a snapshot if that is requested now."""
        record, revision = found
        wanted = record.with_durables(declared_durables(queue))
        if strategy is Strategy.SNAPSHOT and record.strategy is Strategy.DRAIN:
            if self.options.archives is None:
                raise MigrationNeeded("a snapshot needs a directory", fix="give one")
            wanted = dataclasses.replace(wanted, strategy=strategy, archive=self._snapshots.new_location(record))
        if wanted != record:
            with contextlib.suppress(WrongRevision):  # the next poll sees it
                await self._bucket.update(record_key(queue.name), wanted.encode(), revision)

    async def add_durables(self, queue: str, durables: tuple[Json, ...]) -> None:
        """Have these durables created with the new stream."""
        for _ in range(_ATTEMPTS):
            found = await self._load(queue)
            if found is None or found[0].done or (wanted := found[0].with_durables(durables)) == found[0]:
                return
            with contextlib.suppress(WrongRevision):
                await self._bucket.update(record_key(queue), wanted.encode(), found[1])
                return

    async def report_position(self, queue: str, durable: str, sequence: int) -> QueueStatus:
        """Store that a reader by position has processed the sealed stream up to a sequence, and advance."""
        await self._bucket.put(position_key(queue, durable), str(sequence).encode())
        return await self.advance(queue)

    async def wait_until_done(self, queue: str) -> None:
        """Advance a migration until it is done, however long the readers take.

        MigrationNeeded if it needs an archive that is not on this machine, and no other instance works on it.
        """
        status = await self.advance(queue)
        while status is not QueueStatus.READY:
            if queue in self._obstacles:
                raise self._obstacles[queue]
            await asyncio.sleep(_POLL_INTERVAL_SECONDS)
            status = await self.advance(queue)

    async def resume_if_ready(self, queue: str) -> bool:
        """Advance the migration of a queue that a reader waits for; return whether it is over, and report that."""
        if await self.advance(queue) is not QueueStatus.READY:
            return False
        self.options.on_event(OperationResumed())
        return True

    async def advance(self, queue: str) -> QueueStatus:
        """Do the steps that are possible now: none while the stream drains or another instance has the lease."""
        found = await self._load(queue)
        if found is None or found[0].done:
            return QueueStatus.READY
        record = await self._ensure_sealed(*found)
        if record is None:
            return QueueStatus.SEALED_FOR_MIGRATION
        try:
            return await self._advance_sealed(record)
        except LeaseLost:
            return QueueStatus.SEALED_FOR_MIGRATION

    async def _ensure_sealed(self, record: Record, revision: int) -> Record | None:
        """Seal the stream and return the record with its last sequence; None if another instance wrote the record."""
        if record.last_sequence is not None:
            return record
        raw = await self._find(record)
        if raw is None or str(raw["created"]) != record.created:
            return record  # another stream by now: handled later
        try:
            await self._seal(record, raw)
        except ConfigRefused:
            if not (await self._streams.info(record.stream)).config.sealed:
                raise  # otherwise another instance sealed it in the meantime
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
            await self._give_interest_retention(record, raw)
            await self._streams.update(record.stream, {"sealed": True, "allow_direct": True})
            self.options.on_event(StreamSealed(record.stream))
        elif not raw["config"].get("allow_direct"):
            await self._streams.update(record.stream, {"allow_direct": True})

    async def _give_interest_retention(self, record: Record, raw: Json) -> None:
        """Give a stream with limits retention, which never drains, interest retention, after creating its durables."""
        if record.strategy is Strategy.DRAIN and raw["config"]["retention"] == Retention.LIMITS.value:
            for durable in record.durables:
                await recreate.create_durable(self._api, record.stream, durable, self.options.on_event)
            await self._streams.update(record.stream, {"retention": Retention.INTEREST})

    async def _advance_sealed(self, record: Record) -> QueueStatus:
        raw = await self._find(record)
        is_old = raw is not None and str(raw["created"]) == record.created
        if raw is not None and not is_old and not recreate.continues_from(raw["config"], record.created):
            self.options.on_event(
                MigrationWarning(f"another program created stream {record.stream!r} again: its migration is over")
            )
            return await self._mark_done(record)
        if record.strategy is Strategy.SNAPSHOT and await self._is_blocked(record, raw):
            return QueueStatus.SEALED_FOR_MIGRATION
        if raw is not None and is_old and record.strategy is Strategy.DRAIN:
            info = from_wire(StreamInfo, raw)
            if info.state.messages and not await self._can_be_emptied(record, info):
                return QueueStatus.SEALED_FOR_MIGRATION
        async with self._leases.hold(record.queue) as lease:
            if lease is None:
                return QueueStatus.SEALED_FOR_MIGRATION
            return await self._migrate_under_lease(record, lease)

    async def _is_blocked(self, record: Record, raw: Json | None) -> bool:
        """Return whether another machine has to continue; report that unless one does."""
        obstacle = self._snapshots.obstacle(record, raw)
        before = self._obstacles.pop(record.queue, None)
        if obstacle is None:
            return False
        if await self._leases.is_free(record.queue):
            self._obstacles[record.queue] = obstacle
            if str(before) != str(obstacle):
                self.options.on_event(MigrationWarning(str(obstacle)))
        return True

    async def _can_be_emptied(self, record: Record, info: StreamInfo) -> bool:
        """Return whether messages can be removed: all readers by position have passed some, or some are stuck."""
        self._report_remaining(record, info.state.messages)
        work_queue = info.config.retention is Retention.WORK_QUEUE
        if work_queue and await lowest_reader_position(self._bucket, record) >= info.state.first_seq:
            return True
        try:
            consumers = await self._consumers.list_complete(record.stream)
        except UnknownStream:
            return False  # another instance has deleted it and creates it again: the next poll sees that
        if not is_stuck(consumers):
            self._stuck.pop(record.queue, None)
            return False
        now = time.monotonic()
        stuck = self._stuck[record.queue] = track_stuck(self._stuck.get(record.queue), info, now)
        return now - stuck.since >= self.options.stuck_seconds

    async def _migrate_under_lease(self, record: Record, lease: Lease) -> QueueStatus:
        found = await self._load(record.queue)
        if found is None or found[0].done:
            return QueueStatus.READY
        record = found[0]
        raw = await self._find(record)
        if raw is not None and str(raw["created"]) == record.created:
            if record.strategy is Strategy.SNAPSHOT:
                record = await self._write_archive(record)
            elif not await self._try_to_empty(record):
                return QueueStatus.SEALED_FOR_MIGRATION
            else:
                self.options.on_step(Step.DRAINED)
                self.options.on_event(StreamDrained(record.stream))
            await self._wait_out_grace(record)
            lease.check()
            await lease.delete_stream(self._api, self._services.publisher, self._streams, record.created)
            self.options.on_step(Step.DELETED)
            raw = None
        if raw is None or recreate.is_restoring(raw["config"], record):
            await self._create_new(record, lease)
            self.options.on_step(Step.CREATED)
        await recreate.complete(self._api, record, self.options)
        if record.strategy is Strategy.SNAPSHOT:
            await self._snapshots.resume_readers(record)
        return await self._mark_done(record)

    async def _write_archive(self, record: Record) -> Record:
        record, path = await self._claim_location(record)
        await self._snapshots.pause_readers(record)
        self.options.on_step(Step.PAUSED)
        await self._snapshots.write_archive(record, path)
        self.options.on_step(Step.ARCHIVED)
        return record

    async def _claim_location(self, record: Record) -> tuple[Record, Path]:
        """Write into the record where the archive will be, before it is begun."""
        location = self._snapshots.new_location(record)
        for _ in range(_ATTEMPTS):
            found = await self._load(record.queue)
            if found is None or found[0].done:
                break
            wanted = dataclasses.replace(found[0], archive=location)
            with contextlib.suppress(WrongRevision):  # a reader adds its durable at this moment
                await self._bucket.update(record_key(record.queue), wanted.encode(), found[1])
                return wanted, Path(location.path)
        raise LeaseLost(f"the migration of {record.queue!r} is over, or its record changes all the time")

    async def _create_new(self, record: Record, lease: Lease) -> None:
        if record.strategy is Strategy.DRAIN:
            await recreate.create(self._api, record)
            return

        async def delete_remains() -> None:
            await lease.delete_remains(self._api, self._services.publisher)

        path = self._snapshots.find_archive(record)
        if path is None:  # it existed a moment ago
            raise LeaseLost(f"the archive of {record.queue!r} is gone from this machine")
        await self._snapshots.restore(record, path, delete_remains)

    async def _try_to_empty(self, record: Record) -> bool:
        """Remove the messages that can be removed; return whether the sealed stream is empty."""
        info = await self._streams.info(record.stream)
        if info.state.messages and info.config.retention is Retention.WORK_QUEUE:
            passed = await lowest_reader_position(self._bucket, record)
            if passed >= info.state.first_seq:
                await acknowledge_up_to(self._services, record.stream, passed)
                info = await self._streams.info(record.stream)
        consumers = await self._consumers.list_complete(record.stream)
        if not info.state.messages or not is_stuck(consumers):
            return not info.state.messages
        earlier = replaced_consumers(consumers, ({"durable_name": SHARED_DURABLE}, *record.durables))
        if earlier and info.config.retention is Retention.WORK_QUEUE:
            # An earlier reader gave them up, the current ones have not tried. Without its durable the messages are new.
            for name in earlier:
                await self._consumers.remove(record.stream, name)
            return False
        with contextlib.suppress(AlreadyExists):
            await self._streams.add(DEAD_LETTERS.config(replicas=int(record.target["num_replicas"])))
        parked = await StuckMessageParker(self._services).park(record.stream)
        text = f"{parked} messages of stream {record.stream!r} that no reader could process are parked as dead letters"
        self.options.on_event(MigrationWarning(text))
        return not (await self._streams.info(record.stream)).state.messages

    async def _wait_out_grace(self, record: Record) -> None:
        since = self._sealed_since.setdefault(record.queue, time.monotonic())
        await asyncio.sleep(max(since + self.options.grace_seconds - time.monotonic(), 0))

    async def _mark_done(self, record: Record) -> QueueStatus:
        """Mark the record as done, after creating the durables that other instances added in the meantime."""
        for _ in range(_ATTEMPTS):
            found = await self._load(record.queue)
            if found is None or found[0].done:
                return QueueStatus.READY
            now, revision = found
            if now.durables != record.durables:
                await recreate.complete(self._api, now, dataclasses.replace(self.options, on_step=lambda _step: None))
                record = now
            try:
                await self._bucket.update(
                    record_key(record.queue), dataclasses.replace(now, done=True).encode(), revision
                )
            except WrongRevision:
                continue
            self._sealed_since.pop(record.queue, None)
            self._reported.pop(record.queue, None)
            self._snapshots.remove_earlier_archives(record)
            self.options.on_event(MigrationCompleted(record.stream))
            self.options.on_step(Step.DONE)
            return QueueStatus.READY
        return QueueStatus.SEALED_FOR_MIGRATION

    def _report_remaining(self, record: Record, messages: int) -> None:
        self.options.on_progress(Progress(record.queue, "to drain", (record.last_sequence or 0), messages))
        before, at = self._reported.get(record.queue, (-1, -_REPORT_INTERVAL_SECONDS))
        if messages != before and time.monotonic() - at >= _REPORT_INTERVAL_SECONDS:
            self._reported[record.queue] = (messages, time.monotonic())
            self.options.on_event(StreamDraining(record.stream, messages))

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
