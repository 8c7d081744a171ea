"""The rule for all stored records: a record has a version, and a reader that does not know the version stops.

- A record has a field `version`, a whole number. A record without one has version 1.
- A program reads the version and the fields that it knows. A record with another version, or with an unknown field, is
  an `UnreadableRecord`, and so is a damaged one.
- A program never overwrites, skips or deletes a record that it does not understand. It stops the one thing that the
  record describes, reports that, and continues with all others. When a program that understands the record reads it,
  that thing continues where it stopped.

A program that uses only some fields of a record checks only the version (`check_version`): in one version these fields
have one meaning. So does a reader of headers, because other programs may add headers to a message.

`FieldCodec` declares a field once, for reading and for writing; `read_fields` and `write_fields` use a table of them.

See docs/decisions/0022-stored-records-carry-a-version.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, TypeVar

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput, UnreadableRecord
from purveyor.model.json_fields import Json

VERSION: Final = "version"
UPGRADE: Final = "upgrade this program: a newer one wrote the record, or it is damaged"
T = TypeVar("T")


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
        return json_fields.dump({VERSION: self.version, **fields})

    def read(self, data: bytes | str, build: Callable[[Json], T], of: str = "") -> T:
        """Build a record from its bytes; `UnreadableRecord` if that fails. `of` names its owner in the message."""
        whose = f"{of}: " if of else ""
        try:
            return build(json_fields.parse(data, self.what))
        except UnreadableRecord as error:
            raise UnreadableRecord(f"{whose}{error.message}", fix=error.fix) from error
        except InvalidInput as error:
            raise UnreadableRecord(f"{whose}the {self.what} cannot be read: {error.message}", fix=UPGRADE) from error

    def check(self, data: object) -> Json:
        """Return the fields; `UnreadableRecord` if the version or a field is unknown."""
        given = json_fields.mapping(data, self.what)
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
    """Return the names of the fields, for `Kind` and `json_fields.only`."""
    return tuple(field.name for field in table)


def text_field(name: str, *, default: object = _REQUIRED, omit_default: bool = False) -> FieldCodec:
    """Declare a string that is not empty."""
    return FieldCodec(name, json_fields.text, default=default, omit_default=omit_default)


def whole_field(name: str, *, default: object = _REQUIRED) -> FieldCodec:
    """Declare a whole number of 0 or more."""
    return FieldCodec(name, json_fields.whole, default=default)


def moment_field(name: str, *, default: object = _REQUIRED, omit_default: bool = False) -> FieldCodec:
    """Declare a time in ISO 8601."""
    return FieldCodec(name, json_fields.moment, lambda value: value.isoformat(), default, omit_default)


def member_field(
    name: str, kinds: type[Enum], *, default: object = _REQUIRED, omit_default: bool = False
) -> FieldCodec:
    """Declare a member of an enum, stored as its value."""

    def read(given: Json, name: str, what: str) -> Enum:
        return json_fields.member(kinds, given, name, what)

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
