"""Values of LDAP as values of JSON: each type of property has one way to be written. Pure."""

import base64
import re
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from typing import Any, Final

from purveyor.pipeline.transform.records import Value

_TIME: Final = re.compile(r"(\d{4})(\d\d)(\d\d)(\d\d)(?:(\d\d)(\d\d)?)?(?:[.,](\d+))?(?:(Z)|([+-])(\d\d)(\d\d)?)")


class Kind(Enum):
    """How the values of a property are written in JSON."""

    STRING = "string"
    INT = "int"
    BOOL = "bool"
    BINARY = "binary"
    """As base64."""
    TIME = "time"
    """ISO 8601, in UTC."""


def convert(kind: Kind, value: Value) -> Any:
    """The value as its type is written; ValueError or OverflowError when it is not of that type."""
    return _CONVERT[kind](value)


def _string(value: Value) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")  # noqa: TRY004 - the same for every value that does not fit
    return value


def _int(value: Value) -> int:
    return int(_string(value))


def _bool(value: Value) -> bool:
    word = _string(value).lower()
    if word not in ("true", "false"):
        raise ValueError("not a boolean")
    return word == "true"


def _binary(value: Value) -> str:
    return base64.b64encode(value.encode()).decode() if isinstance(value, str) else value["base64"]


def _time(value: Value) -> str:
    """From LDAP's generalized time.

    >>> _time("20260131120000Z"), _time("202601311200+0130")
    ('2026-01-31T12:00:00+00:00', '2026-01-31T10:30:00+00:00')
    """
    found = _TIME.fullmatch(_string(value))
    if found is None:
        raise ValueError("not a generalized time")
    year, month, day, hour, minute, second, fraction, utc, sign, off_hours, off_minutes = found.groups()
    offset = timedelta(0) if utc else timedelta(hours=int(off_hours), minutes=int(off_minutes or 0))
    zone = timezone(-offset if sign == "-" else offset)
    seconds = min(int(second or 0), 59)  # 60 is a leap second
    moment = datetime(int(year), int(month), int(day), int(hour), int(minute or 0), seconds, tzinfo=zone)
    unit = timedelta(seconds=1) if second else timedelta(minutes=1) if minute else timedelta(hours=1)
    if fraction:
        moment += unit * float(f"0.{fraction}")
    return moment.astimezone(UTC).isoformat()


_CONVERT: Final = {Kind.STRING: _string, Kind.INT: _int, Kind.BOOL: _bool, Kind.BINARY: _binary, Kind.TIME: _time}
