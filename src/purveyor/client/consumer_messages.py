"""A message in the hands of a consumer, and what the consumer says of it."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from purveyor.model.errors import InvalidInput


class Teller(Protocol):
    """Where it is said; `client.hand` does it."""

    async def ack(self, message: "Message") -> None:
        """It is handled."""

    async def ack_up_to(self, messages: "Sequence[Message]") -> None:
        """All these are."""

    async def retry(self, message: "Message", delay: float | None) -> None:
        """It is not."""

    async def reject(self, message: "Message", reason: str) -> None:
        """It never will be."""

    async def extend(self, message: "Message", lease_seconds: float | None) -> None:
        """It takes longer."""


@dataclass(slots=True, eq=False)
class Message:
    """One event for this subscription. Say what became of it, once: `ack`, `retry` or `reject`.

    Until then it is ours: its lease is extended by itself. `lost` tells that this failed, because the API was away for
    too long: another instance may have the message by now.
    """

    data: Mapping[str, Any] = field(repr=False)
    """All that the API sent, as it sent it."""
    lease: str
    sequence: int
    position: int | None
    num_delivered: int
    lost: bool = False
    _teller: Teller = field(repr=False, kw_only=True)
    _settled: asyncio.Event = field(repr=False, kw_only=True, default_factory=asyncio.Event)

    @property
    def realm(self) -> str:
        """Who speaks."""
        return str(self.data.get("realm", ""))

    @property
    def topic(self) -> str:
        """What it is about."""
        return str(self.data.get("topic", ""))

    @property
    def key(self) -> str | None:
        """Which object, if the publisher said so."""
        return self.data.get("key")

    @property
    def attributes(self) -> Mapping[str, str]:
        """What the publisher put beside the body."""
        return self.data.get("attributes") or {}

    @property
    def old(self) -> Mapping[str, Any]:
        """The object as it was; empty if it is new."""
        return (self.data.get("body") or {}).get("old") or {}

    @property
    def new(self) -> Mapping[str, Any]:
        """The object as it is; empty if it is deleted."""
        return (self.data.get("body") or {}).get("new") or {}

    @property
    def trace(self) -> Mapping[str, str]:
        """The headers `traceparent` and `tracestate` of its event, for requests to others; empty without a trace."""
        return {name: self.data[name] for name in ("traceparent", "tracestate") if self.data.get(name)}

    @property
    def settled(self) -> bool:
        """Whether it was said what became of it."""
        return self._settled.is_set()

    async def ack(self) -> None:
        """It is handled, and never delivered again."""
        await self._teller.ack(self)

    async def retry(self, delay: float | None = None) -> None:
        """Deliver it again, after so many seconds; without a delay, by the policy of the subscription.

        In ordered delivery what was fetched behind it is given back with it. `LeaseLost` if another instance has it.
        """
        await self._teller.retry(self, delay)

    async def reject(self, reason: str) -> None:
        """It will never be handled: it becomes a dead letter, with the reason. `LeaseLost` as above."""
        await self._teller.reject(self, reason)

    async def extend(self, lease_seconds: float | None = None) -> None:
        """Keep it for longer than the usual lease, from now on. `LeaseLost` as above."""
        await self._teller.extend(self, lease_seconds)

    def settle(self) -> None:
        """Note that it was said."""
        self._settled.set()


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages that were fetched at once, in their order."""

    messages: Sequence[Message]
    _teller: Teller = field(repr=False)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)

    async def ack(self, up_to: Message | None = None) -> None:
        """All of them, or those up to one, are handled: one request, however many there are.

        `LeaseLost` if another instance has them by now.
        """
        last = len(self.messages) - 1 if up_to is None else self._place(up_to)
        waiting = [message for message in self.messages[: last + 1] if not message.settled]
        if waiting:
            await self._teller.ack_up_to(waiting)

    async def retry(self, delay: float | None = None) -> None:
        """Deliver again what is not settled yet."""
        for message in self.messages:
            if not message.settled:
                await message.retry(delay)

    def _place(self, message: Message) -> int:
        for place, each in enumerate(self.messages):
            if each is message:
                return place
        raise InvalidInput(f"message {message.sequence} is not in this batch", fix="name one that is")
