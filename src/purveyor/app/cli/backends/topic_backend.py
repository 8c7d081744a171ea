"""The topics, as `purveyor topic` reads and changes them. A topic has the form of `KnownTopic` of the HTTP API."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

from purveyor.app.cli.backends.api_access import ApiRoutes, part
from purveyor.app.json_views import LIMIT_REACHED, find_topic, list_known_topics
from purveyor.app.settings import Settings
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.queues.client import Queues
from purveyor.sources.schemas.registry import MAX_TOPICS, SchemaRegistry
from purveyor.sources.schemas.schema import Topic


@dataclass(frozen=True, slots=True)
class TopicList:
    """The listed topics, and whether the list has reached its limit."""

    topics: list[Json]
    is_full: bool


class Topics(Protocol):
    """The topics of a deployment."""

    async def list_topics(self) -> TopicList:
        """Return all listed topics."""
        ...

    async def get(self, realm: str, topic: str) -> Json:
        """Return a topic."""
        ...

    async def declare(self, topic: Topic) -> tuple[Json, bool]:
        """Declare a topic or change its declaration; return it, and whether it was not declared before."""
        ...

    async def forget(self, realm: str, topic: str) -> None:
        """Remove a topic from the list."""
        ...


@dataclass(frozen=True, slots=True)
class DirectTopics:
    """The topics in the registry on the NATS server."""

    schemas: SchemaRegistry
    subscriptions: Subscriptions

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, queues: Queues, settings: Settings) -> "AsyncIterator[Topics]":
        """Open the registry."""
        replicas = settings.replicas
        yield cls(SchemaRegistry(queues, replicas=replicas), Subscriptions(queues, replicas=replicas))

    async def list_topics(self) -> TopicList:
        """Return all listed topics."""
        found = await list_known_topics(self.schemas, self.subscriptions)
        return TopicList([each.to_json() for each in found], len(found) >= MAX_TOPICS)

    async def get(self, realm: str, topic: str) -> Json:
        """Return a topic."""
        return (await find_topic(self.schemas, self.subscriptions, realm, topic)).to_json()

    async def declare(self, topic: Topic) -> tuple[Json, bool]:
        """Declare a topic."""
        _, created = await self.schemas.declare(topic)
        return await self.get(topic.realm, topic.topic), created

    async def forget(self, realm: str, topic: str) -> None:
        """Remove a topic from the list."""
        await self.schemas.forget_topic(realm, topic)


@dataclass(frozen=True, slots=True)
class RemoteTopics:
    """The topics over the HTTP API."""

    routes: ApiRoutes

    async def list_topics(self) -> TopicList:
        """Return all listed topics."""
        answer = await self.routes.request("GET", "topics")
        return TopicList(answer.body, LIMIT_REACHED in answer.headers)

    async def get(self, realm: str, topic: str) -> Json:
        """Return a topic."""
        found: Json = (await self.routes.request("GET", *_path(realm, topic))).body
        return found

    async def declare(self, topic: Topic) -> tuple[Json, bool]:
        """Declare a topic."""
        fields = topic.to_json()
        body = {name: fields[name] for name in ("realm", "topic", "description", "strict")}
        answer = await self.routes.request("POST", "topics", body=body)
        return answer.body, answer.status == HTTPStatus.CREATED

    async def forget(self, realm: str, topic: str) -> None:
        """Remove a topic from the list."""
        await self.routes.request("DELETE", *_path(realm, topic))


def _path(realm: str, topic: str) -> tuple[str, ...]:
    if "/" in realm:
        raise InvalidInput(
            f"no path of the API can name the realm {realm!r}, because it contains '/'",
            fix="leave --api out, and use the NATS server",
        )
    return "topics", part(realm), part(topic, safe="/")
