"""The desks of this process, as many as memory allows: those not used for the longest time are forgotten first."""

import asyncio
from collections import OrderedDict
from typing import Final

from purveyor.delivery.memory_limit import Memory
from purveyor.delivery.notifier import Bells
from purveyor.delivery.registration_cache import Gate
from purveyor.delivery.state_writer import Desk, Office
from purveyor.jetstream.key_value import BucketConfig
from purveyor.queues.client import Queues
from purveyor.queues.registry import ACKNOWLEDGED, Registered

_MOST_DESKS: Final = 2000


class Desks:
    """One desk per subscription. All that a desk knows can be read again."""

    def __init__(
        self, queues: Queues, gate: Gate, bells: Bells, *, replicas: int = 1, memory: Memory | None = None
    ) -> None:
        self._queues = queues
        self._gate = gate
        self._bells = bells
        self._replicas = replicas
        self._memory = memory or Memory()
        self._office: Office | None = None
        self._desks: OrderedDict[str, Desk] = OrderedDict()

    async def of(self, found: Registered) -> Desk:
        """The desk of a subscription; a new one if it was deleted and added again."""
        office = self._office or await self._open()
        desk = self._desks.get(found.name)
        if desk is None or desk.incarnation != found.incarnation:
            desk = self._desks[found.name] = Desk(office, found)
        desk.update(found)
        self._desks.move_to_end(found.name)
        desk.window.touch()
        self._make_room(desk)
        return desk

    async def close(self) -> None:
        """Return when nothing is under way at any of them."""
        await asyncio.gather(*(desk.close() for desk in self._desks.values()))
        self._desks.clear()

    def _make_room(self, in_use: Desk) -> None:
        if len(self._desks) <= _MOST_DESKS and not self._memory.is_short:
            return
        for name, desk in [*self._desks.items()]:
            if not desk.idle or desk is in_use:
                continue
            if len(self._desks) > _MOST_DESKS:
                desk.window.clear()
                del self._desks[name]
            elif self._memory.is_short:
                desk.window.clear()
            else:
                break

    async def _open(self) -> Office:
        if self._office is None:
            books = await self._queues.bucket(BucketConfig(name=ACKNOWLEDGED, replicas=self._replicas))
            self._office = Office(
                queues=self._queues, books=books, gate=self._gate, memory=self._memory, ring=self._bells.ring
            )
        return self._office
