"""The console of an API of several processes: every request reaches the process that has the page."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import httpx
import pytest

from purveyor.app.console.console_login import COOKIE
from purveyor.jetstream.address import Address
from tests.support.api_workers import Workers
from tests.support.waiting import PATIENCE_SECONDS, wait_until

_REQUESTS = 12
"""So many connections that no worker of two is left out."""
_SOCKET = "/_nicegui_ws/socket.io/?EIO=4"


@pytest.fixture
def api(tmp_path: Path, address: Address) -> Iterator[Workers]:
    workers = Workers(tmp_path / "data", address, "--workers", "2")
    yield workers
    workers.close()


def log_in(api: Workers) -> dict[str, str]:
    """Log in, and return the headers of the session."""
    form = {"user": "admin", "password": "admin-secret"}
    answer = httpx.post(f"{api.url}/console/login", data=form, timeout=PATIENCE_SECONDS)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert "content-security-policy" in answer.headers
    return {"cookie": f"{COOKIE}={answer.cookies[COOKIE]}"}


def test_any_process_serves_pages_and_scripts_of_one_console(api: Workers) -> None:
    session = log_in(api)
    for _ in range(_REQUESTS):  # each on a connection of its own
        page = httpx.get(f"{api.url}/console/queues", headers=session, timeout=PATIENCE_SECONDS)
        assert page.status_code == 200
        assert "Purveyor" in page.text
        script = re.search(r"/_nicegui/[^\"']+/nicegui\.js", page.text)
        assert script is not None
        answer = httpx.get(api.url + script.group(), headers={**session, "accept-encoding": "gzip"})
        assert (answer.status_code, len(answer.text) > 1000) == (200, True)
        assert httpx.get(f"{api.url}/console/queues").headers["location"].startswith("/console/login")
        assert httpx.head(f"{api.url}/console/login").status_code == 200


async def test_a_websocket_reaches_the_process_that_has_its_session(api: Workers) -> None:
    headers = log_in(api)
    async with aiohttp.ClientSession(headers=headers, cookie_jar=aiohttp.DummyCookieJar()) as session:
        for _ in range(_REQUESTS):
            async with session.get(f"{api.url}{_SOCKET}&transport=polling", headers={"connection": "close"}) as opened:
                sid = json.loads((await opened.text())[1:])["sid"]
            async with session.ws_connect(f"{api.url}{_SOCKET}&transport=websocket&sid={sid}") as socket:
                await socket.send_str("2probe")
                assert await asyncio.wait_for(socket.receive_str(), PATIENCE_SECONDS) == "3probe"
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await session.ws_connect(f"{api.url}{_SOCKET}&transport=websocket", headers={"origin": "http://elsewhere"})


def test_no_client_can_forge_the_address_of_another(api: Workers) -> None:
    """Failed logins of one address lock no other, and the headers between the processes come from them alone."""
    wrong = {"user": "admin", "password": "wrong"}
    answers = [
        httpx.post(f"{api.url}/console/login", data=wrong, headers={"x-purveyor-client": f"192.0.2.{number}"})
        for number in range(11)
    ]
    assert [each.status_code for each in answers] == [*[401] * 10, 429]


def test_the_console_comes_back_with_its_process(api: Workers) -> None:
    headers = log_in(api)
    os.kill(api.parts()[1].pid, signal.SIGKILL)
    seen: list[int] = []

    def is_back() -> bool:
        answer = httpx.get(f"{api.url}/console/queues", headers=headers, timeout=PATIENCE_SECONDS)
        seen.append(answer.status_code)
        return len(api.parts()) == 2 and answer.status_code == 200

    wait_until(is_back, what="the console", ignoring=(httpx.TransportError,))
    # A session of the worker that died is valid; a process accepts those of others once it knows of all logouts.
    assert {*seen} <= {200, 303, 503}
    assert httpx.get(f"{api.url}/healthz").status_code == 200
