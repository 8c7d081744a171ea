"""Keys whose later messages are parked with one that failed for good, as long as any of theirs is a dead letter.

Which those are lies in the bucket of attempts, so that all workers know: a key is noted before the message that failed
is acknowledged, and only then can the next one about it be taken, by whomever. It is free again when none of its dead
letters is left, put back or discarded; that is found out when a message about it comes, or when there is no room for
another key. Of a key its mark is kept (see `keys`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from purveyor.delivery.message_keys import mark
from purveyor.delivery.push.attempt_log import attempts_bucket
from purveyor.delivery.push.payloads import key_of
from purveyor.delivery.state import Kind as SubjectKind
from purveyor.delivery.transitions import Delivered
from purveyor.jetstream.key_value import Bucket
from purveyor.model.errors import Refused, Unavailable, UnknownMessage, UnknownStream, WrongRevision
from purveyor.model.stored_record import Kind
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues

_ATTEMPTS: Final = 50
_AT_ONCE: Final = 100
_ROOM: Final = 1024
"""Bytes for one more key with its dead letter, and for headers."""
_Letters = dict[str, list[int]]
_PARKED: Final = Kind("list of parked keys", ("incarnation", "keys"))


class ParkedKeys:
    """See the module."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._bucket: Bucket | None = None

    async def blocked(self, name: str, incarnation: str, messages: Sequence[Delivered]) -> dict[int, str]:
        """Those messages whose key is parked, by sequence, with the key. What was put back goes on."""
        found: dict[int, str] = {}
        parked = await self.of(name, incarnation)
        for message in messages if parked else ():
            key = key_of(message.data)
            if key is None or mark(key) not in parked or message.kind is SubjectKind.RETRY:
                continue
            if not await self.is_free(name, incarnation, key, parked[mark(key)]):
                found[message.sequence] = key
        return found

    async def of(self, name: str, incarnation: str) -> Mapping[str, list[int]]:
        """The marks of the keys of a subscription that are parked, each with its dead letters."""
        return (await self._read(name, incarnation))[0]

    async def make_room(self, name: str, incarnation: str) -> None:
        """Forget keys that are free if there is no room for another; `Refused` if there is none then."""
        for _ in range(_ATTEMPTS):
            letters, revision = await self._read(name, incarnation)
            if self._has_room(incarnation, letters):
                return
            kept = await self._still_parked(letters)
            if not self._has_room(incarnation, kept):
                raise Refused(
                    f"{len(kept):,} keys of subscription {name!r} are parked, and no more can be noted",
                    fix="put its dead letters back, or discard them",
                )
            if await self._write(name, incarnation, kept, revision):
                return
        raise _too_fast(name)

    async def add(self, name: str, incarnation: str, key: str, letter: int) -> None:
        """One more dead letter of a key."""
        for _ in range(_ATTEMPTS):
            letters, revision = await self._read(name, incarnation)
            added = {**letters, mark(key): sorted({*letters.get(mark(key), ()), letter})}
            if await self._write(name, incarnation, added, revision):
                return
        raise _too_fast(name)

    async def is_free(self, name: str, incarnation: str, key: str, letters: list[int]) -> bool:
        """Whether none of these is left; then the key is forgotten."""
        for letter in letters:
            if await self._is_there(letter):
                return False
        for _ in range(_ATTEMPTS):
            found, revision = await self._read(name, incarnation)
            if set(found.get(mark(key), ())) - set(letters):
                return False  # another one was parked meanwhile
            kept = {each: found[each] for each in found if each != mark(key)}
            if await self._write(name, incarnation, kept, revision):
                return True
        return False

    async def _still_parked(self, letters: _Letters) -> _Letters:
        numbers = sorted({number for found in letters.values() for number in found})
        there: set[int] = set()
        for begin in range(0, len(numbers), _AT_ONCE):
            portion = numbers[begin : begin + _AT_ONCE]
            answers = await asyncio.gather(*map(self._is_there, portion))
            there |= {number for number, is_there in zip(portion, answers, strict=True) if is_there}
        left = {key: [number for number in found if number in there] for key, found in letters.items()}
        return {key: found for key, found in left.items() if found}

    async def _is_there(self, letter: int) -> bool:
        try:
            await self._queues.streams.get(DEAD_LETTERS.stream, letter)
        except (UnknownMessage, UnknownStream):
            return False
        return True

    def _has_room(self, incarnation: str, letters: _Letters) -> bool:
        return len(_value(incarnation, letters)) + _ROOM <= self._queues.connection.max_payload

    async def _read(self, name: str, incarnation: str) -> tuple[_Letters, int]:
        entry = await (await self._open()).newest(_key(name))
        if entry is None or entry.deleted:
            return {}, 0 if entry is None else entry.revision
        found = _PARKED.read(entry.value, _PARKED.check, f"subscription {name!r}")
        kept: _Letters = (found.get("keys") or {}) if found.get("incarnation") == incarnation else {}
        return {mark(key): numbers for key, numbers in kept.items()}, entry.revision  # older versions kept whole keys

    async def _write(self, name: str, incarnation: str, keys: _Letters, revision: int) -> bool:
        try:
            await (await self._open()).update(_key(name), _value(incarnation, keys), revision)
        except WrongRevision:
            return False
        return True

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._queues.bucket(attempts_bucket(self._replicas))
        return self._bucket


def _value(incarnation: str, keys: _Letters) -> bytes:
    return _PARKED.dump({"incarnation": incarnation, "keys": keys})


def _too_fast(name: str) -> Unavailable:
    return Unavailable(f"the parked keys of {name!r} are changed by others too fast", fix="try again")


def _key(name: str) -> str:
    return f"{name}.parked"
