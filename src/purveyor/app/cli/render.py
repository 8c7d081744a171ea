"""Texts for people: tables, blocks, sizes, durations, payloads and received messages. Colours only on a terminal."""

import base64
import math
import sys
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from purveyor.app.cli.output import escape, write, write_json
from purveyor.jetstream.connection import RawMessage
from purveyor.jetstream.headers import Headers
from purveyor.jetstream.messages import Message

_DUMP_BYTES = 256
_UNITS = ("KiB", "MiB", "GiB", "TiB")

_COLUMN_GAP: Final = "  "
_MIN_COLUMN_CHARACTERS: Final = 12
"""A wrapped column keeps this width, and its heading: narrower ones cannot be read."""
_MAX_PADDING_CHARACTERS: Final = 200
"""In a pipe, a longer cell does not move the columns behind it in the other rows."""

Cells = Sequence[Sequence[str]]
"""Rows of cells, the first one with the headings."""
Rows = Sequence[tuple[str, object]]


def payload_fields(data: bytes) -> dict[str, str]:
    """Return a payload as a field for JSON: `data` if it is text, else `data_base64`."""
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": base64.b64encode(data).decode()}


def format_payload(data: bytes) -> str:
    """Format a payload: its text, or the first bytes in hexadecimal if it is not text."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = None
    if text is not None and all(ch.isprintable() or ch in "\n\t" for ch in text):
        return text
    lines = [f"({len(data)} bytes that are not text)"]
    for start in range(0, min(len(data), _DUMP_BYTES), 16):
        row = data[start : start + 16]
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:06x}  {row.hex(' '):<47}  {shown}")
    if len(data) > _DUMP_BYTES:
        lines.append(f"... and {len(data) - _DUMP_BYTES} more")
    return "\n".join(lines)


def format_payload_line(data: bytes) -> str:
    """Format a payload on one line, quoted."""
    try:
        return repr(data.decode())
    except UnicodeDecodeError:
        return f"{len(data)} bytes: {data[:32].hex(' ')}{' ...' if len(data) > 32 else ''}"


def format_value(value: object) -> str:
    """Format a value of a table or block."""
    if value is None or value in ("", (), []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return format_value(value.value)
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, tuple | list):
        return ", ".join(format_value(item) for item in value)
    return escape(str(value))


def format_time(moment: datetime) -> str:
    """Format a time in UTC, to the second."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def read_time(text: str | None) -> datetime | None:
    """Read a time of a JSON document, for a table or block.

    >>> read_time("2026-11-15T12:00:00+00:00")
    datetime.datetime(2026, 11, 15, 12, 0, tzinfo=datetime.timezone.utc)
    """
    return None if text is None else datetime.fromisoformat(text)


def format_duration(duration: timedelta) -> str:
    """Format a duration with its units.

    >>> format_duration(timedelta(seconds=5400)), format_duration(timedelta(milliseconds=500))
    ('1h30m', '500ms')
    """
    left = duration // timedelta(microseconds=1)
    sign, left = ("-", -left) if left < 0 else ("", left)
    text = ""
    for unit, size in (("d", 86_400_000_000), ("h", 3_600_000_000), ("m", 60_000_000)):
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    for unit, size in (("s", 1_000_000), ("ms", 1000), ("us", 1)):
        if left >= size:
            text += f"{left / size:.3f}".rstrip("0").rstrip(".") + unit
            break
    return sign + (text or "0s")


def format_size(size: float, *, brief: bool = False) -> str:
    """Format a size in bytes, and from 1 KiB on also in a larger unit (only in that, if brief).

    >>> format_size(53), format_size(1536), format_size(39.5)
    ('53 B', '1.5 KiB (1536 B)', '39.5 B')
    """
    exact = f"{size:.1f}".removesuffix(".0")
    if size < 1024:
        return f"{exact} B"
    power = min(int(math.log2(size)) // 10, len(_UNITS))
    rounded = f"{size / 1024**power:.1f} {_UNITS[power - 1]}"
    return rounded if brief else f"{rounded} ({exact} B)"


def format_limit(limit: int, *, size: bool = False) -> str:
    """Format a limit; the server stores no limit as -1 or 0."""
    return "none" if limit <= 0 else format_size(limit) if size else str(limit)


def format_block(title: str, rows: Rows) -> str:
    """Format a title and rows whose labels are aligned at their colons."""
    width = max((len(label) for label, _ in rows), default=0) + 4
    return "\n".join([f"{title}:", "", *(f"{label:>{width}}: {format_value(value)}" for label, value in rows)])


def format_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, wrap: Sequence[str] = ()) -> str:
    """Format a table. In a pipe each row is one line, with nothing cut.

    On a terminal, columns are wrapped until the table fits, those in `wrap` first. If it does not fit at all, each row
    is a block of lines.
    """
    cells = [tuple(columns), *(tuple(map(format_value, row)) for row in rows)]
    if not sys.stdout.isatty():
        return "\n".join(pipe_lines(cells))
    console = Console(highlight=False, markup=False, emoji=False)
    widths = fit_widths(cells, console.width, wrap)
    if widths is None:
        return row_blocks(cells) if len(cells) > 1 else "\n".join(pipe_lines(cells))
    built = Table(box=None, pad_edge=False, padding=(0, len(_COLUMN_GAP), 0, 0), header_style="bold")
    for column, width in zip(columns, widths, strict=True):
        built.add_column(column, overflow="fold", width=width)
    for row in cells[1:]:
        built.add_row(*map(Text, row))
    with console.capture() as captured:
        console.print(built)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def write_received(message: Message) -> None:
    """Write a message as a block: its subject, headers and payload."""
    again = f" (delivery {message.delivery.delivered})" if message.delivery.delivered > 1 else ""
    write(f"--- received on {escape(message.subject)}{again}")
    for line in format_headers(message.headers):
        write(line)
    if message.headers:
        write("")
    write(format_payload(message.data))


def write_line(number: int, message: Message | RawMessage, *, timestamps: bool) -> None:
    """Write a message on one line, and each header on one, so that the output can be searched by lines."""
    when = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f} " if timestamps else ""
    write(f"{when}[#{number}] Received on [{escape(message.subject)}]: {format_payload_line(message.data)}")
    for line in format_headers(message.headers):
        write(f"    {line}")


def write_object(message: Message | RawMessage, **more: object) -> None:
    """Write a message as one line of JSON."""
    delivery_fields: dict[str, object] = {}
    if isinstance(message, Message):
        delivery = message.delivery
        delivery_fields = {
            "stream": delivery.stream,
            "consumer": delivery.consumer,
            "sequence": delivery.sequence,
            "consumer_sequence": delivery.consumer_sequence,
            "delivered": delivery.delivered,
            "pending": delivery.pending,
            "timestamp": delivery.timestamp,
        }
    write_json(
        {
            "subject": message.subject,
            **delivery_fields,
            "headers": message.headers,
            **payload_fields(message.data),
            **more,
        }
    )


def format_headers(headers: Headers) -> list[str]:
    """Return one line for each value of a header."""
    return [f"{escape(name)}: {escape(value)}" for name, values in headers.items() for value in values]


def fit_widths(cells: Cells, available: int, wrap: Collection[str]) -> list[int] | None:
    """Return the widths of the columns in a terminal; None if the table does not fit even with wrapped columns.

    The columns in `wrap` shrink first, the widest of them first; then the other columns of text. Numbers are never
    wrapped.
    """
    natural = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    available -= len(_COLUMN_GAP) * (len(natural) - 1)
    if sum(natural) <= available:
        return natural
    texts = [not _is_numeric(column[1:]) for column in zip(*cells, strict=True)]
    first = [is_text and heading in wrap for heading, is_text in zip(cells[0], texts, strict=True)]
    for shrinkable in (first, texts):
        least = [
            max(cell_len(heading), min(width, _MIN_COLUMN_CHARACTERS)) if shrinks else width
            for heading, width, shrinks in zip(cells[0], natural, shrinkable, strict=True)
        ]
        if sum(least) <= available:
            return _shrink(natural, least, available)
    return None


def _shrink(natural: Sequence[int], least: Sequence[int], available: int) -> list[int]:
    """Limit the widths to the highest common cap with which they fit; no width is below its least."""
    low, high = 0, max(natural)
    while low < high:
        cap = (low + high + 1) // 2
        if sum(_capped(natural, least, cap)) <= available:
            low = cap
        else:
            high = cap - 1
    return _capped(natural, least, low)


def _capped(natural: Sequence[int], least: Sequence[int], cap: int) -> list[int]:
    return [min(width, max(cap, floor)) for width, floor in zip(natural, least, strict=True)]


def _is_numeric(cells: Sequence[str]) -> bool:
    return all(cell == "-" or cell.replace(".", "", 1).isdigit() for cell in cells)


def pipe_lines(cells: Cells) -> list[str]:
    """Return the lines of a table for a pipe: each row on one line, with nothing cut.

    >>> pipe_lines([("NAME", "N"), ("ox", "1")])
    ['NAME  N', 'ox    1']
    """
    widths = [
        max((length for length in map(cell_len, column) if length <= _MAX_PADDING_CHARACTERS), default=0)
        for column in zip(*cells, strict=True)
    ]
    padded = ([cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)] for row in cells)
    return [_COLUMN_GAP.join(row).rstrip() for row in padded]


def row_blocks(cells: Cells) -> str:
    """Return a table as a block of lines for each row, with the headings before the values.

    >>> print(row_blocks([("NAME", "N"), ("ox", "1")]))
    NAME: ox
       N: 1
    """
    headings, *rows = cells
    width = max(map(cell_len, headings))
    blocks = (
        [f"{' ' * (width - cell_len(head))}{head}: {cell}" for head, cell in zip(headings, row, strict=True)]
        for row in rows
    )
    return "\n\n".join("\n".join(lines) for lines in blocks)
