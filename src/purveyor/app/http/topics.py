"""Routes of topics: declared topics and those of accepted events, with the schema and the subscriptions of each."""

from datetime import UTC, datetime
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from purveyor.app.http import context
from purveyor.app.http.authentication import Role
from purveyor.app.http.models import RequestBody
from purveyor.app.http.problems import document_errors
from purveyor.app.http.schemas import READERS
from purveyor.app.json_views import LIMIT_REACHED, find_topic, list_known_topics, unknown_topic
from purveyor.sources.schemas.registry import MAX_TOPICS
from purveyor.sources.schemas.schema import Topic

router = APIRouter(prefix="/v1/topics", tags=["topics"])


class NewTopic(RequestBody):
    """A topic to declare."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"realm": "shop", "topic": "orders", "description": "Orders"}]}
    )

    realm: str = Field(min_length=1, examples=["shop"])
    topic: str = Field(min_length=1, examples=["orders"], description="the exact name")
    description: str = Field(default="", max_length=1000)
    strict: bool = Field(default=False, description="true: the realm accepts only events of declared topics")


class SchemaOfTopic(BaseModel):
    """The schema that governs a topic, and its revision in force."""

    name: str
    revision: int


class KnownTopic(BaseModel):
    """A topic that is declared, or for which the API accepted an event."""

    realm: str
    topic: str
    since: datetime = Field(description="when it was declared or first seen")
    declared: bool
    strict: bool
    description: str
    schema_: SchemaOfTopic | None = Field(alias="schema")
    subscriptions: list[str] = Field(
        description="subscriptions that match it; a filter may select only some of its events"
    )


@router.get("", response_model=list[KnownTopic], responses=document_errors())
async def list_topics(request: Request) -> Response:
    """List all topics that are declared, or for which the API accepted an event. For: admin, events.

    A login with realms sees only those realms. The list has a limit: when it is full, the header
    `Purveyor-Limit-Reached` holds the limit; events of other topics are still delivered.
    """
    who = context.require_one_of(request, READERS)
    services = context.services(request)
    found = await list_known_topics(services.schema_cache.registry, services.subscriptions, who.realms)
    answer = context.json_response([each.to_json() for each in found])
    if services.schema_cache.is_full:
        answer.headers[LIMIT_REACHED] = str(MAX_TOPICS)
    return answer


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=KnownTopic,
    responses={
        200: {"description": "It was already declared", "model": KnownTopic},
        **document_errors(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
async def declare_topic(request: Request, given: NewTopic) -> Response:
    """Declare a topic, or change its declaration. For: admin.

    If a topic of a realm is strict, the API refuses events of undeclared topics of that realm with 422.
    """
    context.require_role(request, Role.ADMIN)
    services = context.services(request)
    topic = Topic(**given.model_dump(), since=datetime.now(UTC), declared=True)
    _, created = await services.schema_cache.registry.declare(topic)
    body = (
        await find_topic(services.schema_cache.registry, services.subscriptions, topic.realm, topic.topic)
    ).to_json()
    return context.json_response(body, HTTPStatus.CREATED if created else HTTPStatus.OK)


@router.get("/{realm}/{topic:path}", response_model=KnownTopic, responses=document_errors(HTTPStatus.NOT_FOUND))
async def get_topic(request: Request, realm: str, topic: str) -> Response:
    """Get a topic. For: admin, events; a login with realms sees only those realms."""
    who = context.require_one_of(request, READERS)
    if who.realms is not None and realm not in who.realms:
        raise unknown_topic(realm, topic)
    services = context.services(request)
    found = await find_topic(services.schema_cache.registry, services.subscriptions, realm, topic)
    return context.json_response(found.to_json())


@router.delete("/{realm}/{topic:path}", responses=document_errors(HTTPStatus.NOT_FOUND))
async def forget_topic(request: Request, realm: str, topic: str) -> None:
    """Forget a topic. The next accepted event of the topic adds it again. For: admin."""
    context.require_role(request, Role.ADMIN)
    await context.services(request).schema_cache.registry.forget_topic(realm, topic)
