"""Numbers, times and sizes as people read them at a glance, and what the words of this trade mean. Pure."""

from datetime import UTC, datetime
from typing import Final

_UNITS: Final = ("KB", "MB", "GB", "TB")
_SPACE: Final = "\N{THIN SPACE}"

HINTS: Final = {
    "ack floor": "Everything up to this sequence was acknowledged by this reader",
    "backlog": "Messages that wait in the queue and were not acknowledged",
    "batch": "The pipeline works in small batches; this is how long the last one took",
    "behind": "How many messages lie between this part and the newest one",
    "dead letter": "A message that could not be processed, set aside with its reason and the way back",
    "durable": "A reader whose place in the queue the server remembers",
    "lease": "For how long a consumer has a message to itself before another may get it",
    "oldest": "How long the oldest message that waits has been waiting",
    "pending": "Messages that this reader has not been given yet",
    "position": "The sequence of an event in the queue incoming: the clock of the whole system",
    "prefill": "The current state of all objects, delivered to a new subscription before live events",
    "redelivered": "Messages that were given out again because they were not acknowledged in time",
    "replay": "Events of the past, written to the queue of a subscription once more",
    "sealed": "Takes no new messages: it is being migrated",
    "sequence": "The number of a message in its queue",
    "unanswered": "Messages that were given out and not acknowledged yet",
}


def number(value: float | None) -> str:
    """A whole number with room between thousands.

    >>> number(1234567), number(12), number(None)
    ('1\u2009234\u2009567', '12', '-')
    """
    return "-" if value is None else f"{round(value):,}".replace(",", _SPACE)


def short(value: float | None) -> str:
    """A number in few characters.

    >>> short(999), short(1234), short(45600), short(7800000), short(None)
    ('999', '1.2k', '46k', '7.8M', '-')
    """
    if value is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            scaled = value / size
            return f"{scaled:.0f}{unit}" if scaled >= 10 else f"{scaled:.1f}{unit}"
    return f"{value:.0f}"


def rate(value: float | None) -> str:
    """So many in a second.

    >>> rate(0.0), rate(0.25), rate(12.4), rate(4600.0), rate(None)
    ('0/s', '0.2/s', '12/s', '4.6k/s', '-')
    """
    if value is None:
        return "-"
    return f"{value:.1f}/s" if 0.05 <= value < 10 else f"{short(round(value))}/s"


def duration(seconds: float | None) -> str:
    """How long, in one or two units.

    >>> [duration(each) for each in (0.2, 42, 65, 3700, 90000, None)]
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


def brief(seconds: float) -> str:
    """How long, in one unit: where there is little room.

    >>> [brief(each) for each in (0.2, 42, 65, 3700, 200000)]
    ['0 s', '42 s', '1 min', '1 h', '2 d']
    """
    for size_, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size_:
            return f"{int(seconds // size_)} {unit}"
    return f"{int(seconds)} s"


def size(count: float | None) -> str:
    """Bytes.

    >>> size(512), size(2048), size(5_300_000)
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


def ago(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago, or when it is to come."""
    if moment is None:
        return "-"
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    return f"{duration(seconds)} ago" if seconds >= 0 else f"in {duration(-seconds)}"


def moment(value: datetime | None) -> str:
    """A time, in UTC, to the second."""
    return "-" if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def plural(count: int, what: str) -> str:
    """A number of things.

    >>> plural(1, "message"), plural(2000, "message")
    ('1 message', '2\u2009000 messages')
    """
    return f"{number(count)} {what}{'' if count == 1 else 's'}"
