"""The route by which publishers send events: one, an array, or lines of JSON; all or none; 202 only when stored."""

import asyncio
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from purveyor.app.http import context
from purveyor.app.http.authentication import Principal, Role
from purveyor.app.http.models import Accepted, AcceptedMany, EventBody
from purveyor.app.http.problems import Problem, documented
from purveyor.model import json_fields, tracing
from purveyor.model.errors import InvalidInput, SchemaMismatch
from purveyor.model.json_limits import check_text
from purveyor.sources.http_events import MOST_AT_ONCE, Incoming, trace_of
from purveyor.sources.schemas.event_validator import Rules

_log = logging.getLogger(__name__)
router = APIRouter(tags=["events"])
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
_LONGEST_KEY_BYTES: Final = 200
"""Of an idempotency key: an event of many has it as its id, with its number behind it."""
NDJSON: Final = "application/x-ndjson"
_LARGE: Final = 64 << 10
_ONE: Final = {"$ref": "#/components/schemas/EventBody"}
_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"anyOf": [_ONE, {"type": "array", "items": _ONE, "minItems": 1, "maxItems": MOST_AT_ONCE}]}
            },
            NDJSON: {"schema": {"type": "string"}},
        },
    },
    "parameters": [
        {
            "name": IDEMPOTENCY_KEY,
            "in": "header",
            "required": False,
            "schema": {"type": "string", "maxLength": _LONGEST_KEY_BYTES},
            "description": "By which a repetition of the request is known; an `id` in an event goes before it",
        }
    ],
}
SCHEMAS: Final = (EventBody,)
"""Models that only the documentation mentions."""


@router.post(
    "/v1/messages",
    status_code=HTTPStatus.ACCEPTED,
    response_model=Accepted | AcceptedMany,
    responses=documented(
        HTTPStatus.UNPROCESSABLE_ENTITY,
    ),
    openapi_extra=_BODY,
)
async def publish(request: Request) -> Response:
    """Publish events: one, an array, or lines of JSON (`application/x-ndjson`), up to 1000, all or none. For: events.

    202 means that they are stored. Sent again with the same id within two minutes, an event is not stored again. A
    login that is bound to realms may publish into those only. 422 also when an event does not fit the schema of its
    topic: `errors` tells the places.
    """
    who = context.require_role(request, Role.EVENTS)
    services = context.services(request)
    intake = services.intake
    data = await request.body()
    by_lines = request.headers.get("content-type", "").partition(";")[0].strip().lower() == NDJSON
    work = (data, by_lines, _idempotency_key(request), _Publisher(who, services.book.rules))
    # Reading megabytes of JSON takes long enough for others to notice.
    events, one = await asyncio.to_thread(_read, *work) if len(data) > _LARGE else _read(*work)
    trace = (trace_of(events[0]) if one else tracing.NONE) or tracing.carrier(request.headers.get)
    with tracing.span("accept", trace, events=len(events)) as onward:
        if one:
            receipt = await intake.store(events[0], who.login, onward)
            answer: dict[str, Any] = {
                "position": receipt.sequence,
                "id": events[0].id,
                "duplicate": receipt.duplicate,
            }
        else:
            stored = await intake.store_all(events, who.login, onward)
            answer = {"position": stored.position, "stored": stored.stored, "duplicates": stored.duplicates}
        _log.debug("stored %d events", len(events), extra={"login": who.login, **answer})
    services.book.note(each.event for each in events)
    return context.as_json(answer, HTTPStatus.ACCEPTED)


def _idempotency_key(request: Request) -> str | None:
    given = request.headers.get(IDEMPOTENCY_KEY)
    if given is None:
        return None
    try:
        key = given.encode("latin-1").decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"the header {IDEMPOTENCY_KEY} is not UTF-8", fix="use ASCII, or UTF-8") from None
    return check_text(key, f"the header {IDEMPOTENCY_KEY}", _LONGEST_KEY_BYTES)


@dataclass(frozen=True, slots=True)
class _Publisher:
    """Who sends events, and what they must be like at this moment."""

    who: Principal
    rules: Rules


def _read(data: bytes, by_lines: bool, key: str | None, publisher: _Publisher) -> tuple[list[Incoming], bool]:
    """The events of a body, and whether it is a single one; checked, all of them."""
    if by_lines:
        lines = [line for line in data.splitlines() if line.strip()]
        found: Any = [json_fields.parse(line, f"line {number}") for number, line in enumerate(lines, start=1)]
    else:
        found = _json(data)
    one = not isinstance(found, list)
    given = [found] if one else found
    if not 0 < len(given) <= MOST_AT_ONCE:
        raise InvalidInput(f"{len(given)} events at once", fix=f"send 1 to {MOST_AT_ONCE}")
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


def _event(fields: Any, default_id: str | None, publisher: _Publisher) -> Incoming:
    who = publisher.who
    realm = json_fields.mapping(fields, "event").get("realm")
    # First of all: the schemas of realms that are not its own are none of its business.
    if who.realms is not None and isinstance(realm, str) and realm not in who.realms:
        raise Problem(
            HTTPStatus.FORBIDDEN,
            f"{who.login!r} may not publish into the realm {realm!r}",
            f"its realms are {', '.join(sorted(who.realms)) or 'none'}",
        )
    return Incoming.read(fields, publisher.rules, default_id)


def _id(key: str | None, number: int | None) -> str | None:
    """With a key every event of a request has an id that a repetition repeats."""
    return key if key is None or number is None else f"{key}:{number}"
