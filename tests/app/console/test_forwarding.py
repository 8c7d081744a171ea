"""Forwarding to the process that serves the console: bounded before a login, never of half a request."""

import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from purveyor.app.console.console_login import MAX_FORM_BYTES, Sessions
from purveyor.app.console.forwarding import ConsoleForwarder, serve_forwarded
from purveyor.app.http.authentication import Login, Role
from purveyor.model.errors import SetupError

SESSIONS = Sessions(b"secret", Login(role=Role.ADMIN, username="admin", password="secret"))


async def _do_nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """Be the application to which the forwarder passes other requests on."""


class Console:
    """The process with the console, on a socket of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bodies: list[int] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        self.bodies.append(size)
        await PlainTextResponse("served")(scope, receive, send)

    async def post(self, messages: Sequence[Message], cookie: str = "") -> list[Message]:
        """Send a request through a forwarder; return the messages of its answer."""
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "scheme": "http",
            "path": "/console/login",
            "query_string": b"",
            "headers": [(b"host", b"console"), (b"cookie", cookie.encode())],
            "client": ("127.0.0.1", 1),
        }
        left, sent = iter(messages), list[Message]()

        async def receive() -> Message:
            return next(left)

        async def send(message: Message) -> None:
            sent.append(message)

        forwarder = ConsoleForwarder(_do_nothing, self.path, SESSIONS)
        try:
            await forwarder(scope, receive, send)
        finally:
            await forwarder({"type": "lifespan"}, receive, send)  # closes its connections
        return sent


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as found:  # the path of a socket is short
        yield Path(found)


@pytest.fixture
async def console(directory: Path) -> AsyncIterator[Console]:
    served = Console(directory / "console")
    async with serve_forwarded(served, served.path):
        yield served


def request(body: bytes, *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_request_is_forwarded_whole_or_not_at_all(console: Console) -> None:
    answer = await console.post([request(b"user=admin&", more=True), request(b"password=x")])
    assert (answer[0]["status"], answer[1]["body"], console.bodies) == (200, b"served", [21])
    assert [name for name, _ in answer[0]["headers"]].count(b"date") == 0, "the server of the forwarder adds it"
    cut_off: list[Message] = [request(b"user=admin&password=se", more=True), {"type": "http.disconnect"}]
    assert await console.post(cut_off) == []
    assert console.bodies == [21]


async def test_without_a_session_a_body_is_no_longer_than_the_form_of_the_login(console: Console) -> None:
    large = request(bytes(MAX_FORM_BYTES + 1))
    assert (await console.post([large]))[0]["status"] == 413
    cookie = SESSIONS.cookie(secure=False).partition(";")[0]
    assert (await console.post([large], cookie))[0]["status"] == 200
    assert console.bodies == [MAX_FORM_BYTES + 1]


async def test_a_path_that_no_socket_can_have_is_an_error_that_names_it(directory: Path) -> None:
    path = directory / ("x" * 120)
    with pytest.raises(SetupError, match=f"cannot listen on {path}"):
        async with serve_forwarded(PlainTextResponse("served"), path):
            pass


async def test_while_the_console_is_away_the_answer_says_try_again(directory: Path) -> None:
    answer = await Console(directory / "console").post([request(b"")])
    assert answer[0]["status"] == 503
