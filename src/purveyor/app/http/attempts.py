"""The route of the attempt log of a push subscription."""

from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import AwareDatetime, BaseModel, BeforeValidator, Field

from purveyor.app.http import context
from purveyor.app.http.models import RequestBody
from purveyor.app.http.problems import document_errors
from purveyor.delivery.push.attempt_history import read_attempts
from purveyor.delivery.push.attempt_record import MAX_ATTEMPTS_PER_PAGE, AttemptQuery, parse_attempt_id

router = APIRouter(tags=["subscriptions"])
_ERRORS = (HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)
_IS_ACKNOWLEDGED = {"acknowledged": True, "failed": False, None: None}


def _is_time(value: object) -> object:
    if isinstance(value, str) and value.isdecimal():  # pydantic takes it for seconds since 1970
        raise ValueError("not a time such as 2026-01-01T12:00:00Z")
    return value


Time = Annotated[AwareDatetime, BeforeValidator(_is_time)]


class AttemptsQuery(RequestBody):
    """Which attempts to list."""

    key: str | None = Field(
        default=None, min_length=1, max_length=1024, description="only those whose key contains this text"
    )
    since: Time | None = Field(default=None, description="only those that ended at this time or later")
    until: Time | None = Field(default=None, description="only those that ended at this time or before")
    outcome: Literal["acknowledged", "failed"] | None = None
    before: str | None = Field(default=None, max_length=80, description="only those before this id: `next` of a page")
    limit: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS_PER_PAGE)] = 100

    def query(self) -> AttemptQuery:
        """Return it for the reader of the log."""
        return AttemptQuery(
            key=self.key,
            since=self.since,
            until=self.until,
            is_acknowledged=_IS_ACKNOWLEDGED[self.outcome],
            before=None if self.before is None else parse_attempt_id(self.before),
            limit=self.limit,
        )


class PushAttemptBody(BaseModel):
    """One attempt to push a message."""

    id: str
    time: datetime = Field(description="when it ended")
    sequence: int = Field(description="the sequence of the message in the queue of the subscription")
    position: int | None
    kind: Literal["main", "prefill", "retry"] = Field(description="retry: a dead letter that was put back")
    realm: str
    topic: str
    key: str | None
    event_id: str = Field(description="the id that the endpoint received")
    endpoint: str
    attempt: int = Field(description="1 for the first attempt of the message")
    outcome: Literal["acknowledged", "failed"]
    action: Literal["acknowledge", "retry", "give_up", "disable"] = Field(
        description="what followed: give_up is a dead letter, disable pauses the subscription"
    )
    status: int | None = Field(description="the status of the answer")
    error: str | None = Field(description="why there was no answer")
    seconds: float = Field(description="how long it took")
    excerpt: str | None = Field(description="the beginning of the answer")


class AttemptsBody(BaseModel):
    """Attempts, the newest first. Pass `next` as `before` to get the next page."""

    attempts: list[PushAttemptBody]
    next: str | None
    omitted: int = Field(description="how many attempts of this time were counted and not stored")
    unreadable: str | None = Field(default=None, description="why a part of the log cannot be read")


@router.get("/v1/subscriptions/{name}/attempts", response_model=AttemptsBody, responses=document_errors(*_ERRORS))
async def list_attempts(request: Request, name: str, given: Annotated[AttemptsQuery, Query()]) -> Response:
    """List the last attempts to push messages, the newest first. For: the subscription, admin.

    The log has a bounded size: about the last 4000 attempts that failed and the last 4000 that were acknowledged. Of
    more than 20 acknowledged (50 failed) attempts per second a worker stores a part and counts the others. A worker
    writes the log once a second; when it is killed, the attempts of the last second are missing.
    """
    context.require_owner_or_admin(request, name)
    services = context.services(request)
    found = await services.subscriptions.get(name)
    page = await read_attempts(services.queues, found, given.query())
    return context.json_response(page.to_json())
