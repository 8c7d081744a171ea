"""Requests to the JetStream API over the asynchronous connection; account use and the server's clock."""

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from purveyor.jetstream.api_protocol import (
    API_PREFIX,
    NO_RESPONDERS,
    Json,
    Resource,
    encode_request,
    parse_api_reply,
    parse_time,
)
from purveyor.model.errors import ServerUnavailable, SetupError, Unavailable
from purveyor.model.retries import Backoff, RetryDelays

if TYPE_CHECKING:  # the driver of a Spark query imports this module and must not load nats
    from purveyor.jetstream.client import JetStream
    from purveyor.jetstream.connection import Connection

_RETRY_BACKOFF: Final = Backoff(0.05, 1.0)


class Api:
    """Sends requests to the JetStream API and waits for a lost server up to the connection's `patience_seconds`.

    Every request may be repeated: creating, updating, deleting and purging twice has the same result as once.
    """

    def __init__(self, connection: "Connection") -> None:
        self.connection = connection

    async def request(self, subject: str, body: object = None, *, about: Resource | None = None) -> Json:
        """Return the JSON of the reply; raise the server's error as an error of our tree."""
        about = about or Resource()
        payload = encode_request(body)
        give_up = time.monotonic() + self.connection.patience_seconds
        delays = RetryDelays(_RETRY_BACKOFF)
        while True:
            try:
                return await self._request_once(subject, payload, about, give_up - time.monotonic())
            except Unavailable:
                delay_seconds = delays.next_seconds()
                if time.monotonic() + delay_seconds > give_up:
                    raise
            await asyncio.sleep(delay_seconds)

    async def _request_once(self, subject: str, payload: bytes, about: Resource, left_seconds: float) -> Json:
        await self.connection.wait_until_connected(max(left_seconds, 0.1))
        reply = await self.connection.request(API_PREFIX + subject, payload)
        if reply.status == NO_RESPONDERS and not self.connection.offers_jetstream:
            raise SetupError(
                f"the NATS server at {self.connection.address} has no JetStream", fix="start it with JetStream enabled"
            )
        if reply.status == NO_RESPONDERS:
            raise ServerUnavailable(
                f"{about}: the JetStream API does not answer at {self.connection.address}",
                fix="is JetStream enabled on that server?",
            )
        return parse_api_reply(reply.data, about)

    async def request_pages(self, subject: str, key: str, body: Json | None = None) -> list[Any]:
        """Return the items of all pages of a listing."""
        items: list[Any] = []
        while True:
            page = await self.request(subject, {**(body or {}), "offset": len(items)})
            found = page.get(key) or []
            items += found
            if not found or len(items) >= int(page.get("total", 0)):
                return items


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The use of JetStream by this account and its limits; None means no limit."""

    storage: int
    streams: int
    consumers: int
    max_storage: int | None
    max_streams: int | None
    max_consumers: int | None


async def account(jetstream: "JetStream") -> Account:
    """Return the use and limits of this account; raise SetupError if the server has no JetStream."""
    found = await Api(jetstream.connection).request("INFO")
    limits = found.get("limits") or {}
    return Account(
        storage=int(found.get("storage") or 0),
        streams=int(found.get("streams") or 0),
        consumers=int(found.get("consumers") or 0),
        max_storage=_limit(limits.get("max_storage")),
        max_streams=_limit(limits.get("max_streams")),
        max_consumers=_limit(limits.get("max_consumers")),
    )


def _limit(value: int | None) -> int | None:
    return None if value is None or value <= 0 else int(value)


async def clock_offset_seconds(jetstream: "JetStream", stream: str) -> float | None:
    """Return by how much the server's clock is ahead of ours; None if the server does not report its time.

    The error is at most half the duration of a request.
    """
    before = time.monotonic()
    found = await jetstream.streams.raw_info(stream)
    now, took = datetime.now(UTC), time.monotonic() - before
    there = parse_time(str(found.get("ts") or ""))
    return None if there is None else (there - now).total_seconds() + took / 2
