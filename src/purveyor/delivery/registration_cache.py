"""May a subscription be served now? Asked for every message, so answered from memory.

What the registry says about a subscription is read once and kept until the registry changes: one watcher per process
tells of changes. That what is kept may be a moment old cannot open the gate too early, because a subscription that
asked for a prefill is open only once its prefill was seen to be done, and that is never taken back by another than a
replay. A subscription that was deleted and added anew has another incarnation, which `desk` checks.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from purveyor.model.errors import PrefillFailed, PurveyorError, UnknownSubscription
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.queues.client import Queues
from purveyor.queues.registry import SUBSCRIPTIONS, Registered, Registry

_log = logging.getLogger(__name__)
_AGAIN_SECONDS = 1.0
_NEEDED = ("prefill",)
"""What decides about delivery beside the record; how far dispatch is does not."""


@dataclass(frozen=True, slots=True)
class _Kept:
    found: Registered
    generation: int


class Gate:
    """The registry as far as delivery needs it. `changed` is called with the name of a subscription."""

    def __init__(self, queues: Queues, changed: Callable[[str], None], *, replicas: int = 1) -> None:
        self._queues = queues
        self._changed = changed
        self._replicas = replicas
        self._registry: Registry | None = None
        self._kept: dict[str, _Kept] = {}
        self._changes = 0
        self._current = False
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    async def look(self, name: str) -> Registered:
        """A subscription; `UnknownSubscription` if there is none or it is being deleted."""
        kept = self._kept.get(name)
        if kept is not None and kept.generation == self._queues.connection.generation:
            return kept.found
        return await self.look_again(name)

    async def look_again(self, name: str) -> Registered:
        """The same, as the registry has it now."""
        registry = await self._open()
        generation, changes = self._queues.connection.generation, self._changes
        self._kept.pop(name, None)
        found = await registry.get(name, _NEEDED)
        if found.record.state is RecordState.DELETING:
            raise UnknownSubscription(f"subscription {name!r} is being deleted", fix="delete it again if that ended")
        if self._current and changes == self._changes:
            self._kept[name] = _Kept(found, generation)
        return found

    def forget(self, name: str) -> None:
        """Read it again next time: for those who have just changed it and want to see that."""
        self._changes += 1
        self._kept.pop(name, None)
        self._changed(name)

    async def close(self) -> None:
        """Watch no more; who still asks is answered by the registry each time."""
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._current = False
            self._kept.clear()

    async def _open(self) -> Registry:
        if self._registry is None:
            self._registry = await Registry.open(self._queues, replicas=self._replicas)
        if not self._closed and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch())
        return self._registry

    async def _watch(self) -> None:
        while True:
            try:
                await self._follow()
            except PurveyorError as error:
                _log.warning("the registry of subscriptions is read each time until it can be watched: %s", error)
            self._current = False
            self._kept.clear()
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _follow(self) -> None:
        bucket = await self._queues.bucket(SUBSCRIPTIONS)
        async with contextlib.aclosing(bucket.watch(values=False)) as changes:
            async for entry in changes:
                if entry is None:
                    self._current = True
                    continue
                name, _, part = entry.key.rpartition(".")
                if self._current and part not in ("dispatch", "replay"):
                    self.forget(name)


def is_open(found: Registered) -> bool:
    """Whether messages are handed out now. Pure; `PrefillFailed` when that needs somebody to act."""
    record, prefill = found.record, found.prefill
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
                f"the prefill of subscription {found.name!r} failed: {prefill.reason or 'no reason was given'}",
                fix="mend that and ask for the prefill again, or delete the subscription",
                code=409,
            )
        case _:
            assert_never(prefill.status)
