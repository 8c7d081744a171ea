"""Requests to the API: with the login, again and again while it is away, its errors as those of our tree."""

import asyncio
import base64
import json
import logging
import time
from collections.abc import Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp

from purveyor.client.consumer_options import Backoff, ConsumerOptions, retry_after
from purveyor.model.errors import (
    AuthenticationFailed,
    InvalidInput,
    NotFound,
    PermissionDenied,
    PurveyorError,
    Refused,
    ServerUnavailable,
)

_log = logging.getLogger("purveyor.client")
_CONNECT_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 30.0
_LATER: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT})


class Http:
    """The routes below one subscription."""

    def __init__(self, url: str, subscription: str, authorization: str, options: ConsumerOptions) -> None:
        self._url = url.rstrip("/")
        self._base = f"{self._url}/v1/subscriptions/{quote(subscription, safe='')}"
        self._headers = {"Authorization": authorization, "X-Consumer-Instance": options.instance}
        self._options = options
        self._session: aiohttp.ClientSession | None = None
        self._away = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers, connector=aiohttp.TCPConnector(limit=0, ssl=self._options.tls or True)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        method: str,
        path: str = "",
        body: Mapping[str, Any] | None = None,
        *,
        patience_seconds: float | None = None,
        wait_seconds: float = 0.0,
    ) -> Any:
        """The answer of one request. While the API is away it is made again, for ever if the patience is None.

        A refusal is final, and raised: `AuthenticationFailed` (401), `PermissionDenied` (403), `NotFound`, `Refused`
        (409), `InvalidInput` (422). At the end of the patience: `ServerUnavailable`.
        """
        give_up = None if patience_seconds is None else time.monotonic() + patience_seconds
        backoff = Backoff()
        while True:
            asked = 0.0
            try:
                status, headers, text = await self._once(method, path, body, wait_seconds)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            except aiohttp.ClientError as error:
                raise InvalidInput(f"no request can be made to {self._url}: {error}", fix="check the URL") from error
            else:
                if status < HTTPStatus.BAD_REQUEST:
                    self._is_back()
                    return json.loads(text)
                if status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _LATER:
                    raise _refusal(status, text)
                asked, reason = retry_after(headers.get("Retry-After")), _detail(text) or f"status {status}"
            pause = backoff.pause(asked)
            if give_up is not None and time.monotonic() + pause > give_up:
                raise ServerUnavailable(f"the API at {self._url} is away: {reason}", fix="try again later")
            self._is_away(reason)
            await asyncio.sleep(pause)

    async def _once(
        self, method: str, path: str, body: Mapping[str, Any] | None, wait_seconds: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        if self._session is None:
            raise InvalidInput("the consumer is not open", fix="use it in `async with Consumer(...) as consumer:`")
        timeout = aiohttp.ClientTimeout(total=wait_seconds + _ANSWER_SECONDS, sock_connect=_CONNECT_SECONDS)
        url = f"{self._base}/{path}" if path else self._base
        async with self._session.request(method, url, json=body, timeout=timeout) as answer:
            return answer.status, answer.headers, await answer.read()

    def _is_away(self, reason: str) -> None:
        if not self._away:
            _log.warning("the API at %s is away, it is waited for: %s", self._url, reason)
        self._away = True

    def _is_back(self) -> None:
        if self._away:
            _log.warning("the API at %s answers again", self._url)
        self._away = False


def authorization(subscription: str, password: str | None, token: str | None) -> str:
    """The header by which a consumer logs in."""
    if (password is None) == (token is None):
        raise InvalidInput("a consumer logs in with a password or with a token", fix="give one of the two")
    if token is not None:
        return f"Bearer {token}"
    return "Basic " + base64.b64encode(f"{subscription}:{password}".encode()).decode()


def _refusal(status: int, text: bytes) -> PurveyorError:
    detail, fix = _detail(text) or f"the API answered {status}", _field(text, "fix")
    match status:
        case HTTPStatus.UNAUTHORIZED:
            return AuthenticationFailed(detail, fix=fix)
        case HTTPStatus.FORBIDDEN:
            return PermissionDenied(detail, fix=fix, code=status)
        case HTTPStatus.NOT_FOUND:
            return NotFound(detail, fix=fix)
        case HTTPStatus.CONFLICT:
            return Refused(detail, fix=fix, code=status)
        case _:
            return InvalidInput(detail, fix=fix)


def _detail(text: bytes) -> str | None:
    return _field(text, "detail")


def _field(text: bytes, name: str) -> str | None:
    try:
        found = json.loads(text)[name]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
