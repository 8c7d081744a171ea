"""The output of commands: text and JSON on standard output, remarks and progress bars on standard error.

`purveyor --help` imports this module: nothing here may import Rich or a client library at the top.
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path

EXIT_INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended, as in shells."""
_REDRAW_SECONDS = 0.1

Advance = Callable[[int], None]


def escape(text: str) -> str:
    r"""Escape unprintable characters, so that a text cannot move the cursor, hide or imitate other output.

    >>> escape("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape", "surrogatepass").decode() for ch in text)


def to_jsonable(value: object) -> object:
    """Convert a value to JSON types: enums by value, times in ISO 8601, durations as `..._seconds`; omit None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_jsonable({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {
            f"{key}_seconds" if isinstance(item, timedelta) else str(key): to_jsonable(item)
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, Iterable):
        return [to_jsonable(item) for item in value]
    return value


def write(text: str) -> None:
    """Write text and a line end to standard output, and flush it."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


def write_json(value: object, *, indent: int | None = None) -> None:
    """Write one JSON value to standard output; without `indent` it takes one line."""
    write(json.dumps(to_jsonable(value), ensure_ascii=False, indent=indent))


def write_bytes(data: bytes) -> None:
    """Write bytes unchanged to standard output."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def write_note(text: str) -> None:
    """Write a remark, which is not part of the result, to standard error."""
    sys.stderr.write(escape(text) + "\n")
    sys.stderr.flush()


class StatusPrinter:
    """Prints the status changes of a long-running command: a line of text, or with --json one object per line.

    With `timestamps`, each line begins with the time in UTC, and each object has it as `at`.
    """

    def __init__(self, *, json: bool, timestamps: bool = False) -> None:
        self._json = json
        self._timestamps = timestamps

    def print(self, event: str, detail: str, /, **fields: object) -> None:
        """Print an event such as `ready`; text shows only the detail, JSON also the fields."""
        now = datetime.now(UTC)
        if self._json:
            at = {"at": now.isoformat(timespec="milliseconds")} if self._timestamps else {}
            write_json({**at, "event": event, "detail": detail or None, **fields})
        else:
            at_text = f"{now:%Y-%m-%dT%H:%M:%SZ} " if self._timestamps else ""
            write(at_text + (f"{event}: {escape(detail)}" if detail else event))


@contextlib.contextmanager
def progress(what: str, total: int | None = None, *, visible: bool = True) -> Iterator[Advance]:
    """Show a progress bar on standard error if that is a terminal; without a total, show only that work is in progress.

    Yields a function to call with the number of steps just done.
    """
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
                next_update = time.monotonic() + _REDRAW_SECONDS

        yield advance
        bar.update(task, completed=done)
