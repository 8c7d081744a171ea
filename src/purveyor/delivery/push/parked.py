"""Keys whose later messages are parked with one that failed for good, as long as any of theirs is a dead letter.

Which those are lies in the bucket of attempts, so that all workers know: a key is noted before the message that failed
is acknowledged, and only then can the next one about it be taken, by whomever. It is free again when none of its dead
letters is left, put back or discarded; that is found out when a message about it comes.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from purveyor.delivery.push.attempts import attempts_bucket
from purveyor.model.errors import Unavailable, UnknownMessage, UnknownStream, WrongRevision
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues
from purveyor.queues.keyvalue import Bucket

_ATTEMPTS: Final = 50
_Letters = dict[str, list[int]]


class ParkedKeys:
    """See the module."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._bucket: Bucket | None = None

    async def of(self, name: str, incarnation: str) -> Mapping[str, list[int]]:
        """The keys of a subscription that are parked, each with its dead letters."""
        return (await self._read(name, incarnation))[0]

    async def add(self, name: str, incarnation: str, key: str, letter: int) -> None:
        """One more dead letter of a key."""

        def added(letters: _Letters) -> _Letters:
            return {**letters, key: sorted({*letters.get(key, ()), letter})}

        for _ in range(_ATTEMPTS):
            letters, revision = await self._read(name, incarnation)
            if await self._write(name, incarnation, added(letters), revision):
                return
        raise Unavailable(f"the parked keys of {name!r} are changed by others too fast", fix="try again")

    async def is_free(self, name: str, incarnation: str, key: str, letters: list[int]) -> bool:
        """Whether none of these is left; then the key is forgotten."""
        for letter in letters:
            try:
                await self._queues.streams.get(DEAD_LETTERS.stream, letter)
            except (UnknownMessage, UnknownStream):
                continue
            return False
        for _ in range(_ATTEMPTS):
            found, revision = await self._read(name, incarnation)
            if set(found.get(key, ())) - set(letters):
                return False  # another one was parked meanwhile
            if await self._write(name, incarnation, {each: found[each] for each in found if each != key}, revision):
                return True
        return False

    async def _read(self, name: str, incarnation: str) -> tuple[_Letters, int]:
        entry = await (await self._open()).newest(_key(name))
        if entry is None or entry.deleted:
            return {}, 0 if entry is None else entry.revision
        found: Any = json.loads(entry.value)
        return (found["keys"] if found.get("incarnation") == incarnation else {}), entry.revision

    async def _write(self, name: str, incarnation: str, keys: _Letters, revision: int) -> bool:
        value = json.dumps({"incarnation": incarnation, "keys": keys}).encode()
        try:
            await (await self._open()).update(_key(name), value, revision)
        except WrongRevision:
            return False
        return True

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._queues.bucket(attempts_bucket(self._replicas))
        return self._bucket


def _key(name: str) -> str:
    return f"{name}.parked"
