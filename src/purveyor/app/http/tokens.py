"""Routes of tokens: a second way to log in. A login may have several, so that clients can exchange them one by one.

A credential that expires cannot create one that lives longer: a token created with a token ends with it, and a
previous password in its grace time creates no tokens.
"""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from purveyor.app.http import context
from purveyor.app.http.authentication import Principal, Proof
from purveyor.app.http.models import RequestBody
from purveyor.app.http.problems import Problem, document_errors
from purveyor.delivery.tokens import Token, TokenOptions
from purveyor.model.errors import InvalidInput

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])


class NewToken(RequestBody):
    """A token to create."""

    login: str | None = Field(default=None, description="its login; default: your own (admin may name any)")
    label: str = Field(default="", max_length=200, examples=["host a"])
    expires_in_seconds: Annotated[float, Field(gt=0, le=10 * 365 * 86400, allow_inf_nan=False)] | None = None


class TokenBody(BaseModel):
    """A token without its text."""

    id: str
    login: str
    label: str
    created: datetime
    expires: datetime | None


class CreatedToken(TokenBody):
    """A new token with its text, which the API shows only once."""

    token: str


@router.get("", responses=document_errors(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY))
async def list_tokens(request: Request, login: str | None = None) -> list[TokenBody]:
    """List the tokens of your login; an administrator may name another login. For: every login."""
    whose, _ = await _resolve_login(request, login)
    return [_body(token) for token in await context.services(request).credentials.tokens(whose)]


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    responses=document_errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def create_token(request: Request, given: NewToken) -> CreatedToken:
    """Create a token: `Authorization: Bearer <token>` logs in like the password. The API shows it only once.

    A token created with a token ends with that token. 409: the login has 100 tokens. For: every login.
    """
    whose, incarnation = await _resolve_login(request, given.login)
    who = context.principal(request)
    _check(who.proof, given.expires_in_seconds)
    own = context.authenticator(request).login(whose)
    options = TokenOptions(
        label=given.label,
        seconds=given.expires_in_seconds,
        until=who.proof.until,
        generation=who.proof.generation if whose == who.login else None,
        parent=who.proof.token,
        password=None if own is None else own.password,
    )
    token, text = await context.services(request).credentials.add_token(whose, incarnation, options)
    return CreatedToken(**_body(token).model_dump(), token=text)


@router.delete(
    "/{token_id}",
    responses=document_errors(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def end_token(request: Request, token_id: str, login: str | None = None) -> None:
    """End a token and all tokens created with it: they do not log in any more.

    For: every login, its own tokens.
    """
    whose, _ = await _resolve_login(request, login)
    for ended in await context.services(request).credentials.remove_token(whose, token_id):
        context.authenticator(request).invalidate_token(ended)


async def _resolve_login(request: Request, login: str | None) -> tuple[str, str | None]:
    """Return the login that the request is about, and the incarnation if it is a subscription."""
    who: Principal = context.principal(request)
    if login is None or login == who.login:
        return who.login, who.incarnation
    if not who.is_admin:
        raise context.forbidden(who, f"the login of {login!r}, or of an administrator")
    if context.authenticator(request).is_reserved(login):
        return login, None
    return login, (await context.services(request).subscriptions.get(login)).incarnation


def _check(proof: Proof, seconds: float | None) -> None:
    """Refuse a token that would live longer than the credential that creates it."""
    if proof.derived:
        raise Problem(
            HTTPStatus.FORBIDDEN,
            "a token that was created with a token cannot create tokens",
            "log in with the password, or with the token that created it",
        )
    if proof.until is None:
        return
    if proof.token is None:
        raise Problem(
            HTTPStatus.FORBIDDEN,
            f"this password was replaced, is valid until {proof.until.isoformat()}, and cannot create tokens",
            "log in with the new password",
        )
    left = (proof.until - datetime.now(UTC)).total_seconds()
    if seconds is not None and seconds > left:
        raise InvalidInput(
            f"a token of {seconds:g} seconds would live longer than the token that creates it",
            fix=f"give {max(left, 0):.0f} seconds or less, leave the time out, or log in with the password",
        )


def _body(token: Token) -> TokenBody:
    return TokenBody(id=token.id, login=token.login, label=token.label, created=token.created, expires=token.until)
