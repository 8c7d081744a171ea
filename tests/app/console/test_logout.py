"""A logout ends the session itself, wherever its cookie is: in this process, in others, and in those started later."""

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Page, expect
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from purveyor.app.console.console import ConsoleOptions
from purveyor.app.console.console_login import COOKIE
from purveyor.jetstream.address import Address
from tests.support.console import ADMIN, Chromium, Site, log_in
from tests.support.running_api import RunningApi
from tests.support.waiting import wait_until

FORM = {"user": ADMIN[0], "password": ADMIN[1]}
SECRET = b"s" * 32
HANDSHAKE = '["handshake",{"client_id":"none","document_id":"none","tab_id":"none","next_message_id":0}]'


def with_console(find_address: Callable[[], Address], data_dir: Path, password: str = ADMIN[1]) -> RunningApi:
    api = RunningApi(find_address, patience_seconds=1)
    api.change_password("admin", password)
    options = ConsoleOptions(secret=SECRET, find_operator=find_address, data_dir=data_dir)
    api._options = replace(api._options, console=options)
    return api


def enter(api: RunningApi) -> str:
    """Log in, and return the cookie of the session."""
    with api.client() as browser:
        return browser.post("/console/login", data=FORM).cookies[COOKIE]


def is_inside(api: RunningApi, cookie: str) -> bool:
    """Return whether the console accepts a cookie: the login page then redirects."""
    with api.client(cookies={COOKIE: cookie}) as browser:
        return browser.get("/console/login").status_code == 303


def leave(api: RunningApi, cookie: str) -> httpx.Response:
    with api.client(cookies={COOKIE: cookie}) as browser:
        return browser.post("/console/logout")


@pytest.fixture
def first(address: Address, tmp_path: Path) -> Iterator[RunningApi]:
    with with_console(lambda: address, tmp_path) as api:
        yield api.when_ready()


def test_a_cookie_that_was_copied_ends_with_the_logout(first: RunningApi) -> None:
    cookie, other = enter(first), enter(first)
    assert is_inside(first, cookie)
    answer = leave(first, cookie)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/login")
    assert not is_inside(first, cookie)
    assert is_inside(first, other)


def test_in_every_process_and_in_those_that_start_later(first: RunningApi, address: Address, tmp_path: Path) -> None:
    with with_console(lambda: address, tmp_path) as second:
        second.when_ready()
        cookie, other = enter(first), enter(first)
        assert is_inside(second, cookie)
        leave(first, cookie)
        wait_until(lambda: not is_inside(second, cookie))
        assert is_inside(second, other)
    with with_console(lambda: address, tmp_path) as third:
        third.when_ready()
        assert not is_inside(third, cookie)
        assert is_inside(third, other)


def test_another_password_of_the_administrator_ends_all(first: RunningApi, address: Address, tmp_path: Path) -> None:
    cookie = enter(first)
    with with_console(lambda: address, tmp_path, password="another") as changed:
        assert not is_inside(changed.when_ready(), cookie)


def test_without_the_server_only_own_sessions_are_taken(first: RunningApi, address: Address, tmp_path: Path) -> None:
    """A process that cannot read the logouts accepts no session of another process, but accepts new logins."""
    nowhere, there = Address.parse("nats://127.0.0.1:9"), threading.Event()
    foreign = enter(first)
    with with_console(lambda: address if there.is_set() else nowhere, tmp_path) as alone:
        assert not is_inside(alone, foreign)
        own, left = enter(alone), enter(alone)
        assert is_inside(alone, own)
        leave(alone, left)
        assert not is_inside(alone, left)
        there.set()
        wait_until(lambda: is_inside(alone, foreign))
        wait_until(lambda: not is_inside(first, left))  # told when the server was there
        assert is_inside(first, own)


def test_a_page_that_is_open_elsewhere_leads_to_the_login(browser: Chromium, site: Site) -> None:
    async def visit(page: Page) -> None:
        await log_in(page)
        await page.wait_for_selector("h1")
        second = await page.context.new_page()
        await second.goto("/console/queues")
        await second.wait_for_selector("h1")
        await page.click("text=Log out")
        await expect(page).to_have_url(re.compile("/console/login"))
        await expect(second).to_have_url(re.compile("/console/login"))

    browser.visit(visit, logged_in=False, errors=True)
    assert "Traceback" not in site.errors()


def answer(socket: ClientConnection) -> str:
    """Return the next packet that is no ping."""
    while (packet := str(socket.recv(60))) == "2":
        socket.send("3")
    return packet


def test_a_socket_is_closed_when_its_session_was_ended(site: Site) -> None:
    """After the logout the server ignores all messages of an open page."""
    with site.client() as anybody:
        cookie = anybody.post("/console/login", data=FORM).cookies[COOKIE]
        url = f"{site.url.replace('http', 'ws', 1)}/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
        with connect(url, additional_headers={"cookie": f"{COOKIE}={cookie}"}, open_timeout=60) as socket:
            assert answer(socket).startswith("0{")  # Engine.IO: open
            socket.send("40")  # Socket.IO: connect
            assert answer(socket).startswith("40")
            socket.send(f"420{HANDSHAKE}")
            assert answer(socket) == "430[false]"  # the console answers: it has no such page
            anybody.post("/console/logout")
            socket.send(f"421{HANDSHAKE}")
            with pytest.raises(ConnectionClosed):
                answer(socket)


def test_a_logout_without_a_session_is_no_error(first: RunningApi) -> None:
    with first.client() as browser:
        assert browser.post("/console/logout").status_code == 303
