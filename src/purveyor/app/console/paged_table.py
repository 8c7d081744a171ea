"""A long list in a page: a filter, a page of rows, and the way to the others. A thousand cost as much as twenty."""

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from nicegui import ui

from purveyor.app.console.formatting import number
from purveyor.app.console.page_base import Live, button

R = TypeVar("R")
ROWS: Final = 25


class Listing(Generic[R]):
    """Rows of any kind. `matches` tells whether a row fits what was typed, `render` makes the rows of a page HTML."""

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
        self._live = Live()
        with ui.element("div").classes("bar") as self._bar:
            self._told = ui.label().classes("soft")
            ui.element("span").classes("grow")
            self._back = button("Back", lambda: self._turn(-1))
            self._on = button("Next", lambda: self._turn(1))

    @property
    def shown(self) -> Sequence[R]:
        """The rows of the page that is shown."""
        return self._found()[self._page * self._size : (self._page + 1) * self._size]

    def show(self, rows: Sequence[R]) -> None:
        """All rows there are now."""
        self._rows = rows
        self.draw()

    def draw(self) -> None:
        """Show the page."""
        found = self._found()
        pages = max((len(found) + self._size - 1) // self._size, 1)
        self._page = min(self._page, pages - 1)
        self._live.show(self._render(self.shown))
        many = pages > 1
        self._bar.set_visibility(many)
        if many:
            first = self._page * self._size + 1
            self._told.set_text(f"{first} to {first + len(self.shown) - 1} of {number(len(found))} {self._what}")
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
