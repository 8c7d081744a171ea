"""Routes of topics: those that were declared or seen, with the schema and the subscriptions of each."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from purveyor.app.http import context
from purveyor.app.http.authentication import Role
from purveyor.app.http.models import Given
from purveyor.app.http.problems import documented
from purveyor.app.http.schemas import READERS
from purveyor.app.views.topic_view import known_topics, no_topic, topic_known
from purveyor.sources.schemas.cache import MOST_TOPICS
from purveyor.sources.schemas.schema import Topic

router = APIRouter(prefix="/v1/topics", tags=["topics"])
LIMIT_REACHED: Final = "Purveyor-Limit-Reached"
"""The header of a list that has no room for more."""


class NewTopic(Given):
    """A topic to be declared."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"realm": "shop", "topic": "orders", "description": "Orders"}]}
    )

    realm: str = Field(min_length=1, examples=["shop"])
    topic: str = Field(min_length=1, examples=["orders"], description="exact")
    description: str = Field(default="", max_length=1000)
    strict: bool = Field(default=False, description="true: its realm takes events of declared topics alone")


class SchemaOfTopic(BaseModel):
    """The schema that governs a topic, and its revision in force."""

    name: str
    revision: int


class KnownTopic(BaseModel):
    """A topic that was declared, or that an event was accepted for."""

    realm: str
    topic: str
    since: datetime = Field(description="declared or seen first")
    declared: bool
    strict: bool
    description: str
    schema_: SchemaOfTopic | None = Field(alias="schema")
    subscriptions: list[str] = Field(description="those that ask for it; a filter may let through only some events")


@router.get("", response_model=list[KnownTopic], responses=documented())
async def list_topics(request: Request) -> Response:
    """All topics that were declared, or that an event was accepted for. For: admin, events.

    A login that is bound to realms sees those only. The list has an end: when it is full, the header
    `Purveyor-Limit-Reached` tells how many topics it holds; events of others are delivered all the same.
    """
    who = context.require_one_of(request, READERS)
    services = context.services(request)
    found = await known_topics(services.book.schemas, services.subscriptions, who.realms)
    answer = context.as_json([each.to_json() for each in found])
    if services.book.is_full:
        answer.headers[LIMIT_REACHED] = str(MOST_TOPICS)
    return answer


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=KnownTopic,
    responses={
        200: {"description": "It was declared before", "model": KnownTopic},
        **documented(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
async def declare_topic(request: Request, given: NewTopic) -> Response:
    """Declare a topic, or change what was declared. For: admin.

    If a topic of a realm is strict, events of topics of that realm that are not declared are refused with 422.
    """
    context.require_role(request, Role.ADMIN)
    services = context.services(request)
    topic = Topic(**given.model_dump(), since=datetime.now(UTC), declared=True)
    _, created = await services.book.schemas.declare(topic)
    body = (await topic_known(services.book.schemas, services.subscriptions, topic.realm, topic.topic)).to_json()
    return context.as_json(body, HTTPStatus.CREATED if created else HTTPStatus.OK)


@router.get("/{realm}/{topic:path}", response_model=KnownTopic, responses=documented(HTTPStatus.NOT_FOUND))
async def get_topic(request: Request, realm: str, topic: str) -> Response:
    """A topic. For: admin, events; a login that is bound to realms sees those only."""
    who = context.require_one_of(request, READERS)
    if who.realms is not None and realm not in who.realms:
        raise no_topic(realm, topic)
    services = context.services(request)
    found = await topic_known(services.book.schemas, services.subscriptions, realm, topic)
    return context.as_json(found.to_json())


@router.delete("/{realm}/{topic:path}", responses=documented(HTTPStatus.NOT_FOUND))
async def forget_topic(request: Request, realm: str, topic: str) -> None:
    """Forget a topic. The next event that is accepted for it makes it known again. For: admin."""
    context.require_role(request, Role.ADMIN)
    await context.services(request).book.schemas.forget_topic(realm, topic)
