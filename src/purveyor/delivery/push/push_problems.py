"""Why a subscription is not pushed at present, for those who look at it: an address that is refused, a missing secret.

A worker that cannot send tells so in the bucket of attempts, under a key of the subscription, and tells it again as
long as it is so. When the cause is gone it takes that back; what a worker told that is gone itself is old after a
while, and counts no more. Nothing of it is needed for delivery.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from purveyor.delivery.push.attempt_log import attempts_bucket
from purveyor.delivery.push.circuit_breaker import LONGEST_PAUSE_SECONDS
from purveyor.jetstream.direct_get import Wanted, read_page
from purveyor.jetstream.key_value import OPERATION, Bucket
from purveyor.jetstream.streams import StoredMessage
from purveyor.model import json_fields
from purveyor.model.delivery_policy import Delivery
from purveyor.model.errors import PurveyorError, Unavailable, UnknownMessage, UnknownStream, UnreadableRecord
from purveyor.model.json_fields import Json
from purveyor.model.stored_record import Kind
from purveyor.queues.client import Queues
from purveyor.queues.permissions import PUSH_ATTEMPTS
from purveyor.queues.registry import Registered

_log = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 20.0
_AWAY_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 2.0
_OLD: Final = timedelta(seconds=3 * LONGEST_PAUSE_SECONDS)
"""A worker tries at least so often, and tells it each time."""
_STREAM: Final = f"KV_{PUSH_ATTEMPTS}"
_PAGE: Final = 500
_TROUBLE: Final = Kind("trouble of push", ("incarnation", "reason", "since"))


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why nothing is sent, and since when the worker knows."""

    reason: str
    since: datetime

    def to_json(self) -> Json:
        """As the surfaces show it."""
        return {"reason": self.reason, "since": self.since.isoformat()}


@dataclass(slots=True)
class _Told:
    reason: str
    since: datetime
    at: float = float("-inf")


class Troubles:
    """What one worker tells. Written behind its back: a server that is away must not hold up anything."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._bucket: Bucket | None = None
        self._told: dict[str, _Told] = {}
        self._to_write: dict[str, bytes | None] = {}
        self._writing: asyncio.Task[None] | None = None

    def tell(self, name: str, incarnation: str, reason: str) -> None:
        """It is so, or still so; an empty reason takes back what was told."""
        told = self._told.get(name)
        if not reason:
            if told is not None:
                del self._told[name]
                self._write_soon(name, None)
            return
        if told is None or told.reason != reason:
            told = self._told[name] = _Told(reason, datetime.now(UTC))
        now = asyncio.get_running_loop().time()
        if now - told.at >= _AGAIN_SECONDS:
            told.at = now
            value = {"incarnation": incarnation, "reason": reason, "since": told.since.isoformat()}
            self._write_soon(name, _TROUBLE.dump(value))

    async def close(self) -> None:
        """Return when all that was told is written; what takes too long, because the server is away, is given up."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_CLOSE_SECONDS)
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    def _write_soon(self, name: str, value: bytes | None) -> None:
        self._to_write[name] = value
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._to_write:
            name, value = self._to_write.popitem()
            try:
                if self._bucket is None:
                    self._bucket = await self._queues.bucket(attempts_bucket(self._replicas))
                if value is None:
                    await self._bucket.purge(_key(name))
                else:
                    await self._bucket.put(_key(name), value)
            except Unavailable:
                self._to_write.setdefault(name, value)  # unless there is something newer to tell
                await asyncio.sleep(_AWAY_SECONDS)
            except PurveyorError as error:
                _log.debug("that subscription %s is not pushed cannot be told: %s", name, error)


async def troubles_of(queues: Queues, found: Sequence[Registered]) -> dict[str, Trouble]:
    """Of some subscriptions those that are not pushed, though they should be, by their name."""
    pushed = {each.name: each for each in found if each.record.definition.delivery is Delivery.PUSH}
    told: dict[str, Trouble] = {}
    for message in await _stored(queues, [*pushed]):
        name = message.subject.removeprefix(f"$KV.{PUSH_ATTEMPTS}.").rpartition(".")[0]
        trouble = _read(message, pushed[name]) if name in pushed else None
        if trouble is not None:
            told[name] = trouble
    return told


async def _stored(queues: Queues, names: Sequence[str]) -> list[StoredMessage]:
    """What is told of some: one is asked for by its name, of many all that there is."""
    found: list[StoredMessage] = []
    try:
        if len(names) == 1:
            return [await queues.streams.get_last(_STREAM, f"$KV.{PUSH_ATTEMPTS}.{_key(names[0])}")]
        more, after = bool(names), 0
        while more:
            wanted = Wanted(subject=f"$KV.{PUSH_ATTEMPTS}.*.trouble", from_sequence=after + 1, count=_PAGE)
            page = await read_page(queues, _STREAM, wanted)
            found += page.messages
            more = page.more and bool(page.messages)
            after = found[-1].sequence if found else 0
    except (UnknownMessage, UnknownStream):
        pass  # nobody ever told anything
    return found


def _read(message: StoredMessage, found: Registered) -> Trouble | None:
    old = message.timestamp is None or datetime.now(UTC) - message.timestamp > _OLD
    if old or OPERATION in message.headers:
        return None

    def build(given: Json) -> Trouble | None:
        value = _TROUBLE.check(given)
        if value.get("incarnation") != found.incarnation:
            return None
        reason = json_fields.text(value, "reason", _TROUBLE.what)
        return Trouble(reason, json_fields.moment(value, "since", _TROUBLE.what))

    try:
        return _TROUBLE.read(message.data, build)
    except UnreadableRecord as error:  # it is not pushed, for a reason that a newer worker tells
        return Trouble(str(error), message.timestamp or datetime.now(UTC))


def _key(name: str) -> str:
    return f"{name}.trouble"
