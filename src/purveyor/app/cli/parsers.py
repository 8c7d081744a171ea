"""Parsers of arguments: durations, sizes, times, positions, headers, topics and filters. Pure."""

import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from purveyor.jetstream.config import Deliver
from purveyor.model import json_fields
from purveyor.model.control_events import ReplayPoint
from purveyor.model.errors import InvalidHeader, InvalidInput
from purveyor.model.subscription import RealmTopic, Scalar

_UNITS = {
    "us": timedelta(microseconds=1),
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
    "w": timedelta(weeks=1),
}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|d|w)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MAX_DURATION = timedelta(days=100 * 365)


def parse_duration(text: str) -> timedelta:
    """Parse `500ms`, `2m`, `1h30m`, `7d`; 0 needs no unit.

    >>> parse_duration("1h30m")
    datetime.timedelta(seconds=5400)
    """
    clean = text.strip()
    if clean == "0":
        return timedelta(0)
    parts = _DURATION_PART.findall(clean)
    if not parts or "".join(number + unit for number, unit in parts) != clean:
        raise InvalidInput(f"invalid duration {text!r}", fix="write 500ms, 30s, 2m, 1h30m or 7d")
    try:
        total = sum((float(number) * _UNITS[unit] for number, unit in parts), timedelta(0))
    except OverflowError:
        total = _MAX_DURATION + timedelta(days=1)
    if total > _MAX_DURATION:
        raise InvalidInput(f"the duration {text!r} is longer than a hundred years", fix="leave it out for no limit")
    return total


def parse_seconds(text: str) -> float:
    """Parse a duration in seconds; a bare number means seconds.

    >>> parse_seconds("10"), parse_seconds("1m")
    (10.0, 60.0)
    """
    try:
        seconds = float(text)
    except ValueError:
        return parse_duration(text).total_seconds()
    if not math.isfinite(seconds):
        raise InvalidInput(f"invalid duration {text!r}", fix="write 500ms, 30s, 2m, 1h30m or 7d")
    return seconds


def parse_size(text: str) -> int:
    """Parse `512`, `10MB` (10,000,000 bytes), `1GiB` (1,073,741,824); `none` or -1 is no limit.

    >>> parse_size("10MB"), parse_size("1KiB")
    (10000000, 1024)
    """
    clean = text.strip()
    if clean.lower() in ("none", "-1"):
        return -1
    match = _SIZE.fullmatch(clean)
    if not match or (match[3] and not match[2]):
        raise InvalidInput(f"invalid size {text!r}", fix="write 512, 10MB or 1GiB")
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2].lower()])
    if size > 2**62:
        raise InvalidInput(f"the size {text!r} is more than a server can count", fix="leave it out for no limit")
    return size


def parse_time(text: str) -> datetime:
    """Parse an ISO 8601 time with its zone, such as 2026-11-15T12:00:00Z."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"invalid time {text!r}", fix="write 2026-11-15T12:00:00Z") from None
    if moment.tzinfo is None:
        raise InvalidInput(f"the time {text!r} has no zone", fix="add Z for UTC, or an offset such as +01:00")
    return moment


def parse_moment(text: str, now: datetime) -> datetime:
    """Parse a time in the future: a duration from now, or an ISO time."""
    return now + parse_duration(text) if _DURATION_PART.match(text) and "-" not in text else parse_time(text)


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a consumer."""

    policy: Deliver
    sequence: int | None = None
    time: datetime | None = None


_START_NAMES = {
    "all": Deliver.ALL,
    "last": Deliver.LAST,
    "new": Deliver.NEW,
    "subject": Deliver.LAST_PER_SUBJECT,
}


def parse_start(text: str, now: datetime) -> Start:
    """Parse `all`, `last`, `new`, `subject`, a sequence, a duration ago, or an ISO time.

    >>> parse_start("10", datetime.now(UTC)).sequence
    10
    """
    if text in _START_NAMES:
        return Start(_START_NAMES[text])
    if text.isascii() and text.isdigit():
        if int(text) < 1:
            raise InvalidInput("sequences begin at 1", fix="use --deliver all to begin with the first message")
        return Start(Deliver.BY_START_SEQUENCE, sequence=int(text))
    try:
        ago = parse_duration(text) if "-" not in text else None
        return Start(Deliver.BY_START_TIME, time=now - ago if ago is not None else parse_time(text))
    except InvalidInput:
        raise InvalidInput(
            f"invalid start {text!r}",
            fix="use all, last, new, subject, a sequence, a duration ago such as 2m, or a time such as "
            "2026-11-15T12:00:00Z",
        ) from None


def parse_headers(given: list[str]) -> dict[str, list[str]]:
    """Parse headers `name:value`; a repeated name keeps all its values in order.

    >>> parse_headers(["Tag: a", "Tag:b"])
    {'Tag': ['a', 'b']}
    """
    headers: dict[str, list[str]] = {}
    for item in given:
        name, colon, value = item.partition(":")
        if not colon:
            raise InvalidHeader(f"invalid header {item!r}: no ':'", fix="write -H name:value")
        headers.setdefault(name.strip(), []).append(value.strip(" \t"))
    return headers


def parse_list(given: list[str] | None) -> tuple[str, ...]:
    """Split the values of a repeatable option at commas; drop empty values."""
    return tuple(part.strip() for item in given or [] for part in item.split(",") if part.strip())


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def parse_topic(text: str) -> RealmTopic:
    """Parse `REALM:TOPIC`; the topic may contain colons.

    >>> parse_topic("udm:users/user")
    RealmTopic(realm='udm', topic='users/user')
    """
    realm, colon, topic = text.partition(":")
    if not colon or not realm or not topic:
        raise InvalidInput(f"invalid topic {text!r}", fix="write REALM:TOPIC, such as udm:users/user")
    return RealmTopic(realm, topic)


def parse_pair(text: str) -> tuple[str, str]:
    """Parse `name=value`; the value may be empty."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"invalid filter {text!r}", fix="write NAME=VALUE, such as department=it")
    return name, value


def parse_scalar(text: str) -> Scalar:
    """Parse a JSON string, number, true or false; anything else is text.

    >>> parse_scalar("3"), parse_scalar("it"), parse_scalar('"3"')
    (3, 'it', '3')
    """
    try:
        value = json_fields.load(text)
    except ValueError:
        return text
    return value if isinstance(value, str | int | float | bool) else text


def parse_replay_point(text: str) -> ReplayPoint:
    """Parse a position, an ISO time, or a duration ago."""
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return utc_now() - parse_duration(text) if "-" not in text else parse_time(text)
    except InvalidInput:
        raise InvalidInput(
            f"invalid position or time {text!r}",
            fix="use a position, a time such as 2026-11-15T12:00:00Z, or 2h for two hours ago",
        ) from None


def parse_label(text: str) -> tuple[str, str]:
    """Parse `REALM:TOPIC`, both exact.

    >>> parse_label("shop:orders")
    ('shop', 'orders')
    """
    realm, colon, topic = text.partition(":")
    if not colon or not realm or not topic:
        raise InvalidInput(f"invalid topic {text!r}", fix="write REALM:TOPIC, such as shop:orders")
    return realm, topic
