"""Routes of dead letters: those of a subscription for itself, and those of all parts for an administrator."""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from purveyor.app.http import context
from purveyor.app.http.authentication import Role
from purveyor.app.http.models import Given
from purveyor.app.http.problems import documented
from purveyor.app.views.dead_letter_view import report_json, summary, whole
from purveyor.delivery.dead_letters.service import Choice, Report
from purveyor.model.errors import InvalidInput

router = APIRouter(tags=["dead letters"])
MOST_AT_ONCE: Final = 1000
_OF_ONE: Final = "/v1/subscriptions/{name}/dead-letters"
_OF_ALL: Final = "/v1/dead-letters"
_ERRORS: Final = (HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)

Number = Annotated[int, Field(ge=1, lt=1 << 63)]
Letter = Annotated[int, Path(ge=1, lt=1 << 63)]
Reason = Annotated[str, Field(min_length=1, max_length=1000, description="only those with this in their reason")]
Subscription = Annotated[str, Field(min_length=1, max_length=64, description="only those of this subscription")]
Origin = Annotated[str, Field(min_length=1, max_length=200, description="only those of this part")]


class LetterBody(BaseModel):
    """A dead letter in a list."""

    id: int
    parked: str | None
    origin: str = Field(description="the part that gave up")
    reason: str
    subject: str | None = Field(description="where the message had come on")
    attempts: int | None
    problem: str | None = Field(description="why it is no dead letter, if it is none")
    bytes: int


class AttemptBody(BaseModel):
    """One delivery that failed."""

    time: str | None
    status: int | None
    error: str | None
    excerpt: str | None = Field(description="the beginning of the answer")


class WholeLetterBody(LetterBody):
    """A dead letter with the message as it was."""

    headers: dict[str, list[str]]
    sequence: int | None = Field(default=None, description="of the message in its queue")
    failed_first: str | None = None
    failed_last: str | None = None
    attempts_log: list[AttemptBody] = Field(default_factory=list, description="where each attempt was noted")
    details: dict[str, Any] = Field(default_factory=dict)
    data: str | None = Field(default=None, description="the body, if it is text")
    data_base64: str | None = Field(default=None, description="else so")


class LettersBody(BaseModel):
    """Dead letters, the oldest first; `next` is what to give as `after` for more."""

    dead_letters: list[LetterBody]
    next: int | None


class FailureBody(BaseModel):
    """A dead letter that stays, and why."""

    id: int
    detail: str
    fix: str | None


class ReportBody(BaseModel):
    """What came of it."""

    dry_run: bool
    chosen: int
    done: int
    gone: int = Field(description="others had dealt with them meanwhile")
    targets: dict[str, int] = Field(description="where they go back to: how many to which subject")
    failed: list[FailureBody]


class Listing(Given):
    """Which dead letters to list."""

    reason: Reason | None = None
    after: Annotated[int, Field(ge=0, lt=1 << 63, description="only those behind this one")] = 0
    limit: Annotated[int, Field(ge=1, le=MOST_AT_ONCE)] = 100


class ListingOfAll(Listing):
    """The same among those of all parts."""

    subscription: Subscription | None = None
    origin: Origin | None = None


class Chosen(Given):
    """Which dead letters to deal with: those that fit each part that is given, or `all`."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"ids": [17, 18]}, {"reason": "mailbox"}, {"all": True}]}
    )

    ids: list[Number] = Field(default_factory=list, max_length=MOST_AT_ONCE)
    reason: Reason | None = None
    all: bool = False
    dry_run: bool = Field(default=False, description="only say what would be done")
    limit: Annotated[int, Field(ge=1, le=MOST_AT_ONCE, description="the oldest so many")] = MOST_AT_ONCE


class ChosenOfAll(Chosen):
    """The same among those of all parts."""

    subscription: Subscription | None = None
    origin: Origin | None = None


@router.get(_OF_ONE, response_model=LettersBody, responses=documented(*_ERRORS))
async def list_of_subscription(request: Request, name: str, given: Annotated[Listing, Query()]) -> Response:
    """The dead letters of a subscription, the oldest first. For: the subscription, admin."""
    context.require_owner_or_admin(request, name)
    return await _list(request, given, Choice(subscription=name, reason=given.reason))


@router.get(f"{_OF_ONE}/{{letter}}", response_model=WholeLetterBody, responses=documented(*_ERRORS))
async def show_of_subscription(request: Request, name: str, letter: Letter) -> Response:
    """A dead letter with the message as it was, and every attempt that was noted. For: the subscription, admin."""
    context.require_owner_or_admin(request, name)
    return await _show(request, letter, Choice(subscription=name))


@router.post(_OF_ONE, response_model=ReportBody, responses=documented(*_ERRORS))
async def retry_of_subscription(request: Request, name: str, given: Chosen) -> Response:
    """Put dead letters back: they are delivered next, the oldest first. For: the subscription, admin.

    Each is put back once, however often this is asked. `failed` tells those that stay.
    """
    context.require_owner_or_admin(request, name)
    choice = Choice(subscription=name, ids=tuple(given.ids), reason=given.reason)
    return await _deal(given, choice, context.services(request).letters.retry)


@router.delete(_OF_ONE, response_model=ReportBody, responses=documented(*_ERRORS))
async def discard_of_subscription(request: Request, name: str, given: Annotated[Chosen, Query()]) -> Response:
    """Take dead letters out for good. For: the subscription, admin."""
    context.require_owner_or_admin(request, name)
    choice = Choice(subscription=name, ids=tuple(given.ids), reason=given.reason)
    return await _deal(given, choice, context.services(request).letters.discard)


@router.get(_OF_ALL, response_model=LettersBody, responses=documented(*_ERRORS))
async def list_all(request: Request, given: Annotated[ListingOfAll, Query()]) -> Response:
    """The dead letters of all parts, the oldest first. For: admin."""
    context.require_role(request, Role.ADMIN)
    choice = Choice(subscription=given.subscription, origin=given.origin, reason=given.reason)
    return await _list(request, given, choice)


@router.get(f"{_OF_ALL}/{{letter}}", response_model=WholeLetterBody, responses=documented(*_ERRORS))
async def show_any(request: Request, letter: Letter) -> Response:
    """A dead letter with the message as it was. For: admin."""
    context.require_role(request, Role.ADMIN)
    return await _show(request, letter, Choice())


@router.post(_OF_ALL, response_model=ReportBody, responses=documented(*_ERRORS))
async def retry_any(request: Request, given: ChosenOfAll) -> Response:
    """Put dead letters of any part back to where they were given up. For: admin."""
    context.require_role(request, Role.ADMIN)
    return await _deal(given, _of_all(given), context.services(request).letters.retry)


@router.delete(_OF_ALL, response_model=ReportBody, responses=documented(*_ERRORS))
async def discard_any(request: Request, given: Annotated[ChosenOfAll, Query()]) -> Response:
    """Take dead letters out for good. For: admin."""
    context.require_role(request, Role.ADMIN)
    return await _deal(given, _of_all(given), context.services(request).letters.discard)


async def _list(request: Request, given: Listing, choice: Choice) -> Response:
    page = await context.services(request).letters.list(choice, after=given.after, limit=given.limit)
    return context.as_json({"dead_letters": [summary(each) for each in page.letters], "next": page.next})


async def _show(request: Request, letter: int, choice: Choice) -> Response:
    return context.as_json(whole(await context.services(request).letters.show(letter, choice)))


async def _deal(given: Chosen, choice: Choice, deal: Callable[..., Awaitable[Report]]) -> Response:
    """Nothing is done to all because somebody forgot to say which; to name a subscription is not enough."""
    chosen = bool(choice.ids or choice.reason or choice.origin)
    if given.all == chosen:
        raise InvalidInput(
            "all, and only some, contradict each other" if chosen else "which dead letters?",
            fix="give ids, a reason, or all",
        )
    report = await deal(choice, dry_run=given.dry_run, most=None if choice.ids else given.limit)
    return context.as_json({"dry_run": given.dry_run, **report_json(report)})


def _of_all(given: ChosenOfAll) -> Choice:
    return Choice(ids=tuple(given.ids), subscription=given.subscription, origin=given.origin, reason=given.reason)
