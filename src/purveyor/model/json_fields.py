"""JSON at the edge of the model: text into checked fields, and back. A wrong field is told by its name."""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Any, TypeVar

from purveyor.model.errors import InvalidInput

Json = dict[str, Any]
K = TypeVar("K", bound=Enum)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
"""Made once: `json.dumps` makes a new one each time."""


def dump_utf8(value: Mapping[str, Any]) -> bytes:
    """Encode compact JSON in UTF-8; UnicodeEncodeError if a text holds half of a surrogate pair."""
    return _ENCODER.encode(value).encode()


def dump(value: Mapping[str, Any]) -> bytes:
    """Compact JSON in UTF-8."""
    try:
        return dump_utf8(value)
    except UnicodeEncodeError:  # half of a surrogate pair has no UTF-8; as an escape it passes
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def parse(text: bytes | str, what: str) -> Json:
    """A JSON object, or InvalidInput that says what is wrong with it."""
    try:
        value = load(text)
    except RecursionError:
        raise InvalidInput(f"the {what} is nested too deeply", fix="flatten it") from None
    except ValueError as error:  # broken JSON, or bytes that are not UTF-8
        raise InvalidInput(f"the {what} is not JSON: {error}", fix="write one JSON object in UTF-8") from None
    return mapping(value, what)


def load(text: bytes | str) -> Any:
    """Any JSON value, or ValueError; NaN and numbers beyond all bounds, which Python would take, are none."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a JSON number")
    return value


def mapping(value: object, what: str) -> Json:
    """A JSON object."""
    if not isinstance(value, dict):
        raise InvalidInput(f"the {what} is {kind(value)}", fix="it must be a JSON object")
    return value


def text(data: Mapping[str, Any], name: str, what: str) -> str:
    """A field that is a string and not empty."""
    value = data.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"the {what} has {kind(value)} as {name!r}", fix=f"give {name!r} as a string")
    return value


def whole(data: Mapping[str, Any], name: str, what: str) -> int:
    """A field that is a whole number of 0 or more."""
    value = data.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidInput(f"the {what} has {kind(value)} as {name!r}", fix=f"give {name!r} as a number of 0 or more")
    return value


def flag(data: Mapping[str, Any], name: str, what: str) -> bool:
    """A field that is true or false; false when it is missing."""
    value = data.get(name, False)
    if not isinstance(value, bool):
        raise InvalidInput(f"the {what} has {kind(value)} as {name!r}", fix=f"give {name!r} as true or false")
    return value


def moment(data: Mapping[str, Any], name: str, what: str) -> datetime:
    """A field that is an ISO 8601 time; one without a zone is in UTC."""
    try:
        value = datetime.fromisoformat(text(data, name, what))
    except ValueError:
        raise InvalidInput(
            f"the {what} has {data[name]!r} as {name!r}", fix=f"give {name!r} as a time such as 2026-11-15T12:00:00Z"
        ) from None
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def member(kinds: type[K], data: Mapping[str, Any], name: str, what: str) -> K:
    """A field that is one word of a closed set."""
    word = text(data, name, what)
    try:
        return kinds(word)
    except ValueError:
        known = ", ".join(str(each.value) for each in kinds)
        raise InvalidInput(f"the {what} has {word!r} as {name!r}", fix=f"known are {known}") from None


def only(data: Mapping[str, Any], names: tuple[str, ...], what: str) -> None:
    """Refuse fields that nobody knows: a misspelt one would be ignored in silence."""
    unknown = [name for name in data if name not in names]
    if unknown:
        raise InvalidInput(f"the {what} has an unknown field {unknown[0]!r}", fix=f"known are {', '.join(names)}")


def kind(value: object) -> str:
    """What a JSON value is, in words.

    >>> kind([1]), kind(""), kind(None)
    ('a list', 'an empty string', 'nothing')
    """
    if value is None:
        return "nothing"
    if value == "":
        return "an empty string"
    names = {
        bool: "true or false",
        str: "a string",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")
