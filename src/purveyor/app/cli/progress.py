"""A progress bar on standard error for what may take longer than two seconds; nothing when that is not a terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_STEP_SECONDS = 0.1

Advance = Callable[[int], None]


@contextlib.contextmanager
def progress(what: str, total: int | None = None, *, visible: bool = True) -> Iterator[Advance]:
    """Yields a function to call with the number of things just done. Without a total it shows that work goes on."""
    if not visible or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console  # noqa: PLC0415 - a pipe never needs it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    counter = (MofNCompleteColumn(),) if total is not None else ()
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *counter,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=total)
        done = 0
        next_update = 0.0

        def advance(count: int) -> None:
            # Drawing each of a million steps would take longer than the work.
            nonlocal done, next_update
            done += count
            if time.monotonic() >= next_update:
                bar.update(task, completed=done)
                next_update = time.monotonic() + _STEP_SECONDS

        yield advance
        bar.update(task, completed=done)
