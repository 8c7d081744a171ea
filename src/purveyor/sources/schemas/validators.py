"""Does an object fit a revision of a schema, and may a revision follow another: JSON Schema and Avro behind one form.

JSON Schema is checked by `jsonschema-rs`, the JSON form of Avro by `model.avro_json`; `fastavro` reads Avro's binary
form. Both libraries are imported with the first schema that needs them. No reference is ever fetched from elsewhere,
and what is told of a mistake never holds the value that is wrong: it may be a secret.
"""

import base64
import binascii
import io
import itertools
import math
from collections.abc import Iterator
from typing import Any, Final, Protocol, assert_never

from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.sources.schemas import (
    avro_compatibility,
    avro_schema,
    avro_validation,
    json_compatibility,
)
from purveyor.sources.schemas.schema import Compatibility, Encoding, SchemaType, check_definition

Mistake = tuple[tuple[str, ...], str]
"""Where in the object, from the outside in, and what is wrong there."""
_MOST_TOLD: Final = 10
_MOST_PROBLEMS: Final = 100
_MASK: Final = "the value"
_MOST_BACKTRACKING: Final = 100_000
"""So many steps may an expression take on one text: then the text does not fit."""


class Validator(Protocol):
    """One revision, ready to check objects."""

    def mistakes(self, given: Json) -> list[Mistake]:
        """What does not fit, the first few; none if it fits."""

    def decode(self, data: bytes) -> Json:
        """The object that a binary form means; InvalidInput if it is none."""


def compiled(kind: SchemaType, encoding: Encoding, definition: Json) -> Validator:
    """A definition ready to be used; InvalidInput tells what is wrong with it."""
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


def incompatible(kind: SchemaType, compatibility: Compatibility, old: Json, new: Json) -> tuple[str, ...]:
    """Why a definition may not follow another, the first reasons; empty if it may."""
    found: list[str] = []
    try:
        if compatibility.backward:
            problems = unreadable(kind, reader=new, writer=old)
            found += (f"old objects are not taken: {problem}" for problem in problems[:_MOST_PROBLEMS])
        if compatibility.forward:
            problems = unreadable(kind, reader=old, writer=new)
            found += (f"new objects are not understood by others: {problem}" for problem in problems[:_MOST_PROBLEMS])
    except RecursionError:
        return ("it: nested too deeply to be compared",)
    return tuple(found)


def unreadable(kind: SchemaType, *, reader: Json, writer: Json) -> tuple[str, ...]:
    """Why some objects of one definition do not fit another; empty if all do."""
    match kind:
        case SchemaType.JSON_SCHEMA:
            return json_compatibility.narrowed(writer, reader)
        case SchemaType.AVRO:
            return avro_compatibility.unreadable(avro_schema.parse(reader), avro_schema.parse(writer))
        case _:
            assert_never(kind)


class _JsonSchema:
    def __init__(self, definition: Json) -> None:
        import jsonschema_rs  # noqa: PLC0415 - see the top

        try:
            self._validator = jsonschema_rs.validator_for(
                definition,
                mask=_MASK,
                validate_formats=True,
                offline=True,
                pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=_MOST_BACKTRACKING),
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
            where = ".".join(map(str, getattr(error, "instance_path", ())))
            raise InvalidInput(
                f"the JSON Schema {f'at {where!r} ' if where else ''}is none: {error.message}",
                fix="mend it there; a schema is whole in itself: references to elsewhere are not followed",
            ) from None

    def mistakes(self, given: Json) -> list[Mistake]:
        if self._validator.is_valid(given):
            return []
        errors = itertools.islice(self._validator.iter_errors(given), _MOST_TOLD)
        return [(_path(error.instance_path), error.message) for error in errors]

    def decode(self, data: bytes) -> Json:
        raise InvalidInput("JSON Schema has no binary form", fix="send the object as JSON")


class _Avro:
    def __init__(self, definition: Json, *, binary: bool) -> None:
        self._record = avro_schema.parse(definition)
        avro_validation.check_defaults(self._record)
        self._binary: Any = None
        if binary:
            self._binary = _binary_schema(self._record, definition)

    def mistakes(self, given: Json) -> list[Mistake]:
        found = avro_validation.mistake(self._record, given)
        return [] if found is None else [found]

    def decode(self, data: bytes) -> Json:
        import fastavro  # noqa: PLC0415 - see the top

        stream = io.BytesIO(data)
        try:
            value = fastavro.schemaless_reader(stream, self._binary, None, return_named_type=True)
            found: Json = avro_validation.clear(self._record, value)
        except Exception as error:  # noqa: BLE001 - whatever a decoder makes of rubbish
            raise _no_object(f"{type(error).__name__}") from None
        if stream.tell() != len(data):
            raise _no_object(f"{len(data) - stream.tell()} bytes are left over")
        if not all(map(math.isfinite, _numbers(found))):
            raise _no_object("a number is not finite, and JSON has none of those")
        return found


def _binary_schema(record: avro_schema.Record, definition: Json) -> Any:
    """For fastavro. What bytes could let grow without end, whatever their length, is refused beforehand."""
    import fastavro  # noqa: PLC0415 - see the top

    if avro_schema.contains_itself(record):
        raise InvalidInput("a record that contains itself has no safe binary form here", fix="use the encoding json")
    for each in avro_schema.walk(record):
        if isinstance(each, avro_schema.Array) and avro_schema.may_be_empty(each.items):
            raise InvalidInput("an array of elements without any bytes has no safe binary form", fix="leave it out")
    try:
        return fastavro.parse_schema(_plain(definition))
    except Exception as error:
        raise InvalidInput(f"the Avro schema is not understood: {error}", fix="mend it") from error


def _plain(value: Any) -> Any:
    """Without logical types: dates and decimals stay the numbers and bytes that they are in JSON."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if name != "logicalType"}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _numbers(each)


def _path(parts: list[str | int]) -> tuple[str, ...]:
    return tuple(map(str, parts))


def _no_object(why: str) -> InvalidInput:
    return InvalidInput(f"the bytes are no object of the schema: {why}", fix="encode them with the schema in force")


def from_base64(text: str) -> bytes:
    """Bytes as an event carries them."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput("the text is not base64", fix="send Avro's binary form in base64") from None
