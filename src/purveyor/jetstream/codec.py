"""Convert dataclasses to and from the JSON of the JetStream API: durations in nanoseconds, times in RFC 3339, enums.

A dataclass field has the name of the JSON field. A field that is None is omitted, so the server uses its default.
Reading ignores unknown fields; so updates start from the server's own JSON (`Streams.update`).
"""

import dataclasses
import types
import typing
from collections.abc import Hashable
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from purveyor.model.errors import InvalidConfig

T = TypeVar("T")
Json = dict[str, Any]

_ZERO_TIME = "0001-01-01"


def nanoseconds(duration: timedelta) -> int:
    """Return a duration in nanoseconds, without the rounding of floats."""
    return (duration // timedelta(microseconds=1)) * 1000


def parse_time(text: str) -> datetime | None:
    """Parse RFC 3339 with up to nine fractional digits; return None for an empty text or Go's zero time."""
    if not text or text.startswith(_ZERO_TIME):
        return None
    body, zone = (text[:-1], "+00:00") if text.endswith("Z") else (text[:-6], text[-6:])
    whole, _, fraction = body.partition(".")
    return datetime.fromisoformat(f"{whole}.{(fraction + '000000')[:6]}{zone}")


def format_time(moment: datetime) -> str:
    """Return an aware time as RFC 3339 in UTC."""
    if moment.tzinfo is None:
        raise InvalidConfig(
            f"the time {moment.isoformat()} has no time zone", fix="use an aware datetime, for example in UTC"
        )
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def to_wire(value: object) -> Any:
    """Return a dataclass (or a value of one) as JSON; fields that are None are omitted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: to_wire(item) for name, item in pairs if item is not None}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, timedelta):
        return nanoseconds(value)
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, tuple | list):
        return [to_wire(item) for item in value]
    return value


def from_wire(kind: type[T], data: Json) -> T:
    """Return a dataclass from JSON; missing fields get their defaults."""
    values = {
        name: _convert(hint, data[name])
        for name, hint in _hints(cast("Hashable", kind)).items()
        if name in data and data[name] is not None
    }
    return kind(**values)


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    assert isinstance(kind, type)
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _convert(hint: Any, value: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is tuple:
        return tuple(_convert(get_args(hint)[0], item) for item in value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_wire(hint, value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if hint is timedelta:
        return timedelta(microseconds=value / 1000)
    if hint is datetime:
        return parse_time(value)
    return value
