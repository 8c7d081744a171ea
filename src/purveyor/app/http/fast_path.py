"""A fast path for the two requests of a consumer's loop, `next` and `ok`: the framework would cost more than the work.

The fast path calls the same handlers, and only for requests in their plain form. Every other form, and so every
invalid request, goes through FastAPI, which validates it.
"""

import re
from collections.abc import Awaitable
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from purveyor.app.http import messages
from purveyor.app.http.auth_middleware import count_response
from purveyor.app.http.messages import StatusReport
from purveyor.app.http.problems import answer_to
from purveyor.model.metrics import HTTP_REQUESTS

_PATH: Final = re.compile(r"/v1/subscriptions/([A-Za-z0-9_-]{1,64})/messages/(?:next|(\d{1,18})/status)")
_QUERY: Final = re.compile(rb"(?:timeout=(\d{1,3}(?:\.\d{1,3})?))?(?:&?pop=(true|false))?")
_NEXT_ROUTE: Final = "/v1/subscriptions/{name}/messages/next"
_STATUS_ROUTE: Final = "/v1/subscriptions/{name}/messages/{sequence}/status"
_DEFAULT_WAIT_SECONDS: Final = 5.0
_OK: Final = StatusReport(status="ok")
_OK_BODIES: Final = frozenset({b'{"status": "ok"}', b'{"status":"ok"}'})
_JSON_HEADER: Final = (b"content-type", b"application/json")


class FastPath:
    """ASGI middleware between `AuthMiddleware` and the FastAPI application."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or pass it on unchanged."""
        found = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, count_response(scope, send))
            return
        name, sequence = found.groups()
        if sequence is None and scope["method"] == "GET":
            query = _QUERY.fullmatch(scope["query_string"])
            if query is not None:
                seconds, pop = query.groups()
                request = Request(scope, receive)
                wait = _DEFAULT_WAIT_SECONDS if seconds is None else float(seconds)
                answer = await _answer(messages.next_message(request, name, wait, pop == b"true"))
                HTTP_REQUESTS.add(_NEXT_ROUTE, "GET", str(answer.status_code))
                await answer(scope, receive, send)
                return
        elif sequence is not None and scope["method"] == "PATCH" and not scope["query_string"]:
            first = await receive()
            if not first.get("more_body") and first.get("body") in _OK_BODIES and _JSON_HEADER in scope["headers"]:
                request = Request(scope, receive)
                answer = await _answer(messages.settle_message(request, name, int(sequence), _OK))
                HTTP_REQUESTS.add(_STATUS_ROUTE, "PATCH", str(answer.status_code))
                await answer(scope, receive, send)
                return
            receive = _replay(first, receive)
        await self._app(scope, receive, count_response(scope, send))


async def _answer(work: Awaitable[Response]) -> Response:
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - `answer_to` has an answer for every error
        return answer_to(error)


def _replay(first: Message, receive: Receive) -> Receive:
    """Replay the consumed first message to the next application."""
    consumed: Message | None = first

    async def read() -> Message:
        nonlocal consumed
        message, consumed = consumed, None
        return await receive() if message is None else message

    return read
