"""Formats of numbers, times and sizes, and short definitions of the terms in the console. Pure."""

from datetime import UTC, datetime
from typing import Final

_UNITS: Final = ("KB", "MB", "GB", "TB")
_SPACE: Final = "\N{THIN SPACE}"

HINTS: Final = {
    "ack floor": "This reader has acknowledged everything up to this sequence",
    "backlog": "Messages in the queue that are not acknowledged",
    "batch": "The pipeline works in small batches; this is the duration of the last one",
    "behind": "The number of messages between this part and the newest one",
    "dead letter": "A message that could not be processed, with its reason; retry puts it back",
    "durable": "A reader whose position in the queue the server stores",
    "lease": "How long a consumer has a message to itself before another may get it",
    "oldest": "How long the oldest message has been waiting",
    "pending": "Messages that this reader has not received yet",
    "position": "The sequence of an event in the queue incoming: the clock of the whole system",
    "prefill": "The current state of all objects, delivered to a new subscription before live events",
    "redelivered": "Messages delivered again because they were not acknowledged in time",
    "replay": "Past events, written to the queue of a subscription again",
    "sealed": "Accepts no new messages: the queue is being migrated",
    "sequence": "The number of a message in its queue",
    "unanswered": "Messages delivered but not acknowledged yet",
}


def format_number(value: float | None) -> str:
    """Format a whole number with thin spaces between thousands.

    >>> format_number(1234567), format_number(12), format_number(None)
    ('1\u2009234\u2009567', '12', '-')
    """
    return "-" if value is None else f"{round(value):,}".replace(",", _SPACE)


def format_short(value: float | None) -> str:
    """Format a number in few characters.

    >>> format_short(999), format_short(1234), format_short(45600), format_short(7800000), format_short(None)
    ('999', '1.2k', '46k', '7.8M', '-')
    """
    if value is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            scaled = value / size
            return f"{scaled:.0f}{unit}" if scaled >= 10 else f"{scaled:.1f}{unit}"
    return f"{value:.0f}"


def format_rate(value: float | None) -> str:
    """Format a rate per second.

    >>> [format_rate(each) for each in (0.0, 0.25, 9.97, 12.4, 4600.0, None)]
    ['0/s', '0.2/s', '10/s', '12/s', '4.6k/s', '-']
    """
    if value is None:
        return "-"
    return f"{value:.1f}/s" if 0.05 <= value < 9.95 else f"{format_short(round(value))}/s"


def format_duration(seconds: float | None) -> str:
    """Format a duration in one or two units.

    >>> [format_duration(each) for each in (0.2, 42, 65, 3700, 90000, None)]
    ['0 s', '42 s', '1 min 5 s', '1 h 1 min', '1 d 1 h', '-']
    """
    if seconds is None:
        return "-"
    left = int(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if left >= size:
            rest = left % size // smaller
            return f"{left // size} {unit} {rest} {smaller_unit}" if rest else f"{left // size} {unit}"
    return f"{left} s"


def format_milliseconds(milliseconds: float) -> str:
    """Format a short duration.

    >>> format_milliseconds(84), format_milliseconds(4068)
    ('84 ms', '4.1 s')
    """
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


def format_brief(seconds: float) -> str:
    """Format a duration in one unit, for small spaces.

    >>> [format_brief(each) for each in (0.2, 42, 65, 3700, 200000)]
    ['0 s', '42 s', '1 min', '1 h', '2 d']
    """
    for size_, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size_:
            return f"{int(seconds // size_)} {unit}"
    return f"{int(seconds)} s"


def format_size(count: float | None) -> str:
    """Format a number of bytes.

    >>> format_size(512), format_size(2048), format_size(5_300_000)
    ('512 B', '2.0 KB', '5.3 MB')
    """
    if count is None:
        return "-"
    value, unit = float(count), "B"
    for larger in _UNITS:
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def format_ago(moment: datetime | None, now: datetime | None = None) -> str:
    """Format a time relative to now: past or future."""
    if moment is None:
        return "-"
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    return f"{format_duration(seconds)} ago" if seconds >= 0 else f"in {format_duration(-seconds)}"


def format_time(value: datetime | None) -> str:
    """Format a time in UTC, to the second."""
    return "-" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def format_count(count: int, what: str) -> str:
    """Format a count with its noun.

    >>> format_count(1, "message"), format_count(2000, "message")
    ('1 message', '2\u2009000 messages')
    """
    return f"{format_number(count)} {what}{'' if count == 1 else 's'}"
