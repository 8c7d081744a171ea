"""Routes of tokens: another way to log in, several at once for a login, so that they can be exchanged one by one.

What is valid for a while makes nothing that is valid for longer: a token that is made with a token ends with that one,
and a password that is valid for a while beside a new one makes no tokens.
"""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from purveyor.app.http import context
from purveyor.app.http.authentication import Principal, Proof
from purveyor.app.http.models import Given
from purveyor.app.http.problems import Problem, documented
from purveyor.delivery.tokens import Token, TokenOptions
from purveyor.model.errors import InvalidInput

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
    responses=documented(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def make_token(request: Request, given: NewToken) -> MadeToken:
    """Make a token: `Authorization: Bearer <token>` logs in like the password. It is shown this once.

    One that is made with a token ends with that token. 409: the login has 100 tokens. For: every login.
    """
    whose, incarnation = await _whose(request, given.login)
    who = context.principal(request)
    _check(who.proof, given.expires_in_seconds)
    own = context.security(request).login(whose)
    options = TokenOptions(
        label=given.label,
        seconds=given.expires_in_seconds,
        until=who.proof.until,
        generation=who.proof.generation if whose == who.login else None,
        parent=who.proof.token,
        password=None if own is None else own.password,
    )
    token, text = await context.services(request).credentials.add_token(whose, incarnation, options)
    return MadeToken(**_body(token).model_dump(), token=text)


@router.delete(
    "/{token_id}",
    responses=documented(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def end_token(request: Request, token_id: str, login: str | None = None) -> None:
    """End a token, and those that were made with it: nobody logs in with them any more.

    For: every login, its own ones.
    """
    whose, _ = await _whose(request, login)
    for ended in await context.services(request).credentials.remove_token(whose, token_id):
        context.security(request).forget_token(ended)


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


def _check(proof: Proof, seconds: float | None) -> None:
    """Refuse a token that would be valid for longer than what it is made with."""
    if proof.derived:
        raise Problem(
            HTTPStatus.FORBIDDEN,
            "a token that was made with a token makes no tokens",
            "log in with the password, or with the token that it was made with",
        )
    if proof.until is None:
        return
    if proof.token is None:
        raise Problem(
            HTTPStatus.FORBIDDEN,
            f"this password was replaced, is valid until {proof.until.isoformat()}, and makes no tokens",
            "log in with the new password",
        )
    left = (proof.until - datetime.now(UTC)).total_seconds()
    if seconds is not None and seconds > left:
        raise InvalidInput(
            f"a token of {seconds:g} seconds would be valid for longer than the token it is made with",
            fix=f"ask for {max(left, 0):.0f} seconds or less, for no time at all, or log in with the password",
        )


def _body(token: Token) -> TokenBody:
    return TokenBody(id=token.id, login=token.login, label=token.label, created=token.created, expires=token.until)
