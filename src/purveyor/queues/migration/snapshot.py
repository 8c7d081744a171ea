"""Migration by snapshot: the stream is written to disk and restored with other settings; readers keep their positions.

1. The consumers are paused, and the migrator waits for the messages in flight: an acknowledgement between the snapshot
   and the restore would be lost, and its message delivered again. An acknowledgement after the restore counts.
2. The snapshot is taken and checked. If anything was acknowledged in the meantime, it is taken again.
3. The stream is deleted. From here on only the archive has the messages. The record says where the archive is, and any
   instance that finds both continues.
4. The stream is restored under a separate subject, to which no publisher writes, and compared with the archive. In a
   cluster that loses a node in between, the restored stream may lack its messages, or exist in name only: then it is
   deleted and restored again. When enough replicas hold everything, it gets its subjects, and its consumers resume.

Any machine can continue. While the old stream exists, a machine writes its own archive, in a new directory, and writes
that into the record first: an earlier archive has older positions of the readers, and is never restored. After the
stream is deleted, a machine needs the archive of the record: under its path (a shared directory), or under the same
name in its own archives (mounted in another place, or copied there).
"""

import asyncio
import shutil
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeGuard

from purveyor.jetstream.api import Api, Json
from purveyor.jetstream.config import ConsumerInfo, Retention
from purveyor.jetstream.consumers import Consumers
from purveyor.jetstream.streams import Streams
from purveyor.model.errors import DataLost, MigrationNeeded, NoAnswer, Refused, Unavailable, UnknownStream
from purveyor.queues.migration import recreate, snapshot_files
from purveyor.queues.migration.events import MigrationOptions, Progress
from purveyor.queues.migration.record import ArchiveLocation, Record
from purveyor.queues.migration.recreate import replaced_consumers
from purveyor.queues.migration.snapshot_files import Manifest

_PAUSE_DURATION = timedelta(days=1)
_POLL_INTERVAL_SECONDS = 0.05
_ATTEMPTS = 10
_SETTLE_SECONDS = 30.0
_INCOMPLETE_SECONDS = 2.0
"""Data that is missing for this long after a restore does not arrive any more."""


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The steps of a migration by snapshot. Only the holder of the lease calls them."""

    api: Api
    streams: Streams
    consumers: Consumers
    options: MigrationOptions

    def new_location(self, record: Record) -> ArchiveLocation:
        """Return a new directory for the archive of a migration."""
        directory = self._directory(record)
        assert directory is not None
        path = directory / f"{snapshot_files.archive_name(record.stream, record.created)}-{uuid.uuid4().hex[:8]}"
        return ArchiveLocation(host=socket.gethostname(), path=str(path))

    def _directory(self, record: Record) -> Path | None:
        """Return where this machine writes archives: the directory of the options, else the one of the record."""
        if self.options.archives is not None:
            return self.options.archives.absolute()
        before = None if record.archive is None else Path(record.archive.path).parent
        return before if before is not None and before.is_dir() else None

    def find_archive(self, record: Record) -> Path | None:
        """Return the archive of a migration, if it is complete and on this machine."""
        if record.archive is None:
            return None
        path = Path(record.archive.path)
        own = () if self.options.archives is None else (self.options.archives.absolute() / path.name,)
        return next((each for each in (path, *own) if _belongs_to(snapshot_files.read_manifest(each), record)), None)

    def obstacle(self, record: Record, raw: Json | None) -> MigrationNeeded | None:
        """Return why this machine cannot continue, for the operator; None if it can. `raw` is the current stream."""
        assert record.archive is not None
        there = f"{record.archive.path} on machine {record.archive.host!r}"
        if raw is None or recreate.is_restoring(raw["config"], record):
            if self.find_archive(record) is not None:
                return None
            own = "`migrations/` of the data directory" if self.options.archives is None else self.options.archives
            return MigrationNeeded(
                f"queue {record.queue!r} is being migrated by snapshot: its messages are in the archive {there}, which "
                "is not on this machine",
                fix=f"run `purveyor queues apply {record.queue}` there, or copy that directory into {own} here and run "
                "it here",
            )
        if str(raw["created"]) == record.created and self._directory(record) is None:
            return MigrationNeeded(
                f"queue {record.queue!r} is being migrated by snapshot, whose archive belongs in {there}, and this "
                "program has no directory for it",
                fix=f"run `purveyor queues apply {record.queue}` on any machine: it takes over",
            )
        return None

    async def pause_readers(self, record: Record) -> None:
        """Do step 1; safe to repeat."""
        stream = record.stream
        found = await self.consumers.list_complete(stream)
        for consumer in found:
            await self.consumers.pause(stream, consumer.name, datetime.now(UTC) + _PAUSE_DURATION)
        await self._wait_for_in_flight(stream, found)
        if (await self.streams.info(stream)).config.retention is Retention.WORK_QUEUE:
            for name in replaced_consumers(found, record.durables):
                await self.consumers.remove(stream, name)  # the messages of a work queue stay

    async def _wait_for_in_flight(self, stream: str, found: list[ConsumerInfo]) -> None:
        waits = [consumer.config.ack_wait or timedelta(seconds=30) for consumer in found]
        longest = min(max((wait.total_seconds() for wait in waits), default=0.0), self.options.in_flight_seconds)
        deadline = time.monotonic() + longest
        while time.monotonic() < deadline:
            in_flight = sum(each.num_ack_pending for each in await self.consumers.list_complete(stream))
            if not in_flight:
                return
            self._report(stream, f"waiting for {in_flight} messages that readers are processing")
            await asyncio.sleep(_POLL_INTERVAL_SECONDS)

    async def write_archive(self, record: Record, path: Path) -> None:
        """Do step 2."""
        size = (await self.streams.info(record.stream)).state.bytes
        for _ in range(_ATTEMPTS):
            before = await self._positions(record.stream)
            manifest = await snapshot_files.download_snapshot(
                self.api, record.stream, path, before, lambda done: self._report(record.stream, "to disk", done, size)
            )
            await snapshot_files.verify_archive(path, manifest)
            if before == await self._positions(record.stream):
                return
        raise Unavailable(
            f"stream {record.stream!r} changes faster than it can be written to disk", fix="stop its readers"
        )

    async def restore(self, record: Record, path: Path, delete_remains: Callable[[], Awaitable[None]]) -> None:
        """Do step 4. `delete_remains` deletes an incomplete stream, to which no publisher has written.

        NoAnswer if the cluster cannot restore it now: the archive has everything, and the next attempt begins again.
        """
        manifest = _require_complete(path, record)
        await snapshot_files.verify_archive(path, manifest)
        wrong = None
        for _ in range(_ATTEMPTS):
            if await self._find(record.stream) is None:
                await self._restore(record, path, manifest, delete_remains)
            wrong = await self._settle(record, manifest)
            if wrong is None:
                await self.streams.update(record.stream, {"subjects": record.subjects})
                return
            self._report(record.stream, f"restored again, because {wrong}")
            await delete_remains()
        raise NoAnswer(
            f"stream {record.stream!r} is not restored: {wrong}",
            fix=f"is every node up? Then apply again: its archive {path} has everything",
        )

    async def _restore(
        self, record: Record, path: Path, manifest: Manifest, delete_remains: Callable[[], Awaitable[None]]
    ) -> None:
        async def upload() -> None:
            await snapshot_files.restore_snapshot(
                self.api,
                recreate.restoring_config(record),
                path,
                manifest,
                lambda done: self._report(record.stream, "from disk", done, manifest.bytes),
            )

        try:
            await recreate.create_replacement(self.api, record, upload)
        except Refused as error:
            if error.err_code not in recreate.NAME_IN_USE:
                raise
            await delete_remains()  # an interrupted restore: its name is taken, but no stream is found

    async def _settle(self, record: Record, manifest: Manifest) -> str | None:
        """Wait until enough replicas hold everything; return what is wrong if that does not happen."""
        began = time.monotonic()
        wrong_since: float | None = None
        while True:
            raw = await self._find(record.stream)
            wrong = "it is gone" if raw is None else find_restore_loss(manifest.state, raw["state"], record.target)
            now = time.monotonic()
            if (
                raw is not None
                and wrong is None
                and has_enough_replicas(raw)
                and await self._has_readers(record, manifest)
            ):
                return None
            wrong_since = None if wrong is None else wrong_since or now
            if wrong_since is not None and now - wrong_since > _INCOMPLETE_SECONDS:
                return wrong
            if now - began > _SETTLE_SECONDS:
                return wrong or "too few replicas hold it, or readers are missing"
            await asyncio.sleep(_POLL_INTERVAL_SECONDS)

    async def _has_readers(self, record: Record, manifest: Manifest) -> bool:
        """Return whether the durables are restored: in a cluster they follow the stream one by one."""
        wanted = {each["durable_name"] for each in record.durables} & set(manifest.consumers)
        return wanted <= {each.name for each in await self.consumers.list_complete(record.stream)}

    async def _find(self, stream: str) -> Json | None:
        try:
            return await self.streams.raw_info(stream)
        except UnknownStream:
            return None

    async def resume_readers(self, record: Record) -> None:
        """Do the end of step 4."""
        for consumer in await self.consumers.list_complete(record.stream):
            if consumer.paused:
                await self.consumers.resume(record.stream, consumer.name)

    def remove_earlier_archives(self, record: Record) -> None:
        """Remove all other archives of the queue, complete or not, after a migration that succeeded."""
        path = self.find_archive(record)
        if path is None:
            return
        snapshot_files.remove_other_archives(path.parent, record.stream, path)
        for other in path.parent.glob(f"{snapshot_files.archive_name(record.stream, record.created)}*"):
            if other != path:
                shutil.rmtree(other, ignore_errors=True)

    async def _positions(self, stream: str) -> Json:
        found = await self.consumers.list_complete(stream)
        return {each.name: [each.ack_floor.stream_seq, each.num_pending, each.num_ack_pending] for each in found}

    def _report(self, stream: str, what: str, done: int = 0, total: int = 0) -> None:
        self.options.on_progress(Progress(stream.partition(":")[2], what, done, total))


def has_enough_replicas(raw: Json) -> bool:
    """Return whether a majority of the replicas of a stream has all of it. A single server has one replica. Pure."""
    others = (raw.get("cluster") or {}).get("replicas") or []
    current = sum(bool(each.get("current")) and not each.get("offline") for each in others)
    return 2 * (1 + current) > 1 + len(others)


def find_restore_loss(was: Json, is_: Json, target: Json) -> str | None:
    """Return what is missing in a restored stream; None if nothing is. Pure.

    A new work queue drops messages that were acknowledged before, and messages expire.
    """
    if int(is_["last_seq"]) != int(was["last_seq"]):
        return f"it ends at {is_['last_seq']} and not at {was['last_seq']}"
    may_shrink = (
        target["retention"] == Retention.WORK_QUEUE.value or target.get("max_age") or target.get("allow_msg_ttl")
    )
    if int(is_["messages"]) < int(was["messages"]) and not may_shrink:
        return f"it holds {is_['messages']} messages and not {was['messages']}"
    return None


def _belongs_to(manifest: Manifest | None, record: Record) -> TypeGuard[Manifest]:
    return manifest is not None and (manifest.stream, manifest.created) == (record.stream, record.created)


def _require_complete(path: Path, record: Record) -> Manifest:
    manifest = snapshot_files.read_manifest(path)
    if not _belongs_to(manifest, record):
        raise DataLost(f"the archive of stream {record.stream!r} is not in {path}", fix="put it back, then apply again")
    return manifest
