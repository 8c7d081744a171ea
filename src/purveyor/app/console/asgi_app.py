"""The pages as an ASGI application. NiceGUI serves its own files: the console loads nothing from the internet."""

import contextlib

from fastapi import FastAPI
from nicegui import app as framework
from nicegui import ui
from starlette.types import ASGIApp

from purveyor.app.console import html
from purveyor.app.console.console import Console
from purveyor.app.console.html import ICON
from purveyor.app.console.page_base import card, page_frame
from purveyor.app.console.pages import dead_letters, queues
from purveyor.app.console.pages.overview import install_overview, install_pipeline
from purveyor.app.console.pages.subscriptions import install_subscription, install_subscriptions


def build_pages(console: Console) -> tuple[ASGIApp, contextlib.AbstractAsyncContextManager[object]]:
    """Return the application, and the lifespan to enter before its first request."""
    shell = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    install_overview(console)
    queues.install(console)
    install_subscriptions(console)
    install_subscription(console)
    dead_letters.install(console)
    install_pipeline(console)
    _install_not_found(console)
    framework.config.quasar_config["brand"] = {"primary": "#2f5fd0", "negative": "#c02b2b", "positive": "#24774b"}
    ui.run_with(
        shell,
        title="Purveyor",
        favicon=ICON,
        dark=None,
        language="en-US",
        tailwind=False,
        binding_refresh_interval=None,
        reconnect_timeout=10.0,
        show_welcome_message=False,
    )
    return shell, shell.router.lifespan_context(shell)


def _install_not_found(console: Console) -> None:
    """Register the catch-all pages. They come last: `/console` leads to the overview, all other paths are unknown."""

    @ui.page("/console")
    def moved() -> None:
        ui.navigate.to("/")

    @ui.page("/console/{rest:path}", title="No such page · Purveyor")
    async def missing(rest: str) -> None:
        with (
            page_frame(console, "", "No such page", "The address is wrong or belongs to another version.") as page,
            card(),
        ):
            text = html.empty(f"There is no page /console/{rest[:80]}", "The menu above lists the pages.")
            ui.html(text, sanitize=False).classes("live")
        await page.begin()
