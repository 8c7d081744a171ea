"""A lease on the migration of a queue, and a stream deletion that only the holder of the lease can cause.

A lease alone does not protect: a process that was stopped for a while may continue after its last check of the lease
and delete a stream that others have created since. The server has no conditional deletion of a stream. But it has
conditional writes, and it republishes stored messages: the deletion is a message in the bucket, which the server stores
only if the lease is still at the revision that its holder knows, and republishes as the request to delete. So the
server refuses a late deletion; no clock decides.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator

from purveyor.jetstream.api import API_PREFIX, Api
from purveyor.jetstream.config import to_wire
from purveyor.jetstream.connection import NatsSubscription
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
from purveyor.queues.lease import RENEWALS_PER_LEASE, HeldLease, SeenRevisions, is_abandoned
from purveyor.queues.migration.record import deletion_key, lease_key

_EXPECTED_ON = f"{EXPECTED_LAST_SUBJECT_SEQUENCE}-Subject"
_ADVISORIES = "$JS.EVENT.ADVISORY.API"
_ADVISORY_SECONDS = 2.0
_GIVE_UP_SECONDS = 60.0


async def create_bucket(api: Api, replicas: int) -> None:
    """Create the bucket of migrations, with the republishing of deletions."""
    config = to_wire(BucketConfig(name=BUCKET, replicas=replicas).stream())
    config["republish"] = {
        "src": key_subject(deletion_key("*")),
        "dest": "$JS.API.STREAM.DELETE.{{wildcard(1)}}",
    }
    with contextlib.suppress(AlreadyExists):  # perhaps with another number of replicas
        await api.request(f"STREAM.CREATE.{RECORDS_STREAM}", config)


class Lease(HeldLease):
    """The right to work on the migration of one queue, while it is held."""

    def __init__(self, bucket: Bucket, queue: str, revision: int) -> None:
        super().__init__(bucket, lease_key(queue), revision, _owner)
        self._queue = queue

    def check(self) -> None:
        """Raise LeaseLost if another instance has taken the lease."""
        if self.is_lost:
            raise LeaseLost(f"another instance continues the migration of {self._queue!r}", fix="wait for it")

    async def delete_stream(self, api: Api, publisher: Publisher, streams: Streams, created: str) -> None:
        """Delete the stream of the queue, if it was created at that time and this lease is still held.

        Returns when the stream and its files are gone. Raises LeaseLost if another instance has the lease.
        """
        stream = f"{STREAM_PREFIX}{self._queue}"
        advisories = await api.connection.subscribe(_ADVISORIES)
        try:
            give_up = time.monotonic() + _GIVE_UP_SECONDS
            while await _still_exists(streams, stream, created):
                async with self.busy:
                    await self._request_deletion(publisher, stream)
                    await _wait_for_answer(advisories, f"{API_PREFIX}STREAM.DELETE.{stream}")
                if time.monotonic() > give_up:
                    raise Unavailable(f"stream {stream!r} is not deleted", fix="is the cluster complete?")
        finally:
            await advisories.close()

    async def delete_remains(self, api: Api, publisher: Publisher) -> None:
        """Delete the remains of an interrupted restore, which have the name of the stream and may not be visible."""
        stream = f"{STREAM_PREFIX}{self._queue}"
        advisories = await api.connection.subscribe(_ADVISORIES)
        try:
            async with self.busy:
                await self._request_deletion(publisher, stream)
                await _wait_for_answer(advisories, f"{API_PREFIX}STREAM.DELETE.{stream}")
        finally:
            await advisories.close()

    async def _request_deletion(self, publisher: Publisher, stream: str) -> None:
        self.check()
        condition = {
            EXPECTED_LAST_SUBJECT_SEQUENCE: str(self.revision),
            _EXPECTED_ON: key_subject(lease_key(self._queue)),
        }
        subject, expect = key_subject(deletion_key(stream)), Expect(stream=RECORDS_STREAM)
        try:
            await publisher.publish(subject, headers=condition, msg_id=uuid.uuid4().hex, expect=expect)
        except WrongRevision:
            self.lose()
            self.check()


async def _wait_for_answer(advisories: NatsSubscription, request: str) -> None:
    """Return when an advisory says that the server has answered the request.

    A stream is not found any more as soon as its deletion begins; created again before the deletion is complete, it
    would meet the files of the old one. A user that may not listen waits for the longest time that a deletion takes.
    """
    deadline = time.monotonic() + _ADVISORY_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        advisory = await advisories.next(left)
        if advisory is not None and json.loads(advisory.data).get("subject") == request:
            return


class Leases:
    """The leases of this process, and the leases of others that it has seen.

    Several objects for one server may share `seen`: a program that opens a new connection for each poll, as the
    pipeline does, would otherwise never see a lease unchanged for long enough.
    """

    def __init__(self, bucket: Bucket, lease_seconds: float, seen: SeenRevisions | None = None) -> None:
        self._bucket = bucket
        self._seconds = lease_seconds
        self._seen: SeenRevisions = {} if seen is None else seen

    @contextlib.asynccontextmanager
    async def hold(self, queue: str) -> AsyncIterator[Lease | None]:
        """Hold the lease during a block; None if another instance has it."""
        revision = await self._take(queue)
        if revision is None:
            yield None
            return
        lease = Lease(self._bucket, queue, revision)
        renewal = asyncio.create_task(lease.keep_renewed(self._seconds / RENEWALS_PER_LEASE))
        try:
            yield lease
        finally:
            renewal.cancel()
            await asyncio.gather(renewal, return_exceptions=True)
        # After an error a deletion may still be under way: then the lease expires, long after the deletion.
        await lease.release()

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
        """Return whether no instance works on a queue, as far as this process knows. Takes no lease."""
        try:
            found = await self._bucket.get(lease_key(queue))
        except UnknownKey:
            return True
        return self._is_abandoned(queue, found.revision)

    def _is_abandoned(self, queue: str, now: int) -> bool:
        return is_abandoned(self._seen, queue, now, self._seconds)


def _owner() -> bytes:
    return uuid.uuid4().hex.encode()


async def _still_exists(streams: Streams, stream: str, created: str) -> bool:
    """Return whether that stream still exists."""
    try:
        return str((await streams.raw_info(stream))["created"]) == created
    except (UnknownStream, NotFound):
        return False
