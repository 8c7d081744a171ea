"""One at a time: a lease on a queue, and a deletion that only the holder of the lease can bring about.

A lease alone does not protect: a process that was stopped for a while may wake up behind its last look at the lease and
delete what others have made since. The server knows no conditional deletion of a stream. But it knows conditional
writes, and it republishes what it has stored: the deletion is a message in the bucket, stored only if the lease is
still at the revision that its holder knows, and republished by the server as the request to delete. So a late one is
refused by the server and not by a clock.

Nor does a lease run out by a clock that two machines would have to share. It is renewed while its holder works; whoever
sees it unchanged for long enough by its own clock takes it over.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import TypeAlias

from purveyor.jetstream.api import PREFIX as PREFIX_OF_API
from purveyor.jetstream.api import Api
from purveyor.jetstream.codec import to_wire
from purveyor.jetstream.connection import Subscription
from purveyor.jetstream.headers import EXPECTED_LAST_SUBJECT_SEQUENCE
from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.jetstream.maintenance import BUCKET, RECORDS_STREAM, STREAM_PREFIX, key_subject
from purveyor.jetstream.publisher import Expect, Publisher
from purveyor.jetstream.streams import Streams
from purveyor.model.errors import (
    AlreadyExists,
    LeaseLost,
    NotFound,
    Unavailable,
    UnknownKey,
    UnknownStream,
    WrongRevision,
)
from purveyor.queues.migration.record import deletion_key, lease_key

Seen: TypeAlias = dict[str, tuple[int, float]]
"""The revision of the lease of each queue, and since when it is that, by the clock of this process."""
_EXPECTED_ON = f"{EXPECTED_LAST_SUBJECT_SEQUENCE}-Subject"
_ADVISORIES = "$JS.EVENT.ADVISORY.API"
_HEARD_SECONDS = 2.0
_GIVE_UP_SECONDS = 60.0


async def make_bucket(api: Api, replicas: int) -> None:
    """The bucket, with the republishing of deletions."""
    config = to_wire(BucketConfig(name=BUCKET, replicas=replicas).stream())
    config["republish"] = {
        "src": key_subject(deletion_key("*")),
        "dest": "$JS.API.STREAM.DELETE.{{wildcard(1)}}",
    }
    with contextlib.suppress(AlreadyExists):  # with other replicas, say
        await api.ask(f"STREAM.CREATE.{RECORDS_STREAM}", config)


class Lease:
    """The right to work on one queue, while it is held."""

    def __init__(self, bucket: Bucket, queue: str, revision: int) -> None:
        self._bucket = bucket
        self._queue = queue
        self._revision = revision
        self._lost = False
        self._busy = asyncio.Lock()

    def check(self) -> None:
        """LeaseLost if somebody else has it by now."""
        if self._lost:
            raise LeaseLost(f"another instance goes on with the migration of {self._queue!r}", fix="let it")

    async def keep(self, every_seconds: float) -> None:
        """Renew it for as long as this runs."""
        while not self._lost:
            await asyncio.sleep(every_seconds)
            async with self._busy:
                await self._renew()

    async def _renew(self) -> None:
        try:
            self._revision = await self._bucket.update(lease_key(self._queue), _owner(), self._revision)
        except WrongRevision:
            self._lost = True
        except Unavailable:
            pass  # the server is away, for the others too

    async def give_back(self) -> None:
        """Let the next one have it at once."""
        async with self._busy:
            with contextlib.suppress(WrongRevision, Unavailable):
                await self._bucket.delete(lease_key(self._queue), revision=self._revision)

    async def delete_stream(self, api: Api, publisher: Publisher, streams: Streams, created: str) -> None:
        """Delete the queue's stream, if it is the one made at that time and the lease is still ours.

        Returns when it is gone, with its files. Raises LeaseLost if somebody else has the lease.
        """
        stream = f"{STREAM_PREFIX}{self._queue}"
        listening = await api.connection.subscribe(_ADVISORIES)
        try:
            give_up = time.monotonic() + _GIVE_UP_SECONDS
            while await _is(streams, stream, created):
                async with self._busy:
                    await self._order_deletion(publisher, stream)
                    await _heard(listening, f"{PREFIX_OF_API}STREAM.DELETE.{stream}")
                if time.monotonic() > give_up:
                    raise Unavailable(f"stream {stream!r} is not deleted", fix="is the cluster complete?")
        finally:
            await listening.close()

    async def clear(self, api: Api, publisher: Publisher) -> None:
        """Delete whatever has the name of the queue's stream, though it may not show: a restore that was broken off."""
        stream = f"{STREAM_PREFIX}{self._queue}"
        listening = await api.connection.subscribe(_ADVISORIES)
        try:
            async with self._busy:
                await self._order_deletion(publisher, stream)
                await _heard(listening, f"{PREFIX_OF_API}STREAM.DELETE.{stream}")
        finally:
            await listening.close()

    async def _order_deletion(self, publisher: Publisher, stream: str) -> None:
        self.check()
        guard = {EXPECTED_LAST_SUBJECT_SEQUENCE: str(self._revision), _EXPECTED_ON: key_subject(lease_key(self._queue))}
        order, expect = key_subject(deletion_key(stream)), Expect(stream=RECORDS_STREAM)
        try:
            await publisher.publish(order, headers=guard, msg_id=uuid.uuid4().hex, expect=expect)
        except WrongRevision:
            self._lost = True
            self.check()


async def _heard(listening: Subscription, request: str) -> None:
    """Return when the server tells that it has answered the request.

    A stream is not found any more as soon as its deletion begins; made anew before that is through, it would meet the
    files of the old one. Who may not listen waits for as long as that takes at the most.
    """
    deadline = time.monotonic() + _HEARD_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        told = await listening.next(left)
        if told is not None and json.loads(told.data).get("subject") == request:
            return


class Leases:
    """The leases of this process, and what it has seen of those of others.

    `seen` may be shared by several, of one server: a program that connects anew for each look, as the pipeline does,
    would else never see a lease unchanged for long enough.
    """

    def __init__(self, bucket: Bucket, lease_seconds: float, seen: "Seen | None" = None) -> None:
        self._bucket = bucket
        self._seconds = lease_seconds
        self._seen: Seen = {} if seen is None else seen

    @contextlib.asynccontextmanager
    async def hold(self, queue: str) -> AsyncIterator[Lease | None]:
        """The lease for the length of a block; None if another instance has it."""
        revision = await self._take(queue)
        if revision is None:
            yield None
            return
        lease = Lease(self._bucket, queue, revision)
        keeping = asyncio.create_task(lease.keep(self._seconds / 4))
        try:
            yield lease
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        # After an error a deletion may be on its way: the lease then runs out by itself, long after that has arrived.
        await lease.give_back()

    async def _take(self, queue: str) -> int | None:
        key = lease_key(queue)
        try:
            found = await self._bucket.get(key)
        except UnknownKey:
            with contextlib.suppress(AlreadyExists):
                return await self._bucket.create(key, _owner())
            return None
        if not self._is_abandoned(queue, found.revision):
            return None
        with contextlib.suppress(WrongRevision):
            return await self._bucket.update(key, _owner(), found.revision)
        return None

    async def is_free(self, queue: str) -> bool:
        """Whether nobody works on a queue, as far as this process can tell by now. Takes nothing."""
        try:
            found = await self._bucket.get(lease_key(queue))
        except UnknownKey:
            return True
        return self._is_abandoned(queue, found.revision)

    def _is_abandoned(self, queue: str, now: int) -> bool:
        revision, since = self._seen.get(queue, (0, 0.0))
        if revision != now:
            self._seen[queue] = (now, time.monotonic())
            return False
        return time.monotonic() - since >= self._seconds


def _owner() -> bytes:
    return uuid.uuid4().hex.encode()


async def _is(streams: Streams, stream: str, created: str) -> bool:
    """Whether that stream is there still."""
    try:
        return str((await streams.raw_info(stream))["created"]) == created
    except (UnknownStream, NotFound):
        return False
