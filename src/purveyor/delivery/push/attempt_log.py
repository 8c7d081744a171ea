"""What each failed attempt to push a message came to, kept until the message is acknowledged or becomes a dead letter.

It lies in a bucket of its own, one key for each message that failed: the book of a subscription is written with every
message, and has to be short. It is a record for people, of the last attempts: how often a message was tried is counted
in the book. So what a newer worker wrote stops nothing: it is left as it is, and this worker adds nothing to it.
"""

import contextlib
import logging
from datetime import timedelta
from typing import Final

from purveyor.delivery.failure_history import KEPT
from purveyor.delivery.push.retry_decision import Outcome
from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.model.errors import UnknownKey, UnreadableRecord
from purveyor.model.json_fields import Json
from purveyor.model.stored_record import Kind
from purveyor.queues.client import Queues
from purveyor.queues.permissions import PUSH_ATTEMPTS

_AGE: Final = timedelta(days=30)
_ATTEMPTS: Final = Kind("list of push attempts", ("incarnation", "attempts"))
_log = logging.getLogger(__name__)


class Attempts:
    """See the module. What this process has written itself is at hand."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._bucket: Bucket | None = None
        self._known: dict[str, list[Json]] = {}

    async def add(self, name: str, incarnation: str, sequence: int, attempt: int, entry: Json) -> None:
        """Note a failed attempt; `attempt` counts this one."""
        key = _key(name, sequence)
        if attempt > 1 and key not in self._known:
            try:
                self._known[key] = await self._read(key, incarnation)
            except UnreadableRecord as error:
                _log.warning("an attempt to push to subscription %s is not noted: %s", name, error)
                return
        log = [*self._known.get(key, ()), entry][-KEPT:]
        self._known[key] = log
        await (await self._open()).put(key, _ATTEMPTS.dump({"incarnation": incarnation, "attempts": log}))

    async def log(self, name: str, incarnation: str, sequence: int) -> list[Json]:
        """The failed attempts that are kept, as a dead letter has them."""
        key = _key(name, sequence)
        log = self._known.get(key)
        if log is None:
            log = []
            with contextlib.suppress(UnreadableRecord):
                log = await self._read(key, incarnation)
        return log

    async def forget(self, name: str, sequence: int, *, failed_before: bool) -> None:
        """The message is done with."""
        key = _key(name, sequence)
        if self._known.pop(key, None) is not None or failed_before:
            await (await self._open()).purge(key)

    def drop(self, name: str) -> None:
        """The subscription is another's now: what is at hand is read again if need be."""
        for key in [key for key in self._known if key.rpartition(".")[0] == name]:
            del self._known[key]

    async def _read(self, key: str, incarnation: str) -> list[Json]:
        try:
            entry = await (await self._open()).get(key)
        except UnknownKey:
            return []
        found = _ATTEMPTS.read(entry.value, _ATTEMPTS.check)
        return list(found.get("attempts") or ()) if found.get("incarnation") == incarnation else []

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._queues.bucket(attempts_bucket(self._replicas))
        return self._bucket


def attempts_bucket(replicas: int) -> BucketConfig:
    """The bucket; what nobody removed, because its subscription was deleted, goes by its age."""
    return BucketConfig(name=PUSH_ATTEMPTS, max_age=_AGE, replicas=replicas)


def note(outcome: Outcome) -> str:
    """How the last attempt ended, as the reason of a dead letter has it."""
    excerpt = outcome.excerpt
    return f"{outcome.words}: {excerpt}" if excerpt else outcome.words


def _key(name: str, sequence: int) -> str:
    return f"{name}.{sequence}"
