"""Every error of the API as one JSON body: what happened (`detail`) and what to do (`fix`).

This module alone maps the type of an error to its HTTP status. An error that the client did not cause is a 503 with
`Retry-After`; a 500 is a defect of the API.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from purveyor.app.http.models import ProblemBody
from purveyor.model.errors import (
    DataLost,
    InvalidInput,
    MigrationNeeded,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    PublishRefused,
    PurveyorError,
    Refused,
    SchemaMismatch,
    SetupError,
    Unavailable,
    UnreadableRecord,
    WindowFull,
    WrongRevision,
)
from purveyor.model.event import EventTooLarge

COMMON_ERRORS: Final = (
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
"""Errors that every route with a login may answer."""
NAMED_PATH_ERRORS: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)
"""Further errors of routes whose path names an object: it does not exist, or its name is invalid."""
MEDIA_TYPE: Final = "application/problem+json"
_RETRY_SECONDS: Final = 1
_UPGRADE_RETRY_SECONDS: Final = 30
"""The Retry-After of a record that only a newer version can read."""
_log = logging.getLogger(__name__)

_STATUS: Final[Sequence[tuple[type[PurveyorError], HTTPStatus]]] = (
    (EventTooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (InvalidInput, HTTPStatus.UNPROCESSABLE_ENTITY),
    (NotFound, HTTPStatus.NOT_FOUND),
    # The next concern the API and the NATS server: the client's request may succeed later or elsewhere.
    (PublishRefused, HTTPStatus.SERVICE_UNAVAILABLE),
    (PermissionDenied, HTTPStatus.SERVICE_UNAVAILABLE),
    (WrongRevision, HTTPStatus.SERVICE_UNAVAILABLE),
    (WindowFull, HTTPStatus.TOO_MANY_REQUESTS),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (OutcomeUnknown, HTTPStatus.SERVICE_UNAVAILABLE),
    (MigrationNeeded, HTTPStatus.SERVICE_UNAVAILABLE),
    (SetupError, HTTPStatus.SERVICE_UNAVAILABLE),
    (UnreadableRecord, HTTPStatus.SERVICE_UNAVAILABLE),
    (Refused, HTTPStatus.CONFLICT),
    (DataLost, HTTPStatus.GONE),
)
"""The first type that an error is an instance of decides."""


class Problem(HTTPException):
    """An error of the HTTP surface, with its status."""

    def __init__(self, status: HTTPStatus, detail: str, fix: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, detail, None if headers is None else dict(headers))
        self.fix = fix


def status_of(error: PurveyorError) -> HTTPStatus:
    """Return the HTTP status of an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)


def answer_to(error: Exception) -> Response:
    """Return the answer for any exception."""
    if isinstance(error, Problem):
        return _answer(HTTPStatus(error.status_code), error.detail, error.fix, headers=error.headers)
    if isinstance(error, PurveyorError):
        status = status_of(error)
        if status is HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error("no HTTP status is defined for %r", error)
        mistakes = error.mistakes if isinstance(error, SchemaMismatch) else ()
        errors = [{"where": where, "what": what} for where, what in mistakes]
        retry = {"Retry-After": str(_UPGRADE_RETRY_SECONDS)} if isinstance(error, UnreadableRecord) else None
        return _answer(status, error.message, error.fix, headers=retry, errors=errors)
    if isinstance(error, HTTPException):
        if error.status_code == HTTPStatus.BAD_REQUEST:  # from FastAPI, for a body that is not text
            return _answer(HTTPStatus.UNPROCESSABLE_ENTITY, "the body cannot be read", "send JSON in UTF-8")
        return _answer(HTTPStatus(error.status_code), str(error.detail), _common_fix(error), headers=error.headers)
    if isinstance(error, ClientDisconnect):  # only for the metric: the client has gone
        return _answer(HTTPStatus.REQUEST_TIMEOUT, "the body of the request is not complete", "send all of it")
    _log.error("a request failed with an unexpected error", exc_info=error)
    return _answer(HTTPStatus.INTERNAL_SERVER_ERROR, "the API failed unexpectedly", "see the log of the API")


def encode_response(status: HTTPStatus, detail: str, fix: str) -> bytes:
    """Return an answer as HTTP/1.1 bytes, for requests that the API refuses before they are complete."""
    answer = _answer(status, detail, fix, headers={"connection": "close"})
    lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
    lines += [name + b": " + value for name, value in answer.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(answer.body)])


def install(app: FastAPI) -> None:
    """Register the handlers that turn exceptions of the routes into answers."""

    async def on_error(_request: Request, error: Exception) -> Response:
        return answer_to(error)

    async def on_invalid(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = [_one(each) for each in error.errors()]
        first = found[0]
        rest = f", and {len(found) - 1} more" if len(found) > 1 else ""
        return _answer(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            f"{first['where']}: {first['what']}{rest}",
            "correct the fields in `errors`; /openapi.json describes every request",
            errors=found,
        )

    app.add_exception_handler(PurveyorError, on_error)
    app.add_exception_handler(HTTPException, on_error)
    app.add_exception_handler(ClientDisconnect, on_error)
    app.add_exception_handler(Exception, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)


def document_errors(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """Return the errors of a route for OpenAPI. `application` adds those of every route."""
    every = (*statuses, HTTPStatus.SERVICE_UNAVAILABLE)
    return {int(status): {"description": status.phrase, "model": ProblemBody} for status in every}


def _answer(
    status: HTTPStatus,
    detail: str,
    fix: str | None,
    *,
    headers: Mapping[str, str] | None = None,
    errors: Sequence[Mapping[str, str]] = (),
) -> Response:
    body: dict[str, Any] = {"title": status.phrase, "status": int(status), "detail": detail, "fix": fix}
    if errors:
        body["errors"] = errors
    given = dict(headers or {})
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        given.setdefault("Retry-After", str(_RETRY_SECONDS))
    data = json.dumps(body, separators=(",", ":")).encode()  # ASCII: a message may quote any text
    return Response(data, status, given, MEDIA_TYPE)


def _one(error: Mapping[str, Any]) -> dict[str, str]:
    """Return one mistake without the given value, which may be a password."""
    where = ".".join(str(part) for part in error["loc"])
    return {"where": where, "what": str(error["msg"]).removeprefix("Value error, ")}


def _common_fix(error: HTTPException) -> str:
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            return "/openapi.json lists the routes"
        case HTTPStatus.METHOD_NOT_ALLOWED:
            return "/openapi.json lists the methods of every route"
        case _:
            return "/openapi.json describes every request"
