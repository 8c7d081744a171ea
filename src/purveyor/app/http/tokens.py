"""Routes of tokens: another way to log in, several at once for a login, so that they can be exchanged one by one."""

from datetime import datetime
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from purveyor.app.http import context
from purveyor.app.http.models import Given
from purveyor.app.http.problems import documented
from purveyor.app.http.security import Principal
from purveyor.delivery.credentials import Token

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])


class NewToken(Given):
    """A token to be made."""

    login: str | None = Field(default=None, description="whose; default: that of the one who asks (admin may name any)")
    label: str = Field(default="", max_length=200, examples=["host a"])
    expires_in_seconds: Annotated[float, Field(gt=0, le=10 * 365 * 86400, allow_inf_nan=False)] | None = None


class TokenBody(BaseModel):
    """A token, without its text."""

    id: str
    login: str
    label: str
    created: datetime
    expires: datetime | None


class MadeToken(TokenBody):
    """A token with its text, which is shown this once."""

    token: str


@router.get("", responses=documented(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY))
async def list_tokens(request: Request, login: str | None = None) -> list[TokenBody]:
    """The tokens of the login that asks; an administrator may name another. For: every login."""
    whose, _ = await _whose(request, login)
    return [_body(token) for token in await context.services(request).credentials.tokens(whose)]


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    responses=documented(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def make_token(request: Request, given: NewToken) -> MadeToken:
    """Make a token: `Authorization: Bearer <token>` logs in like the password. It is shown this once.

    For: every login.
    """
    whose, incarnation = await _whose(request, given.login)
    token, text = await context.services(request).credentials.add_token(
        whose, incarnation, label=given.label, seconds=given.expires_in_seconds
    )
    return MadeToken(**_body(token).model_dump(), token=text)


@router.delete(
    "/{token_id}",
    responses=documented(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def end_token(request: Request, token_id: str, login: str | None = None) -> None:
    """End a token: nobody logs in with it any more. For: every login, its own ones."""
    whose, _ = await _whose(request, login)
    await context.services(request).credentials.remove_token(whose, token_id)
    context.security(request).forget_token(token_id)


async def _whose(request: Request, login: str | None) -> tuple[str, str | None]:
    """The login that is meant, and the incarnation if it is a subscription's."""
    who: Principal = context.principal(request)
    if login is None or login == who.login:
        return who.login, who.incarnation
    if not who.is_admin:
        raise context.forbidden(who, f"{login!r} itself, or an administrator")
    if context.security(request).is_reserved(login):
        return login, None
    return login, (await context.services(request).subscriptions.get(login)).incarnation


def _body(token: Token) -> TokenBody:
    return TokenBody(id=token.id, login=token.login, label=token.label, created=token.created, expires=token.until)
