"""JSON from outside and in stored records: parsing, checked fields, limits, and the version rule. Pure.

Errors name the wrong field. `FieldCodec` declares a field once, for reading and for writing; `read_fields` and
`write_fields` use a table of them.

The rule for all stored records (`Kind`): a record has a version, and a reader that does not know the version stops.

- A record has a field `version`, a whole number. A record without one has version 1.
- A program reads the version and the fields that it knows. A record with another version, or with an unknown field, is
  an `UnreadableRecord`, and so is a damaged one.
- A program never overwrites, skips or deletes a record that it does not understand. It stops the one thing that the
  record describes, reports that, and continues with all others. When a program that understands the record reads it,
  that thing continues where it stopped.

A program that uses only some fields of a record checks only the version (`check_version`): in one version these fields
have one meaning. So does a reader of headers, because other programs may add headers to a message.

See docs/decisions/0022-stored-records-carry-a-version.md.
"""

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, Protocol, TypeVar

from purveyor.model.errors import InvalidInput, UnreadableRecord

Json = dict[str, Any]
K = TypeVar("K", bound=Enum)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
"""Created once: `json.dumps` creates a new one for each call."""
VERSION: Final = "version"
UPGRADE: Final = "upgrade this program: a newer one wrote the record, or it is damaged"
T = TypeVar("T")


def dump_utf8(value: Mapping[str, Any]) -> bytes:
    """Encode compact JSON in UTF-8; UnicodeEncodeError if a text holds half of a surrogate pair."""
    return _ENCODER.encode(value).encode()


def dump(value: Mapping[str, Any]) -> bytes:
    """Encode compact JSON in UTF-8; half of a surrogate pair becomes an escape."""
    try:
        return dump_utf8(value)
    except UnicodeEncodeError:  # half of a surrogate pair has no UTF-8
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def parse(text: bytes | str, what: str) -> Json:
    """Parse a JSON object; InvalidInput says what is wrong."""
    try:
        value = load(text)
    except RecursionError:
        raise InvalidInput(f"the {what} is nested too deeply", fix="flatten it") from None
    except ValueError as error:  # broken JSON, or bytes that are not UTF-8
        raise InvalidInput(
            f"the {what} is not JSON: {_describe_error(error)}", fix="write one JSON object in UTF-8"
        ) from None
    return mapping(value, what)


def _describe_error(error: ValueError) -> str:
    """Say where a JSON text is wrong; the line only if the text has several."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    line = f"line {error.lineno}, " if "\n" in error.doc.rstrip("\n") else ""
    return f"{error.msg[:1].lower()}{error.msg[1:]} at {line}character {error.colno}"


def load(text: bytes | str) -> Any:
    """Parse any JSON value; ValueError also for NaN and infinite numbers, which Python would accept."""
    return json.loads(text, parse_constant=_finite, parse_float=_finite)


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a JSON number")
    return value


def mapping(value: object, what: str) -> Json:
    """Return a value that must be a JSON object."""
    if not isinstance(value, dict):
        wrong = "missing" if value is None else describe_type(value)
        raise InvalidInput(f"the {what} is {wrong}", fix="it must be a JSON object")
    return value


def text(data: Mapping[str, Any], name: str, what: str) -> str:
    """Read a field that is a string and not empty."""
    value = data.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"the {what} has {describe_type(value)} as {name!r}", fix=f"give {name!r} as a string")
    return value


def whole(data: Mapping[str, Any], name: str, what: str) -> int:
    """Read a field that is a whole number of 0 or more."""
    value = data.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidInput(
            f"the {what} has {describe_type(value)} as {name!r}", fix=f"give {name!r} as a number of 0 or more"
        )
    return value


def flag(data: Mapping[str, Any], name: str, what: str) -> bool:
    """Read a field that is true or false; false if it is missing."""
    value = data.get(name, False)
    if not isinstance(value, bool):
        raise InvalidInput(f"the {what} has {describe_type(value)} as {name!r}", fix=f"give {name!r} as true or false")
    return value


def moment(data: Mapping[str, Any], name: str, what: str) -> datetime:
    """Read a field that is an ISO 8601 time; a time without a zone is in UTC."""
    try:
        return to_moment(text(data, name, what))
    except ValueError:
        raise InvalidInput(
            f"the {what} has {data[name]!r} as {name!r}", fix=f"give {name!r} as a time such as 2026-11-15T12:00:00Z"
        ) from None


def to_moment(given: str) -> datetime:
    """Return an ISO 8601 time, in UTC if it names no zone; ValueError if it is none."""
    value = datetime.fromisoformat(given)
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def member(kinds: type[K], data: Mapping[str, Any], name: str, what: str) -> K:
    """Read a field that is the value of an enum member."""
    word = text(data, name, what)
    try:
        return kinds(word)
    except ValueError:
        known = ", ".join(str(each.value) for each in kinds)
        raise InvalidInput(f"the {what} has {word!r} as {name!r}", fix=f"known are {known}") from None


def reject_unknown(data: Mapping[str, Any], names: tuple[str, ...], what: str) -> None:
    """Raise InvalidInput for an unknown field: otherwise a misspelt one would be ignored."""
    unknown = [name for name in data if name not in names]
    if unknown:
        raise InvalidInput(f"the {what} has an unknown field {unknown[0]!r}", fix=f"known are {', '.join(names)}")


def describe_type(value: object) -> str:
    """Describe the type of a JSON value.

    >>> describe_type([1]), describe_type(""), describe_type(None)
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


LONGEST_FIELD_NAME_BYTES: Final = 4096
"""Spark SQL does not parse an object with a longer name than 50,000 characters, so no filter would match it."""
MOST_LEVELS: Final = 100

_LARGEST_NUMBER: Final = int(sys.float_info.max)
_LONGEST_SHOWN_CHARACTERS: Final = 200
_HALF_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_FORBIDDEN_CHARACTER: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def check_text(text: str, what: str, most_bytes: int) -> str:
    """Return a text that is not empty, not too long, and without control characters; `what` names it in the error."""
    if not text:
        raise InvalidInput(f"{what} is empty", fix=f"give 1 to {most_bytes} bytes")
    return check_optional_text(text, what, most_bytes)


def check_optional_text(text: str, what: str, most_bytes: int) -> str:
    """Return a text that is not too long and without control characters."""
    if len(text) <= most_bytes and text.isascii() and text.isprintable():  # nearly every one
        return text
    bad = _FORBIDDEN_CHARACTER.search(text)
    if bad is not None and _HALF_SURROGATE.match(bad.group()):
        raise half_surrogate_error(what)
    if bad is not None:
        raise InvalidInput(f"{what} holds the control character {bad.group()!r}", fix="leave it out")
    size = len(text.encode())
    if size > most_bytes:
        raise InvalidInput(f"{what} is {size} bytes long", fix=f"give at most {most_bytes} bytes")
    return text


def check_json(value: object, what: str, *, most_levels: int = MOST_LEVELS) -> None:
    """Raise InvalidInput if a JSON value is too deep, or holds a number or a name beyond the limits."""
    if not _is_within_limits(value, most_levels):
        _raise_first_error(value, what, most_levels)


def _is_within_limits(value: object, most_levels: int) -> bool:
    """Return whether a value is certainly within the limits. It runs for every event, so it records no paths."""
    level: list[Any] = [value] if value else []
    for _ in range(most_levels):
        children: list[Any] = []
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
                    children.append(inner)
                elif not ((kind_inside is int or kind_inside is float) and in_range(inner)):
                    return False
        if not children:
            return True
        level = children
    return False


def _raise_first_error(value: object, what: str, most_levels: int) -> None:
    level: list[tuple[object, str]] = [(value, what)] if value else []
    for _ in range(most_levels):
        children: list[tuple[object, str]] = []
        for container, path in level:
            for name, inner in _items(container):
                if isinstance(inner, dict | list | tuple):
                    children.append((inner, _child_path(path, name)))
                elif isinstance(inner, int | float) and not in_range(inner):
                    raise InvalidInput(
                        f"{_shorten(_child_path(path, name))} is a number beyond the range of a double",
                        fix="send it as a string",
                    )
                if isinstance(name, str) and len(name) * 4 > LONGEST_FIELD_NAME_BYTES:
                    _check_field_name(name, path)
        level = children
        if not level:
            return
    raise InvalidInput(f"{what} is nested more than {most_levels} levels deep", fix="flatten it")


def check_surrogates(value: object, what: str) -> None:
    """Raise InvalidInput, with the path, if a text of a JSON value holds half of a surrogate pair."""
    todo: list[tuple[object, str]] = [(value, what)]
    while todo:
        found, path = todo.pop()
        if isinstance(found, str) and _HALF_SURROGATE.search(found):
            raise half_surrogate_error(path)
        for name, inner in _items(found):
            if isinstance(name, str) and _HALF_SURROGATE.search(name):
                raise half_surrogate_error(f"the name of a field in {path}")
            todo.append((inner, _child_path(path, name)))


def in_range(number: float) -> bool:
    """Return whether a number is finite as a double.

    >>> in_range(2**1023), in_range(10**400), in_range(float("nan"))
    (True, False, False)
    """
    return -_LARGEST_NUMBER <= number <= _LARGEST_NUMBER


def half_surrogate_error(what: str) -> InvalidInput:
    """Return the error about half of a surrogate pair."""
    return InvalidInput(
        f"{_shorten(what)} holds half of a surrogate pair, which is no character",
        fix="send the whole character, or leave it out",
    )


def _check_field_name(name: str, path: str) -> None:
    size = len(name.encode("utf-8", "surrogatepass"))
    if size > LONGEST_FIELD_NAME_BYTES:
        raise InvalidInput(
            f"{_shorten(path)} has a field whose name is {size} bytes long",
            fix=f"use at most {LONGEST_FIELD_NAME_BYTES} bytes",
        )


def _items(container: object) -> Iterator[tuple[str | int, Any]]:
    if isinstance(container, Mapping):
        yield from container.items()
    elif isinstance(container, list | tuple):
        yield from enumerate(container)


def _child_path(path: str, name: str | int) -> str:
    return f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}"


def _shorten(path: str) -> str:
    return path if len(path) <= _LONGEST_SHOWN_CHARACTERS else f"{path[:_LONGEST_SHOWN_CHARACTERS]}..."


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of stored record: its name in messages, its fields, and the version that is read and written.

    >>> kind = Kind("shopping list", ("items",))
    >>> kind.dump({"items": 3})
    b'{"version":1,"items":3}'
    >>> kind.read(b'{"items":3}', lambda given: given["items"])
    3
    """

    what: str
    fields: tuple[str, ...] = ()
    version: int = 1

    def dump(self, fields: Json) -> bytes:
        """Encode the record with its version."""
        return dump({VERSION: self.version, **fields})

    def read(self, data: bytes | str, build: Callable[[Json], T], of: str = "") -> T:
        """Build a record from its bytes; `UnreadableRecord` if that fails. `of` names its owner in the message."""
        whose = f"{of}: " if of else ""
        try:
            return build(parse(data, self.what))
        except UnreadableRecord as error:
            raise UnreadableRecord(f"{whose}{error.message}", fix=error.fix) from error
        except InvalidInput as error:
            raise UnreadableRecord(f"{whose}the {self.what} cannot be read: {error.message}", fix=UPGRADE) from error

    def check(self, data: object) -> Json:
        """Return the fields; `UnreadableRecord` if the version or a field is unknown."""
        given = mapping(data, self.what)
        self.check_version(given)
        for name in given:
            if name not in self.fields and name != VERSION:
                raise UnreadableRecord(
                    f"the {self.what} has the field {name!r}, which this program does not know", fix=UPGRADE
                )
        return given

    def check_version(self, given: Json) -> None:
        """Raise `UnreadableRecord` if the version is unknown. For a reader of some fields."""
        version = given.get(VERSION, 1)
        if version != self.version or isinstance(version, bool):
            raise UnreadableRecord(
                f"the {self.what} has version {version!r}, and this program understands version {self.version}",
                fix=UPGRADE,
            )


_REQUIRED: Final = object()


@dataclass(frozen=True, slots=True)
class FieldCodec:
    """One field of a record: its name in JSON and as an attribute, and how its value is read and written.

    A field without a `default` is required. An optional field that is absent or null has the default; with
    `omit_default` the default is not written.
    """

    name: str
    read: Callable[[Json, str, str], Any]
    write: Callable[[Any], object] = lambda value: value
    default: object = _REQUIRED
    omit_default: bool = False


def read_fields(table: Sequence[FieldCodec], given: Json, what: str) -> dict[str, Any]:
    """Read the attributes of a record; InvalidInput names the wrong field.

    >>> read_fields((text_field("a"), whole_field("b", default=None)), {"a": "x"}, "thing")
    {'a': 'x', 'b': None}
    """
    return {
        field.name: field.default
        if field.default is not _REQUIRED and given.get(field.name) is None
        else field.read(given, field.name, what)
        for field in table
    }


def write_fields(table: Sequence[FieldCodec], record: object) -> Json:
    """Write the fields of a record, in the order of the table."""
    values = [(field, getattr(record, field.name)) for field in table]
    return {
        field.name: None if value is None else field.write(value)
        for field, value in values
        if not (field.omit_default and value == field.default)
    }


def field_names(table: Sequence[FieldCodec]) -> tuple[str, ...]:
    """Return the names of the fields, for `Kind` and `reject_unknown`."""
    return tuple(field.name for field in table)


def text_field(name: str, *, default: object = _REQUIRED, omit_default: bool = False) -> FieldCodec:
    """Declare a string that is not empty."""
    return FieldCodec(name, text, default=default, omit_default=omit_default)


def whole_field(name: str, *, default: object = _REQUIRED) -> FieldCodec:
    """Declare a whole number of 0 or more."""
    return FieldCodec(name, whole, default=default)


def moment_field(name: str, *, default: object = _REQUIRED, omit_default: bool = False) -> FieldCodec:
    """Declare a time in ISO 8601."""
    return FieldCodec(name, moment, lambda value: value.isoformat(), default, omit_default)


def member_field(
    name: str, kinds: type[Enum], *, default: object = _REQUIRED, omit_default: bool = False
) -> FieldCodec:
    """Declare a member of an enum, stored as its value."""

    def read(given: Json, name: str, what: str) -> Enum:
        return member(kinds, given, name, what)

    return FieldCodec(name, read, lambda value: value.value, default, omit_default)


class _Nested(Protocol):
    @classmethod
    def from_json(cls, data: object) -> object: ...

    def to_json(self) -> Json: ...


def nested_field(name: str, nested: type[_Nested], *, default: object = _REQUIRED) -> FieldCodec:
    """Declare an object with `from_json` and `to_json`."""
    return FieldCodec(
        name, lambda given, name, _: nested.from_json(given.get(name)), lambda value: value.to_json(), default
    )
