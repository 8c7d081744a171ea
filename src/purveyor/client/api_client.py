"""Requests to the HTTP API: with the login, repeated while the API is unavailable, its errors as those of our tree."""

import asyncio
import base64
import json
import logging
import ssl
import time
from collections.abc import Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import aiohttp

from purveyor.model.errors import (
    AuthenticationFailed,
    InvalidInput,
    NotFound,
    PermissionDenied,
    PurveyorError,
    Refused,
    ServerUnavailable,
)
from purveyor.model.retries import Backoff, RetryDelays, random_jitter

_log = logging.getLogger("purveyor.client")
_CONNECT_TIMEOUT_SECONDS: Final = 10.0
_RESPONSE_TIMEOUT_SECONDS: Final = 30.0
"""Beside the time that the API itself waits for messages."""
_RETRY_BACKOFF: Final = Backoff(0.1, 10.0)
_RETRYABLE_STATUSES: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT})


class ApiClient:
    """The routes of one subscription."""

    def __init__(
        self, url: str, subscription: str, authorization: str, *, instance: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self._url = url.rstrip("/")
        self._base = f"{self._url}/v1/subscriptions/{quote(subscription, safe='')}"
        self._headers = {"Authorization": authorization, "X-Consumer-Instance": instance}
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None
        self._is_unavailable = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers, connector=aiohttp.TCPConnector(limit=0, ssl=self._tls or True)
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
        """Return the response of one request; repeat it while the API is unavailable, for ever without a patience.

        A refusal is final, and raised: `AuthenticationFailed` (401), `PermissionDenied` (403), `NotFound`, `Refused`
        (409), `InvalidInput` (422). At the end of the patience: `ServerUnavailable`.
        """
        deadline = None if patience_seconds is None else time.monotonic() + patience_seconds
        delays = RetryDelays(_RETRY_BACKOFF)
        while True:
            requested_seconds = 0.0
            try:
                status, headers, text = await self._request(method, path, body, wait_seconds)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            except aiohttp.ClientError as error:
                raise InvalidInput(f"no request can be made to {self._url}: {error}", fix="check the URL") from error
            else:
                if status < HTTPStatus.BAD_REQUEST:
                    self._log_available()
                    return json.loads(text)
                if status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _RETRYABLE_STATUSES:
                    raise _refusal(status, text)
                requested_seconds = parse_retry_after(headers.get("Retry-After"))
                reason = _text_field(text, "detail") or f"status {status}"
            delay_seconds = max(requested_seconds, delays.next_seconds(jitter=random_jitter()))
            if deadline is not None and time.monotonic() + delay_seconds > deadline:
                raise ServerUnavailable(f"the API at {self._url} is unavailable: {reason}", fix="try again later")
            self._log_unavailable(reason)
            await asyncio.sleep(delay_seconds)

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, wait_seconds: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        if self._session is None:
            raise InvalidInput("the consumer is not open", fix="use it in `async with Consumer(...) as consumer:`")
        timeout = aiohttp.ClientTimeout(
            total=wait_seconds + _RESPONSE_TIMEOUT_SECONDS, sock_connect=_CONNECT_TIMEOUT_SECONDS
        )
        url = f"{self._base}/{path}" if path else self._base
        async with self._session.request(method, url, json=body, timeout=timeout) as response:
            return response.status, response.headers, await response.read()

    def _log_unavailable(self, reason: str) -> None:
        """Warn once per outage."""
        if not self._is_unavailable:
            _log.warning("the API at %s is unavailable, the consumer retries: %s", self._url, reason)
        self._is_unavailable = True

    def _log_available(self) -> None:
        if self._is_unavailable:
            _log.warning("the API at %s is available again", self._url)
        self._is_unavailable = False


def authorization_header(subscription: str, password: str | None, token: str | None) -> str:
    """Return the value of the `Authorization` header of a consumer."""
    if (password is None) == (token is None):
        raise InvalidInput("a consumer logs in with a password or with a token", fix="give one of the two")
    if token is not None:
        return f"Bearer {token}"
    return "Basic " + base64.b64encode(f"{subscription}:{password}".encode()).decode()


def parse_retry_after(header: str | None) -> float:
    """Return the seconds of a `Retry-After` header; 0 for a date, which our API does not send.

    >>> parse_retry_after("3"), parse_retry_after(None), parse_retry_after("Wed, 21 Oct 2026 07:28:00 GMT")
    (3.0, 0.0, 0.0)
    """
    return float(header) if header is not None and header.isdecimal() else 0.0


def _refusal(status: int, text: bytes) -> PurveyorError:
    detail, fix = _text_field(text, "detail") or f"the API answered {status}", _text_field(text, "fix")
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


def _text_field(text: bytes, name: str) -> str | None:
    try:
        found = json.loads(text)[name]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
