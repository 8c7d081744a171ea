"""Encode and decode the types of an endpoint as JSON: decoded once, with the path of a mistake in the error.

Types: dataclasses, pydantic models, enums, times, UUIDs, decimals, bytes (as base64), and lists, tuples, sets, mappings
and unions of them. A decoder ignores fields that its type does not have, so that a sender may be newer than a receiver.

Neither msgspec nor pydantic replaces this module without a loss (`tests/stages/test_message_codec.py` holds the cases):
- msgspec takes no union of two dataclasses or of two types that are text in JSON, and no pydantic models; it writes and
  reads a timedelta as an ISO text, where stored messages have a number of seconds.
- pydantic reads bytes in the fields of a user's dataclass as UTF-8, not as base64, and takes no setting for that; its
  strict mode refuses a number of seconds, and its other mode takes the text "1" as a number.
- The extra `stages` needs neither of them.
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
Decoder: TypeAlias = Callable[[Any, str], Any]
"""Takes a JSON value and its path in the message."""

_JSON_TYPES = (str, int, float, bool, type(None))


def dump(value: object) -> bytes:
    """Return a value as JSON text. Raises InvalidInput for a type that has no JSON form."""
    try:
        return json.dumps(to_json(value), separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:  # half a surrogate pair, or a number that JSON does not have
        raise InvalidInput(
            f"a {type(value).__name__} has no JSON form: {error}", fix="send text and numbers"
        ) from error


def load(kind: type[T], data: bytes) -> T:
    """Return a value of that type from JSON text; InvalidInput names the wrong field."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise InvalidInput(f"a message is not JSON: {error}", fix="send what the endpoint takes") from error
    return from_json(kind, value)


def from_json(kind: type[T], value: object) -> T:
    """Return a value of that type from a JSON value."""
    result: T = decoder_for(cast("Hashable", kind))(value, "message")
    return result


def to_json(value: Any) -> Any:
    """Return a value as a JSON value."""
    if isinstance(value, Enum):
        return to_json(value.value)
    if isinstance(value, _JSON_TYPES):
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
    raise InvalidInput(f"a {type(value).__name__} has no JSON form", fix="use a dataclass or a pydantic model")


@cache
def decoder_for(kind: Any) -> Decoder:  # noqa: PLR0912, C901 - a table of types, written as one
    """Return the decoder of a type, built once per type. Raises InvalidConfig for a type that has no JSON form."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return lambda value, _: value
    if kind in _JSON_TYPES or kind is None:
        return _json_type(type(None) if kind is None else kind)
    if kind is Event:
        return lambda value, _: Event.from_json(value)
    if origin in (Union, types.UnionType):
        return _union([decoder_for(option) for option in arguments])
    if origin is typing.Literal:
        return _parsed(lambda value: arguments[arguments.index(value)], f"one of {arguments}")
    if origin in (list, set, frozenset) or kind in (list, set, frozenset):
        return _items(origin or kind, decoder_for(arguments[0] if arguments else Any))
    if origin is tuple and (len(arguments) != 2 or arguments[1] is not ...):
        return _fixed_tuple([decoder_for(item) for item in arguments])
    if origin is tuple or kind is tuple:
        return _items(tuple, decoder_for(arguments[0] if arguments else Any))
    if isinstance(origin or kind, type) and issubclass(origin or kind, Mapping):
        return _mapping(*(decoder_for(item) for item in (arguments or (str, Any))))
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
    raise InvalidConfig(f"messages of type {kind!r} have no JSON form", fix="use a dataclass or a pydantic model")


def _wrong(path: str, wanted: str, value: object) -> InvalidInput:
    return InvalidInput(f"{path} is not {wanted}: {type(value).__name__}", fix="send what the endpoint takes")


def _json_type(kind: type) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _wrong(path, f"of type {kind.__name__}", value)
        return value

    return decode


def _parsed(parse: Callable[[Any], Any], wanted: str) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        try:
            return parse(value)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise _wrong(path, wanted, value) from error

    return decode


def _union(options: list[Decoder]) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        problem: InvalidInput | None = None
        for option in options:
            try:
                return option(value, path)
            except InvalidInput as error:
                problem = problem or error
        assert problem is not None
        raise problem

    return decode


def _items(make: Callable[[Any], Any], item: Decoder) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if not isinstance(value, list):
            raise _wrong(path, "a list", value)
        return make(item(each, f"{path}[{index}]") for index, each in enumerate(value))

    return decode


def _fixed_tuple(items: list[Decoder]) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if not isinstance(value, list) or len(value) != len(items):
            raise _wrong(path, f"a list of {len(items)}", value)
        pairs = zip(items, value, strict=True)
        return tuple(item(each, f"{path}[{index}]") for index, (item, each) in enumerate(pairs))

    return decode


def _mapping(key: Decoder, item: Decoder) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise _wrong(path, "an object", value)
        return {key(name, f"{path}: {name}"): item(each, f"{path}.{name}") for name, each in value.items()}

    return decode


def _dataclass(kind: Any) -> Decoder:
    fields: dict[str, Decoder] | None = None  # built at the first message: a type may contain itself

    def decode(value: Any, path: str) -> Any:
        nonlocal fields
        if fields is None:
            hints = typing.get_type_hints(kind)
            fields = {field.name: decoder_for(hints[field.name]) for field in dataclasses.fields(kind) if field.init}
        if not isinstance(value, dict):
            raise _wrong(path, f"a {kind.__name__}", value)
        given = {name: item(value[name], f"{path}.{name}") for name, item in fields.items() if name in value}
        try:
            return kind(**given)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"{path} is no {kind.__name__}: {error}", fix="send what the endpoint takes") from error

    return decode
