"""Every error of the API as one JSON body: what happened (`detail`), and what to do about it (`fix`).

Which status an error of ours has is decided by its type, here and nowhere else. What the client cannot help is a 503
with `Retry-After`; a 500 would be a defect of ours.
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
from purveyor.sources.http_events import TooLarge

OF_EVERY_ROUTE: Final = (
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
"""What every request that needs a login may be answered."""
OF_PATHS_WITH_NAMES: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)
"""And where the path names something: it is not there, or cannot be."""
MEDIA_TYPE: Final = "application/problem+json"
_AGAIN_SECONDS: Final = 1
_UPGRADE_SECONDS: Final = 30
"""When to ask again for what only an upgraded program understands."""
_log = logging.getLogger(__name__)

_STATUS: Final[Sequence[tuple[type[PurveyorError], HTTPStatus]]] = (
    (TooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (InvalidInput, HTTPStatus.UNPROCESSABLE_ENTITY),
    (NotFound, HTTPStatus.NOT_FOUND),
    # The next are between us and the NATS server; the client's request may be good, later or elsewhere.
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
"""The first that an error is an instance of counts."""


class Problem(HTTPException):
    """An error that only HTTP knows."""

    def __init__(self, status: HTTPStatus, detail: str, fix: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, detail, None if headers is None else dict(headers))
        self.fix = fix


def status_of(error: PurveyorError) -> HTTPStatus:
    """The status that an error has in HTTP."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)


def answer_to(error: Exception) -> Response:
    """The answer for an error of ours, or one that only HTTP knows."""
    if isinstance(error, Problem):
        return _answer(HTTPStatus(error.status_code), error.detail, error.fix, headers=error.headers)
    if isinstance(error, PurveyorError):
        status = status_of(error)
        if status is HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error("no status is known for %r", error)
        mistakes = error.mistakes if isinstance(error, SchemaMismatch) else ()
        errors = [{"where": where, "what": what} for where, what in mistakes]
        again = {"Retry-After": str(_UPGRADE_SECONDS)} if isinstance(error, UnreadableRecord) else None
        return _answer(status, error.message, error.fix, headers=again, errors=errors)
    if isinstance(error, HTTPException):
        if error.status_code == HTTPStatus.BAD_REQUEST:  # FastAPI's, for a body that is not even text
            return _answer(HTTPStatus.UNPROCESSABLE_ENTITY, "the body cannot be read", "send JSON in UTF-8")
        return _answer(HTTPStatus(error.status_code), str(error.detail), _common_fix(error), headers=error.headers)
    if isinstance(error, ClientDisconnect):  # for the count alone: the client reads no answer any more
        return _answer(HTTPStatus.REQUEST_TIMEOUT, "the body of the request is not complete", "send all of it")
    _log.error("a request failed for no reason that is known", exc_info=error)
    return _answer(HTTPStatus.INTERNAL_SERVER_ERROR, "this should not have happened", "the log of the API tells more")


def written(status: HTTPStatus, detail: str, fix: str) -> bytes:
    """Return an answer as it goes over the wire, for what is refused before a request is complete."""
    answer = _answer(status, detail, fix, headers={"connection": "close"})
    lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
    lines += [name + b": " + value for name, value in answer.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(answer.body)])


def install(app: FastAPI) -> None:
    """Answer every error of the routes so."""

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
            "mend what `errors` names; /openapi.json tells the form of every request",
            errors=found,
        )

    app.add_exception_handler(PurveyorError, on_error)
    app.add_exception_handler(HTTPException, on_error)
    app.add_exception_handler(ClientDisconnect, on_error)
    app.add_exception_handler(Exception, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)


def documented(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """Errors of a route for its documentation. Those of every route are added to all of them at once."""
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
        given.setdefault("Retry-After", str(_AGAIN_SECONDS))
    data = json.dumps(body, separators=(",", ":")).encode()  # in ASCII: whatever a message quotes can be sent
    return Response(data, status, given, MEDIA_TYPE)


def _one(error: Mapping[str, Any]) -> dict[str, str]:
    """One mistake, without the value that was given: it may be a password."""
    where = ".".join(str(part) for part in error["loc"])
    return {"where": where, "what": str(error["msg"]).removeprefix("Value error, ")}


def _common_fix(error: HTTPException) -> str:
    match error.status_code:
        case HTTPStatus.NOT_FOUND:
            return "/openapi.json lists the routes"
        case HTTPStatus.METHOD_NOT_ALLOWED:
            return "/openapi.json tells the methods of every route"
        case _:
            return "/openapi.json tells the form of every request"
