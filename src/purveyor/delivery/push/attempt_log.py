"""The log of failed push attempts of each message, kept until the message is acknowledged or becomes a dead letter.

The log has its own bucket, with one key for each message that failed, because the delivery state of a subscription is
written with every message and has to be short. The log is for operators and holds the last attempts; the delivery state
counts the attempts. So a log that a newer worker wrote stops nothing: this worker leaves it as it is and adds nothing.
"""

import contextlib
import logging
from datetime import timedelta
from typing import Final

from purveyor.delivery.lease_rules import MAX_FAILURES_PER_MESSAGE
from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.model.errors import UnknownKey, UnreadableRecord
from purveyor.model.json_fields import Json
from purveyor.model.stored_record import Kind
from purveyor.queues.client import Queues
from purveyor.queues.permissions import PUSH_ATTEMPTS

_MAX_AGE: Final = timedelta(days=30)
_ATTEMPTS: Final = Kind("list of push attempts", ("incarnation", "attempts"))
_log = logging.getLogger(__name__)


class AttemptLog:
    """The attempt logs of all subscriptions. It caches the logs that this process wrote."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._bucket: Bucket | None = None
        self._cache: dict[str, list[Json]] = {}

    async def append(self, name: str, incarnation: str, sequence: int, attempt: int, entry: Json) -> None:
        """Add a failed attempt to the log of a message; `attempt` counts this one."""
        key = _key(name, sequence)
        if attempt > 1 and key not in self._cache:
            try:
                self._cache[key] = await self._read(key, incarnation)
            except UnreadableRecord as error:
                _log.warning("an attempt to push to subscription %s is not logged: %s", name, error)
                return
        log = [*self._cache.get(key, ()), entry][-MAX_FAILURES_PER_MESSAGE:]
        self._cache[key] = log
        await (await self._open()).put(key, _ATTEMPTS.dump({"incarnation": incarnation, "attempts": log}))

    async def read(self, name: str, incarnation: str, sequence: int) -> list[Json]:
        """Return the logged attempts of a message, in the form that a dead letter stores."""
        key = _key(name, sequence)
        log = self._cache.get(key)
        if log is None:
            log = []
            with contextlib.suppress(UnreadableRecord):
                log = await self._read(key, incarnation)
        return log

    async def delete(self, name: str, sequence: int) -> None:
        """Delete the log of a message that is acknowledged or parked."""
        key = _key(name, sequence)
        self._cache.pop(key, None)
        await (await self._open()).purge(key)

    def clear_cache(self, name: str) -> None:
        """Drop the cached logs of a subscription that this process no longer pushes."""
        for key in [key for key in self._cache if key.rpartition(".")[0] == name]:
            del self._cache[key]

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
    """Return the configuration of the bucket; entries of deleted subscriptions expire by age."""
    return BucketConfig(name=PUSH_ATTEMPTS, max_age=_MAX_AGE, replicas=replicas)


def _key(name: str, sequence: int) -> str:
    return f"{name}.{sequence}"
