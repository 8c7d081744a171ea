"""Key-value buckets: a bucket is a stream with one subject per key; every write has a revision."""

import asyncio
import contextlib
import dataclasses
import itertools
import math
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from purveyor.jetstream import headers as header_names
from purveyor.jetstream.config import (
    AckPolicy,
    ConsumerConfig,
    ConsumerInfo,
    Deliver,
    Discard,
    Storage,
    StreamConfig,
)
from purveyor.jetstream.consumers import Consumers
from purveyor.jetstream.headers import Headers, first
from purveyor.jetstream.messages import Message
from purveyor.jetstream.publisher import Expect, OutgoingMessage, Publisher
from purveyor.jetstream.puller import Puller
from purveyor.jetstream.streams import Streams
from purveyor.model.errors import (
    AlreadyExists,
    NotFound,
    PermissionDenied,
    Unavailable,
    UnknownConsumer,
    UnknownKey,
    UnknownMessage,
    WrongRevision,
)
from purveyor.model.name_rules import check_bucket, check_key, check_subject

_REMOVE_WATCHER_SECONDS = 2.0
OPERATION = "KV-Operation"
"""The header that marks a deletion."""


class Operation(Enum):
    """The kind of a revision."""

    PUT = "PUT"
    DELETE = "DEL"
    PURGE = "PURGE"


@dataclass(frozen=True, slots=True)
class Entry:
    """A key at one revision; a deletion has an empty value."""

    key: str
    value: bytes
    revision: int
    operation: Operation
    timestamp: datetime | None = None

    @property
    def deleted(self) -> bool:
        """Whether this revision deletes the key."""
        return self.operation is not Operation.PUT


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """The configuration of a bucket: how many revisions of a key it keeps, and for how long."""

    name: str
    history: int = 1
    max_age: timedelta = timedelta(0)
    marker_age: timedelta | None = None
    """How long a deletion marker is kept; None: for ever. If set, single keys may have their own maximum age."""
    storage: Storage = Storage.FILE
    replicas: int = 1

    def stream(self) -> StreamConfig:
        """Return the configuration of the stream, as every NATS client expects it for a bucket."""
        return StreamConfig(
            name=f"KV_{check_bucket(self.name)}",
            subjects=(f"$KV.{self.name}.>",),
            max_msgs_per_subject=self.history,
            max_age=self.max_age,
            storage=self.storage,
            num_replicas=self.replicas,
            discard=Discard.NEW,
            allow_rollup_hdrs=True,
            allow_msg_ttl=self.marker_age is not None,
            deny_delete=True,
        )


@dataclass(slots=True)
class BucketServices:
    """The services that a bucket uses."""

    streams: Streams
    consumers: Consumers
    publisher: Publisher
    puller: Puller


class Bucket:
    """One bucket. The leader answers reads, so a read sees every acknowledged write."""

    def __init__(self, name: str, services: BucketServices, marker_age: timedelta | None = None) -> None:
        self.name = check_bucket(name)
        self._stream = f"KV_{name}"
        self._marker_age = marker_age
        self._services = services
        self._writer_id, self._write_numbers = uuid.uuid4().hex, itertools.count()

    async def get(self, key: str) -> Entry:
        """Return the current entry of a key; raise UnknownKey if it was never written or is deleted."""
        entry = await self.newest(key)
        if entry is None or entry.deleted:
            raise UnknownKey(f"no key {key!r} in bucket {self.name!r}")
        return entry

    async def newest(self, key: str) -> Entry | None:
        """Return the newest revision of a key, even a deletion; None if the key was never written."""
        try:
            found = await self._services.streams.get_last(self._stream, self._subject(key))
        except UnknownMessage:
            return None
        return Entry(key, found.data, found.sequence, _operation(found.headers), found.timestamp)

    async def put(self, key: str, value: bytes, *, max_age: timedelta | None = None) -> int:
        """Write a key unconditionally, for at most `max_age` if given; return the revision."""
        return await self._write(key, value, max_age=max_age)

    async def create(self, key: str, value: bytes, *, max_age: timedelta | None = None) -> int:
        """Write a key that does not exist, else raise AlreadyExists. Of concurrent calls exactly one succeeds."""
        revision = 0
        while True:
            try:
                return await self._write(key, value, revision=revision, max_age=max_age)
            except WrongRevision as error:
                entry = await self.newest(key)
                if entry is not None and not entry.deleted:
                    raise AlreadyExists(
                        f"key {key!r} already exists in bucket {self.name!r}", code=400, err_code=error.err_code
                    ) from error
                revision = entry.revision if entry else 0

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write a key if `revision` is still its newest, else raise WrongRevision."""
        return await self._write(key, value, revision=revision)

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        """Mark a key as deleted; its history stays readable."""
        marker = {OPERATION: Operation.DELETE.value}
        await self._write(key, headers=marker, revision=revision, max_age=self._marker_age)

    async def purge(self, key: str) -> None:
        """Delete a key with its history."""
        marker = {OPERATION: Operation.PURGE.value, header_names.ROLLUP: "sub"}
        await self._write(key, headers=marker, max_age=self._marker_age)

    async def _write(
        self,
        key: str,
        value: bytes = b"",
        *,
        headers: dict[str, str] | None = None,
        revision: int | None = None,
        max_age: timedelta | None = None,
    ) -> int:
        # With an id, the server recognises a write that is repeated after a lost reply. Without it, a successful
        # compare-and-set would fail when it is repeated.
        msg_id = f"{self._writer_id}-{next(self._write_numbers)}"
        expect = Expect(stream=self._stream, last_subject_sequence=revision)
        given = {name: (text,) for name, text in (headers or {}).items()}
        if max_age is not None:
            given[header_names.TTL] = (f"{max(math.ceil(max_age.total_seconds()), 1)}s",)
        block = header_names.encode({**given, header_names.MSG_ID: (msg_id,), **expect.headers()})
        message = OutgoingMessage(self._subject(key), value, block, msg_id, expect)
        return (await self._services.publisher.send(message)).sequence

    async def keys(self, pattern: str = ">") -> list[str]:
        """Return the existing keys, sorted."""
        found = []
        async with contextlib.aclosing(self.watch(pattern, values=False)) as changes:
            async for entry in changes:
                if entry is None:
                    break
                if not entry.deleted:
                    found.append(entry.key)
        return sorted(found)

    async def watch(self, pattern: str = ">", *, values: bool = True) -> AsyncGenerator[Entry | None]:
        """Yield the current entry of every matching key, then None once, then every change, without end.

        The watch survives a lost server.
        """
        check_subject(pattern, wildcards=True)
        revision = 0
        caught_up = False
        while True:
            info = await self._add_watcher(pattern, values, revision)
            if not info.num_pending and not caught_up:
                caught_up = True
                yield None
            try:
                async with contextlib.aclosing(self._services.puller.pull(self._stream, info.name)) as messages:
                    async for message in messages:
                        if message.sequence > revision:
                            revision = message.sequence
                            yield _entry(message, self.name)
                        if not message.delivery.pending and not caught_up:
                            caught_up = True
                            yield None
            except UnknownConsumer:
                continue  # its server restarted: continue after the last revision seen
            finally:
                # An error would hide the cancellation of this task, and a lost server would delay it.
                # The server removes an idle watcher after a minute.
                with contextlib.suppress(NotFound, Unavailable, PermissionDenied, TimeoutError):
                    async with asyncio.timeout(_REMOVE_WATCHER_SECONDS):
                        await self._services.consumers.remove(self._stream, info.name)

    async def _add_watcher(self, pattern: str, values: bool, revision: int) -> ConsumerInfo:
        begin = (
            {"deliver_policy": Deliver.BY_START_SEQUENCE, "opt_start_seq": revision + 1}
            if revision
            else {"deliver_policy": Deliver.LAST_PER_SUBJECT}
        )
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE,
            filter_subject=f"$KV.{self.name}.{pattern}",
            headers_only=not values,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=timedelta(minutes=1),
        )
        return await self._services.consumers.add(self._stream, dataclasses.replace(config, **begin))

    def _subject(self, key: str) -> str:
        return f"$KV.{self.name}.{check_key(key)}"


def _operation(headers: Headers) -> Operation:
    return Operation(first(headers, OPERATION) or "PUT")


def _entry(message: Message, bucket: str) -> Entry:
    key = message.subject.removeprefix(f"$KV.{bucket}.")
    return Entry(key, message.data, message.sequence, _operation(message.headers), message.delivery.timestamp)
