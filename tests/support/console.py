"""The console with a browser in front of it."""

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from playwright.async_api import BrowserContext, Page, async_playwright, expect

from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer
from purveyor.pipeline.part_status import PartStatus, status_key, status_message
from purveyor.queues.client import Queues
from purveyor.queues.status_board import post_notice
from tests.support.command_line import PROGRAM, SOURCE, url_of
from tests.support.running_api import PASSWORD, on_server, wanted
from tests.support.waiting import PATIENCE_SECONDS

T = TypeVar("T")


ARTIFACTS = Path(__file__).parents[2] / "artifacts" / "console"


ADMIN = ("admin", "admin-secret")


class Site:
    """The API with its console, in its own process."""

    def __init__(self, server: EmbeddedServer, data_dir: Path) -> None:
        self.address: Address = server.address
        self.data_dir = data_dir
        self._silent = threading.Event()
        self._status_publisher: threading.Thread | None = None
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PURVEYOR_")}
        environment |= {
            "PYTHONPATH": str(SOURCE),
            "PURVEYOR_DATA_DIR": str(data_dir),
            "PURVEYOR_NATS_URL": url_of(server.address),
            "PURVEYOR_ADMIN_PASSWORD": ADMIN[1],
            "PURVEYOR_EVENTS_PASSWORD": "events-secret",
            "PURVEYOR_PREFILL_PASSWORD": "prefill-secret",
            "PURVEYOR_PUSH_ALLOW": "127.0.0.0/8",
        }
        self._log = (data_dir / "api.log").open("w")
        self.process = subprocess.Popen(
            [*PROGRAM, "serve", "api", "--port", "0", "--json"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.process.stdout is not None
        reported = json.loads(self.process.stdout.readline())
        assert reported["event"] == "ready", reported
        self.url: str = reported["url"]
        self.admin = self.client(*ADMIN)

    def client(self, *auth: str, **more: Any) -> httpx.Client:
        login = (auth[0], auth[1]) if auth else None
        return httpx.Client(base_url=self.url, auth=login, timeout=120, trust_env=False, verify=False, **more)

    def subscribe(self, name: str, **more: Any) -> None:
        assert self.admin.post("/v1/subscriptions", json=wanted(name, **more)).status_code == 201

    def consumer(self, name: str) -> httpx.Client:
        return self.client(name, PASSWORD)

    def on_server(self, work: Callable[[Queues], Awaitable[T]]) -> T:
        return on_server(self.address, work)

    def post(self, *parts: PartStatus, **about: Any) -> None:
        """Publish the status of a pipeline, again each second as a pipeline does, until the test ends."""
        self.fall_silent()
        status = {"group": "dispatcher", **about}
        post_notice(self.address, status_key(""), status_message(status, parts))
        silent = self._silent = threading.Event()

        def repeat() -> None:
            while not silent.wait(1.0):
                post_notice(self.address, status_key(""), status_message(status, parts))

        self._status_publisher = threading.Thread(target=repeat, name="pipeline-status", daemon=True)
        self._status_publisher.start()

    def fall_silent(self) -> None:
        """Stop publishing the status."""
        if self._status_publisher is not None:
            self._silent.set()
            self._status_publisher.join()
            self._status_publisher = None

    def errors(self) -> str:
        """Return the errors that the API has logged."""
        return (self.data_dir / "api.log").read_text()

    def stop(self) -> None:
        self.fall_silent()
        self.admin.close()
        self.process.terminate()
        assert self.process.wait(PATIENCE_SECONDS) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


class Chromium:
    """A browser that tests share; each visit has its own context and cookies."""

    def __init__(self, path: str, url: str) -> None:
        self._path, self._url = path, url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._context: BrowserContext | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_SECONDS)

    async def _start(self) -> None:
        expect.set_options(timeout=60_000)
        self._playwright = await async_playwright().start()
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        self._browser = await self._playwright.chromium.launch(executable_path=self._path, args=flags)

    async def _stop(self) -> None:
        await self._browser.close()
        await self._playwright.stop()

    def visit(
        self, work: Callable[[Page], Coroutine[Any, Any, None]], *, logged_in: bool = True, errors: bool = False
    ) -> None:
        """Visit a page; unless `errors` are expected, assert that the console of the browser shows none."""
        self._run(self._visit(work, logged_in, errors))

    async def _visit(self, work: Callable[[Page], Coroutine[Any, Any, None]], logged_in: bool, errors: bool) -> None:
        heard: list[str] = []
        outside: list[str] = []
        context = await self._logged_in() if logged_in else await self._new_context()
        page = await context.new_page()
        page.on("console", lambda said: heard.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: heard.append(str(error)))
        ours = (self._url, "data:", "blob:")
        page.on("request", lambda asked: None if asked.url.startswith(ours) else outside.append(asked.url))
        try:
            await work(page)
        except BaseException:
            ARTIFACTS.mkdir(parents=True, exist_ok=True)
            await page.screenshot(path=ARTIFACTS / "last-failure.png", full_page=True)
            raise
        finally:
            await (page if logged_in else context).close()
        assert errors or not heard, heard
        assert not outside, outside

    async def _new_context(self) -> BrowserContext:
        size: Any = {"width": 1280, "height": 900}
        # Without a graphics card motion is drawn by the processor, which others need.
        context = await self._browser.new_context(
            base_url=self._url, viewport=size, color_scheme="light", reduced_motion="reduce"
        )
        context.set_default_timeout(60_000)
        return context

    async def _logged_in(self) -> BrowserContext:
        """Return the shared context, whose cache saves requests in later tests."""
        if self._context is None:
            self._context = await self._new_context()
            page = await self._context.new_page()
            await log_in(page)
            await page.wait_for_selector("h1")
            await page.close()
        return self._context


async def log_in(page: Page, user: str = ADMIN[0], password: str = ADMIN[1], path: str = "/") -> None:
    await page.goto(path)
    await page.fill("input[name=user]", user)
    await page.fill("input[name=password]", password)
    await page.click("button[type=submit]")


async def picture(page: Page, name: str) -> None:
    """Store a screenshot."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=ARTIFACTS / f"{name}.jpg", type="jpeg", quality=70, full_page=True)
