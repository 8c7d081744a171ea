"""The route for publishers: one event, an array, or lines of JSON. All or none; 202 when stored."""

import asyncio
import logging
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from purveyor.app.http import context
from purveyor.app.http.authentication import Principal, Role
from purveyor.app.http.problems import Problem, document_errors
from purveyor.model import json_fields, tracing
from purveyor.model.errors import InvalidInput, SchemaMismatch
from purveyor.model.json_fields import check_text
from purveyor.sources.event_arrays import read_events
from purveyor.sources.http_events import MAX_EVENTS_PER_BATCH, IncomingEvent, event_trace
from purveyor.sources.schemas.event_validator import EventValidator

_log = logging.getLogger(__name__)
router = APIRouter(tags=["events"])
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
_MAX_IDEMPOTENCY_KEY_BYTES: Final = 200
"""Shorter than an event id: with several events, the id of each is the key and its number."""
NDJSON: Final = "application/x-ndjson"
_LARGE_BODY_BYTES: Final = 64 << 10


class ObjectChange(BaseModel):
    """The object before and after the change. At least one of them is not empty."""

    old: dict[str, Any] = Field(default_factory=dict)
    new: dict[str, Any] = Field(default_factory=dict)


class EventBody(BaseModel):
    """An event to publish."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "publisher_name": "hr",
                    "ts": "2026-01-01T12:00:00Z",
                    "realm": "udm",
                    "topic": "users/user",
                    "body": {"old": {}, "new": {"uuid": "u-1", "name": "Ada"}},
                }
            ]
        }
    )

    publisher_name: str
    ts: datetime
    realm: str
    topic: str
    body: ObjectChange
    key: str | None = Field(default=None, description="the object that changed; default: a field of the object")
    attributes: dict[str, str] | None = None
    id: str | None = Field(default=None, description="the same in each retry; or use the header Idempotency-Key")


class Accepted(BaseModel):
    """The stored event: its position and id, and whether it was stored before."""

    position: int
    id: str
    duplicate: bool


class AcceptedMany(BaseModel):
    """The stored events: the position of the last one, and how many are new or were stored before."""

    position: int
    stored: int
    duplicates: int


_ONE: Final = {"$ref": "#/components/schemas/EventBody"}
_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "anyOf": [_ONE, {"type": "array", "items": _ONE, "minItems": 1, "maxItems": MAX_EVENTS_PER_BATCH}]
                }
            },
            NDJSON: {"schema": {"type": "string"}},
        },
    },
    "parameters": [
        {
            "name": IDEMPOTENCY_KEY,
            "in": "header",
            "required": False,
            "schema": {"type": "string", "maxLength": _MAX_IDEMPOTENCY_KEY_BYTES},
            "description": "The same in each retry of the request; the `id` of an event takes precedence",
        }
    ],
}
SCHEMAS: Final = (EventBody,)
"""Models that only OpenAPI uses: the route reads the body itself."""


@router.post(
    "/v1/messages",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Accepted | AcceptedMany,
    responses=document_errors(
        HTTPStatus.UNPROCESSABLE_ENTITY,
    ),
    openapi_extra=_BODY,
)
async def publish(request: Request) -> Response:
    """Publish events: one, an array, or lines of JSON (`application/x-ndjson`), up to 1000, all or none. For: events.

    202 means that all events are stored. An event that is sent again with the same id within two minutes is not stored
    again. A login with realms may publish into those realms only. 422 also when an event does not fit the schema of
    its topic; `errors` names the fields.
    """
    who = context.require_role(request, Role.EVENTS)
    services = context.services(request)
    data = await request.body()
    by_lines = request.headers.get("content-type", "").partition(";")[0].strip().lower() == NDJSON
    work = (data, by_lines, _idempotency_key(request), _Publisher(who, services.schema_cache.validator))
    # Parsing megabytes of JSON in the event loop would delay other requests.
    events, one = await asyncio.to_thread(_read, *work) if len(data) > _LARGE_BODY_BYTES else _read(*work)
    trace = (event_trace(events[0]) if one else tracing.NO_TRACE) or tracing.read_carrier(request.headers.get)
    with tracing.span("accept", trace, events=len(events)) as onward:
        if one:
            answer: dict[str, Any] = await publish_one(services, events[0], who.login, onward)
        else:
            stored = await services.events.publish_batch(events, who.login, onward)
            answer = {"position": stored.position, "stored": stored.stored, "duplicates": stored.duplicates}
        _log.debug("stored %d events", len(events), extra={"login": who.login, **answer})
    if not one:
        services.schema_cache.record_topics_in_background(each.event for each in events)
    return context.json_response(answer, HTTPStatus.ACCEPTED)


async def publish_one(
    services: context.Services, event: IncomingEvent, login: str, trace: tracing.Carrier = tracing.NO_TRACE
) -> dict[str, Any]:
    """Store one checked event, and return the answer in the form of `Accepted`. The console publishes here as well."""
    receipt = await services.events.publish(event, login, trace)
    services.schema_cache.record_topics_in_background([event.event])
    return {"position": receipt.sequence, "id": event.id, "duplicate": receipt.duplicate}


def _idempotency_key(request: Request) -> str | None:
    given = request.headers.get(IDEMPOTENCY_KEY)
    if given is None:
        return None
    try:
        key = given.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"the header {IDEMPOTENCY_KEY} is not UTF-8", fix="use ASCII or UTF-8") from None
    return check_text(key, f"the header {IDEMPOTENCY_KEY}", _MAX_IDEMPOTENCY_KEY_BYTES)


@dataclass(frozen=True, slots=True)
class _Publisher:
    """The client that sends events, and the schemas in force now."""

    who: Principal
    validator: EventValidator


def _read(data: bytes, by_lines: bool, key: str | None, publisher: _Publisher) -> tuple[list[IncomingEvent], bool]:
    """Return the checked events of a body, and whether the body is a single event."""
    lines = [line for line in data.splitlines() if line.strip()] if by_lines else []
    if by_lines or data[:1] == b"[":
        many = read_events(lines if by_lines else data, publisher.validator, realms=publisher.who.realms, key=key)
        if many is not None:
            return many, False
    if by_lines:
        found: Any = [json_fields.parse(line, f"line {number}") for number, line in enumerate(lines, start=1)]
    else:
        found = _json(data)
    one = not isinstance(found, list)
    given = [found] if one else found
    if not 0 < len(given) <= MAX_EVENTS_PER_BATCH:
        raise InvalidInput(f"{len(given)} events at once", fix=f"send 1 to {MAX_EVENTS_PER_BATCH}")
    events = []
    for number, fields in enumerate(given):
        try:
            events.append(_event(fields, _id(key, None if one else number), publisher))
        except SchemaMismatch as error:
            if one:
                raise
            mistakes = tuple((f"event {number + 1}: {where}", what) for where, what in error.mistakes)
            message = f"event {number + 1}: {error.message}"
            raise SchemaMismatch(message, fix=error.fix, mistakes=mistakes) from error
        except InvalidInput as error:
            if one:
                raise
            raise InvalidInput(f"event {number + 1}: {error.message}", fix=error.fix) from error
    return events, one


def _json(data: bytes) -> Any:
    try:
        return json_fields.load(data)
    except RecursionError:
        raise InvalidInput("the body is nested too deeply", fix="flatten it") from None
    except ValueError as error:
        raise InvalidInput(f"the body is not JSON: {error}", fix="send one event or an array of them") from None


def _event(fields: Any, default_id: str | None, publisher: _Publisher) -> IncomingEvent:
    who = publisher.who
    realm = json_fields.mapping(fields, "event").get("realm")
    # Checked first: a client must not learn about the schemas of other realms.
    if who.realms is not None and isinstance(realm, str) and realm not in who.realms:
        raise Problem(
            HTTPStatus.FORBIDDEN,
            f"{who.login!r} may not publish into the realm {realm!r}",
            f"its realms are {', '.join(sorted(who.realms)) or 'none'}",
        )
    return IncomingEvent.read(fields, publisher.validator, default_id)


def _id(key: str | None, number: int | None) -> str | None:
    """Return the id of an event from the idempotency key, so that a retry of the request repeats it."""
    return key if key is None or number is None else f"{key}:{number}"
