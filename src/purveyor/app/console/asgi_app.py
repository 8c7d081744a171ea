"""The pages as an ASGI application: NiceGUI with what of it we use, and nothing that needs a network but ours."""

import contextlib

from fastapi import FastAPI
from nicegui import app as framework
from nicegui import ui
from starlette.types import ASGIApp

from purveyor.app.console.console import Console
from purveyor.app.console.pages import (
    dead_letters,
    not_found,
    overview,
    pipeline,
    queues,
    subscription,
    subscriptions,
)
from purveyor.app.console.theme import ICON


def build(console: Console) -> tuple[ASGIApp, contextlib.AbstractAsyncContextManager[object]]:
    """The application, and what must be entered before it is asked anything."""
    shell = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for page in (overview, queues, subscriptions, subscription, dead_letters, pipeline, not_found):
        page.install(console)
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
