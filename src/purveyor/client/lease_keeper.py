"""What a consumer has in hand: it keeps the leases alive while work goes on, and tells the API what became of each.

What it says is safe to say twice, so a request whose answer got lost is simply made again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from purveyor.client.api_client import Http
from purveyor.client.consumer_messages import Message
from purveyor.model.errors import InvalidInput, LeaseLost, NotFound, PurveyorError, Refused, Unavailable

_log = logging.getLogger("purveyor.client")
_PARTS: Final = 3
"""A lease is extended when this part of it is over: one failed try, or two, do no harm."""


@dataclass(slots=True, eq=False)
class _Lease:
    messages: dict[int, Message] = field(default_factory=dict)
    """Those that are not settled, in the order of delivery."""
    keeping: "asyncio.Task[None] | None" = None


@dataclass(slots=True, eq=False)
class Hand:
    """See the module."""

    http: Http
    lease_seconds: float
    patience_seconds: float
    ordered: bool
    changed: Callable[[], None]
    """Called whenever something was settled or lost."""
    _leases: dict[str, _Lease] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many messages are not settled."""
        return sum(len(lease.messages) for lease in self._leases.values())

    def take(self, answer: dict[str, Any]) -> list[Message]:
        """The messages of a lease, as the API gave them."""
        found = [
            Message(
                data=data,
                lease=data["lease_id"],
                sequence=data["sequence_number"],
                position=data["position"],
                num_delivered=data["num_delivered"],
                _teller=self,
            )
            for data in answer["messages"]
        ]
        for message in found:
            lease = self._leases.setdefault(message.lease, _Lease())
            lease.messages[message.sequence] = message
            if lease.keeping is None:
                lease.keeping = asyncio.create_task(self._keep(lease))
        return found

    async def ack(self, message: Message) -> None:
        """It is handled. One that is not there any more was acknowledged before, by us or whoever took over."""
        _check(message)
        with contextlib.suppress(NotFound):
            await self._tell(message, status="ok")
        self._settle([message])

    async def ack_up_to(self, messages: Sequence[Message]) -> None:
        """These, which are all that we have up to the last of them, are handled."""
        last = messages[-1]
        body = {"status": "ok", "up_to": last.sequence}
        try:
            with contextlib.suppress(NotFound):
                await self.http.call("PATCH", "messages/status", body, patience_seconds=self.patience_seconds)
        except Refused as error:
            self.lose(messages)
            raise LeaseLost(error.message, fix=error.fix, code=error.code) from error
        self._settle(messages)

    async def retry(self, message: Message, delay: float | None) -> None:
        """Deliver it again; in ordered delivery the API takes back what lies behind it as well."""
        _check(message)
        behind = self._from(message) if self.ordered else [message]
        with contextlib.suppress(NotFound):
            await self._tell(message, status="retry", **({} if delay is None else {"delay": delay}))
        self._settle(behind)

    async def reject(self, message: Message, reason: str) -> None:
        """It becomes a dead letter."""
        _check(message)
        with contextlib.suppress(NotFound):
            await self._tell(message, status="reject", reason=reason)
        self._settle([message])

    async def extend(self, message: Message, lease_seconds: float | None) -> None:
        """Its lease begins anew."""
        _check(message)
        await self._tell(message, status="extend", lease_seconds=lease_seconds or self.lease_seconds)

    async def give_back(self) -> None:
        """Let others have what is left, at once. What cannot be told is given back by the end of its lease."""
        for lease in [*self._leases.values()]:
            left = [*lease.messages.values()]
            for message in left[:1] if self.ordered else left:
                with contextlib.suppress(PurveyorError):
                    await self._tell(message, status="retry", delay=0)
            self._settle(left)

    def close(self) -> None:
        """Extend nothing any more."""
        for lease in self._leases.values():
            if lease.keeping is not None:
                lease.keeping.cancel()
        self._leases.clear()

    async def _tell(self, message: Message, **body: Any) -> None:
        path = f"messages/{message.sequence}/status"
        try:
            await self.http.call("PATCH", path, body, patience_seconds=self.patience_seconds)
        except Refused as error:
            self.lose([message])
            raise LeaseLost(error.message, fix=error.fix, code=error.code) from error

    async def _keep(self, lease: _Lease) -> None:
        """Extend a lease as long as anything of it is not settled."""
        while True:
            await asyncio.sleep(self.lease_seconds / _PARTS)
            message = next(iter(lease.messages.values()))
            body = {"status": "extend", "lease_seconds": self.lease_seconds}
            try:
                path = f"messages/{message.sequence}/status"
                await self.http.call("PATCH", path, body, patience_seconds=self.lease_seconds / _PARTS)
            except Unavailable:
                continue
            except PurveyorError as error:
                left = [each for each in lease.messages.values() if not each.settled]
                _log.warning("%d messages from %d on are ours no more: %s", len(left), message.sequence, error)
                self.lose(left)
                return

    def _from(self, message: Message) -> list[Message]:
        held = [*self._leases.get(message.lease, _Lease()).messages.values()]
        return held[held.index(message) :] if message in held else [message]

    def lose(self, messages: Sequence[Message]) -> None:
        """They are ours no more."""
        for message in messages:
            message.lost = True
        self._forget(messages)

    def _settle(self, messages: Sequence[Message]) -> None:
        for message in messages:
            message.settle()
        self._forget(messages)

    def _forget(self, messages: Sequence[Message]) -> None:
        for message in messages:
            lease = self._leases.get(message.lease)
            if lease is None or lease.messages.pop(message.sequence, None) is None or lease.messages:
                continue
            del self._leases[message.lease]
            if lease.keeping is not None and lease.keeping is not asyncio.current_task():
                lease.keeping.cancel()
        self.changed()


def _check(message: Message) -> None:
    if message.settled:
        raise InvalidInput(
            f"message {message.sequence} is settled already", fix="say once what became of it: ack, retry or reject"
        )
