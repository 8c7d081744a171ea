"""Routes of schemas: what the objects of a topic must look like, with revisions that follow one another."""

from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from purveyor.app.http import context
from purveyor.app.http.authentication import Role
from purveyor.app.http.models import Given, TopicBody
from purveyor.app.http.problems import documented
from purveyor.app.views.schema_view import judge, part_for, schema_json
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.model.subscription import RealmTopic, read_topics
from purveyor.sources.schemas.registry import NewSchema, Schemas, no_schema, revision_problems
from purveyor.sources.schemas.schema import Compatibility, Encoding, Schema, SchemaType

router = APIRouter(prefix="/v1/schemas", tags=["schemas"])
READERS: Final = (Role.ADMIN, Role.EVENTS)
"""Who may look: those who decide, and those who publish."""
_NUMBER: Final = Path(ge=1, lt=1 << 31)
_EXAMPLE: Final[Json] = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "total": {"type": "number", "minimum": 0}},
    "required": ["id"],
}

CompatibilityWord = Literal["none", "backward", "forward", "full"]


class NewSchemaBody(Given):
    """A schema to be added, with its first revision."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "name": "order",
                    "type": "json-schema",
                    "realms_topics": [{"realm": "shop", "topic": "orders"}],
                    "definition": _EXAMPLE,
                }
            ]
        },
    )

    name: str = Field(json_schema_extra={"pattern": "^[A-Za-z0-9_-]{1,64}$"})
    type: Literal["json-schema", "avro"] = "json-schema"
    encoding: Literal["json", "binary"] = Field(default="json", description="binary: Avro's own, in base64")
    compatibility: CompatibilityWord = Field(default="backward", description="what the next revisions must keep")
    realms_topics: list[TopicBody] = Field(min_length=1)
    definition: dict[str, Any]

    def schema_wanted(self) -> NewSchema:
        """Checked by the rules."""
        return NewSchema(
            name=self.name,
            type=SchemaType(self.type),
            encoding=Encoding(self.encoding),
            compatibility=Compatibility(self.compatibility),
            realms_topics=_topics(self.realms_topics),
            definition=self.definition,
        )


class SchemaChange(Given):
    """What is given is changed, the rest stays."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"compatibility": "full"}]})

    compatibility: CompatibilityWord | None = None
    realms_topics: Annotated[list[TopicBody], Field(min_length=1)] | None = None


class NewRevision(Given):
    """The text of the next revision."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"definition": _EXAMPLE}]})

    definition: dict[str, Any]


class Rollback(Given):
    """The revision whose text is in force again."""

    revision: Annotated[int, Field(ge=1, lt=1 << 31)]


class Question(Given):
    """A definition that could be the next revision, or an object that could be published; one of them."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"definition": _EXAMPLE}, {"object": {"id": "17"}}]}
    )

    definition: dict[str, Any] | None = None
    object: dict[str, Any] | str | None = Field(default=None, description="a text: Avro's binary form in base64")


class Judgement(BaseModel):
    """Whether it would be taken, and if not, why."""

    ok: bool
    problems: list[str]


class RevisionBody(BaseModel):
    """A revision."""

    number: int
    created: str
    copy_of: int | None = Field(default=None, description="the revision that was rolled back to")
    definition: dict[str, Any]


class SchemaBody(BaseModel):
    """A schema; its newest revision is in force."""

    name: str
    type: Literal["json-schema", "avro"]
    encoding: Literal["json", "binary"]
    compatibility: CompatibilityWord
    realms_topics: list[TopicBody]
    revision: int
    revisions: list[int]
    definition: dict[str, Any]


@router.get("", response_model=list[SchemaBody], responses=documented())
async def list_schemas(request: Request) -> Response:
    """All schemas. For: admin, events; a login that is bound to realms sees theirs only, with its own topics."""
    who = context.require_one_of(request, READERS)
    found = (await _schemas(request).list()).schemas
    seen = [part for name in sorted(found) if (part := part_for(found[name], who.realms)) is not None]
    return context.as_json([schema_json(schema) for schema in seen])


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=SchemaBody,
    responses={
        200: {"description": "It was there, the same", "model": SchemaBody},
        **documented(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
async def add_schema(request: Request, given: NewSchemaBody) -> Response:
    """Add a schema. For: admin.

    From now on events of its topics whose new object does not fit are refused with 422. 409: one of that name exists,
    and is another. 404: somebody deleted it meanwhile.
    """
    schema, created = await _changing(request).add(given.schema_wanted())
    return context.as_json(schema_json(schema), HTTPStatus.CREATED if created else HTTPStatus.OK)


@router.get("/{name}", response_model=SchemaBody, responses=documented(HTTPStatus.NOT_FOUND))
async def get_schema(request: Request, name: str) -> Response:
    """A schema with the revision in force. For: admin, events."""
    return context.as_json(schema_json(await _look(request, name)))


@router.patch("/{name}", response_model=SchemaBody, responses=documented(HTTPStatus.NOT_FOUND))
async def change_schema(request: Request, name: str, given: SchemaChange) -> Response:
    """Set another compatibility or other topics. For: admin."""
    schema = await _changing(request).change(
        name,
        compatibility=None if given.compatibility is None else Compatibility(given.compatibility),
        topics=None if given.realms_topics is None else _topics(given.realms_topics),
    )
    return context.as_json(schema_json(schema))


@router.delete("/{name}", responses=documented(HTTPStatus.NOT_FOUND))
async def delete_schema(request: Request, name: str) -> None:
    """Delete a schema with all its revisions: its topics take any object again. For: admin."""
    await _changing(request).delete(name)


@router.post(
    "/{name}/revisions",
    status_code=HTTPStatus.CREATED,
    response_model=SchemaBody,
    responses={
        200: {"description": "It is in force already", "model": SchemaBody},
        **documented(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
async def commit_revision(request: Request, name: str, given: NewRevision) -> Response:
    """Commit a revision, which is in force with the answer. For: admin.

    409: it is not compatible with the one in force, as the schema asks for; `detail` tells where.
    """
    schema, changed = await _changing(request).commit(name, given.definition)
    return context.as_json(schema_json(schema), HTTPStatus.CREATED if changed else HTTPStatus.OK)


@router.get("/{name}/revisions", response_model=list[RevisionBody], responses=documented(HTTPStatus.NOT_FOUND))
async def list_revisions(request: Request, name: str) -> Response:
    """All revisions of a schema, the oldest first. For: admin, events."""
    return context.as_json([each.to_json() for each in (await _look(request, name)).revisions])


@router.delete("/{name}/revisions/{number}", responses=documented(HTTPStatus.NOT_FOUND))
async def delete_revision(request: Request, name: str, number: Annotated[int, _NUMBER]) -> None:
    """Delete a revision that is not in force. For: admin."""
    await _changing(request).delete_revision(name, number)


@router.post(
    "/{name}/rollback",
    status_code=HTTPStatus.CREATED,
    response_model=SchemaBody,
    responses=documented(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def roll_back(request: Request, name: str, given: Rollback) -> Response:
    """Put an earlier revision in force again, as a new one, compatible or not. For: admin."""
    return context.as_json(schema_json(await _changing(request).roll_back(name, given.revision)), HTTPStatus.CREATED)


@router.post(
    "/{name}/check",
    response_model=Judgement,
    responses=documented(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def check(request: Request, name: str, given: Question) -> Response:
    """Would this be the next revision, or would this object be accepted? Nothing is changed. For: admin, events."""
    schema = await _look(request, name)
    if (given.definition is None) == (given.object is None):
        raise InvalidInput("neither a definition nor an object, or both", fix="give one of them")
    definition = given.definition
    if definition is not None:
        found = await _schemas(request).check(lambda: list(revision_problems(schema, definition)))
    else:
        found = await _schemas(request).check(lambda: judge(schema, given.object))
    return context.as_json({"ok": not found, "problems": found})


def _topics(given: list[TopicBody]) -> tuple[RealmTopic, ...]:
    return read_topics({"realms_topics": [each.model_dump() for each in given]}, "realms_topics")


async def _look(request: Request, name: str) -> Schema:
    """A schema as this login sees it; one of other realms is as if it were not there."""
    who = context.require_one_of(request, READERS)
    found = part_for(await _schemas(request).get(name), who.realms)
    if found is None:
        raise no_schema(name)
    return found


def _changing(request: Request) -> Schemas:
    context.require_role(request, Role.ADMIN)
    return _schemas(request)


def _schemas(request: Request) -> Schemas:
    return context.services(request).book.schemas
