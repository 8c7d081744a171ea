"""The subscriptions, as `purveyor subscription` reads and changes them.

A subscription has the form of the HTTP API with `details=true`.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Final, Protocol
from urllib.parse import urlencode

from purveyor.app.cli.backends.api_access import ApiRoutes, part
from purveyor.app.cli.subscription_options import OptionFlags
from purveyor.app.settings import Settings
from purveyor.app.subscription_details import read_all_details, read_details
from purveyor.app.subscription_input import PushInput, changed_definition, new_definition
from purveyor.delivery.credentials import Credentials, PasswordHasher
from purveyor.delivery.push.attempt_history import read_attempts
from purveyor.delivery.push.attempt_record import AttemptQuery, attempt_id
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.control_events import ReplayPoint
from purveyor.model.delivery_policy import Delivery, RetryPolicy
from purveyor.model.errors import NotFound
from purveyor.model.json_fields import Json
from purveyor.model.subscription import RealmTopic, Subscription, read_topics
from purveyor.queues.client import Queues

_DETAILS: Final = "?details=true"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSubscription:
    """A subscription to add, as the flags give it."""

    name: str
    realms_topics: Sequence[Json]
    request_prefill: bool
    flags: OptionFlags
    password: str | None

    def body(self, *, keep_secret: bool = False) -> Json:
        """Return the fields of the API, without the password. `keep_secret`: see `OptionFlags.new_options`."""
        return {
            "name": self.name,
            "realms_topics": [*self.realms_topics],
            "request_prefill": self.request_prefill,
            **self.flags.new_options(keep_secret=keep_secret),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPassword:
    """A password to set, and what stays valid beside it."""

    text: str
    keep_seconds: float
    keep_tokens: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRange:
    """The events to replay; no topics: all."""

    begin: ReplayPoint
    end: ReplayPoint | None
    topics: tuple[RealmTopic, ...]

    def to_json(self) -> Json:
        """Return the range for requests and for JSON output."""
        return {
            "from": _point(self.begin),
            "to": None if self.end is None else _point(self.end),
            "topics": [each.to_json() for each in self.topics],
        }


class SubscriptionBackend(Protocol):
    """The subscriptions of a deployment."""

    async def list_details(self) -> list[Json]:
        """Return all subscriptions with their backlogs."""
        ...

    async def details(self, name: str) -> Json:
        """Return a subscription with its status."""
        ...

    async def add(self, new: NewSubscription) -> bool:
        """Add a subscription; return False if it exists with the same parameters."""
        ...

    async def edit(self, name: str, flags: OptionFlags) -> None:
        """Change options and topics of a subscription."""
        ...

    async def set_password(self, name: str, password: NewPassword) -> None:
        """Set the password of a subscription."""
        ...

    async def pause(self, name: str) -> None:
        """Stop deliveries."""
        ...

    async def resume(self, name: str) -> int | None:
        """Continue deliveries; return the position from which a suspended subscription catches up."""
        ...

    async def request_prefill(self, name: str) -> Json:
        """Request a failed prefill again; return its state."""
        ...

    async def replay(self, name: str, wanted: ReplayRange) -> str:
        """Request events of the past again; return the job."""
        ...

    async def delete(self, name: str, *, force: bool) -> None:
        """Delete a subscription with its queue and its logins."""
        ...

    async def attempts(self, name: str, query: AttemptQuery) -> Json:
        """Return a page of the attempts to push."""
        ...


@dataclass(frozen=True, slots=True)
class DirectSubscriptions:
    """The subscriptions in the registry on the NATS server."""

    queues: Queues
    subscriptions: Subscriptions
    settings: Settings

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, queues: Queues, settings: Settings) -> AsyncIterator[SubscriptionBackend]:
        """Open the registry."""
        yield cls(queues, Subscriptions(queues, replicas=settings.replicas), settings)

    async def list_details(self) -> list[Json]:
        """Return all subscriptions."""
        return await read_all_details(self.subscriptions, self.queues)

    async def details(self, name: str) -> Json:
        """Return a subscription."""
        return await read_details(self.subscriptions, self.queues, name)

    async def add(self, new: NewSubscription) -> bool:
        """Add a subscription."""
        existing = await self.subscriptions.find(new.name)
        known = None if existing is None else existing.push
        body = new.body(keep_secret=known is not None and known.secret is not None)
        definition = new_definition(body, PushInput.from_settings(self.settings), existing)
        record, created = await self.subscriptions.add(definition)
        if new.password is not None:
            # A crash before this leaves a subscription without a password; the same command again sets it.
            with self._credentials() as credentials:
                created |= await credentials.set_first_password(new.name, record.incarnation, new.password)
        return created

    async def edit(self, name: str, flags: OptionFlags) -> None:
        """Change options."""
        push_input = PushInput.from_settings(self.settings)

        def changed(now: Subscription) -> Subscription:
            options = flags.changed_options(now.delivery, now.retry) | flags.topics.options(now.realms_topics)
            return changed_definition(now, options, push_input)

        await self.subscriptions.redefine(name, changed, prefill_new_topics=flags.topics.prefill)

    async def set_password(self, name: str, password: NewPassword) -> None:
        """Set the password."""
        found = await self.subscriptions.get(name)
        with self._credentials() as credentials:
            await credentials.set_password(
                name,
                found.incarnation,
                password.text,
                keep_seconds=password.keep_seconds,
                keep_tokens=password.keep_tokens,
            )

    async def pause(self, name: str) -> None:
        """Stop deliveries."""
        await self.subscriptions.pause(name)

    async def resume(self, name: str) -> int | None:
        """Continue deliveries."""
        suspended = (await self.subscriptions.get(name)).suspended
        await self.subscriptions.resume(name)
        return None if suspended is None else suspended.position

    async def request_prefill(self, name: str) -> Json:
        """Request a failed prefill again."""
        return (await self.subscriptions.request_prefill(name)).to_json()

    async def replay(self, name: str, wanted: ReplayRange) -> str:
        """Request events again."""
        return (await self.subscriptions.replay(name, wanted.begin, wanted.end, wanted.topics)).job

    async def delete(self, name: str, *, force: bool) -> None:
        """Delete a subscription."""
        incarnation = await self.subscriptions.delete(name, force=force)
        with self._credentials() as credentials:
            await credentials.remove(name, incarnation)

    async def attempts(self, name: str, query: AttemptQuery) -> Json:
        """Return attempts."""
        return (await read_attempts(self.queues, await self.subscriptions.get(name), query)).to_json()

    @contextlib.contextmanager
    def _credentials(self) -> Iterator[Credentials]:
        """Open the credentials with a thread pool for hashing."""
        hasher = PasswordHasher()
        try:
            yield Credentials(self.queues, hasher, replicas=self.settings.replicas)
        finally:
            hasher.close()


@dataclass(frozen=True, slots=True)
class RemoteSubscriptions:
    """The subscriptions over the HTTP API."""

    routes: ApiRoutes

    async def list_details(self) -> list[Json]:
        """Return all subscriptions."""
        found: list[Json] = (await self.routes.request("GET", f"subscriptions{_DETAILS}")).body
        return found

    async def details(self, name: str) -> Json:
        """Return a subscription."""
        return await self._call("GET", name, query=_DETAILS)

    async def add(self, new: NewSubscription) -> bool:
        """Add a subscription."""
        keep_secret = new.flags.push.secret_generated and await self._has_secret(new.name)
        body = new.body(keep_secret=keep_secret)
        if new.password is not None:
            body["password"] = new.password
        return (await self.routes.request("POST", "subscriptions", body=body)).status == HTTPStatus.CREATED

    async def edit(self, name: str, flags: OptionFlags) -> None:
        """Change options."""
        now = await self._call("GET", name)
        delivery = Delivery(now.get("delivery", Delivery.ORDERED))
        body = flags.changed_options(delivery, RetryPolicy.from_json(now.get("retry")))
        body |= flags.topics.options(read_topics(now, "realms_topics"))
        if flags.topics.prefill:
            body["prefill_new_topics"] = True
        await self._call("PATCH", name, body=body)

    async def set_password(self, name: str, password: NewPassword) -> None:
        """Set the password."""
        body = {
            "password": password.text,
            "password_grace_seconds": password.keep_seconds,
            "keep_tokens": password.keep_tokens,
        }
        await self._call("PATCH", name, body=body)

    async def pause(self, name: str) -> None:
        """Stop deliveries."""
        await self._call("PATCH", name, body={"paused": True})

    async def resume(self, name: str) -> int | None:
        """Continue deliveries."""
        suspended = (await self._call("GET", name)).get("suspended")
        await self._call("PATCH", name, body={"paused": False})
        return None if suspended is None else int(suspended["position"])

    async def request_prefill(self, name: str) -> Json:
        """Request a failed prefill again."""
        return await self._call("POST", name, "prefill")

    async def replay(self, name: str, wanted: ReplayRange) -> str:
        """Request events again."""
        given = wanted.to_json()
        body: Json = {"from": given["from"]}
        if wanted.end is not None:
            body["to"] = given["to"]
        if wanted.topics:
            body["filter"] = {"realms_topics": given["topics"]}
        return str((await self._call("POST", name, "replay", body=body))["job"])

    async def delete(self, name: str, *, force: bool) -> None:
        """Delete a subscription."""
        await self._call("DELETE", name, query="?force=true" if force else "")

    async def attempts(self, name: str, query: AttemptQuery) -> Json:
        """Return attempts."""
        given = {
            "key": query.key,
            "since": None if query.since is None else query.since.isoformat(),
            "until": None if query.until is None else query.until.isoformat(),
            "outcome": None if query.is_acknowledged is None else "acknowledged" if query.is_acknowledged else "failed",
            "before": None if query.before is None else attempt_id(query.before),
            "limit": query.limit,
        }
        words = urlencode({name: value for name, value in given.items() if value is not None})
        return await self._call("GET", name, "attempts", query=f"?{words}")

    async def _has_secret(self, name: str) -> bool:
        try:
            push = (await self._call("GET", name)).get("push")
        except NotFound:
            return False
        return push is not None and "secret" in push

    async def _call(self, method: str, name: str, *path: str, query: str = "", body: object = None) -> Json:
        parts = ["subscriptions", part(name), *path]
        parts[-1] += query
        answer: Json = (await self.routes.request(method, *parts, body=body)).body
        return answer


def _point(point: ReplayPoint) -> int | str:
    return point.isoformat() if isinstance(point, datetime) else point
