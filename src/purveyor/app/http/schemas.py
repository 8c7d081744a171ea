"""Routes of schemas: the rules for the objects of a topic, in revisions."""

from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from purveyor.app.http import context
from purveyor.app.http.authentication import Role
from purveyor.app.http.models import RequestBody, TopicBody
from purveyor.app.http.problems import document_errors
from purveyor.app.json_views import check_object, schema_json, visible_part
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.model.subscription import RealmTopic, read_topics
from purveyor.sources.schemas.registry import NewSchema, SchemaRegistry, find_revision_problems, unknown_schema
from purveyor.sources.schemas.schema import Compatibility, Encoding, Schema, SchemaType

router = APIRouter(prefix="/v1/schemas", tags=["schemas"])
READERS: Final = (Role.ADMIN, Role.EVENTS)
"""The roles that may read schemas and topics."""
_NUMBER: Final = Path(ge=1, lt=1 << 31)
_EXAMPLE: Final[Json] = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "total": {"type": "number", "minimum": 0}},
    "required": ["id"],
}

CompatibilityName = Literal["none", "backward", "forward", "full"]


class NewSchemaBody(RequestBody):
    """A schema to add, with its first revision."""

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
    encoding: Literal["json", "binary"] = Field(default="json", description="binary: Avro binary encoding in base64")
    compatibility: CompatibilityName = Field(default="backward", description="the rule for the next revisions")
    realms_topics: list[TopicBody] = Field(min_length=1)
    definition: dict[str, Any]

    def to_schema(self) -> NewSchema:
        """Return the checked schema."""
        return NewSchema(
            name=self.name,
            type=SchemaType(self.type),
            encoding=Encoding(self.encoding),
            compatibility=Compatibility(self.compatibility),
            realms_topics=_topics(self.realms_topics),
            definition=self.definition,
        )


class SchemaChange(RequestBody):
    """The fields to change. Other fields keep their values."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"compatibility": "full"}]})

    compatibility: CompatibilityName | None = None
    realms_topics: Annotated[list[TopicBody], Field(min_length=1)] | None = None


class NewRevision(RequestBody):
    """The definition of the next revision."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"definition": _EXAMPLE}]})

    definition: dict[str, Any]


class Rollback(RequestBody):
    """The revision to put in force again."""

    revision: Annotated[int, Field(ge=1, lt=1 << 31)]


class CheckRequest(RequestBody):
    """A candidate for the next revision, or an object to validate. Exactly one of them."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"definition": _EXAMPLE}, {"object": {"id": "17"}}]}
    )

    definition: dict[str, Any] | None = None
    object: dict[str, Any] | str | None = Field(default=None, description="a text: Avro binary encoding in base64")


class CheckResult(BaseModel):
    """Whether the API would accept it, and if not, the reasons."""

    ok: bool
    problems: list[str]


class RevisionBody(BaseModel):
    """A revision."""

    number: int
    created: str
    copy_of: int | None = Field(default=None, description="the revision that a rollback copied")
    definition: dict[str, Any]


class SchemaBody(BaseModel):
    """A schema. Its newest revision is in force."""

    name: str
    type: Literal["json-schema", "avro"]
    encoding: Literal["json", "binary"]
    compatibility: CompatibilityName
    realms_topics: list[TopicBody]
    revision: int
    revisions: list[int]
    revision_created: str = Field(description="when the revision in force was committed")
    definition: dict[str, Any]


@router.get("", response_model=list[SchemaBody], responses=document_errors())
async def list_schemas(request: Request) -> Response:
    """List all schemas. For: admin, events; a login with realms sees only the schemas and topics of its realms."""
    who = context.require_one_of(request, READERS)
    found = (await _schemas(request).list()).schemas
    seen = [part for name in sorted(found) if (part := visible_part(found[name], who.realms)) is not None]
    return context.json_response([schema_json(schema) for schema in seen])


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=SchemaBody,
    responses={
        200: {"description": "The same schema exists", "model": SchemaBody},
        **document_errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
async def add_schema(request: Request, given: NewSchemaBody) -> Response:
    """Add a schema. For: admin.

    From now on the API refuses events of its topics with 422 if the new object does not fit. 409: another schema of
    that name exists. 404: another request deleted it meanwhile.
    """
    schema, created = await _schemas_for_admin(request).add(given.to_schema())
    return context.json_response(schema_json(schema), HTTPStatus.CREATED if created else HTTPStatus.OK)


@router.get("/{name}", response_model=SchemaBody, responses=document_errors(HTTPStatus.NOT_FOUND))
async def get_schema(request: Request, name: str) -> Response:
    """Get a schema with the revision in force. For: admin, events."""
    return context.json_response(schema_json(await _read_visible(request, name)))


@router.patch("/{name}", response_model=SchemaBody, responses=document_errors(HTTPStatus.NOT_FOUND))
async def change_schema(request: Request, name: str, given: SchemaChange) -> Response:
    """Change the compatibility or the topics. For: admin."""
    schema = await _schemas_for_admin(request).change(
        name,
        compatibility=None if given.compatibility is None else Compatibility(given.compatibility),
        topics=None if given.realms_topics is None else _topics(given.realms_topics),
    )
    return context.json_response(schema_json(schema))


@router.delete("/{name}", responses=document_errors(HTTPStatus.NOT_FOUND))
async def delete_schema(request: Request, name: str) -> None:
    """Delete a schema with all its revisions. Its topics accept any object again. For: admin."""
    await _schemas_for_admin(request).delete(name)


@router.post(
    "/{name}/revisions",
    status_code=HTTPStatus.CREATED,
    response_model=SchemaBody,
    responses={
        200: {"description": "It is already in force", "model": SchemaBody},
        **document_errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
async def commit_revision(request: Request, name: str, given: NewRevision) -> Response:
    """Commit a revision. It is in force when the API answers. For: admin.

    409: it breaks the compatibility rule of the schema; `detail` names the place.
    """
    schema, changed = await _schemas_for_admin(request).commit(name, given.definition)
    return context.json_response(schema_json(schema), HTTPStatus.CREATED if changed else HTTPStatus.OK)


@router.get("/{name}/revisions", response_model=list[RevisionBody], responses=document_errors(HTTPStatus.NOT_FOUND))
async def list_revisions(request: Request, name: str) -> Response:
    """List all revisions of a schema, the oldest first. For: admin, events."""
    return context.json_response([each.to_json() for each in (await _read_visible(request, name)).revisions])


@router.delete("/{name}/revisions/{number}", responses=document_errors(HTTPStatus.NOT_FOUND))
async def delete_revision(request: Request, name: str, number: Annotated[int, _NUMBER]) -> None:
    """Delete a revision that is not in force. For: admin."""
    await _schemas_for_admin(request).delete_revision(name, number)


@router.post(
    "/{name}/rollback",
    status_code=HTTPStatus.CREATED,
    response_model=SchemaBody,
    responses=document_errors(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def roll_back(request: Request, name: str, given: Rollback) -> Response:
    """Put an earlier revision in force again, as a new revision, compatible or not. For: admin."""
    return context.json_response(
        schema_json(await _schemas_for_admin(request).roll_back(name, given.revision)), HTTPStatus.CREATED
    )


@router.post(
    "/{name}/check",
    response_model=CheckResult,
    responses=document_errors(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def check(request: Request, name: str, given: CheckRequest) -> Response:
    """Check a candidate for the next revision, or an object, without changing anything. For: admin, events."""
    schema = await _read_visible(request, name)
    if (given.definition is None) == (given.object is None):
        raise InvalidInput(
            "the request has neither a definition nor an object, or both", fix="give exactly one of them"
        )
    definition = given.definition
    if definition is not None:
        found = await _schemas(request).check(lambda: list(find_revision_problems(schema, definition)))
    else:
        found = await _schemas(request).check(lambda: check_object(schema, given.object))
    return context.json_response({"ok": not found, "problems": found})


def _topics(given: list[TopicBody]) -> tuple[RealmTopic, ...]:
    return read_topics({"realms_topics": [each.model_dump() for each in given]}, "realms_topics")


async def _read_visible(request: Request, name: str) -> Schema:
    """Return the part of a schema that this login may see. A schema of other realms is unknown to it."""
    who = context.require_one_of(request, READERS)
    found = visible_part(await _schemas(request).get(name), who.realms)
    if found is None:
        raise unknown_schema(name)
    return found


def _schemas_for_admin(request: Request) -> SchemaRegistry:
    context.require_role(request, Role.ADMIN)
    return _schemas(request)


def _schemas(request: Request) -> SchemaRegistry:
    return context.services(request).schema_cache.registry
