"""Whether a reader with one Avro schema can read data written with another: the specification's resolution rules. Pure.

`find_unreadable` returns nothing when the reader can read all data of the writer. Where the specification leaves the
choice of a union's branch to the implementation, every branch that it could choose must be readable.

Apache's `avro.compatibility` does not replace this module: it is a development dependency, it loses the path of a
problem inside of a union, and its verdicts differ as `tests/sources/schemas/test_avro_apache.py` explains.
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

_PROMOTIONS: Final = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}


def find_unreadable(reader: Type, writer: Type) -> tuple[str, ...]:
    """Return why the reader cannot read some of the writer's data; empty if it can read all."""
    return tuple(_Resolution().problems(reader, writer, ""))


class _Resolution:
    """One comparison. A pair of types that it meets again counts as readable: data is finite."""

    def __init__(self) -> None:
        self._visited: set[tuple[int, int]] = set()
        self._branches: dict[int, _Branches] = {}

    def problems(self, reader: Type, writer: Type, where: str) -> Iterator[str]:
        pair = (id(reader), id(writer))
        if pair in self._visited:
            return
        self._visited.add(pair)
        if isinstance(writer, Union):
            for branch in writer.branches:
                yield from self.problems(reader, branch, where)
        elif isinstance(reader, Union):
            if id(reader) not in self._branches:
                self._branches[id(reader)] = _Branches(reader)
            candidates = self._branches[id(reader)].candidates(writer)
            if not candidates:
                yield f"{where or 'it'}: {type_name(writer)} is none of {type_name(reader)}"
            for branch in candidates:
                yield from self.problems(branch, writer, where)
        elif not _is_same_kind(reader, writer):
            yield f"{where or 'it'}: {type_name(writer)} cannot be read as {type_name(reader)}"
        else:
            yield from self._inside(reader, writer, where)

    def _inside(self, reader: Type, writer: Type, where: str) -> Iterator[str]:
        match reader, writer:
            case Record(), Record():
                for field in reader.fields.values():
                    path = f"{where}.{field.name}" if where else field.name
                    written = _find_written(field, writer)
                    if written is not None:
                        yield from self.problems(field.type, written.type, path)
                    elif not field.has_default:
                        yield f"{path}: is not there, and has no default"
            case EnumType(), EnumType():
                known = frozenset(reader.symbols)
                missing = [symbol for symbol in writer.symbols if symbol not in known]
                if missing and reader.default is None:
                    yield f"{where or 'it'}: the symbol {missing[0]} is gone, and there is no default"
            case Array(), Array():
                yield from self.problems(reader.items, writer.items, f"{where}[]")
            case Map(), Map():
                yield from self.problems(reader.values, writer.values, f"{where}{{}}")
            case _:
                return


class _Branches:
    """The branches of a reader's union, indexed by name: a union may have thousands."""

    def __init__(self, union: Union) -> None:
        self._unnamed: list[Type] = [each for each in union.branches if not isinstance(each, Record | EnumType | Fixed)]
        self._named: dict[str, list[Type]] = defaultdict(list)
        for each in union.branches:
            if isinstance(each, Record | EnumType | Fixed):
                for name in dict.fromkeys((each.name, *each.aliases)):
                    self._named[name].append(each)

    def candidates(self, writer: Type) -> list[Type]:
        """Return the branches that a reader may choose for data of the writer."""
        found = self._unnamed
        if isinstance(writer, Record | EnumType | Fixed):
            found = self._named.get(writer.name, [])
        return [branch for branch in found if _is_same_kind(branch, writer)]


def _is_same_kind(reader: Type, writer: Type) -> bool:
    """Whether data of the writer can be read as the reader's type, apart from the types inside."""
    match reader, writer:
        case Primitive(wanted), Primitive(given):
            return wanted == given or wanted in _PROMOTIONS.get(given, ())
        case Record(), Record():
            return _is_same_name(reader, writer)
        case EnumType(), EnumType():
            return _is_same_name(reader, writer)
        case Fixed(), Fixed():
            return reader.size == writer.size and _is_same_name(reader, writer)
        case (Array(), Array()) | (Map(), Map()):
            return True
        case _:
            return False


def _is_same_name(reader: Record | EnumType | Fixed, writer: Record | EnumType | Fixed) -> bool:
    return reader.name == writer.name or writer.name in reader.aliases


def _find_written(field: Field, writer: Record) -> Field | None:
    """Return the field of the writer from which a field of the reader is read."""
    return next((writer.fields[name] for name in (field.name, *field.aliases) if name in writer.fields), None)
