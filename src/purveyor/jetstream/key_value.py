"""Small state shared by processes: a bucket is a stream with one subject per key; every write has a revision."""

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
from purveyor.jetstream.publisher import Expect, Letter, Publisher
from purveyor.jetstream.puller import Puller
from purveyor.jetstream.streams import Streams
from purveyor.model.errors import (
    AlreadyExists,
    NotFound,
    Unavailable,
    UnknownConsumer,
    UnknownKey,
    UnknownMessage,
    WrongRevision,
)
from purveyor.model.name_rules import check_bucket, check_key, check_subject

OPERATION = "KV-Operation"
"""The header that marks a deletion."""


class Operation(Enum):
    """What a revision of a key is."""

    PUT = "PUT"
    DELETE = "DEL"
    PURGE = "PURGE"


@dataclass(frozen=True, slots=True)
class Entry:
    """A key at one revision. A deletion has an empty value."""

    key: str
    value: bytes
    revision: int
    operation: Operation
    timestamp: datetime | None = None

    @property
    def deleted(self) -> bool:
        """Whether the key is gone as of this revision."""
        return self.operation is not Operation.PUT


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """A bucket: how many revisions of a key it keeps, and for how long."""

    name: str
    history: int = 1
    max_age: timedelta = timedelta(0)
    marker_age: timedelta | None = None
    """How long the mark of a deletion is kept; None: for ever. With it, single keys may have an age of their own."""
    storage: Storage = Storage.FILE
    replicas: int = 1

    def stream(self) -> StreamConfig:
        """The stream behind it, laid out as every NATS client expects a bucket."""
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
class Services:
    """What a bucket is made of."""

    streams: Streams
    consumers: Consumers
    publisher: Publisher
    puller: Puller


class Bucket:
    """One bucket. Reads ask the leader: what was written and acknowledged is seen."""

    def __init__(self, name: str, services: Services, marker_age: timedelta | None = None) -> None:
        self.name = check_bucket(name)
        self._stream = f"KV_{name}"
        self._marker_age = marker_age
        self._services = services
        self._writer, self._writes = uuid.uuid4().hex, itertools.count()

    async def get(self, key: str) -> Entry:
        """The key now; UnknownKey if it was never written or is deleted."""
        entry = await self.newest(key)
        if entry is None or entry.deleted:
            raise UnknownKey(f"no key {key!r} in bucket {self.name!r}")
        return entry

    async def newest(self, key: str) -> Entry | None:
        """The newest revision of the key, also when it is a deletion; None if it was never written."""
        try:
            found = await self._services.streams.get_last(self._stream, self._subject(key))
        except UnknownMessage:
            return None
        return Entry(key, found.data, found.sequence, _operation(found.headers), found.timestamp)

    async def put(self, key: str, value: bytes, *, max_age: timedelta | None = None) -> int:
        """Write, whatever was there, and keep it so long if an age is given; returns the revision."""
        return await self._write(key, value, max_age=max_age)

    async def create(self, key: str, value: bytes, *, max_age: timedelta | None = None) -> int:
        """Write only if the key is not there; AlreadyExists otherwise. Of many at once exactly one succeeds."""
        revision = 0
        while True:
            try:
                return await self._write(key, value, revision=revision, max_age=max_age)
            except WrongRevision as error:
                entry = await self.newest(key)
                if entry is not None and not entry.deleted:
                    raise AlreadyExists(
                        f"key {key!r} is in bucket {self.name!r} already", code=400, err_code=error.err_code
                    ) from error
                revision = entry.revision if entry else 0

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """Write only if `revision` is still the newest of the key; WrongRevision otherwise."""
        return await self._write(key, value, revision=revision)

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        """Mark as deleted; its history stays readable."""
        marker = {OPERATION: Operation.DELETE.value}
        await self._write(key, headers=marker, revision=revision, max_age=self._marker_age)

    async def purge(self, key: str) -> None:
        """Delete with all its history."""
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
        # The id makes a repeated write after a lost answer the same write: without it a compare-and-set that
        # succeeded would look lost to its own repetition.
        msg_id = f"{self._writer}-{next(self._writes)}"
        expect = Expect(stream=self._stream, last_subject_sequence=revision)
        given = {name: (text,) for name, text in (headers or {}).items()}
        if max_age is not None:
            given[header_names.TTL] = (f"{max(math.ceil(max_age.total_seconds()), 1)}s",)
        block = header_names.encode({**given, header_names.MSG_ID: (msg_id,), **expect.headers()})
        letter = Letter(self._subject(key), value, block, msg_id, expect)
        return (await self._services.publisher.send(letter)).sequence

    async def keys(self, pattern: str = ">") -> list[str]:
        """The keys that exist, by name."""
        found = []
        async with contextlib.aclosing(self.watch(pattern, values=False)) as changes:
            async for entry in changes:
                if entry is None:
                    break
                if not entry.deleted:
                    found.append(entry.key)
        return sorted(found)

    async def watch(self, pattern: str = ">", *, values: bool = True) -> AsyncGenerator[Entry | None]:
        """Every key that matches as it is now, then None once, then every change: without end, through lost servers."""
        check_subject(pattern, wildcards=True)
        revision = 0
        caught_up = False
        while True:
            info = await self._follow(pattern, values, revision)
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
                continue  # it lived in a server that restarted: go on after the last revision seen
            finally:
                with contextlib.suppress(NotFound, Unavailable):
                    await self._services.consumers.remove(self._stream, info.name)

    async def _follow(self, pattern: str, values: bool, revision: int) -> ConsumerInfo:
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
