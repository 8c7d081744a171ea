"""Building blocks of pages in NiceGUI: frame, live HTML, actions, dialogs, buttons and paged tables."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from nicegui import ui
from nicegui.client import Client
from nicegui.events import GenericEventArguments

from purveyor.app.console import html
from purveyor.app.console.console import Console
from purveyor.app.console.console_login import LOGIN, SESSION, Session
from purveyor.app.console.formatting import format_number
from purveyor.app.console.snapshot import SystemSnapshot
from purveyor.model.errors import PurveyorError

REFRESH_INTERVAL_SECONDS: Final = 1.0
_FIRST_SNAPSHOT_TIMEOUT_SECONDS: Final = 1.5
"""How long a new page waits for its first content before the API sends it without."""


class LiveHtml:
    """An element whose HTML changes. The browser patches only the differences."""

    def __init__(self, text: str = "", *, tag: str = "div", classes: str = "live") -> None:
        self._element = ui.html(text, sanitize=False, tag=tag).classes(classes)
        self._text = text

    def show(self, text: str) -> None:
        """Set the content."""
        if text != self._text:
            self._text = text
            place = json.dumps(self._element.html_id)
            self._element.client.run_javascript(f"purveyor.patch({place}, {json.dumps(text)})")


class ConsolePage:
    """The frame of a page. It refreshes every second while a browser has the page open."""

    def __init__(self, console: Console, session: Session, current: str) -> None:
        self.console = console
        self._session = session
        self._current = current
        self._shows: list[Callable[[SystemSnapshot], Awaitable[None] | None]] = []
        self._acts: dict[str, Callable[[str], Awaitable[None]]] = {}
        self._client: Client = ui.context.client
        self._top: LiveHtml

    def on_snapshot(self, show: Callable[[SystemSnapshot], Awaitable[None] | None]) -> None:
        """Call `show` with each new snapshot."""
        self._shows.append(show)

    def on_action(self, name: str, act: Callable[[str], Awaitable[None]]) -> None:
        """Call `act` with the key of an action link or checkbox when the operator clicks it."""
        self._acts[name] = act

    async def _handle_action(self, event: GenericEventArguments) -> None:
        act = self._acts.get(str(event.args.get("act")))
        if act is not None:
            await act(str(event.args.get("key")))

    async def begin(self) -> None:
        """Show the first snapshot and start the refresh timer."""
        ui.on("act", self._handle_action)
        with contextlib.suppress(TimeoutError):  # the page loads also while the NATS server does not answer
            async with asyncio.timeout(_FIRST_SNAPSHOT_TIMEOUT_SECONDS):
                await self.refresh()
        ui.timer(REFRESH_INTERVAL_SECONDS, self.refresh, immediate=False)

    async def refresh(self, *, fresh: bool = False) -> None:
        """Show the current snapshot."""
        if self._client.is_deleted:  # the operator closed the page meanwhile
            return
        if not self.is_allowed():
            return
        snapshot = await self.console.collector.read(fresh=fresh)
        self._top.show(html.top_bar(self._current, snapshot.dead_letter_total))
        for show in self._shows:
            shown = show(snapshot)
            if shown is not None:
                await shown

    async def run_action(self, work: Callable[[], Awaitable[object]], done: str) -> bool:
        """Run an action of the operator, report its success or error, and refresh. Requires a valid session."""
        if not self.is_allowed():
            return False
        try:
            await work()
        except PurveyorError as error:
            notify_error(error)
            return False
        if not self._client.is_deleted:
            ui.notify(done, type="positive", position="top")
        await self.refresh(fresh=True)
        return True

    @property
    def user(self) -> str:
        """The login of the operator."""
        return self._session.user

    def is_allowed(self) -> bool:
        """Return whether the session is valid; open the login page if not."""
        if self.console.sessions.is_live(self._session):
            return True
        self._client.open(LOGIN)
        return False

    def frame(self) -> None:
        """Add the bar at the top."""
        ui.add_head_html(html.head())
        self._top = LiveHtml(html.top_bar(self._current), tag="header", classes="top")


@contextlib.contextmanager
def page_frame(console: Console, current: str, title: str, text: str) -> Iterator[ConsolePage]:
    """Open the frame of a page. The block adds its content."""
    session: Session = ui.context.client.request.scope[SESSION]
    page = ConsolePage(console, session, current)
    page.frame()
    with ui.element("main").classes("page"):
        ui.html(html.page_head(title, text), sanitize=False).classes("live")
        yield page


@contextlib.contextmanager
def card(title: str = "", text: str = "") -> Iterator[None]:
    """Open a card with a title. The block adds its content."""
    with ui.element("section").classes("card"):
        if title:
            remark = f'<p class="soft">{html.cell(text)}</p>' if text else ""
            ui.html(f"<h2>{html.cell(title)}</h2>{remark}", sanitize=False).classes("live title")
        yield


def notify_error(error: PurveyorError) -> None:
    """Show an error with its fix."""
    text = error.message if error.fix is None else f"{error.message}. Next: {error.fix}"
    ui.notify(text, type="negative", position="top", timeout=12_000, close_button="Close", multi_line=True)


def button(text: str, on_click: Callable[..., object], *, kind: str = "plain", hint: str = "") -> ui.button:
    """Add a button. `kind`: plain, main or danger."""
    made = ui.button(text, on_click=on_click, color=None).props("flat no-caps").classes(kind)
    if hint:
        made.props(f'title="{html.cell(hint)}"')
    return made


async def confirm(title: str, text: str, *, yes: str, danger: bool = True) -> bool:
    """Ask for confirmation. Escape, and Enter on the first button, both mean no."""
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
async def modal(title: str) -> AsyncIterator[ui.dialog]:
    """Open a dialog with a form or a text, and wait until the operator closes it."""
    with ui.dialog() as dialog, ui.card().classes("sheet"):
        ui.html(f"<h2>{html.cell(title)}</h2>", sanitize=False)
        yield dialog
    await dialog
    _remove(dialog)


def _remove(dialog: ui.dialog) -> None:
    """Remove a dialog from its page, unless the page is already closed."""
    if not dialog.client.is_deleted:
        dialog.delete()


R = TypeVar("R")
ROWS: Final = 25


class PagedTable(Generic[R]):
    """A table with a filter and pages: a thousand rows cost as much as one page.

    `matches` returns whether a row matches the filter text; `render` turns the rows of a page into HTML.
    """

    def __init__(
        self, what: str, matches: Callable[[R, str], bool], render: Callable[[Sequence[R]], str], *, rows: int = ROWS
    ) -> None:
        self._what = what
        self._matches = matches
        self._render = render
        self._size = rows
        self._rows: Sequence[R] = ()
        self._page = 0
        with ui.element("div").classes("bar"):
            self._text = (
                ui.input(placeholder=f"Filter {what}  ( / )", on_change=self._typed)
                .props(f'outlined dense clearable debounce=150 type=search aria-label="Filter {what}"')
                .classes("filter")
            )
            ui.element("span").classes("grow")
            self.tools = ui.element("div").classes("bar").style("width:auto")
        self._live = LiveHtml()
        with ui.element("div").classes("bar") as self._bar:
            self._summary = ui.label().classes("soft")
            ui.element("span").classes("grow")
            self._back = button("Back", lambda: self._turn(-1))
            self._on = button("Next", lambda: self._turn(1))

    @property
    def shown(self) -> Sequence[R]:
        """The rows of the current page."""
        return self._found()[self._page * self._size : (self._page + 1) * self._size]

    def show(self, rows: Sequence[R]) -> None:
        """Set all rows."""
        self._rows = rows
        self.draw()

    def draw(self) -> None:
        """Draw the current page."""
        found = self._found()
        pages = max((len(found) + self._size - 1) // self._size, 1)
        self._page = min(self._page, pages - 1)
        self._live.show(self._render(self.shown))
        many = pages > 1
        self._bar.set_visibility(many)
        if many:
            first = self._page * self._size + 1
            self._summary.set_text(
                f"{first} to {first + len(self.shown) - 1} of {format_number(len(found))} {self._what}"
            )
            self._back.set_enabled(self._page > 0)
            self._on.set_enabled(self._page < pages - 1)

    def _found(self) -> Sequence[R]:
        text = (self._text.value or "").strip().lower()
        return [row for row in self._rows if self._matches(row, text)] if text else self._rows

    def _typed(self) -> None:
        self._page = 0
        self.draw()

    def _turn(self, by: int) -> None:
        self._page = max(self._page + by, 0)
        self.draw()
