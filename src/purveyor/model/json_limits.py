"""Limits of texts and JSON values that come from outside: what has no UTF-8, no number, or no end is refused. Pure."""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from purveyor.model.errors import InvalidInput

LONGEST_FIELD_NAME_BYTES: Final = 4096
"""Spark SQL does not parse an object with a longer name than 50,000 characters, so no filter would match it."""
MOST_LEVELS: Final = 100

_LARGEST_NUMBER: Final = int(sys.float_info.max)
_LONGEST_SHOWN: Final = 200
_HALF: Final = re.compile("[\ud800-\udfff]")
_BAD: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def check_text(text: str, what: str, most_bytes: int) -> str:
    """Return a text that is not empty, not too long, and without control characters; `what` names it in the error."""
    if not text:
        raise InvalidInput(f"{what} is empty", fix=f"give 1 to {most_bytes} bytes")
    return check_perhaps_empty(text, what, most_bytes)


def check_perhaps_empty(text: str, what: str, most_bytes: int) -> str:
    """Return a text that is not too long and without control characters."""
    if len(text) <= most_bytes and text.isascii() and text.isprintable():  # nearly every one
        return text
    bad = _BAD.search(text)
    if bad is not None and _HALF.match(bad.group()):
        raise half(what)
    if bad is not None:
        raise InvalidInput(f"{what} holds the control character {bad.group()!r}", fix="leave it out")
    size = len(text.encode())
    if size > most_bytes:
        raise InvalidInput(f"{what} is {size} bytes long", fix=f"give at most {most_bytes} bytes")
    return text


def check_json(value: object, what: str, *, most_levels: int = MOST_LEVELS) -> None:
    """Raise InvalidInput if a JSON value is too deep, or holds a number or a name beyond the limits."""
    if not _fits(value, most_levels):
        _find_fault(value, what, most_levels)


def _fits(value: object, most_levels: int) -> bool:
    """Whether there is certainly no fault; this is asked of every event, so it keeps no places."""
    level: list[Any] = [value] if value else []
    for _ in range(most_levels):
        below: list[Any] = []
        for container in level:
            kind = type(container)
            if kind is dict:
                if container and len(max(container, key=len)) * 4 > LONGEST_FIELD_NAME_BYTES:
                    return False
            elif kind is not list:
                return False
            for inner in container.values() if kind is dict else container:
                kind_inside = type(inner)
                if kind_inside is str or inner is None or kind_inside is bool:
                    continue
                if kind_inside is dict or kind_inside is list:
                    below.append(inner)
                elif not ((kind_inside is int or kind_inside is float) and in_range(inner)):
                    return False
        if not below:
            return True
        level = below
    return False


def _find_fault(value: object, what: str, most_levels: int) -> None:
    level: list[tuple[object, str]] = [(value, what)] if value else []
    for _ in range(most_levels):
        below: list[tuple[object, str]] = []
        for container, place in level:
            for name, inner in _items(container):
                if isinstance(inner, dict | list | tuple):
                    below.append((inner, _below(place, name)))
                elif isinstance(inner, int | float) and not in_range(inner):
                    raise InvalidInput(
                        f"{_shown(_below(place, name))} is a number beyond the range of a double",
                        fix="send it as a string",
                    )
                if isinstance(name, str) and len(name) * 4 > LONGEST_FIELD_NAME_BYTES:
                    _check_field_name(name, place)
        level = below
        if not level:
            return
    raise InvalidInput(f"{what} is nested more than {most_levels} levels deep", fix="flatten it")


def check_halves(value: object, what: str) -> None:
    """Raise InvalidInput if a text of a JSON value holds half of a surrogate pair, with its place."""
    todo: list[tuple[object, str]] = [(value, what)]
    while todo:
        found, place = todo.pop()
        if isinstance(found, str) and _HALF.search(found):
            raise half(place)
        for name, inner in _items(found):
            if isinstance(name, str) and _HALF.search(name):
                raise half(f"the name of a field in {place}")
            todo.append((inner, _below(place, name)))


def in_range(number: float) -> bool:
    """Whether a number is finite as a double.

    >>> in_range(2**1023), in_range(10**400), in_range(float("nan"))
    (True, False, False)
    """
    return -_LARGEST_NUMBER <= number <= _LARGEST_NUMBER


def half(what: str) -> InvalidInput:
    """The error about half of a surrogate pair."""
    return InvalidInput(
        f"{_shown(what)} holds half of a surrogate pair, which is no character",
        fix="send the whole character, or leave it out",
    )


def _check_field_name(name: str, place: str) -> None:
    size = len(name.encode("utf-8", "surrogatepass"))
    if size > LONGEST_FIELD_NAME_BYTES:
        raise InvalidInput(
            f"{_shown(place)} has a field whose name is {size} bytes long",
            fix=f"use at most {LONGEST_FIELD_NAME_BYTES} bytes",
        )


def _items(container: object) -> Iterator[tuple[str | int, Any]]:
    if isinstance(container, Mapping):
        yield from container.items()
    elif isinstance(container, list | tuple):
        yield from enumerate(container)


def _below(place: str, name: str | int) -> str:
    return f"{place}[{name}]" if isinstance(name, int) else f"{place}.{name}"


def _shown(place: str) -> str:
    return place if len(place) <= _LONGEST_SHOWN else f"{place[:_LONGEST_SHOWN]}..."
