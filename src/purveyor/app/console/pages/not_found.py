"""Addresses of the console that are no pages: `/console` leads to the overview, and the rest says so. Comes last."""

from nicegui import ui

from purveyor.app.console import html
from purveyor.app.console.console import Console
from purveyor.app.console.page_base import card, page_frame


def install(console: Console) -> None:
    """Make it known."""

    @ui.page("/console")
    def moved() -> None:
        ui.navigate.to("/")

    @ui.page("/console/{rest:path}", title="No such page · Purveyor")
    async def missing(rest: str) -> None:
        with page_frame(console, "", "No such page", "The address is wrong, or from another version.") as page, card():
            told = html.empty(f"There is nothing at /console/{rest[:80]}", "The pages are above.")
            ui.html(told, sanitize=False).classes("live")
        await page.begin()
