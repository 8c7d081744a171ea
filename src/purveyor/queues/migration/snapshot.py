"""By snapshot: the stream goes to disk and comes back with other settings, its readers where they were.

1. Its consumers are paused, and what they have in hand is waited for: an acknowledgement that comes between the
   snapshot and the restore would be lost, and its message delivered again. One that comes after the restore counts.
2. The snapshot is taken and checked. If anything was acknowledged meanwhile, it is taken again.
3. The stream is deleted. From here on the archive is the only place that has the messages, and the journal: the record
   tells where it is, and whoever finds both, goes on.
4. It is restored, compared with what it was, and its consumers are let go on.
"""

import asyncio
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from purveyor.model.errors import DataLost, Unavailable
from purveyor.queues.api import Api
from purveyor.queues.codec import Json
from purveyor.queues.config import ConsumerInfo, Retention
from purveyor.queues.consumers import Consumers
from purveyor.queues.migration import archive, recreate
from purveyor.queues.migration.archive import Manifest
from purveyor.queues.migration.record import Archive, Record
from purveyor.queues.migration.steps import Options, Progress
from purveyor.queues.migration.target import replaced
from purveyor.queues.streams import Streams

_PAUSE = timedelta(days=1)
_LOOK_SECONDS = 0.05
_TRIES = 10


@dataclass(frozen=True, slots=True)
class Snapshots:
    """See the module. Only for the holder of the lease."""

    api: Api
    streams: Streams
    consumers: Consumers
    options: Options

    def place(self, record: Record) -> Archive:
        """Where the archive of a migration goes."""
        assert self.options.archives is not None
        path = self.options.archives.absolute() / archive.archive_name(record.stream, record.created)
        return Archive(host=socket.gethostname(), path=str(path))

    def here(self, record: Record) -> Path | None:
        """The archive's directory, if it is one of this machine."""
        if record.archive is None or record.archive.host != socket.gethostname():
            return None
        return Path(record.archive.path)

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
            manifest = await archive.download(
                self.api, record.stream, path, before, lambda done: self._tell(record.stream, "to disk", done, size)
            )
            await archive.check(path, manifest)
            if before == await self._positions(record.stream):
                return
        raise Unavailable(
            f"stream {record.stream!r} changes faster than it can be written to disk", fix="stop its readers"
        )

    async def restore(self, record: Record, path: Path) -> None:
        """Step 4, with the comparison: DataLost if the restored stream does not hold what was archived."""
        manifest = _complete(path, record)
        await archive.check(path, manifest)

        async def upload() -> None:
            state = await archive.upload(
                self.api,
                recreate.first_config(record),
                path,
                manifest,
                lambda done: self._tell(record.stream, "from disk", done, manifest.bytes),
            )
            # As it was when it came into being: from then on publishers add to it, and readers remove from it.
            lost = lost_in_restore(manifest.state, state, record.target)
            if lost:
                raise DataLost(f"stream {record.stream!r} after its restore: {lost}", fix=f"keep the archive {path}")

        await recreate.in_its_place(self.api, record, upload)

    async def resume(self, record: Record) -> None:
        """The end of step 4."""
        for consumer in await self.consumers.every(record.stream):
            if consumer.paused:
                await self.consumers.resume(record.stream, consumer.name)

    def forget_earlier(self, record: Record) -> None:
        """This one succeeded: the archives of earlier migrations of the queue are of no use any more."""
        path = self.here(record)
        if path is not None:
            archive.remove_others(path.parent, record.stream, path)

    async def _positions(self, stream: str) -> Json:
        found = await self.consumers.every(stream)
        return {each.name: [each.ack_floor.stream_seq, each.num_pending, each.num_ack_pending] for each in found}

    def _tell(self, stream: str, what: str, done: int = 0, total: int = 0) -> None:
        self.options.on_progress(Progress(stream.partition(":")[2], what, done, total))


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


def _complete(path: Path, record: Record) -> Manifest:
    manifest = archive.read_manifest(path)
    if manifest is None or manifest.created != record.created:
        raise DataLost(
            f"the archive of stream {record.stream!r} is not in {path}", fix="bring it back, then apply again"
        )
    return manifest
