"""The console of an API of several processes: one of them serves it, and the others forward its requests to that one.

A page of the console is state in the memory of the process that built it, and its WebSocket is a connection of its own,
which any process on the port may accept. So worker 1 serves the console also on a Unix socket in a private directory,
and the others forward there. Worker 1 trusts the headers with the address of the client on that socket only.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import aiohttp
import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from yarl import URL

from purveyor.app.console.console_login import API_PREFIX, MAX_FORM_BYTES, Sessions, is_console, read_body
from purveyor.app.http.uvicorn_adapter import SocketServer
from purveyor.model.errors import SetupError

_CLIENT: Final = b"x-purveyor-client"
_SCHEME: Final = b"x-purveyor-scheme"
_MAX_BODY_BYTES: Final = 4 << 20
"""Of a request with a session. Without one, only the form of the login has a body."""
_CONNECT_TIMEOUT_SECONDS: Final = 5.0
_ANSWER_TIMEOUT_SECONDS: Final = 60.0
"""Longer than a poll of the browser waits."""
_START_POLL_SECONDS: Final = 0.01
_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
_NOT_FORWARDED: Final = _HOP_BY_HOP | {b"content-length", _CLIENT, _SCHEME}
_GOING_AWAY: Final = 1001
_POLICY_VIOLATION: Final = 1008
_TRY_AGAIN: Final = 1013
_GRACE_SECONDS: Final = 1
_log = logging.getLogger(__name__)


class ConsoleForwarder:
    """ASGI middleware of the other workers: it forwards requests for the console, and passes all others on."""

    def __init__(self, app: ASGIApp, path: Path, sessions: Sessions) -> None:
        self._app = app
        self._path = path
        self._sessions = sessions
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request for the console, or pass the request on unchanged."""
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                if self._session is not None:
                    await self._session.close()
        elif scope["path"].startswith(API_PREFIX) or not is_console(scope["path"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._forward_websocket(scope, receive, send)
        else:
            await self._forward_request(scope, receive, send)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self._path), limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_TIMEOUT_SECONDS, sock_read=_ANSWER_TIMEOUT_SECONDS
                ),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._session

    async def _forward_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        cookie = dict(scope["headers"]).get(b"cookie", b"").decode("latin-1")
        try:
            body = await read_body(receive, _MAX_BODY_BYTES if self._sessions.read(cookie) else MAX_FORM_BYTES)
        except ClientDisconnect:
            return
        if body is None:
            await PlainTextResponse("", HTTPStatus.REQUEST_ENTITY_TOO_LARGE)(scope, receive, send)
            return
        begun = False
        try:
            async with self._client().request(
                scope["method"], _url(scope), headers=_headers(scope), data=body or None, allow_redirects=False
            ) as answer:
                headers = [(name.lower(), value) for name, value in answer.raw_headers]
                kept = [(name, value) for name, value in headers if name not in _HOP_BY_HOP]
                await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                begun = True
                async for chunk in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, OSError) as error:
            _log.debug("cannot forward a request for the console: %s", error)
            if begun:
                raise  # the connection closes: the client must not take a part for the whole
            answer_away = PlainTextResponse(
                "The console starts. Try again in a moment.", HTTPStatus.SERVICE_UNAVAILABLE, {"retry-after": "1"}
            )
            await answer_away(scope, receive, send)

    async def _forward_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # the request to connect
        headers = [each for each in _headers(scope) if not each[0].startswith("sec-websocket-")]
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_SECONDS):
                connected = await self._client().ws_connect(
                    _url(scope), headers=headers, protocols=scope.get("subprotocols", ()), max_msg_size=0
                )
            async with connected as socket:
                await send({"type": "websocket.accept", "subprotocol": socket.protocol})
                await _pump(socket, receive, send)
        except aiohttp.WSServerHandshakeError:
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "refused"})
        except (aiohttp.ClientError, OSError) as error:
            _log.debug("cannot forward a WebSocket of the console: %s", error)
            await send({"type": "websocket.close", "code": _TRY_AGAIN, "reason": "the console starts"})


async def _pump(socket: aiohttp.ClientWebSocketResponse, receive: Receive, send: Send) -> None:
    """Pass messages on in both directions until one side closes."""

    async def to_console() -> None:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            await (socket.send_bytes(message["bytes"]) if text is None else socket.send_str(text))

    async def to_browser() -> None:
        async for message in socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                await send({"type": "websocket.send", "text": message.data})
            elif message.type is aiohttp.WSMsgType.BINARY:
                await send({"type": "websocket.send", "bytes": message.data})
        await send({"type": "websocket.close", "code": socket.close_code or _GOING_AWAY, "reason": ""})

    tasks = [asyncio.create_task(to_console()), asyncio.create_task(to_browser())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                _log.debug("a WebSocket of the console ended: %s", outcome)


def _url(scope: Scope) -> URL:
    path = scope.get("raw_path") or scope["path"].encode()
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    return URL("http://console" + (path + query).decode("latin-1"), encoded=True)


def _headers(scope: Scope) -> list[tuple[str, str]]:
    """Return the headers to forward, with the address of the client and the scheme of its request."""
    kept = [(name, value) for name, value in scope["headers"] if name not in _NOT_FORWARDED]
    client = scope.get("client")
    added = [(_CLIENT, str(client[0] if client else "").encode()), (_SCHEME, scope["scheme"].encode())]
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in (*kept, *added)]


@contextlib.asynccontextmanager
async def serve_forwarded(app: ASGIApp, path: Path) -> AsyncIterator[None]:
    """Serve forwarded requests on a Unix socket until the end of the block. SetupError says why it cannot."""

    async def restore(scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        client = headers.get(_CLIENT, b"").decode("latin-1")
        restored: dict[str, Any] = {
            "client": (client, 0) if client else None,
            "scheme": headers.get(_SCHEME, b"http").decode("latin-1"),
            "headers": [each for each in scope["headers"] if each[0] not in (_CLIENT, _SCHEME)],
        }
        await app({**scope, **restored}, receive, send)

    await asyncio.to_thread(path.unlink, missing_ok=True)  # of a worker that died
    config = uvicorn.Config(
        restore,
        uds=str(path),
        ws="websockets-sansio",
        lifespan="off",
        log_config=None,
        access_log=logging.getLogger().isEnabledFor(logging.DEBUG),
        proxy_headers=False,
        server_header=False,
        date_header=False,  # the other worker adds its own
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = SocketServer(config)
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.wait((serving,), timeout=_START_POLL_SECONDS)
    if not server.started:
        raise SetupError(
            f"the console cannot listen on {path}: {serving.exception()}", fix="set TMPDIR to a short, writable path"
        )
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)
