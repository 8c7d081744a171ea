"""Keys that are blocked by a dead letter: under the policy `park_key` their later messages become dead letters too.

The blocked keys of a subscription are stored in the bucket of the attempt log, so that all workers know them. A worker
blocks a key before it acknowledges the message that failed; only after that can any worker lease the next message of
the key. A key is unblocked when none of its dead letters is left, because they were redriven or discarded. A worker
finds that out when a message of the key arrives, or when there is no space for another key. The record stores the
compact form of a key (`compact_key`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from purveyor.delivery.push.attempt_log import attempts_bucket
from purveyor.delivery.push.payloads import message_key
from purveyor.delivery.transitions import DeliveredMessage
from purveyor.jetstream.key_value import Bucket
from purveyor.model.delivery_state import SubjectKind, compact_key
from purveyor.model.errors import Refused, Unavailable, UnknownMessage, UnknownStream, WrongRevision
from purveyor.model.stored_record import Kind
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues

_MAX_WRITE_ATTEMPTS: Final = 50
_CONCURRENT_READS: Final = 100
_RESERVED_BYTES: Final = 1024
"""Space for one more key with its dead letter, and for headers."""
_DeadLettersByKey = dict[str, list[int]]
_BLOCKED: Final = Kind("list of blocked keys", ("incarnation", "keys"))


class BlockedKeys:
    """The blocked keys of all subscriptions."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._bucket: Bucket | None = None

    async def find_blocked(self, name: str, incarnation: str, messages: Sequence[DeliveredMessage]) -> dict[int, str]:
        """Return the key of each message whose key is blocked, by sequence. A redriven message is never blocked."""
        found: dict[int, str] = {}
        blocked = await self.read(name, incarnation)
        for message in messages if blocked else ():
            key = message_key(message.data)
            if key is None or compact_key(key) not in blocked or message.kind is SubjectKind.RETRY:
                continue
            if not await self.unblock(name, incarnation, key, blocked[compact_key(key)]):
                found[message.sequence] = key
        return found

    async def read(self, name: str, incarnation: str) -> Mapping[str, list[int]]:
        """Return the blocked keys of a subscription in compact form, each with its dead letters."""
        return (await self._read(name, incarnation))[0]

    async def make_space(self, name: str, incarnation: str) -> None:
        """Unblock keys if there is no space for another one; raise `Refused` if there is none afterwards."""
        for _ in range(_MAX_WRITE_ATTEMPTS):
            blocked, revision = await self._read(name, incarnation)
            if self._has_space(incarnation, blocked):
                return
            kept = await self._without_resolved(blocked)
            if not self._has_space(incarnation, kept):
                raise Refused(
                    f"{len(kept):,} keys of subscription {name!r} are blocked, and there is no space for another one",
                    fix="redrive or discard its dead letters",
                )
            if await self._write(name, incarnation, kept, revision):
                return
        raise _contended(name)

    async def block(self, name: str, incarnation: str, key: str, dead_letter: int) -> None:
        """Block a key because of a dead letter."""
        compact = compact_key(key)
        for _ in range(_MAX_WRITE_ATTEMPTS):
            blocked, revision = await self._read(name, incarnation)
            added = {**blocked, compact: sorted({*blocked.get(compact, ()), dead_letter})}
            if await self._write(name, incarnation, added, revision):
                return
        raise _contended(name)

    async def unblock(self, name: str, incarnation: str, key: str, dead_letters: list[int]) -> bool:
        """Unblock a key if none of its dead letters is left; return whether it is unblocked."""
        for dead_letter in dead_letters:
            if await self._exists(dead_letter):
                return False
        compact = compact_key(key)
        for _ in range(_MAX_WRITE_ATTEMPTS):
            blocked, revision = await self._read(name, incarnation)
            if set(blocked.get(compact, ())) - set(dead_letters):
                return False  # another message of the key was parked meanwhile
            kept = {each: blocked[each] for each in blocked if each != compact}
            if await self._write(name, incarnation, kept, revision):
                return True
        return False

    async def _without_resolved(self, blocked: _DeadLettersByKey) -> _DeadLettersByKey:
        sequences = sorted({sequence for found in blocked.values() for sequence in found})
        existing: set[int] = set()
        for begin in range(0, len(sequences), _CONCURRENT_READS):
            chunk = sequences[begin : begin + _CONCURRENT_READS]
            answers = await asyncio.gather(*map(self._exists, chunk))
            existing |= {sequence for sequence, exists in zip(chunk, answers, strict=True) if exists}
        left = {key: [sequence for sequence in found if sequence in existing] for key, found in blocked.items()}
        return {key: found for key, found in left.items() if found}

    async def _exists(self, dead_letter: int) -> bool:
        try:
            await self._queues.streams.get(DEAD_LETTERS.stream, dead_letter)
        except (UnknownMessage, UnknownStream):
            return False
        return True

    def _has_space(self, incarnation: str, blocked: _DeadLettersByKey) -> bool:
        return len(_encode(incarnation, blocked)) + _RESERVED_BYTES <= self._queues.connection.max_payload

    async def _read(self, name: str, incarnation: str) -> tuple[_DeadLettersByKey, int]:
        entry = await (await self._open()).newest(_key(name))
        if entry is None or entry.deleted:
            return {}, 0 if entry is None else entry.revision
        found = _BLOCKED.read(entry.value, _BLOCKED.check, f"subscription {name!r}")
        kept: _DeadLettersByKey = (found.get("keys") or {}) if found.get("incarnation") == incarnation else {}
        return {compact_key(key): sequences for key, sequences in kept.items()}, entry.revision  # old: full keys

    async def _write(self, name: str, incarnation: str, blocked: _DeadLettersByKey, revision: int) -> bool:
        try:
            await (await self._open()).update(_key(name), _encode(incarnation, blocked), revision)
        except WrongRevision:
            return False
        return True

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._queues.bucket(attempts_bucket(self._replicas))
        return self._bucket


def _encode(incarnation: str, blocked: _DeadLettersByKey) -> bytes:
    return _BLOCKED.dump({"incarnation": incarnation, "keys": blocked})


def _contended(name: str) -> Unavailable:
    return Unavailable(f"other workers change the blocked keys of {name!r} too fast", fix="try again")


def _key(name: str) -> str:
    return f"{name}.parked"
