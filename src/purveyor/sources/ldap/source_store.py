"""What is stored about a source, in the bucket `sources`: its place in the directory, and which process owns it.

| key | content | written |
|---|---|---|
| `<source>` | `SourceState`: the cookie and its settings | when the queue has acknowledged all before it |
| `<source>.lease` | `Ownership`: the epoch and its process | by compare-and-set, at takeovers and renewals |

1. A process takes a source over: it raises the epoch in the lease, by compare-and-set.
2. It writes the state again, with its epoch. A late write of the process before it now meets another revision.
3. It publishes records, each with its epoch.
4. It stores the cookie, at the revision that it knows.

A crash between 3 and 4 sends the records after the stored cookie again. A process that was suspended in 3 finds the
lease and the revision of the state lost; the transform drops what it wrote late, because of its epoch.

An epoch is never used twice, also if an operator deletes the whole bucket: without an earlier one it begins at the time
in seconds. Deleting the key of a state asks for a full refresh.
"""

import contextlib
import os
import socket
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Final

from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.model.errors import AlreadyExists, LeaseLost, UnknownKey, WrongRevision
from purveyor.model.json_fields import (
    Json,
    Kind,
    field_names,
    member_field,
    read_fields,
    text_field,
    whole_field,
    write_fields,
)
from purveyor.queues.client import Queues
from purveyor.queues.lease import HeldLease, SeenRevisions, is_abandoned
from purveyor.queues.permissions import SOURCES_BUCKET
from purveyor.sources.ldap.directory import Directory, Mode

LEASE_SECONDS: Final = 10.0
"""A lease that another process sees unchanged for this long is taken over."""
_LEASE_SUFFIX: Final = ".lease"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """How far a source is, and with which settings it got there. Without a cookie, a full refresh is due."""

    uri: str
    base: str
    filter: str
    mode: Mode
    epoch: int
    cookie: str | None = None
    entries: int | None = None
    """The number of entries that the directory had at the cookie."""

    def continues(self, directory: Directory, mode: Mode) -> bool:
        """Return whether the cookie is valid for these settings."""
        place = (directory.base.lower(), directory.filter)
        return self.cookie is not None and self.mode is mode and (self.base.lower(), self.filter) == place


_STATE_FIELDS: Final = (
    text_field("uri"),
    text_field("base"),
    text_field("filter"),
    member_field("mode", Mode),
    whole_field("epoch"),
    text_field("cookie", default=None),
    whole_field("entries", default=None),
)
_STATE: Final = Kind("state of a source", field_names(_STATE_FIELDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """The content of a lease: its epoch, and the process that holds it; without one, it is free."""

    epoch: int
    pid: int | None = None
    host: str | None = None
    instance: str | None = None


_OWNERSHIP_FIELDS: Final = (
    whole_field("epoch"),
    whole_field("pid", default=None),
    text_field("host", default=None),
    text_field("instance", default=None),
)
_OWNERSHIP: Final = Kind("lease of a source", field_names(_OWNERSHIP_FIELDS))


def encode_state(state: SourceState) -> bytes:
    """Return the stored form of a state."""
    return _STATE.dump(write_fields(_STATE_FIELDS, state))


def decode_state(data: bytes, source: str) -> SourceState:
    """Read a stored state; UnreadableRecord if a newer program wrote it."""

    def build(given: Json) -> SourceState:
        return SourceState(**read_fields(_STATE_FIELDS, _STATE.check(given), _STATE.what))

    return _STATE.read(data, build, f"source {source!r}")


def _decode_ownership(data: bytes, source: str) -> Ownership:
    def build(given: Json) -> Ownership:
        return Ownership(**read_fields(_OWNERSHIP_FIELDS, _OWNERSHIP.check(given), _OWNERSHIP.what))

    return _OWNERSHIP.read(data, build, f"source {source!r}")


@dataclass(slots=True)
class HeldSource:
    """A source that this process has taken over, and holds by a lease."""

    source: str
    epoch: int
    lease: HeldLease
    state: SourceState | None
    """The stored state; None: there is none."""
    revision: int
    """The revision of the state for its next write."""
    bucket: Bucket
    _free: bytes = field(repr=False, default=b"")

    async def ensure_held(self, seconds: float) -> None:
        """Raise LeaseLost if another process has taken the source; ask the server if this process paused."""
        if time.monotonic() - self.lease.renewed_at > seconds / 2:
            await self.lease.renew()
        self.lease.check()

    async def save(self, state: SourceState) -> None:
        """Store the state. LeaseLost if another process wrote it; UnknownKey if an operator deleted it, once."""
        try:
            self.revision = await self.bucket.update(self.source, encode_state(state), self.revision)
        except WrongRevision:
            newest = await self.bucket.newest(self.source)
            if newest is not None and newest.deleted:
                self.revision = newest.revision
                self.state = None
                raise UnknownKey(f"the state of source {self.source!r} was deleted") from None
            if newest is None or decode_state(newest.value, self.source).epoch != self.epoch:
                self.lease.lose()
                raise LeaseLost(f"another instance writes source {self.source!r}", fix="wait for it") from None
            # This process wrote it, and the answer was lost.
            self.revision = await self.bucket.update(self.source, encode_state(state), newest.revision)
        self.state = state

    async def release(self) -> None:
        """Let another process take the source over at once."""
        await self.lease.release(self._free)


class SourceStore:
    """The stored states and leases of all sources. A lease that the same `instance` left behind is taken at once."""

    def __init__(
        self,
        bucket: Bucket,
        lease_seconds: float = LEASE_SECONDS,
        seen: SeenRevisions | None = None,
        instance: str | None = None,
    ) -> None:
        self._bucket = bucket
        self._lease_seconds = lease_seconds
        self._seen: SeenRevisions = {} if seen is None else seen
        self._instance = instance or uuid.uuid4().hex

    @classmethod
    async def open(
        cls,
        queues: Queues,
        *,
        replicas: int = 1,
        lease_seconds: float = LEASE_SECONDS,
        seen: SeenRevisions | None = None,
        instance: str | None = None,
    ) -> "SourceStore":
        """Open the bucket; create it if it is missing."""
        bucket = await queues.bucket(BucketConfig(name=SOURCES_BUCKET, replicas=replicas))
        return cls(bucket, lease_seconds, seen, instance)

    async def take(self, source: str) -> HeldSource | None:
        """Take a source over; None while another process holds it. UnreadableRecord if its records are newer."""
        key = f"{source}{_LEASE_SUFFIX}"
        newest = await self._bucket.newest(key)
        held = None if newest is None or newest.deleted else _decode_ownership(newest.value, source)
        is_taken = held is not None and held.instance not in (None, self._instance)
        if newest and is_taken and not is_abandoned(self._seen, key, newest.revision, self._lease_seconds):
            return None
        _, state = await self._read(source)
        last = max(held.epoch if held else 0, state.epoch if state else 0)
        epoch = last + 1 if last else int(time.time())
        mine = Ownership(epoch=epoch, pid=os.getpid(), host=socket.gethostname(), instance=self._instance)
        value = _OWNERSHIP.dump(write_fields(_OWNERSHIP_FIELDS, mine))
        try:
            if newest is None or held is None:
                revision = await self._bucket.create(key, value)
            else:
                revision = await self._bucket.update(key, value, newest.revision)
        except (AlreadyExists, WrongRevision):
            return None  # another process was quicker
        lease = HeldLease(self._bucket, key, revision, lambda: value)
        revision, state = await self._write_epoch(source, epoch)
        free = _OWNERSHIP.dump(write_fields(_OWNERSHIP_FIELDS, Ownership(epoch=epoch)))
        return HeldSource(source, epoch, lease, state, revision, self._bucket, free)

    async def _read(self, source: str) -> tuple[int, SourceState | None]:
        """Return the revision of a state, 0 if it was never written, and the state; None if there is none."""
        stored = await self._bucket.newest(source)
        if stored is None or stored.deleted:
            return (0 if stored is None else stored.revision), None
        return stored.revision, decode_state(stored.value, source)

    async def _write_epoch(self, source: str, epoch: int) -> tuple[int, SourceState | None]:
        """Write the state again with a new epoch: then the process before cannot write it any more."""
        while True:
            revision, state = await self._read(source)
            if state is None:
                return revision, None
            state = replace(state, epoch=epoch)
            with contextlib.suppress(WrongRevision):  # the process before wrote it at this moment
                return await self._bucket.update(source, encode_state(state), revision), state

    async def owner(self, source: str) -> Ownership | None:
        """Return who holds a source; None if it was never taken."""
        try:
            return _decode_ownership((await self._bucket.get(f"{source}{_LEASE_SUFFIX}")).value, source)
        except UnknownKey:
            return None

    async def state(self, source: str) -> SourceState | None:
        """Return the stored state of a source; None if there is none."""
        try:
            return decode_state((await self._bucket.get(source)).value, source)
        except UnknownKey:
            return None

    async def sources(self) -> list[str]:
        """Return the names of all sources that were ever taken."""
        return sorted({key.removesuffix(_LEASE_SUFFIX) for key in await self._bucket.keys()})

    async def forget(self, source: str) -> bool:
        """Delete the state of a source: the process that follows it begins a full refresh. False if there is none."""
        try:
            await self._bucket.get(source)
        except UnknownKey:
            return False
        await self._bucket.delete(source)
        return True

    async def watch_deletions(self, source: str, after: int) -> AsyncGenerator[None]:
        """Yield whenever the state of a source is deleted after a revision, without end."""
        async with contextlib.aclosing(self._bucket.watch(source)) as changes:
            async for entry in changes:
                if entry is not None and entry.deleted and entry.revision > after:
                    yield None
