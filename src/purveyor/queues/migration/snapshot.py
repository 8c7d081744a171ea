"""By snapshot: the stream goes to disk and comes back with other settings, its readers where they were.

1. Its consumers are paused, and what they have in hand is waited for: an acknowledgement that comes between the
   snapshot and the restore would be lost, and its message delivered again. One that comes after the restore counts.
2. The snapshot is taken and checked. If anything was acknowledged meanwhile, it is taken again.
3. The stream is deleted. From here on the archive is the only place that has the messages, and the journal: the record
   tells where it is, and whoever finds both, goes on.
4. It is restored under a subject of its own, to which nobody writes, and compared with what it was. In a cluster that
   loses a node halfway it may come to be without its messages, or be there in name only: then it is deleted, and
   restored again. When enough replicas hold everything it gets its subjects, and its consumers are let go on.

Any machine can go on. As long as the old stream is there, it writes an archive of its own, in a directory that had no
archive before, and notes that in the record first: an earlier archive has older positions of the readers, and is never
restored. When the stream is deleted, it needs the archive of the record: under its path (a shared directory), or under
the same name in the archives of this machine (mounted in another place, or copied there).
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

from purveyor.jetstream.api import Api
from purveyor.jetstream.codec import Json
from purveyor.jetstream.config import ConsumerInfo, Retention
from purveyor.jetstream.consumers import Consumers
from purveyor.jetstream.streams import Streams
from purveyor.model.errors import DataLost, MigrationNeeded, NoAnswer, Refused, Unavailable, UnknownStream
from purveyor.queues.migration import recreate, snapshot_files
from purveyor.queues.migration.record import Archive, Record
from purveyor.queues.migration.snapshot_files import Manifest
from purveyor.queues.migration.steps import Options, Progress
from purveyor.queues.migration.target_config import replaced

_PAUSE = timedelta(days=1)
_LOOK_SECONDS = 0.05
_TRIES = 10
_SETTLE_SECONDS = 30.0
_WRONG_SECONDS = 2.0
"""What is missing for so long after a restore does not come any more."""


@dataclass(frozen=True, slots=True)
class Snapshots:
    """See the module. Only for the holder of the lease."""

    api: Api
    streams: Streams
    consumers: Consumers
    options: Options

    def place(self, record: Record) -> Archive:
        """A directory for the archive of a migration, in which no archive was before."""
        directory = self._directory(record)
        assert directory is not None
        path = directory / f"{snapshot_files.archive_name(record.stream, record.created)}-{uuid.uuid4().hex[:8]}"
        return Archive(host=socket.gethostname(), path=str(path))

    def _directory(self, record: Record) -> Path | None:
        """Where archives go on this machine: as the options say, else where the one of the record was to go."""
        if self.options.archives is not None:
            return self.options.archives.absolute()
        before = None if record.archive is None else Path(record.archive.path).parent
        return before if before is not None and before.is_dir() else None

    def find(self, record: Record) -> Path | None:
        """The archive of a migration, if it is complete and on this machine."""
        if record.archive is None:
            return None
        path = Path(record.archive.path)
        own = () if self.options.archives is None else (self.options.archives.absolute() / path.name,)
        return next((each for each in (path, *own) if _is_of(snapshot_files.read_manifest(each), record)), None)

    def hindrance(self, record: Record, raw: Json | None) -> MigrationNeeded | None:
        """What keeps this machine from going on, for the operator; None if nothing does. `raw` is the stream now."""
        assert record.archive is not None
        there = f"{record.archive.path} on machine {record.archive.host!r}"
        if raw is None or recreate.is_parked(raw["config"], record):
            if self.find(record) is not None:
                return None
            own = "`migrations/` of the data directory" if self.options.archives is None else self.options.archives
            return MigrationNeeded(
                f"queue {record.queue!r} is being migrated by snapshot: its messages are in the archive {there}, which "
                "is not to be found here",
                fix=f"run `purveyor queues apply {record.queue}` there, or copy that directory into {own} here and run "
                "it here",
            )
        if str(raw["created"]) == record.created and self._directory(record) is None:
            return MigrationNeeded(
                f"queue {record.queue!r} is being migrated by snapshot, which was to be written to {there}, and this "
                "program has no directory for it",
                fix=f"run `purveyor queues apply {record.queue}` on any machine: it takes over",
            )
        return None

    async def pause(self, record: Record) -> None:
        """Step 1. Repeated, it pauses what is paused."""
        stream = record.stream
        found = await self.consumers.every(stream)
        for consumer in found:
            await self.consumers.pause(stream, consumer.name, datetime.now(UTC) + _PAUSE)
        await self._wait_for_hands(stream, found)
        if (await self.streams.info(stream)).config.retention is Retention.WORK_QUEUE:
            for name in replaced(found, record.durables):
                await self.consumers.remove(stream, name)  # a work queue keeps its messages

    async def _wait_for_hands(self, stream: str, found: list[ConsumerInfo]) -> None:
        waits = [consumer.config.ack_wait or timedelta(seconds=30) for consumer in found]
        longest = min(max((wait.total_seconds() for wait in waits), default=0.0), self.options.in_flight_seconds)
        deadline = time.monotonic() + longest
        while time.monotonic() < deadline:
            in_hand = sum(each.num_ack_pending for each in await self.consumers.every(stream))
            if not in_hand:
                return
            self._tell(stream, f"waiting for {in_hand} messages that readers have in hand")
            await asyncio.sleep(_LOOK_SECONDS)

    async def take(self, record: Record, path: Path) -> None:
        """Step 2."""
        size = (await self.streams.info(record.stream)).state.bytes
        for _ in range(_TRIES):
            before = await self._positions(record.stream)
            manifest = await snapshot_files.download(
                self.api, record.stream, path, before, lambda done: self._tell(record.stream, "to disk", done, size)
            )
            await snapshot_files.check(path, manifest)
            if before == await self._positions(record.stream):
                return
        raise Unavailable(
            f"stream {record.stream!r} changes faster than it can be written to disk", fix="stop its readers"
        )

    async def bring_back(self, record: Record, path: Path, clear: Callable[[], Awaitable[None]]) -> None:
        """Step 4. `clear` deletes a stream that was not restored whole; nobody has written to it.

        NoAnswer if the cluster does not get it done now: the archive has everything, and the next one tries again.
        """
        manifest = _complete(path, record)
        await snapshot_files.check(path, manifest)
        wrong = None
        for _ in range(_TRIES):
            if await self._find(record.stream) is None:
                await self._restore(record, path, manifest, clear)
            wrong = await self._settle(record, manifest)
            if wrong is None:
                await self.streams.update(record.stream, {"subjects": record.subjects})
                return
            self._tell(record.stream, f"restored again, because {wrong}")
            await clear()
        raise NoAnswer(
            f"stream {record.stream!r} is not restored: {wrong}",
            fix=f"is every node up? Then apply again: its archive {path} has everything",
        )

    async def _restore(
        self, record: Record, path: Path, manifest: Manifest, clear: Callable[[], Awaitable[None]]
    ) -> None:
        async def upload() -> None:
            await snapshot_files.upload(
                self.api,
                recreate.parked_config(record),
                path,
                manifest,
                lambda done: self._tell(record.stream, "from disk", done, manifest.bytes),
            )

        try:
            await recreate.in_its_place(self.api, record, upload)
        except Refused as error:
            if error.err_code not in recreate.NAME_IN_USE:
                raise
            await clear()  # a restore that was broken off: its name is taken, and nobody finds it

    async def _settle(self, record: Record, manifest: Manifest) -> str | None:
        """Wait until so many replicas hold all of it that one may die; what is wrong, if that does not come about."""
        began = time.monotonic()
        wrong_since: float | None = None
        while True:
            raw = await self._find(record.stream)
            wrong = "it is gone" if raw is None else lost_in_restore(manifest.state, raw["state"], record.target)
            now = time.monotonic()
            if raw is not None and wrong is None and enough_replicas(raw) and await self._has_readers(record, manifest):
                return None
            wrong_since = None if wrong is None else wrong_since or now
            if wrong_since is not None and now - wrong_since > _WRONG_SECONDS:
                return wrong
            if now - began > _SETTLE_SECONDS:
                return wrong or "too few replicas hold it, or readers are missing"
            await asyncio.sleep(_LOOK_SECONDS)

    async def _has_readers(self, record: Record, manifest: Manifest) -> bool:
        """Whether the durables are back: in a cluster they come after the stream, and one by one."""
        wanted = {each["durable_name"] for each in record.durables} & set(manifest.consumers)
        return wanted <= {each.name for each in await self.consumers.every(record.stream)}

    async def _find(self, stream: str) -> Json | None:
        try:
            return await self.streams.raw_info(stream)
        except UnknownStream:
            return None

    async def resume(self, record: Record) -> None:
        """The end of step 4."""
        for consumer in await self.consumers.every(record.stream):
            if consumer.paused:
                await self.consumers.resume(record.stream, consumer.name)

    def forget_earlier(self, record: Record) -> None:
        """This one succeeded: other archives of the queue are of no use any more, whether complete or not."""
        path = self.find(record)
        if path is None:
            return
        snapshot_files.remove_others(path.parent, record.stream, path)
        for other in path.parent.glob(f"{snapshot_files.archive_name(record.stream, record.created)}*"):
            if other != path:
                shutil.rmtree(other, ignore_errors=True)

    async def _positions(self, stream: str) -> Json:
        found = await self.consumers.every(stream)
        return {each.name: [each.ack_floor.stream_seq, each.num_pending, each.num_ack_pending] for each in found}

    def _tell(self, stream: str, what: str, done: int = 0, total: int = 0) -> None:
        self.options.on_progress(Progress(stream.partition(":")[2], what, done, total))


def enough_replicas(raw: Json) -> bool:
    """Whether a majority of a stream's replicas has all of it; pure. A single server has no others."""
    others = (raw.get("cluster") or {}).get("replicas") or []
    current = sum(bool(each.get("current")) and not each.get("offline") for each in others)
    return 2 * (1 + current) > 1 + len(others)


def lost_in_restore(was: Json, is_: Json, target: Json) -> str | None:
    """What is missing in a restored stream; None if nothing is. Pure.

    A work queue lets go of what was acknowledged before it was one, and messages come to the end of their life.
    """
    if int(is_["last_seq"]) != int(was["last_seq"]):
        return f"it ends at {is_['last_seq']} and not at {was['last_seq']}"
    sheds = target["retention"] == Retention.WORK_QUEUE.value or target.get("max_age") or target.get("allow_msg_ttl")
    if int(is_["messages"]) < int(was["messages"]) and not sheds:
        return f"it holds {is_['messages']} messages and not {was['messages']}"
    return None


def _is_of(manifest: Manifest | None, record: Record) -> TypeGuard[Manifest]:
    return manifest is not None and (manifest.stream, manifest.created) == (record.stream, record.created)


def _complete(path: Path, record: Record) -> Manifest:
    manifest = snapshot_files.read_manifest(path)
    if not _is_of(manifest, record):
        raise DataLost(
            f"the archive of stream {record.stream!r} is not in {path}", fix="bring it back, then apply again"
        )
    return manifest
