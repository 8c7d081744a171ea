"""Validators of objects, and the comparison of revisions: JSON Schema and Avro behind one interface.

`jsonschema-rs` checks JSON Schema, this module checks the JSON form of Avro, and `fastavro` reads Avro's binary form.
The first schema that needs a library imports it. A validator never fetches a reference from elsewhere, and a mistake
never contains the wrong value: it may be a secret.

The JSON form of Avro, by the specification: a union other than null is an object with the name of its branch
(`{"string": "x"}`), bytes are strings of characters below 256. A missing field must have a default; an unknown field is
refused.
"""

import base64
import binascii
import io
import itertools
import math
from collections.abc import Iterator
from typing import Any, Final, Protocol, assert_never

from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json, describe_type
from purveyor.sources.schemas import (
    avro_schema,
    json_compatibility,
)
from purveyor.sources.schemas.avro_schema import (
    Array,
    EnumType,
    Fixed,
    Map,
    Primitive,
    Record,
    Type,
    Union,
    type_name,
    walk,
)
from purveyor.sources.schemas.schema import Compatibility, Encoding, SchemaType, check_definition

Mistake = tuple[tuple[str, ...], str]
"""The path in the object, and what is wrong there."""
_MAX_MISTAKES: Final = 10
_MAX_PROBLEMS: Final = 100
_MASK: Final = "the value"
_MAX_BACKTRACKING_STEPS: Final = 100_000
"""Of a regular expression on one text; beyond it the text does not fit."""
_INTEGER_LIMITS: Final = {"int": 1 << 31, "long": 1 << 63}


class Validator(Protocol):
    """A compiled revision, which checks objects."""

    def find_mistakes(self, given: Json) -> list[Mistake]:
        """Return the first mistakes of an object; none if it fits."""

    def decode(self, data: bytes) -> Json:
        """Return the object in a binary form; InvalidInput if there is none."""


def compile_schema(kind: SchemaType, encoding: Encoding, definition: Json) -> Validator:
    """Compile a definition; InvalidInput says what is wrong with it."""
    check_definition(definition)
    try:
        match kind:
            case SchemaType.JSON_SCHEMA:
                return _JsonSchema(definition)
            case SchemaType.AVRO:
                return _Avro(definition, binary=encoding is Encoding.BINARY)
            case _:
                assert_never(kind)
    except RecursionError:
        raise InvalidInput("the schema is nested too deeply", fix="flatten it") from None


def find_incompatibilities(kind: SchemaType, compatibility: Compatibility, old: Json, new: Json) -> tuple[str, ...]:
    """Return the first reasons why a definition may not follow another; empty if it may."""
    found: list[str] = []
    try:
        if compatibility.backward:
            problems = find_unreadable(kind, reader=new, writer=old)
            found += (f"old objects are not taken: {problem}" for problem in problems[:_MAX_PROBLEMS])
        if compatibility.forward:
            problems = find_unreadable(kind, reader=old, writer=new)
            found += (f"new objects are not understood by others: {problem}" for problem in problems[:_MAX_PROBLEMS])
    except RecursionError:
        return ("it: nested too deeply to be compared",)
    return tuple(found)


def find_unreadable(kind: SchemaType, *, reader: Json, writer: Json) -> tuple[str, ...]:
    """Return why the reader refuses some objects of the writer; empty if it takes all."""
    match kind:
        case SchemaType.JSON_SCHEMA:
            return json_compatibility.find_narrowed(writer, reader)
        case SchemaType.AVRO:
            return avro_schema.find_unreadable(avro_schema.parse(reader), avro_schema.parse(writer))
        case _:
            assert_never(kind)


class _JsonSchema:
    def __init__(self, definition: Json) -> None:
        import jsonschema_rs  # noqa: PLC0415 - loaded at the first use

        try:
            self._validator = jsonschema_rs.validator_for(
                definition,
                mask=_MASK,
                validate_formats=True,
                offline=True,
                pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=_MAX_BACKTRACKING_STEPS),
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
            where = ".".join(map(str, getattr(error, "instance_path", ())))
            raise InvalidInput(
                f"the JSON Schema {f'at {where!r} ' if where else ''}is none: {error.message}",
                fix="correct it there; a schema may not refer to other documents",
            ) from None

    def find_mistakes(self, given: Json) -> list[Mistake]:
        if self._validator.is_valid(given):
            return []
        errors = itertools.islice(self._validator.iter_errors(given), _MAX_MISTAKES)
        return [(_path(error.instance_path), error.message) for error in errors]

    def decode(self, data: bytes) -> Json:
        raise InvalidInput("JSON Schema has no binary form", fix="send the object as JSON")


class _Avro:
    def __init__(self, definition: Json, *, binary: bool) -> None:
        self._record = avro_schema.parse(definition)
        check_defaults(self._record)
        self._binary: Any = None
        if binary:
            self._binary = _binary_schema(self._record, definition)

    def find_mistakes(self, given: Json) -> list[Mistake]:
        found = find_mistake(self._record, given)
        return [] if found is None else [found]

    def decode(self, data: bytes) -> Json:
        import fastavro  # noqa: PLC0415 - loaded at the first use

        stream = io.BytesIO(data)
        try:
            value = fastavro.schemaless_reader(stream, self._binary, None, return_named_type=True)
            found: Json = to_json_form(self._record, value)
        except Exception as error:  # noqa: BLE001 - a decoder may raise anything for bad bytes
            raise _undecodable(f"{type(error).__name__}") from None
        if stream.tell() != len(data):
            raise _undecodable(f"{len(data) - stream.tell()} bytes are left over")
        if not all(map(math.isfinite, _floats(found))):
            raise _undecodable("a number is not finite, and JSON has none of those")
        return found


def _binary_schema(record: avro_schema.Record, definition: Json) -> Any:
    """Return the schema for fastavro; refuse types whose values could be large beyond the length of their bytes."""
    import fastavro  # noqa: PLC0415 - loaded at the first use

    if avro_schema.contains_itself(record):
        raise InvalidInput("a record that contains itself has no safe binary form here", fix="use the encoding json")
    for each in avro_schema.walk(record):
        if isinstance(each, avro_schema.Array) and avro_schema.may_be_empty(each.items):
            raise InvalidInput("an array of elements without any bytes has no safe binary form", fix="leave it out")
    try:
        return fastavro.parse_schema(_without_logical_types(definition))
    except Exception as error:
        raise InvalidInput(f"the Avro schema is not understood: {error}", fix="correct it") from error


def _without_logical_types(value: Any) -> Any:
    """Return a definition without logical types: dates and decimals stay numbers and bytes, as in JSON."""
    if isinstance(value, dict):
        return {name: _without_logical_types(inner) for name, inner in value.items() if name != "logicalType"}
    return [_without_logical_types(each) for each in value] if isinstance(value, list) else value


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _floats(each)


def _path(parts: list[str | int]) -> tuple[str, ...]:
    return tuple(map(str, parts))


def _undecodable(why: str) -> InvalidInput:
    return InvalidInput(f"the bytes are no object of the schema: {why}", fix="encode them with the schema in force")


def decode_base64(text: str) -> bytes:
    """Decode the bytes in an event."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput("the text is not base64", fix="send Avro's binary form in base64") from None


# The JSON form of Avro


def find_mistake(wanted: Type, value: Any, where: tuple[str, ...] = (), *, default: bool = False) -> Mistake | None:
    """Return the first mistake of a value; None if it fits.

    In a `default` of a schema a union is written without its name, as its first branch.
    """
    match wanted:
        case Primitive(name):
            return None if _fits_primitive(name, value) else (where, f"{describe_type(value)} is no {name}")
        case Record():
            return _mistake_in_record(wanted, value, where, default)
        case Union():
            return _mistake_in_union(wanted, value, where, default)
        case Array():
            if not isinstance(value, list):
                return where, f"{describe_type(value)} is no array"
            found = (
                find_mistake(wanted.items, each, (*where, str(n)), default=default) for n, each in enumerate(value)
            )
        case Map():
            if not isinstance(value, dict):
                return where, f"{describe_type(value)} is no map"
            found = (find_mistake(wanted.values, each, (*where, name), default=default) for name, each in value.items())
        case EnumType():
            return None if value in wanted.symbols else (where, f"is none of {', '.join(wanted.symbols)}")
        case Fixed():
            return None if _is_bytes(value) and len(value) == wanted.size else (where, f"is not {wanted.size} bytes")
    return next((each for each in found if each is not None), None)


def check_defaults(root: Type) -> None:
    """Raise InvalidInput unless every default of a schema fits its field."""
    for record in walk(root):
        for field in record.fields.values() if isinstance(record, Record) else ():
            if field.has_default and find_mistake(field.type, field.default, default=True) is not None:
                raise InvalidInput(
                    f"the default of {field.name!r} in the Avro schema is no {type_name(field.type)}",
                    fix="the default of a union is one of its first type",
                )


def to_json_form(wanted: Type, value: Any) -> Any:
    """Return a value that `fastavro` decoded in the JSON form of Avro.

    In unions the decoder must return values of named types as pairs of the name and the value.
    """
    match wanted:
        case Primitive(name):
            return value.decode("latin-1") if name == "bytes" else value
        case Fixed():
            return value.decode("latin-1")
        case Record():
            return {name: to_json_form(field.type, value[name]) for name, field in wanted.fields.items()}
        case Array():
            return [to_json_form(wanted.items, each) for each in value]
        case Map():
            return {name: to_json_form(wanted.values, each) for name, each in value.items()}
        case Union():
            return _union_to_json_form(wanted, value)
        case EnumType():
            return value


def _union_to_json_form(wanted: Union, value: Any) -> Any:
    if value is None:
        return None
    name, inner = value if isinstance(value, tuple) else (None, value)
    branch = next(
        each
        for each in wanted.branches
        if type_name(each) == name or (name is None and _may_be_decoded_as(each, inner))
    )
    return {type_name(branch): to_json_form(branch, inner)}


def _may_be_decoded_as(branch: Type, value: Any) -> bool:
    """Whether a decoder returns such a value for a branch without a name."""
    match branch:
        case Array():
            return isinstance(value, list)
        case Map():
            return isinstance(value, dict)
        case Primitive("bytes"):
            return isinstance(value, bytes)
        case Primitive("float" | "double"):
            return isinstance(value, float)
        case Primitive(name):
            return _fits_primitive(name, value)
        case _:
            return False


def _mistake_in_record(wanted: Record, value: Any, where: tuple[str, ...], default: bool) -> Mistake | None:
    if not isinstance(value, dict):
        return where, f"{describe_type(value)} is no {wanted.name}"
    for name, field in wanted.fields.items():
        if name in value:
            found = find_mistake(field.type, value[name], (*where, name), default=default)
            if found is not None:
                return found
        elif not field.has_default:
            return (*where, name), "is missing"
    unknown = next((name for name in value if name not in wanted.fields), None)
    return None if unknown is None else ((*where, unknown), f"is no field of {wanted.name}")


def _mistake_in_union(wanted: Union, value: Any, where: tuple[str, ...], default: bool) -> Mistake | None:
    if default:
        return find_mistake(wanted.branches[0], value, where, default=True)
    named = {type_name(branch): branch for branch in wanted.branches}
    if value is None and "null" in named:
        return None
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in named:
        names = " or ".join("null" if name == "null" else f'{{"{name}": ...}}' for name in named)
        return where, f"is not {names}"
    ((name, inner),) = value.items()
    return find_mistake(named[name], inner, (*where, name))


def _fits_primitive(name: str, value: Any) -> bool:
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "int" | "long":
            return (
                isinstance(value, int)
                and not isinstance(value, bool)
                and -_INTEGER_LIMITS[name] <= value < _INTEGER_LIMITS[name]
            )
        case "float" | "double":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "bytes":
            return _is_bytes(value)
        case _:
            return isinstance(value, str)


def _is_bytes(value: Any) -> bool:
    return isinstance(value, str) and all(ord(character) < 256 for character in value)
