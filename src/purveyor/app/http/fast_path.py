"""The two requests of a consumer's loop, `next` and `ok`, past the framework: it would cost more than the work.

The same handlers serve them, and only in their plain form; whatever looks different in any way, and so whatever is
wrong, goes the usual way, which reads it by the documented types.
"""

import re
from collections.abc import Awaitable
from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from purveyor.app.http import messages
from purveyor.app.http.models import StatusReport
from purveyor.app.http.problems import answer_to
from purveyor.app.http.request_metrics import count, counted

_PATH: Final = re.compile(r"/v1/subscriptions/([A-Za-z0-9_-]{1,64})/messages/(?:next|(\d{1,18})/status)")
_QUERY: Final = re.compile(rb"(?:timeout=(\d{1,3}(?:\.\d{1,3})?))?(?:&?pop=(true|false))?")
_NEXT: Final = "/v1/subscriptions/{name}/messages/next"
_STATUS: Final = "/v1/subscriptions/{name}/messages/{sequence}/status"
_DEFAULT_SECONDS: Final = 5.0
_OK: Final = StatusReport(status="ok")
_OK_BODIES: Final = frozenset({b'{"status": "ok"}', b'{"status":"ok"}'})
_JSON: Final = (b"content-type", b"application/json")


class Express:
    """See the module. Stands behind the guard and before the application."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or pass it on as it came."""
        found = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, counted(scope, send))
            return
        name, sequence = found.groups()
        if sequence is None and scope["method"] == "GET":
            query = _QUERY.fullmatch(scope["query_string"])
            if query is not None:
                seconds, pop = query.groups()
                request = Request(scope, receive)
                wait = _DEFAULT_SECONDS if seconds is None else float(seconds)
                answer = await _answer(messages.next_message(request, name, wait, pop == b"true"))
                count(_NEXT, "GET", answer.status_code)
                await answer(scope, receive, send)
                return
        elif sequence is not None and scope["method"] == "PATCH" and not scope["query_string"]:
            first = await receive()
            if not first.get("more_body") and first.get("body") in _OK_BODIES and _JSON in scope["headers"]:
                request = Request(scope, receive)
                answer = await _answer(messages.tell_status(request, name, int(sequence), _OK))
                count(_STATUS, "PATCH", answer.status_code)
                await answer(scope, receive, send)
                return
            receive = _again(first, receive)
        await self._app(scope, receive, counted(scope, send))


async def _answer(work: Awaitable[Response]) -> Response:
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - every error has its answer
        return answer_to(error)


def _again(first: Message, receive: Receive) -> Receive:
    """What was read is read once more by whoever comes behind."""
    given: Message | None = first

    async def read() -> Message:
        nonlocal given
        message, given = given, None
        return await receive() if message is None else message

    return read
