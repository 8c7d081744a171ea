"""How the pipeline tells what it does: a live table on a terminal, lines of changes elsewhere, JSON for programs."""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from purveyor.app.cli.render import write, write_json
from purveyor.app.cli.sanitize import safe

if TYPE_CHECKING:  # importing the pipeline imports Spark: only the command itself does that
    from rich.live import Live
    from rich.table import Table

    from purveyor.pipeline.part_status import PartStatus

_EVERY_SECONDS = 30.0


class Reporter(Protocol):
    """What the service calls."""

    def say(self, event: str, text: str) -> None:
        """A step of the whole."""

    def show(self, parts: "Sequence[PartStatus]") -> None:
        """How the parts are."""


class JsonLines:
    """One object for each step, and one for each change of a part, its batches included."""

    def __init__(self) -> None:
        self._last: dict[str, PartStatus] = {}

    def say(self, event: str, text: str) -> None:
        """A step."""
        write_json({"event": event, "detail": text})

    def show(self, parts: "Sequence[PartStatus]") -> None:
        """What is new."""
        for part in parts:
            if self._last.get(part.name) != part:
                self._last[part.name] = part
                write_json({"event": "progress", **part.to_json()})


class Lines:
    """A line when a part changes its state or has a new error, and from time to time one for each."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[object, ...]] = {}
        self._next = time.monotonic() + _EVERY_SECONDS

    def say(self, event: str, text: str) -> None:
        """A step."""
        write(f"{event}: {safe(text)}")

    def show(self, parts: "Sequence[PartStatus]") -> None:
        """What is new, or everything when it is time."""
        due = time.monotonic() >= self._next
        for part in parts:
            seen = (part.state, part.error, part.restarts)
            if due or self._last.get(part.name) != seen:
                write(safe(part.line()))
            self._last[part.name] = seen
        if due:
            self._next = time.monotonic() + _EVERY_SECONDS


class LiveTable:
    """One row for each part, redrawn in place; steps stand above it."""

    def __init__(self) -> None:
        self._live: Live | None = None

    def say(self, event: str, text: str) -> None:
        """A step."""
        if self._live is not None:
            self._live.console.print(f"{event}: {safe(text)}", markup=False, highlight=False)
        else:
            write(f"{event}: {safe(text)}")

    def show(self, parts: "Sequence[PartStatus]") -> None:
        """Redraw. The table begins with the first part, not before: Spark starts with our output turned elsewhere."""
        if self._live is None:
            from rich.live import Live  # noqa: PLC0415 - a pipe never needs it

            self._live = Live(auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        self._live.update(_table(parts), refresh=True)

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.stop()


@contextlib.contextmanager
def reporter_for(*, json: bool) -> Iterator[Reporter]:
    """The reporter for where the output goes."""
    if json:
        yield JsonLines()
    elif not sys.stdout.isatty():
        yield Lines()
    else:
        table = LiveTable()
        try:
            yield table
        finally:
            table.close()


def _table(parts: "Sequence[PartStatus]") -> "Table":
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415

    columns = ("part", "state", "position", "behind", "rows/s", "batch", "restarts", "last error")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column != "last error", overflow="fold")
    for part in parts:
        reading = part.reading
        cells = (
            part.name,
            part.state.value,
            reading.position,
            reading.lag,
            f"{reading.rows_per_second:,.0f}" if reading.batch_ms is not None else None,
            f"{reading.batch_ms} ms" if reading.batch_ms is not None else None,
            part.restarts or None,
            part.error,
        )
        table.add_row(*(Text("-" if cell is None else safe(str(cell))) for cell in cells))
    return table
