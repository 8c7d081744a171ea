"""A cache of subscription registrations: delivery reads one for each message.

The cache reads a registration once and keeps it until the registry changes; one watcher per process reports changes. A
cached registration may be a moment old. It cannot allow a delivery too early: a subscription with a prefill becomes
deliverable only after its prefill was seen as done, and only a replay takes that back. A subscription that was deleted
and added again has another incarnation, which the state writer checks.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, assert_never

from purveyor.model.errors import PrefillFailed, PurveyorError, UnknownSubscription
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues.client import Queues
from purveyor.queues.registry import SUBSCRIPTIONS, Registered, Registry

_log = logging.getLogger(__name__)
_WATCH_RETRY_SECONDS: Final = 1.0
_STATES_READ: Final = ("prefill",)
"""Delivery depends on the prefill state; the dispatch state does not matter to it."""


@dataclass(frozen=True, slots=True)
class _CachedRegistration:
    registered: Registered
    generation: int


class RegistrationCache:
    """Reads registrations from the registry. `on_change` is called with the name of a changed subscription."""

    def __init__(
        self, queues: Queues, *, on_change: Callable[[str], None] = lambda _name: None, replicas: int = 1
    ) -> None:
        self._queues = queues
        self._on_change = on_change
        self._replicas = replicas
        self._registry: Registry | None = None
        self._cached: dict[str, _CachedRegistration] = {}
        self._changes = 0
        self._is_current = False
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False

    async def get(self, name: str) -> Registered:
        """Return a subscription; `UnknownSubscription` if it does not exist or is being deleted."""
        cached = self._cached.get(name)
        if cached is not None and cached.generation == self._queues.connection.generation:
            return cached.registered
        return await self.refresh(name)

    async def refresh(self, name: str) -> Registered:
        """Read a subscription from the registry, as `get` returns it."""
        registry = await self._open()
        generation, changes = self._queues.connection.generation, self._changes
        self._cached.pop(name, None)
        registered = await registry.get(name, _STATES_READ)
        if registered.record.state is RecordState.DELETING:
            raise UnknownSubscription(f"subscription {name!r} is being deleted", fix="delete it again if that ended")
        if self._is_current and changes == self._changes:
            self._cached[name] = _CachedRegistration(registered, generation)
        return registered

    def invalidate(self, name: str) -> None:
        """Read a subscription from the registry next time: for callers that have just changed it."""
        self._changes += 1
        self._cached.pop(name, None)
        self._on_change(name)

    async def close(self) -> None:
        """Stop watching. Later calls read from the registry each time."""
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._is_current = False
            self._cached.clear()

    async def _open(self) -> Registry:
        if self._registry is None:
            self._registry = await Registry.open(self._queues, replicas=self._replicas)
        if not self._is_closed and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch())
        return self._registry

    async def _watch(self) -> None:
        while True:
            try:
                await self._follow_changes()
            except PurveyorError as error:
                _log.warning("the registry cannot be watched; each registration is read until it can: %s", error)
            self._is_current = False
            self._cached.clear()
            await asyncio.sleep(_WATCH_RETRY_SECONDS)

    async def _follow_changes(self) -> None:
        bucket = await self._queues.bucket(SUBSCRIPTIONS)
        async with contextlib.aclosing(bucket.watch(values=False)) as changes:
            async for entry in changes:
                if entry is None:
                    self._is_current = True
                    continue
                name, _, part = entry.key.rpartition(".")
                if self._is_current and part not in ("dispatch", "replay"):
                    self.invalidate(name)


def is_deliverable(registered: Registered) -> bool:
    """Return whether messages may be delivered now. Pure; `PrefillFailed` if an operator has to act first."""
    record, prefill = registered.record, registered.prefill
    if record.state is not RecordState.ACTIVE or record.paused:
        return False
    if prefill is None:
        return not record.definition.request_prefill
    match prefill.status:
        case PrefillStatus.DONE:
            return True
        case PrefillStatus.PENDING | PrefillStatus.RUNNING:
            return False
        case PrefillStatus.FAILED:
            raise PrefillFailed(
                f"the prefill of subscription {registered.name!r} failed: {prefill.reason or 'no reason was given'}",
                fix="correct the cause and request the prefill again, or delete the subscription",
                code=409,
            )
        case _:
            assert_never(prefill.status)
