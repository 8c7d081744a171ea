"""What a reader with one Avro schema makes of data written with another: the resolution rules of the specification.

`unreadable` is empty when all data of the writer can be read. Where the specification leaves the choice of a union's
branch to the implementation, every branch that could be chosen must do. Pure.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from purveyor.sources.schemas.avro_schema import (
    Array,
    EnumType,
    Field,
    Fixed,
    Map,
    Primitive,
    Record,
    Type,
    Union,
    type_name,
)

_PROMOTED: Final = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}


def unreadable(reader: Type, writer: Type) -> tuple[str, ...]:
    """Why the reader could not read some of the writer's data; empty if it can read all."""
    return tuple(_Resolution().problems(reader, writer, ""))


class _Resolution:
    """One question. A pair of types that is being looked at already is taken to be readable: data has an end."""

    def __init__(self) -> None:
        self._asked: set[tuple[int, int]] = set()
        self._branches: dict[int, _Branches] = {}

    def problems(self, reader: Type, writer: Type, where: str) -> Iterator[str]:
        pair = (id(reader), id(writer))
        if pair in self._asked:
            return
        self._asked.add(pair)
        if isinstance(writer, Union):
            for branch in writer.branches:
                yield from self.problems(reader, branch, where)
        elif isinstance(reader, Union):
            if id(reader) not in self._branches:
                self._branches[id(reader)] = _Branches(reader)
            fitting = self._branches[id(reader)].fitting(writer)
            if not fitting:
                yield f"{where or 'it'}: {type_name(writer)} is none of {type_name(reader)}"
            for branch in fitting:
                yield from self.problems(branch, writer, where)
        elif not _same_kind(reader, writer):
            yield f"{where or 'it'}: {type_name(writer)} cannot be read as {type_name(reader)}"
        else:
            yield from self._inside(reader, writer, where)

    def _inside(self, reader: Type, writer: Type, where: str) -> Iterator[str]:
        match reader, writer:
            case Record(), Record():
                for field in reader.fields.values():
                    place = f"{where}.{field.name}" if where else field.name
                    written = _written(field, writer)
                    if written is not None:
                        yield from self.problems(field.type, written.type, place)
                    elif not field.has_default:
                        yield f"{place}: is not there, and has no default"
            case EnumType(), EnumType():
                known = frozenset(reader.symbols)
                gone = [symbol for symbol in writer.symbols if symbol not in known]
                if gone and reader.default is None:
                    yield f"{where or 'it'}: the symbol {gone[0]} is gone, and there is no default"
            case Array(), Array():
                yield from self.problems(reader.items, writer.items, f"{where}[]")
            case Map(), Map():
                yield from self.problems(reader.values, writer.values, f"{where}{{}}")
            case _:
                return


class _Branches:
    """The branches of a reader's union, by what they are found by: a union may have thousands."""

    def __init__(self, union: Union) -> None:
        self._unnamed: list[Type] = [each for each in union.branches if not isinstance(each, Record | EnumType | Fixed)]
        self._named: dict[str, list[Type]] = defaultdict(list)
        for each in union.branches:
            if isinstance(each, Record | EnumType | Fixed):
                for name in dict.fromkeys((each.name, *each.aliases)):
                    self._named[name].append(each)

    def fitting(self, writer: Type) -> list[Type]:
        """The branches that data of the writer may be read as."""
        found = self._unnamed
        if isinstance(writer, Record | EnumType | Fixed):
            found = self._named.get(writer.name, [])
        return [branch for branch in found if _same_kind(branch, writer)]


def _same_kind(reader: Type, writer: Type) -> bool:
    """Whether data of the writer is read as the reader's type at all; what is inside is another matter."""
    match reader, writer:
        case Primitive(wanted), Primitive(given):
            return wanted == given or wanted in _PROMOTED.get(given, ())
        case Record(), Record():
            return _same_name(reader, writer)
        case EnumType(), EnumType():
            return _same_name(reader, writer)
        case Fixed(), Fixed():
            return reader.size == writer.size and _same_name(reader, writer)
        case (Array(), Array()) | (Map(), Map()):
            return True
        case _:
            return False


def _same_name(reader: Record | EnumType | Fixed, writer: Record | EnumType | Fixed) -> bool:
    return reader.name == writer.name or writer.name in reader.aliases


def _written(field: Field, writer: Record) -> Field | None:
    """The field of the writer that a field of the reader is read from."""
    return next((writer.fields[name] for name in (field.name, *field.aliases) if name in writer.fields), None)
