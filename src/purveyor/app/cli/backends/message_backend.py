"""The messages of a subscription, as `purveyor next` and `purveyor ack` get and acknowledge them."""

import base64
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from purveyor.app.cli.backends.api_access import ApiRoutes, part
from purveyor.app.json_views import lease_fields, message_json, status_json
from purveyor.app.settings import Settings
from purveyor.delivery.pull import DeliveredMessage, PullService, open_pull
from purveyor.delivery.subscription_status import read_status
from purveyor.model import json_fields, tracing
from purveyor.model.errors import InvalidInput, NotFound, UnknownMessage, UnknownSubscription
from purveyor.model.json_fields import Json
from purveyor.queues.client import Queues
from purveyor.queues.registry import Registry


class SubscriptionMessages(Protocol):
    """The messages of one subscription, leased as one instance. Messages have the form of `POST .../messages/lease`."""

    async def lease(self, count: int, wait_seconds: float) -> list[Json]:
        """Return up to `count` messages as soon as there is one; none after `wait_seconds`."""
        ...

    async def acknowledge(self, sequence: int) -> None:
        """Acknowledge a message; `UnknownMessage` if it is acknowledged already, or was never delivered."""
        ...

    async def acknowledge_up_to(self, sequence: int) -> int:
        """Acknowledge the messages that the instance has leased, up to this one; return how many."""
        ...

    async def status(self) -> Json:
        """Return the status of the subscription, in the form of `GET .../status`."""
        ...


@dataclass(frozen=True, slots=True)
class Consuming:
    """A subscription, and the instance that leases its messages."""

    name: str
    instance: str


@dataclass(frozen=True, slots=True)
class DirectMessages:
    """The messages through the delivery service of the API, in this process."""

    queues: Queues
    pull: PullService
    consuming: Consuming

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, queues: Queues, settings: Settings, consuming: Consuming
    ) -> AsyncIterator[SubscriptionMessages]:
        """Open the delivery service."""
        async with open_pull(queues, replicas=settings.replicas) as pull:
            yield cls(queues, pull, consuming)

    async def lease(self, count: int, wait_seconds: float) -> list[Json]:
        """Lease messages."""
        name, instance = self.consuming.name, self.consuming.instance
        found = await self.pull.lease(name, instance, count, timeout=wait_seconds)
        return [_to_json(each) for each in found]

    async def acknowledge(self, sequence: int) -> None:
        """Acknowledge a message, whichever instance has it."""
        await self.pull.acknowledge(self.consuming.name, sequence)

    async def acknowledge_up_to(self, sequence: int) -> int:
        """Acknowledge leased messages."""
        name, instance = self.consuming.name, self.consuming.instance
        return await self.pull.acknowledge_up_to(name, sequence, instance=instance)

    async def status(self) -> Json:
        """Read the status."""
        registry = await Registry.open(self.queues)
        found = await registry.get(self.consuming.name)
        return status_json(await read_status(self.queues, registry, found), datetime.now(UTC))


def _to_json(message: DeliveredMessage) -> Json:
    fields = {**lease_fields(message), **tracing.carrier_from_headers(message.headers)}
    try:
        return json_fields.parse(message_json(message, fields), "message")
    except (InvalidInput, RecursionError):  # no event: an operator must still see and acknowledge it
        counts = {"sequence_number": message.sequence, "num_delivered": message.num_delivered}
        return {"raw": base64.b64encode(message.data).decode(), **fields, **counts}


@dataclass(frozen=True, slots=True)
class RemoteMessages:
    """The messages over the HTTP API, which takes the login of the subscription only."""

    routes: ApiRoutes
    consuming: Consuming

    async def lease(self, count: int, wait_seconds: float) -> list[Json]:
        """Lease messages."""
        body = {"max": count, "timeout": wait_seconds, "instance": self.consuming.instance}
        try:
            found: list[Json] = (await self._call("POST", "lease", body, wait_seconds))["messages"]
        except NotFound as error:
            raise UnknownSubscription(error.message, fix=error.fix) from error
        return found

    async def acknowledge(self, sequence: int) -> None:
        """Acknowledge a message, whichever instance has it."""
        try:
            await self._call("PATCH", f"{sequence}/status", {"status": "ok"})
        except NotFound as error:
            raise UnknownMessage(error.message, fix=error.fix) from error

    async def acknowledge_up_to(self, sequence: int) -> int:
        """Acknowledge leased messages."""
        return int((await self._call("PATCH", "status", {"status": "ok", "up_to": sequence}))["acknowledged"])

    async def status(self) -> Json:
        """Read the status."""
        found: Json = (await self.routes.request("GET", "subscriptions", part(self.consuming.name), "status")).body
        return found

    async def _call(self, method: str, path: str, body: Json, wait_seconds: float = 0.0) -> Json:
        """Send a request in the name of the instance."""
        answer = await self.routes.request(
            method,
            "subscriptions",
            part(self.consuming.name),
            "messages",
            path,
            body=body,
            wait_seconds=wait_seconds,
        )
        found: Json = answer.body
        return found
