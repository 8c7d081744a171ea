"""Messages that a consumer holds, and the leases that keep them from other instances.

`LeaseKeeper` extends the leases while the program works and reports the outcome of each message to the API. Every
request of it may be repeated without harm, so a request whose response got lost is sent again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from purveyor.client.api_client import ApiClient
from purveyor.model.errors import InvalidInput, LeaseLost, NotFound, PurveyorError, Refused, Unavailable
from purveyor.model.event import event_key

_log = logging.getLogger("purveyor.client")
_EXTENSIONS_PER_LEASE: Final = 3
"""The keeper extends a lease after a third of it, so that one or two failed attempts do no harm."""


@dataclass(slots=True, eq=False)
class Message:
    """One event for this subscription. Settle it once: with `ack`, `retry` (also called `nack`) or `reject`.

    Until then the consumer holds it and extends its lease. `lost` is true when the extension failed because the API was
    unavailable for too long: another instance may have the message.
    """

    data: Mapping[str, Any] = field(repr=False)
    """The whole message as the API sent it."""
    lease: str
    sequence: int
    position: int | None
    num_delivered: int
    event_id: str | None = None
    """The id of the event, unique among those of one publisher's login; None for an event without one, as in a prefill,
    and from an API of an older version."""
    lost: bool = False
    _leases: "LeaseKeeper" = field(repr=False, kw_only=True)
    _settled: asyncio.Event = field(repr=False, kw_only=True, default_factory=asyncio.Event)

    @property
    def realm(self) -> str:
        """The system that published the event."""
        return str(self.data.get("realm", ""))

    @property
    def topic(self) -> str:
        """The topic of the event."""
        return str(self.data.get("topic", ""))

    @property
    def key(self) -> str | None:
        """The key of the object: from the publisher, or the first field of the object that can be one.

        Orders by key and push use the same key. None if there is none, or the subscription hides it.
        """
        given = self.data.get("key")
        return event_key(self.new, self.old, given=given if isinstance(given, str) else None)

    @property
    def attributes(self) -> Mapping[str, str]:
        """The attributes that the publisher gave beside the body."""
        return self.data.get("attributes") or {}

    @property
    def old(self) -> Mapping[str, Any]:
        """The object before the change; empty if it is new."""
        return (self.data.get("body") or {}).get("old") or {}

    @property
    def new(self) -> Mapping[str, Any]:
        """The object after the change; empty if it was deleted."""
        return (self.data.get("body") or {}).get("new") or {}

    @property
    def trace(self) -> Mapping[str, str]:
        """The headers `traceparent` and `tracestate` of the event, for further requests; empty without a trace."""
        return {name: self.data[name] for name in ("traceparent", "tracestate") if self.data.get(name)}

    @property
    def settled(self) -> bool:
        """Whether the message was acknowledged, rejected or given back."""
        return self._settled.is_set()

    async def ack(self) -> None:
        """Acknowledge the message: it is handled, and never delivered again."""
        await self._leases.ack(self)

    async def retry(self, delay: float | None = None) -> None:
        """Have the message delivered again after `delay` seconds; without a delay, by the subscription's policy.

        In ordered delivery the messages that were fetched behind it are given back with it. Raises `LeaseLost` if
        another instance has the message.
        """
        await self._leases.retry(self, delay)

    nack = retry

    async def reject(self, reason: str) -> None:
        """Make the message a dead letter with this reason. Raises `LeaseLost` if another instance has it."""
        await self._leases.reject(self, reason)

    async def extend(self, lease_seconds: float | None = None) -> None:
        """Restart the lease, with another length if given. Raises `LeaseLost` if another instance has it."""
        await self._leases.extend(self, lease_seconds)

    def settle(self) -> None:
        """Mark the message as settled."""
        self._settled.set()


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages of one fetch, in their order."""

    messages: Sequence[Message]
    _leases: "LeaseKeeper" = field(repr=False)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __len__(self) -> int:
        return len(self.messages)

    async def ack(self, up_to: Message | None = None) -> None:
        """Acknowledge all messages, or those up to one, with a single request.

        Raises `LeaseLost` if another instance has them.
        """
        last = len(self.messages) - 1 if up_to is None else self._index(up_to)
        unsettled = [message for message in self.messages[: last + 1] if not message.settled]
        if unsettled:
            await self._leases.ack_up_to(unsettled)

    async def retry(self, delay: float | None = None) -> None:
        """Have all messages that are not settled delivered again."""
        for message in self.messages:
            if not message.settled:
                await message.retry(delay)

    nack = retry

    def _index(self, message: Message) -> int:
        for index, each in enumerate(self.messages):
            if each is message:
                return index
        raise InvalidInput(f"message {message.sequence} is not in this batch", fix="name one that is")


@dataclass(slots=True, eq=False)
class _Lease:
    messages: dict[int, Message] = field(default_factory=dict)
    """The unsettled messages by sequence, in the order of delivery."""
    extending: "asyncio.Task[None] | None" = None


@dataclass(slots=True, eq=False)
class LeaseKeeper:
    """The unsettled messages of one consumer and their leases."""

    api: ApiClient
    lease_seconds: float
    patience_seconds: float
    ordered: bool
    on_change: Callable[[], None]
    """Called whenever a message was settled or lost."""
    _leases: dict[str, _Lease] = field(default_factory=dict)

    def __len__(self) -> int:
        """Count the unsettled messages."""
        return sum(len(lease.messages) for lease in self._leases.values())

    def add(self, response: dict[str, Any]) -> list[Message]:
        """Hold the messages of a response to a lease request, and keep their leases alive."""
        messages = [
            Message(
                data=data,
                lease=data["lease_id"],
                sequence=data["sequence_number"],
                position=data["position"],
                num_delivered=data["num_delivered"],
                event_id=data.get("event_id"),
                _leases=self,
            )
            for data in response["messages"]
        ]
        for message in messages:
            lease = self._leases.setdefault(message.lease, _Lease())
            lease.messages[message.sequence] = message
            if lease.extending is None:
                lease.extending = asyncio.create_task(self._extend_while_held(lease))
        return messages

    async def ack(self, message: Message) -> None:
        """Acknowledge a message. 404 means that this or another instance acknowledged it before."""
        _require_unsettled(message)
        with contextlib.suppress(NotFound):
            await self._set_status(message, status="ok")
        self._settle([message])

    async def ack_up_to(self, messages: Sequence[Message]) -> None:
        """Acknowledge these messages, which are all that the consumer holds up to the last of them."""
        body = {"status": "ok", "up_to": messages[-1].sequence}
        try:
            with contextlib.suppress(NotFound):
                await self.api.call("PATCH", "messages/status", body, patience_seconds=self.patience_seconds)
        except Refused as error:
            self.mark_lost(messages)
            raise LeaseLost(error.message, fix=error.fix, code=error.code) from error
        self._settle(messages)

    async def retry(self, message: Message, delay: float | None) -> None:
        """Have a message delivered again; in ordered delivery the API takes back the messages behind it as well."""
        _require_unsettled(message)
        returned = self._held_from(message) if self.ordered else [message]
        with contextlib.suppress(NotFound):
            await self._set_status(message, status="retry", **({} if delay is None else {"delay": delay}))
        self._settle(returned)

    async def reject(self, message: Message, reason: str) -> None:
        """Make a message a dead letter."""
        _require_unsettled(message)
        with contextlib.suppress(NotFound):
            await self._set_status(message, status="reject", reason=reason)
        self._settle([message])

    async def extend(self, message: Message, lease_seconds: float | None) -> None:
        """Restart the lease of a message."""
        _require_unsettled(message)
        await self._set_status(message, status="extend", lease_seconds=lease_seconds or self.lease_seconds)

    async def give_back(self) -> None:
        """Give the unsettled messages back at once. If a request fails, the end of the lease gives them back."""
        for lease in [*self._leases.values()]:
            unsettled = [*lease.messages.values()]
            for message in unsettled[:1] if self.ordered else unsettled:
                with contextlib.suppress(PurveyorError):
                    await self._set_status(message, status="retry", delay=0)
            self._settle(unsettled)

    def close(self) -> None:
        """Stop extending leases."""
        for lease in self._leases.values():
            if lease.extending is not None:
                lease.extending.cancel()
        self._leases.clear()

    def mark_lost(self, messages: Sequence[Message]) -> None:
        """Mark messages as lost: another instance may have them."""
        for message in messages:
            message.lost = True
        self._forget(messages)

    async def _set_status(self, message: Message, **body: Any) -> None:
        path = f"messages/{message.sequence}/status"
        try:
            await self.api.call("PATCH", path, body, patience_seconds=self.patience_seconds)
        except Refused as error:
            self.mark_lost([message])
            raise LeaseLost(error.message, fix=error.fix, code=error.code) from error

    async def _extend_while_held(self, lease: _Lease) -> None:
        """Extend a lease until all its messages are settled; mark them as lost if the API refuses."""
        interval_seconds = self.lease_seconds / _EXTENSIONS_PER_LEASE
        while True:
            await asyncio.sleep(interval_seconds)
            message = next(iter(lease.messages.values()))
            body = {"status": "extend", "lease_seconds": self.lease_seconds}
            try:
                path = f"messages/{message.sequence}/status"
                await self.api.call("PATCH", path, body, patience_seconds=interval_seconds)
            except Unavailable:
                continue
            except PurveyorError as error:
                unsettled = [each for each in lease.messages.values() if not each.settled]
                _log.warning("the lease of %d messages from %d on is lost: %s", len(unsettled), message.sequence, error)
                self.mark_lost(unsettled)
                return

    def _held_from(self, message: Message) -> list[Message]:
        held = [*self._leases.get(message.lease, _Lease()).messages.values()]
        return held[held.index(message) :] if message in held else [message]

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
            if lease.extending is not None and lease.extending is not asyncio.current_task():
                lease.extending.cancel()
        self.on_change()


def _require_unsettled(message: Message) -> None:
    if message.settled:
        raise InvalidInput(
            f"message {message.sequence} is settled already", fix="settle it once: with ack, retry or reject"
        )
