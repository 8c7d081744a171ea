"""A consumer of the demo: takes what its subscription has, keeps the objects told of, and notes what is wrong."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from purveyor.delivery.leases import Kind
from purveyor.delivery.pull import Delivered, Pull

_AT_ONCE = 200
_WAIT_SECONDS = 1.0


@dataclass(slots=True)
class Received:
    """What one subscriber got."""

    name: str
    prefill: int = 0
    live: int = 0
    doubled: int = 0
    disordered: int = 0
    seconds: float = 0.0
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By key, as the events told."""
    _last: int = 0
    _seen: set[tuple[Kind, int | None]] = field(default_factory=set)

    def take(self, message: Delivered) -> None:
        """One message."""
        told = json.loads(message.data)
        identity = (message.kind, message.position)
        self.doubled += identity in self._seen
        self._seen.add(identity)
        if message.kind is Kind.PREFILL:
            self.prefill += 1
            self.disordered += self.live > 0
        else:
            self.live += 1
            self.disordered += (message.position or 0) <= self._last
            self._last = message.position or 0
        old, new = told["body"]["old"], told["body"]["new"]
        if new:
            self.objects[new["uuid"]] = new
        else:
            self.objects.pop(old["uuid"], None)


async def consume(pull: Pull, name: str, expected: int, deadline_seconds: float) -> Received:
    """Take and acknowledge messages until there are as many as expected, and then look whether more come."""
    got = Received(name)
    began = time.monotonic()
    while time.monotonic() - began < deadline_seconds:
        messages = await pull.lease(name, max=_AT_ONCE, timeout=_WAIT_SECONDS)
        for message in messages:
            got.take(message)
        if messages:
            await pull.acknowledge_up_to(name, messages[-1].sequence)
            got.seconds = time.monotonic() - began
        elif got.prefill + got.live >= expected:
            break
        await asyncio.sleep(0)
    return got
