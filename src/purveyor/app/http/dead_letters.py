"""Routes of dead letters: a subscription sees its own, an administrator those of all parts."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from purveyor.app.http import context
from purveyor.app.http.authentication import Role
from purveyor.app.http.models import RequestBody
from purveyor.app.http.problems import document_errors
from purveyor.app.json_views import dead_letter_details, dead_letter_summary, report_json
from purveyor.delivery.dead_letters.service import DeadLetterFilter, Report
from purveyor.model.errors import InvalidInput

router = APIRouter(tags=["dead letters"])
MAX_PER_REQUEST: Final = 1000
_SUBSCRIPTION_PATH: Final = "/v1/subscriptions/{name}/dead-letters"
_ADMIN_PATH: Final = "/v1/dead-letters"
_ERRORS: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)

Number = Annotated[int, Field(ge=1, lt=1 << 63)]
DeadLetterId = Annotated[int, Path(ge=1, lt=1 << 63)]
Reason = Annotated[str, Field(min_length=1, max_length=1000, description="only those whose reason contains this text")]
Subscription = Annotated[str, Field(min_length=1, max_length=64, description="only those of this subscription")]
Origin = Annotated[str, Field(min_length=1, max_length=200, description="only those of this part")]


class DeadLetterBody(BaseModel):
    """A dead letter in a list."""

    id: int
    parked: str | None
    origin: str = Field(description="the part that gave up")
    reason: str
    subject: str | None = Field(description="the subject of the message")
    attempts: int | None
    problem: str | None = Field(description="why the entry cannot be read as a dead letter")
    bytes: int


class AttemptBody(BaseModel):
    """One failed delivery."""

    time: str | None
    status: int | None
    error: str | None
    excerpt: str | None = Field(description="the start of the endpoint's answer")


class DeadLetterDetails(DeadLetterBody):
    """A dead letter with its original message."""

    headers: dict[str, list[str]]
    sequence: int | None = Field(default=None, description="the sequence of the message in its queue")
    failed_first: str | None = None
    failed_last: str | None = None
    attempts_log: list[AttemptBody] = Field(default_factory=list, description="the recorded attempts")
    details: dict[str, Any] = Field(default_factory=dict)
    data: str | None = Field(default=None, description="the body, if it is text")
    data_base64: str | None = Field(default=None, description="the body, if it is not text")


class DeadLetterPage(BaseModel):
    """Dead letters, the oldest first. Pass `next` as `after` to get the next page."""

    dead_letters: list[DeadLetterBody]
    next: int | None


class FailureBody(BaseModel):
    """A dead letter that stays, and the reason."""

    id: int
    detail: str
    fix: str | None


class ReportBody(BaseModel):
    """The result of a retry or discard."""

    dry_run: bool
    chosen: int
    done: int
    gone: int = Field(description="another request had already retried or discarded them")
    targets: dict[str, int] = Field(description="the number of messages that go back, by subject")
    failed: list[FailureBody]
    next: int | None = Field(default=None, description="more dead letters match: pass it as `after`")


class DeadLetterQuery(RequestBody):
    """Which dead letters to list."""

    reason: Reason | None = None
    after: Annotated[int, Field(ge=0, lt=1 << 63, description="only those after this id")] = 0
    limit: Annotated[int, Field(ge=1, le=MAX_PER_REQUEST)] = 100


class AnyDeadLetterQuery(DeadLetterQuery):
    """Which dead letters of all parts to list."""

    subscription: Subscription | None = None
    origin: Origin | None = None


class DeadLetterSelection(RequestBody):
    """Which dead letters to retry or discard: those that match every given condition, or `all`."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"ids": [17, 18]}, {"reason": "mailbox"}, {"all": True}]}
    )

    ids: list[Number] = Field(default_factory=list, max_length=MAX_PER_REQUEST)
    reason: Reason | None = None
    all: bool = False
    dry_run: bool = Field(default=False, description="report the result without doing anything")
    after: Annotated[int, Field(ge=0, lt=1 << 63, description="only those after this id")] = 0
    limit: Annotated[int, Field(ge=1, le=MAX_PER_REQUEST, description="at most this number, the oldest first")] = (
        MAX_PER_REQUEST
    )


class AnyDeadLetterSelection(DeadLetterSelection):
    """Which dead letters of all parts to retry or discard."""

    subscription: Subscription | None = None
    origin: Origin | None = None


@router.get(_SUBSCRIPTION_PATH, response_model=DeadLetterPage, responses=document_errors(*_ERRORS))
async def list_of_subscription(request: Request, name: str, given: Annotated[DeadLetterQuery, Query()]) -> Response:
    """List the dead letters of a subscription, the oldest first. For: the subscription, admin."""
    context.require_owner_or_admin(request, name)
    return await _list(request, given, DeadLetterFilter(subscription=name, reason=given.reason))


@router.get(f"{_SUBSCRIPTION_PATH}/{{letter}}", response_model=DeadLetterDetails, responses=document_errors(*_ERRORS))
async def show_of_subscription(request: Request, name: str, letter: DeadLetterId) -> Response:
    """Get a dead letter with its original message and all recorded attempts. For: the subscription, admin."""
    context.require_owner_or_admin(request, name)
    return await _show(request, letter, DeadLetterFilter(subscription=name))


@router.post(_SUBSCRIPTION_PATH, response_model=ReportBody, responses=document_errors(*_ERRORS))
async def retry_of_subscription(request: Request, name: str, given: DeadLetterSelection) -> Response:
    """Put dead letters back: the API delivers them next, the oldest first. For: the subscription, admin.

    Repeating the request does not put one back twice. `failed` lists those that stay.
    """
    context.require_owner_or_admin(request, name)
    choice = DeadLetterFilter(subscription=name, ids=tuple(given.ids), reason=given.reason)
    return await _run(given, choice, context.services(request).dead_letters.retry)


@router.delete(_SUBSCRIPTION_PATH, response_model=ReportBody, responses=document_errors(*_ERRORS))
async def discard_of_subscription(
    request: Request, name: str, given: Annotated[DeadLetterSelection, Query()]
) -> Response:
    """Discard dead letters for good. For: the subscription, admin."""
    context.require_owner_or_admin(request, name)
    choice = DeadLetterFilter(subscription=name, ids=tuple(given.ids), reason=given.reason)
    return await _run(given, choice, context.services(request).dead_letters.discard)


@router.get(_ADMIN_PATH, response_model=DeadLetterPage, responses=document_errors(*_ERRORS))
async def list_all(request: Request, given: Annotated[AnyDeadLetterQuery, Query()]) -> Response:
    """List the dead letters of all parts, the oldest first. For: admin."""
    context.require_role(request, Role.ADMIN)
    choice = DeadLetterFilter(subscription=given.subscription, origin=given.origin, reason=given.reason)
    return await _list(request, given, choice)


@router.get(f"{_ADMIN_PATH}/{{letter}}", response_model=DeadLetterDetails, responses=document_errors(*_ERRORS))
async def show_any(request: Request, letter: DeadLetterId) -> Response:
    """Get a dead letter with its original message. For: admin."""
    context.require_role(request, Role.ADMIN)
    return await _show(request, letter, DeadLetterFilter())


@router.post(_ADMIN_PATH, response_model=ReportBody, responses=document_errors(*_ERRORS))
async def retry_any(request: Request, given: AnyDeadLetterSelection) -> Response:
    """Put dead letters of any part back into the queue they came from. For: admin."""
    context.require_role(request, Role.ADMIN)
    return await _run(given, _to_filter(given), context.services(request).dead_letters.retry)


@router.delete(_ADMIN_PATH, response_model=ReportBody, responses=document_errors(*_ERRORS))
async def discard_any(request: Request, given: Annotated[AnyDeadLetterSelection, Query()]) -> Response:
    """Discard dead letters for good. For: admin."""
    context.require_role(request, Role.ADMIN)
    return await _run(given, _to_filter(given), context.services(request).dead_letters.discard)


async def _list(request: Request, given: DeadLetterQuery, choice: DeadLetterFilter) -> Response:
    page = await context.services(request).dead_letters.list(choice, after=given.after, limit=given.limit)
    return context.json_response(
        {"dead_letters": [dead_letter_summary(each) for each in page.letters], "next": page.next}
    )


async def _show(request: Request, letter: int, choice: DeadLetterFilter) -> Response:
    return context.json_response(dead_letter_details(await context.services(request).dead_letters.show(letter, choice)))


async def _run(
    given: DeadLetterSelection, choice: DeadLetterFilter, deal: Callable[..., Awaitable[Report]]
) -> Response:
    """Retry or discard. Without a condition the request must say `all`; a subscription alone is no condition."""
    chosen = bool(choice.ids or choice.reason or choice.origin)
    if given.all == chosen:
        raise InvalidInput(
            "`all` contradicts the other conditions" if chosen else "the request does not say which dead letters",
            fix="give ids, a reason, or all",
        )
    limit = None if choice.ids else given.limit
    report = await deal(choice, dry_run=given.dry_run, after=given.after, limit=limit)
    return context.json_response({"dry_run": given.dry_run, **report_json(report), "next": report.next})


def _to_filter(given: AnyDeadLetterSelection) -> DeadLetterFilter:
    return DeadLetterFilter(
        ids=tuple(given.ids), subscription=given.subscription, origin=given.origin, reason=given.reason
    )
