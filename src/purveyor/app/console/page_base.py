"""What pages are made of on the side of NiceGUI: the frame, parts that change by themselves, actions and questions."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Final

from nicegui import ui
from nicegui.client import Client
from nicegui.events import GenericEventArguments

from purveyor.app.console import html, theme
from purveyor.app.console.auth_middleware import LOGIN, SESSION
from purveyor.app.console.console import Console
from purveyor.app.console.sessions import Session
from purveyor.app.console.snapshot import Facts
from purveyor.model.errors import PurveyorError

EVERY_SECONDS: Final = 1.0
"""How often a page looks."""
_FIRST_SECONDS: Final = 1.5
"""So long a page waits for what it shows before it is sent without it."""


class Live:
    """A part of a page that changes: only what differs is changed in the browser."""

    def __init__(self, text: str = "", *, tag: str = "div", classes: str = "live") -> None:
        self._element = ui.html(text, sanitize=False, tag=tag).classes(classes)
        self._text = text

    def show(self, text: str) -> None:
        """Its content now."""
        if text != self._text:
            self._text = text
            place = json.dumps(self._element.html_id)
            self._element.client.run_javascript(f"purveyor.patch({place}, {json.dumps(text)})")


class Page:
    """The frame of a page, and its life: it looks every second, as long as somebody has it open."""

    def __init__(self, console: Console, session: Session, current: str) -> None:
        self.console = console
        self._session = session
        self._current = current
        self._shows: list[Callable[[Facts], Awaitable[None] | None]] = []
        self._acts: dict[str, Callable[[str], Awaitable[None]]] = {}
        self._client: Client = ui.context.client
        self._top: Live

    def on_facts(self, show: Callable[[Facts], Awaitable[None] | None]) -> None:
        """What to do with new facts."""
        self._shows.append(show)

    def on_act(self, name: str, act: Callable[[str], Awaitable[None]]) -> None:
        """What a word in a table does when it is clicked; it is given the word's key."""
        self._acts[name] = act

    async def _acted(self, event: GenericEventArguments) -> None:
        act = self._acts.get(str(event.args.get("act")))
        if act is not None:
            await act(str(event.args.get("key")))

    async def begin(self) -> None:
        """Show what is known, and go on doing so."""
        ui.on("act", self._acted)
        with contextlib.suppress(TimeoutError):  # a page comes at once, also while the server is away
            async with asyncio.timeout(_FIRST_SECONDS):
                await self.refresh()
        ui.timer(EVERY_SECONDS, self.refresh, immediate=False)

    async def refresh(self, *, anew: bool = False) -> None:
        """Show what is known now."""
        if self._client.is_deleted:  # it was closed while something was done
            return
        if not self._is_allowed():
            return
        facts = await self.console.gatherer.look(anew=anew)
        self._top.show(theme.top(self._current, facts.dead))
        for show in self._shows:
            shown = show(facts)
            if shown is not None:
                await shown

    async def act(self, work: Callable[[], Awaitable[object]], done: str) -> bool:
        """Do something, say that it is done or why not, and show what came of it. Needs the login, as all does."""
        if not self._is_allowed():
            return False
        try:
            await work()
        except PurveyorError as error:
            complain(error)
            return False
        if not self._client.is_deleted:
            ui.notify(done, type="positive", position="top")
        await self.refresh(anew=True)
        return True

    def _is_allowed(self) -> bool:
        """Whether its session is neither over nor ended; else lead to the login."""
        if self.console.sessions.is_live(self._session):
            return True
        self._client.open(LOGIN)
        return False

    def frame(self) -> None:
        """The bar at the top."""
        ui.add_head_html(theme.head())
        self._top = Live(theme.top(self._current), tag="header", classes="top")


@contextlib.contextmanager
def page_frame(console: Console, current: str, title: str, text: str) -> Iterator[Page]:
    """The frame of a page; what stands in the block is its content."""
    session: Session = ui.context.client.request.scope[SESSION]
    page = Page(console, session, current)
    page.frame()
    with ui.element("main").classes("page"):
        ui.html(theme.page_head(title, text), sanitize=False).classes("live")
        yield page


@contextlib.contextmanager
def card(title: str = "", text: str = "") -> Iterator[None]:
    """A box with a title."""
    with ui.element("section").classes("card"):
        if title:
            remark = f'<p class="soft" style="margin:0">{text}</p>' if text else ""
            ui.html(f"<h2>{html.cell(title)}</h2>{remark}", sanitize=False).classes("live")
        yield


def complain(error: PurveyorError) -> None:
    """Say what went wrong and what to do."""
    text = error.message if error.fix is None else f"{error.message}. Next: {error.fix}"
    ui.notify(text, type="negative", position="top", timeout=12_000, close_button="Close", multi_line=True)


def button(text: str, on_click: Callable[..., object], *, kind: str = "plain", hint: str = "") -> ui.button:
    """A button: plain, main or danger."""
    made = ui.button(text, on_click=on_click, color=None).props("flat no-caps").classes(kind)
    if hint:
        made.props(f'title="{html.cell(hint)}"')
    return made


async def confirm(title: str, text: str, *, yes: str, danger: bool = True) -> bool:
    """Ask before something that cannot be undone. Escape and Enter on the first button both mean no."""
    with ui.dialog() as dialog, ui.card().classes("sheet"):
        ui.html(f"<h2>{html.cell(title)}</h2>", sanitize=False)
        ui.html(f"<p style='margin:0'>{html.cell(text)}</p>", sanitize=False)
        with ui.element("div").classes("bar"):
            ui.element("span").classes("grow")
            button("Cancel", lambda: dialog.submit(False)).props("autofocus")
            button(yes, lambda: dialog.submit(True), kind="danger" if danger else "main")
    answer = await dialog
    _remove(dialog)
    return answer is True


@contextlib.asynccontextmanager
async def sheet(title: str) -> AsyncIterator[ui.dialog]:
    """A dialog with a form or a text, open until somebody closes it."""
    with ui.dialog() as dialog, ui.card().classes("sheet"):
        ui.html(f"<h2>{html.cell(title)}</h2>", sanitize=False)
        yield dialog
    await dialog
    _remove(dialog)


def _remove(dialog: ui.dialog) -> None:
    """Take a dialog out of its page, unless the page itself was closed under it."""
    if not dialog.client.is_deleted:
        dialog.delete()
