"""Between the types of an endpoint and the JSON on the wire: parsed once, at the edge, with the place of a mistake.

Dataclasses, pydantic models, enums, times, UUIDs, decimals, bytes (as base64), and lists, tuples, sets and mappings of
them. Fields that a type does not know are ignored, so that a sender may be newer than a receiver.
"""

import base64
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import cache
from typing import Any, TypeAlias, TypeVar, Union, cast, get_args, get_origin
from uuid import UUID

from purveyor.model.errors import InvalidConfig, InvalidInput
from purveyor.model.event import Event

T = TypeVar("T")
Reader: TypeAlias = Callable[[Any, str], Any]
"""Takes a JSON value and the place where it stands."""

_PLAIN = (str, int, float, bool, type(None))


def dump(value: object) -> bytes:
    """A value as JSON text. InvalidInput when it is of no type that can travel."""
    try:
        return json.dumps(to_json(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:  # half a surrogate pair, or a number that JSON does not have
        raise InvalidInput(f"a {type(value).__name__} cannot travel: {error}", fix="send text and numbers") from error


def load(kind: type[T], data: bytes) -> T:
    """A value of that type from JSON text; InvalidInput names the field that is wrong."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise InvalidInput(f"a message is not JSON: {error}", fix="send what the endpoint takes") from error
    return from_json(kind, value)


def from_json(kind: type[T], value: object) -> T:
    """A value of that type from JSON."""
    result: T = reader_of(cast("Hashable", kind))(value, "message")
    return result


def to_json(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Enum):
        return to_json(value.value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Event):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(to_json(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, UUID | Decimal):
        return str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise InvalidInput(f"a {type(value).__name__} cannot travel", fix="use a dataclass or a pydantic model")


@cache
def reader_of(kind: Any) -> Reader:  # noqa: PLR0912, C901 - a table of types, written as one
    """How a type is read; made once per type. InvalidConfig for a type that cannot travel."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return lambda value, _: value
    if kind in _PLAIN or kind is None:
        return _plain(type(None) if kind is None else kind)
    if kind is Event:
        return lambda value, _: Event.from_json(value)
    if origin in (Union, types.UnionType):
        return _union([reader_of(option) for option in arguments])
    if origin is typing.Literal:
        return _parsed(lambda value: arguments[arguments.index(value)], f"one of {arguments}")
    if origin in (list, set, frozenset) or kind in (list, set, frozenset):
        return _items(origin or kind, reader_of(arguments[0] if arguments else Any))
    if origin is tuple and (len(arguments) != 2 or arguments[1] is not ...):
        return _fixed([reader_of(item) for item in arguments])
    if origin is tuple or kind is tuple:
        return _items(tuple, reader_of(arguments[0] if arguments else Any))
    if isinstance(origin or kind, type) and issubclass(origin or kind, Mapping):
        return _mapping(*(reader_of(item) for item in (arguments or (str, Any))))
    if isinstance(kind, type):
        if issubclass(kind, Enum):
            return _parsed(kind, f"one of {[option.value for option in kind]}")
        if dataclasses.is_dataclass(kind):
            return _dataclass(kind)
        if hasattr(kind, "model_validate"):
            return _parsed(kind.model_validate, f"a {kind.__name__}")
    simple: dict[Any, tuple[Callable[[Any], Any], str]] = {
        datetime: (datetime.fromisoformat, "a time in ISO form"),
        date: (date.fromisoformat, "a date in ISO form"),
        timedelta: (lambda value: timedelta(seconds=value), "a number of seconds"),
        UUID: (UUID, "a UUID"),
        Decimal: (Decimal, "a decimal number"),
        bytes: (lambda value: base64.b64decode(value, validate=True), "base64"),
    }
    if kind in simple:
        return _parsed(*simple[kind])
    raise InvalidConfig(f"messages of type {kind!r} cannot travel", fix="use a dataclass or a pydantic model")


def _wrong(place: str, wanted: str, value: object) -> InvalidInput:
    return InvalidInput(f"{place} is not {wanted}: {type(value).__name__}", fix="send what the endpoint takes")


def _plain(kind: type) -> Reader:
    def read(value: Any, place: str) -> Any:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _wrong(place, f"of type {kind.__name__}", value)
        return value

    return read


def _parsed(parse: Callable[[Any], Any], wanted: str) -> Reader:
    def read(value: Any, place: str) -> Any:
        try:
            return parse(value)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise _wrong(place, wanted, value) from error

    return read


def _union(options: list[Reader]) -> Reader:
    def read(value: Any, place: str) -> Any:
        problem: InvalidInput | None = None
        for option in options:
            try:
                return option(value, place)
            except InvalidInput as error:
                problem = problem or error
        assert problem is not None
        raise problem

    return read


def _items(make: Callable[[Any], Any], item: Reader) -> Reader:
    def read(value: Any, place: str) -> Any:
        if not isinstance(value, list):
            raise _wrong(place, "a list", value)
        return make(item(each, f"{place}[{index}]") for index, each in enumerate(value))

    return read


def _fixed(items: list[Reader]) -> Reader:
    def read(value: Any, place: str) -> Any:
        if not isinstance(value, list) or len(value) != len(items):
            raise _wrong(place, f"a list of {len(items)}", value)
        pairs = zip(items, value, strict=True)
        return tuple(item(each, f"{place}[{index}]") for index, (item, each) in enumerate(pairs))

    return read


def _mapping(key: Reader, item: Reader) -> Reader:
    def read(value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(place, "an object", value)
        return {key(name, f"{place}: {name}"): item(each, f"{place}.{name}") for name, each in value.items()}

    return read


def _dataclass(kind: Any) -> Reader:
    fields: dict[str, Reader] | None = None  # made at the first message: a type may hold itself

    def read(value: Any, place: str) -> Any:
        nonlocal fields
        if fields is None:
            hints = typing.get_type_hints(kind)
            fields = {field.name: reader_of(hints[field.name]) for field in dataclasses.fields(kind) if field.init}
        if not isinstance(value, dict):
            raise _wrong(place, f"a {kind.__name__}", value)
        given = {name: item(value[name], f"{place}.{name}") for name, item in fields.items() if name in value}
        try:
            return kind(**given)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{place} is no {kind.__name__}: {error}", fix="send what the endpoint takes") from error

    return read
