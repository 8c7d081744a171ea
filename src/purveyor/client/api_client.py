"""Requests to the HTTP API: with the login, repeated while the API is unavailable, its errors as those of our tree."""

import asyncio
import base64
import contextlib
import io
import json
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
from yarl import URL

from purveyor.model.errors import (
    AuthenticationFailed,
    DataLost,
    InvalidInput,
    NotFound,
    PermissionDenied,
    PurveyorError,
    Refused,
    ServerUnavailable,
    Unavailable,
)
from purveyor.model.retries import Backoff, RetryDelays, random_jitter

_log = logging.getLogger("purveyor.client")
_CONNECT_TIMEOUT_SECONDS: Final = 10.0
_RESPONSE_TIMEOUT_SECONDS: Final = 30.0
"""Beside the time that the API itself waits for messages."""
_RETRY_BACKOFF: Final = Backoff(0.1, 10.0)
_RETRYABLE_STATUSES: Final = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.REQUEST_TIMEOUT})
_FOREIGN_STATUSES: Final = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED})
"""Errors which, without a body of our form, mean that another program answered."""
_JSON_TYPE: Final = "application/json"
_PROBLEM_TYPE: Final = "application/problem+json"


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Where the API is, and the login there."""

    url: str
    authorization: str = field(repr=False)
    """The value of the header `Authorization`."""
    tls: ssl.SSLContext | None = None
    """For an API with a certificate that the system does not know."""


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """A successful answer."""

    status: int
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failed attempt that may be repeated: why, and the body of the answer if there was one."""

    reason: str
    status: int = 0
    text: bytes = b""
    retry_after_seconds: float = 0.0


class RequestRefused(InvalidInput):
    """The API refused the content of a request. `mistakes` are the fields and what is wrong there, if it named them."""

    def __init__(self, message: str, *, fix: str | None, status: int, mistakes: tuple[tuple[str, str], ...]) -> None:
        super().__init__(message, fix=fix)
        self.status = status
        self.mistakes = mistakes


class ApiClient:
    """The requests of one login, to the routes below one path.

    `on_failure` is called with the reason when an attempt fails and is repeated.
    """

    def __init__(
        self,
        access: ApiAccess,
        *,
        base: str = "",
        headers: Mapping[str, str] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self._url = access.url.rstrip("/")
        self._base = self._url + base
        self._headers = {"Authorization": access.authorization, **(headers or {})}
        self._tls = access.tls
        self._on_failure = on_failure
        self._session: aiohttp.ClientSession | None = None
        self._has_answered = False
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
        body: object = None,
        *,
        patience_seconds: float | None = None,
        wait_seconds: float = 0.0,
    ) -> Any:
        """Return the body of the answer to one request. See `request`."""
        answer = await self.request(method, path, body, patience_seconds=patience_seconds, wait_seconds=wait_seconds)
        return answer.body

    async def request(
        self,
        method: str,
        path: str = "",
        body: object = None,
        *,
        patience_seconds: float | None = None,
        wait_seconds: float = 0.0,
    ) -> ApiAnswer:
        """Return the answer to one request; repeat it while the API is unavailable, for ever without a patience.

        A body of bytes is JSON already. The path is encoded, and may hold a query. A refusal is final, and raised:
        `AuthenticationFailed` (401), `PermissionDenied` (403), `NotFound`, `Refused` (409), `DataLost` (410),
        `RequestRefused` (413, 422). At the end of the patience: `Unavailable`. An address that has never been an API
        raises `InvalidInput` at once.
        """
        deadline = None if patience_seconds is None else time.monotonic() + patience_seconds
        delays = RetryDelays(_RETRY_BACKOFF)
        while True:
            found = await self._attempt(method, path, body, wait_seconds)
            if isinstance(found, ApiAnswer):
                self._log_available()
                return found
            delay_seconds = max(found.retry_after_seconds, delays.next_seconds(jitter=random_jitter()))
            if deadline is not None and time.monotonic() + delay_seconds > deadline:
                raise self._unavailable(found)
            self._log_unavailable(found.reason)
            await asyncio.sleep(delay_seconds)

    async def _attempt(self, method: str, path: str, body: object, wait_seconds: float) -> ApiAnswer | _Failure:
        try:
            status, headers, text = await self._send(method, path, body, wait_seconds)
        except aiohttp.ClientSSLError as error:
            if not self._has_answered:
                raise self._no_tls(error) from error
            return _Failure(_connection_error(error))
        except TimeoutError:
            return _Failure(f"no answer in {wait_seconds + _RESPONSE_TIMEOUT_SECONDS:g} seconds")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return _Failure(_connection_error(error))
        except aiohttp.ClientError as error:
            raise InvalidInput(f"no request can be made to {self._url}: {error}", fix="check the URL") from error
        kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if status < HTTPStatus.MULTIPLE_CHOICES and kind == _JSON_TYPE:
            with contextlib.suppress(ValueError):
                answer = ApiAnswer(status, headers, json.loads(text))
                self._has_answered = True
                return answer
        if status < HTTPStatus.BAD_REQUEST or (status in _FOREIGN_STATUSES and kind != _PROBLEM_TYPE):
            raise self._no_api(method, path, status, headers)
        if status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _RETRYABLE_STATUSES:
            raise _refusal(status, text)
        return _Failure(
            _text_field(text, "detail") or f"status {status}",
            status,
            text,
            parse_retry_after(headers.get("Retry-After")),
        )

    async def _send(
        self, method: str, path: str, body: object, wait_seconds: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        if self._session is None:
            raise InvalidInput("the client is not open", fix="use it in `async with`")
        timeout = aiohttp.ClientTimeout(
            total=wait_seconds + _RESPONSE_TIMEOUT_SECONDS, sock_connect=_CONNECT_TIMEOUT_SECONDS
        )
        url = URL(f"{self._base}/{path}" if path else self._base, encoded=True)  # a topic may hold any character
        data = json.dumps(body).encode() if body is not None and not isinstance(body, bytes) else body
        headers = None if data is None else {"Content-Type": _JSON_TYPE}
        stream = None if data is None else io.BytesIO(data)  # aiohttp writes a large one in parts
        async with self._session.request(
            method, url, data=stream, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            return response.status, response.headers, await response.read()

    def _unavailable(self, failure: _Failure) -> Unavailable:
        """Return the error at the end of the patience."""
        fix = _text_field(failure.text, "fix")
        if failure.status == HTTPStatus.TOO_MANY_REQUESTS:
            seconds = f"try again in {failure.retry_after_seconds:g} seconds"
            return Unavailable(failure.reason, fix=fix or seconds)
        if not failure.status:
            fix = "check the URL, and that `purveyor serve api` runs there"
        return ServerUnavailable(
            f"the API at {self._url} is unavailable: {failure.reason}", fix=fix or "try again later"
        )

    def _no_tls(self, error: aiohttp.ClientSSLError) -> InvalidInput:
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            cause = error.certificate_error
            reason = getattr(cause, "verify_message", "") or str(cause)
            return InvalidInput(
                f"the certificate of {self._url} is not accepted: {reason}",
                fix="give the certificate of its authority: --api-tls-ca, or `tls` of the options in Python",
            )
        return InvalidInput(
            f"{self._url} does not speak TLS", fix="check the port, or write http:// instead of https://"
        )

    def _no_api(self, method: str, path: str, status: int, headers: Mapping[str, str]) -> InvalidInput:
        """Return the error for the answer of a program that is not Purveyor's API."""
        target = headers.get("Location")
        if target is not None and status >= HTTPStatus.MULTIPLE_CHOICES:
            return InvalidInput(f"{self._url} redirects to {target}", fix="give the URL behind the redirection")
        kind = headers.get("Content-Type", "no type").partition(";")[0]
        route = f"{self._base.removeprefix(self._url)}/{path.partition('?')[0]}"
        return InvalidInput(
            f"{self._url} is not the API of Purveyor: the answer to {method} {route} was {status} and {kind}",
            fix="check the URL; it is what `purveyor serve api` prints, such as http://127.0.0.1:7777",
        )

    def _log_unavailable(self, reason: str) -> None:
        """Warn once per outage."""
        if not self._is_unavailable:
            _log.warning("the API at %s is unavailable, the client retries: %s", self._url, reason)
            if self._on_failure is not None:
                self._on_failure(reason)
        self._is_unavailable = True

    def _log_available(self) -> None:
        if self._is_unavailable:
            _log.warning("the API at %s is available again", self._url)
        self._is_unavailable = False


def authorization_header(login: str, password: str | None, token: str | None) -> str:
    """Return the value of the `Authorization` header of a login: the name of a subscription, or a user name."""
    if (password is None) == (token is None):
        raise InvalidInput("a client logs in with a password or with a token", fix="give one of the two")
    if token is not None:
        return f"Bearer {token}"
    return "Basic " + base64.b64encode(f"{login}:{password}".encode()).decode()


def parse_retry_after(header: str | None) -> float:
    """Return the seconds of a `Retry-After` header; 0 for a date, which our API does not send.

    >>> parse_retry_after("3"), parse_retry_after(None), parse_retry_after("Wed, 21 Oct 2026 07:28:00 GMT")
    (3.0, 0.0, 0.0)
    """
    return float(header) if header is not None and header.isdecimal() else 0.0


def _refusal(status: int, text: bytes) -> PurveyorError:
    detail = _text_field(text, "detail") or f"the request was answered with {status} ({_phrase(status)})"
    fix = _text_field(text, "fix") or "check the URL, and the proxies before the API: it gives a reason with each error"
    match status:
        case HTTPStatus.UNAUTHORIZED:
            return AuthenticationFailed(detail, fix=fix)
        case HTTPStatus.FORBIDDEN:
            return PermissionDenied(detail, fix=fix, code=status)
        case HTTPStatus.NOT_FOUND:
            return NotFound(detail, fix=fix)
        case HTTPStatus.CONFLICT:
            return Refused(detail, fix=fix, code=status)
        case HTTPStatus.GONE:
            return DataLost(detail, fix=fix)
        case HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            fix = _text_field(text, "fix") or "send less, or raise the limit of the proxy"
            return RequestRefused(detail, fix=fix, status=status, mistakes=())
        case _:
            return RequestRefused(detail, fix=fix, status=status, mistakes=_mistakes(text))


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "unknown status"


def _connection_error(error: aiohttp.ClientError) -> str:
    """Return why a connection failed, without the address that the message around it names."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else None
    if isinstance(cause, OSError):
        if cause.errno and not isinstance(cause, socket.gaierror):
            return os.strerror(cause.errno).lower()
        return (cause.strerror or str(cause)).lower()
    return str(error) or type(error).__name__


def _mistakes(text: bytes) -> tuple[tuple[str, str], ...]:
    try:
        return tuple((str(each["where"]), str(each["what"])) for each in json.loads(text)["errors"])
    except (ValueError, KeyError, TypeError):
        return ()


def _text_field(text: bytes, name: str) -> str | None:
    try:
        found = json.loads(text)[name]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
