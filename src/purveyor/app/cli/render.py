"""How things look: tables and blocks for people, JSON for programs; colours and wrapping only on a terminal."""

import base64
import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from purveyor.app.cli.sanitize import safe

_WIDE = 100_000
_DUMP_BYTES = 256
_UNITS = ("KiB", "MiB", "GiB", "TiB")

Rows = Sequence[tuple[str, object]]


def jsonable(value: object) -> object:
    """Data as JSON has it: enums by value, times in ISO, durations in seconds (their keys say so), None left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jsonable({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {
            f"{key}_seconds" if isinstance(item, timedelta) else str(key): jsonable(item)
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
        return [jsonable(item) for item in value]
    return value


def payload_fields(data: bytes) -> dict[str, str]:
    """A payload as a field of JSON: text if it is text, else base64 under another name."""
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": base64.b64encode(data).decode()}


def show_payload(data: bytes) -> str:
    """A payload for people: its text, or the first bytes in hexadecimal when it is not text."""
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


def show_line(data: bytes) -> str:
    """A payload on one line, quoted."""
    try:
        return repr(data.decode())
    except UnicodeDecodeError:
        return f"{len(data)} bytes: {data[:32].hex(' ')}{' ...' if len(data) > 32 else ''}"


def show(value: object) -> str:
    """A value in a table or block."""
    if value is None or value in ("", (), []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return show(value.value)
    if isinstance(value, timedelta):
        return show_duration(value)
    if isinstance(value, datetime):
        return show_time(value)
    if isinstance(value, tuple | list):
        return ", ".join(show(item) for item in value)
    return safe(str(value))


def show_time(moment: datetime) -> str:
    """A time, in UTC, to the second."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def show_duration(duration: timedelta) -> str:
    """A duration in its units.

    >>> show_duration(timedelta(seconds=5400)), show_duration(timedelta(milliseconds=500))
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


def show_size(size: float, *, brief: bool = False) -> str:
    """Bytes, and in larger units as well when there are many (only in those, if brief).

    >>> show_size(53), show_size(1536), show_size(39.5)
    ('53 B', '1.5 KiB (1536 B)', '39.5 B')
    """
    exact = f"{size:.1f}".removesuffix(".0")
    if size < 1024:
        return f"{exact} B"
    power = min(int(math.log2(size)) // 10, len(_UNITS))
    rounded = f"{size / 1024**power:.1f} {_UNITS[power - 1]}"
    return rounded if brief else f"{rounded} ({exact} B)"


def show_limit(limit: int, *, size: bool = False) -> str:
    """A limit, where none is not a number."""
    return "none" if limit <= 0 else show_size(limit) if size else str(limit)


def block(title: str, rows: Rows) -> str:
    """A title and its rows, labels aligned at their colons."""
    width = max((len(label) for label, _ in rows), default=0) + 4
    return "\n".join([f"{title}:", "", *(f"{label:>{width}}: {show(value)}" for label, value in rows)])


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, wrap: Sequence[str] = ()) -> str:
    """A table of columns of their natural width; on a terminal those in `wrap` give way until it fits."""
    terminal = sys.stdout.isatty()
    built = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        built.add_column(column, overflow="fold", no_wrap=not terminal or column not in wrap, min_width=len(column))
    for row in rows:
        built.add_row(*(Text(show(cell)) for cell in row))
    console = Console(width=None if terminal else _WIDE, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(built)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def write(text: str) -> None:
    """A line (or several) for people on standard output, seen at once."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A remark on standard error: not part of the result."""
    sys.stderr.write(safe(text) + "\n")
    sys.stderr.flush()


def write_json(value: object, *, indent: int | None = None) -> None:
    """One JSON value on standard output; a stream of things has one on each line."""
    write(json.dumps(jsonable(value), ensure_ascii=False, indent=indent))


def write_bytes(data: bytes) -> None:
    """The bytes as they are."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
