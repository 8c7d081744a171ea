"""Avro schemas as types, parsed strictly from JSON with every name resolved, and their compatibility. Pure.

`parse` returns the tree that `find_unreadable` and `validators` walk. It ignores logical types (`logicalType`): by the
specification their data is valid where the type below is.

`find_unreadable` applies the specification's resolution rules: it returns nothing when a reader with one schema can
read all data of a writer with another. Where the specification leaves the choice of a union's branch to the
implementation, every branch that it could choose must be readable.

Apache's `avro.compatibility` does not replace it: it is a development dependency, it loses the path of a problem inside
of a union, and its verdicts differ as `tests/sources/schemas/test_avro_apache.py` explains.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json, describe_type

PRIMITIVES: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FULL_NAME: Final = re.compile(rf"{_NAME.pattern}(?:\.{_NAME.pattern})*")
_MAX_DEPTH: Final = 60
_MAX_SHOWN_BRANCHES: Final = 10
_MAX_FIXED_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Primitive:
    """A type without parts."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """The base of the named types; names are full ones, with their namespace."""

    name: str
    aliases: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A field of a record. `default` is valid only if `has_default`."""

    name: str
    aliases: tuple[str, ...]
    type: "Type"
    has_default: bool
    default: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Record(Named):
    """A record with its fields by name. The parser adds the fields later, because a record may contain itself."""

    fields: dict[str, Field] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class EnumType(Named):
    """One of several symbols."""

    symbols: tuple[str, ...] = ()
    default: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Fixed(Named):
    """A fixed number of bytes."""

    size: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """A list."""

    items: "Type"


@dataclass(frozen=True, slots=True, eq=False)
class Map:
    """Values by name."""

    values: "Type"


@dataclass(frozen=True, slots=True, eq=False)
class Union:
    """One of several types; at most one of each kind without a name."""

    branches: tuple["Type", ...]


Type: TypeAlias = Primitive | Record | EnumType | Fixed | Array | Map | Union


def parse(definition: Json) -> Record:
    """Return the record of a definition; InvalidInput says where it is wrong."""
    found = _Parser().parse(definition, "", "", 0)
    if not isinstance(found, Record):
        raise InvalidInput("the Avro schema is no record", fix="an object needs {'type': 'record', 'name': ...}")
    return found


def type_name(found: Type) -> str:
    """Return the name of a type: in messages, and as the branch of a union in JSON."""
    match found:
        case Primitive() | Record() | EnumType() | Fixed():
            return found.name
        case Array():
            return "array"
        case Map():
            return "map"
        case Union():
            shown = [type_name(each) for each in found.branches[:_MAX_SHOWN_BRANCHES]]
            more = ["others"] if len(found.branches) > _MAX_SHOWN_BRANCHES else []
            return "union of " + " and ".join(shown + more)


def parts(found: Type) -> tuple[Type, ...]:
    """Return the types directly inside of one."""
    match found:
        case Record():
            return tuple(each.type for each in found.fields.values())
        case Array():
            return (found.items,)
        case Map():
            return (found.values,)
        case Union():
            return found.branches
        case _:
            return ()


def walk(root: Type) -> Iterator[Type]:
    """Yield every type of a tree once."""
    seen: set[int] = set()
    todo: list[Type] = [root]
    while todo:
        found = todo.pop()
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            todo += parts(found)


def contains_itself(root: Type) -> bool:
    """Whether its data can be nested without a limit."""
    done: set[int] = set()

    def search(found: Type, above: frozenset[int]) -> bool:
        if id(found) in above:
            return True
        if id(found) in done:
            return False
        done.add(id(found))
        return any(search(part, above | {id(found)}) for part in parts(found))

    return search(root, frozenset())


def may_be_empty(found: Type) -> bool:
    """Whether its binary form can be empty. Not for a type that contains itself."""
    match found:
        case Primitive(name):
            return name == "null"
        case Fixed(size=size):
            return size == 0
        case Record():
            return all(may_be_empty(each.type) for each in found.fields.values())
        case _:
            return False


class _Parser:
    """Parses one definition; knows the names that were defined so far."""

    def __init__(self) -> None:
        self._named: dict[str, Record | EnumType | Fixed] = {}

    def parse(self, given: object, where: str, namespace: str, depth: int) -> Type:
        if depth > _MAX_DEPTH:
            raise _wrong(where, f"is nested more than {_MAX_DEPTH} deep", "flatten it")
        if isinstance(given, str):
            return self._by_name(given, where, namespace)
        if isinstance(given, list):
            return self._union(given, where, namespace, depth)
        if not isinstance(given, dict):
            raise _wrong(where, f"is {describe_type(given)}", "a type is a name, an object or a list of types")
        match given.get("type"):
            case "record":
                return self._record(given, where, namespace, depth)
            case "enum":
                return self._enum(given, where, namespace)
            case "fixed":
                return self._fixed(given, where, namespace)
            case "array":
                return Array(self.parse(given.get("items"), _below(where, "items"), namespace, depth + 1))
            case "map":
                return Map(self.parse(given.get("values"), _below(where, "values"), namespace, depth + 1))
            case inner:
                return self.parse(inner, where, namespace, depth + 1)

    def _by_name(self, name: str, where: str, namespace: str) -> Type:
        if name in PRIMITIVES:
            return Primitive(name)
        found = self._named.get(_qualified(name, namespace)) or self._named.get(name)
        if found is None:
            raise _wrong(where, f"names the unknown type {name!r}", "define it where it is used first")
        return found

    def _union(self, given: list[Any], where: str, namespace: str, depth: int) -> Union:
        branches = tuple(
            self.parse(each, _below(where, str(number)), namespace, depth + 1) for number, each in enumerate(given)
        )
        if not branches or any(isinstance(each, Union) for each in branches):
            raise _wrong(where, "is a union of nothing, or of unions", "name the types themselves")
        names = [type_name(each) for each in branches]
        if len(set(names)) < len(names):
            raise _wrong(where, "is a union with the same type twice", "leave one out")
        return Union(branches)

    def _record(self, given: Json, where: str, namespace: str, depth: int) -> Record:
        name, below = self._name(given, where, namespace)
        record = Record(name, _aliases(given, where, below))
        self._define(record, where)
        fields = given.get("fields")
        if not isinstance(fields, list):
            raise _wrong(where, f"has {describe_type(fields)} as 'fields'", "give a list of fields")
        for each in fields:
            if not isinstance(each, dict) or not isinstance(each.get("name"), str):
                raise _wrong(where, "has a field without a name", "a field is an object with 'name' and 'type'")
            if not _NAME.fullmatch(each["name"]) or each["name"] in record.fields:
                raise _wrong(where, f"has the field {each['name']!r} twice, or that is no name", "rename it")
            path = _below(where, each["name"])
            if "type" not in each:
                raise _wrong(path, "has no type", "give 'type'")
            aliases = each.get("aliases") or []
            if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
                raise _wrong(path, "has aliases that are no list of names", "correct 'aliases'")
            record.fields[each["name"]] = Field(
                each["name"],
                tuple(aliases),
                self.parse(each["type"], path, below, depth + 1),
                "default" in each,
                each.get("default"),
            )
        return record

    def _enum(self, given: Json, where: str, namespace: str) -> EnumType:
        name, below = self._name(given, where, namespace)
        symbols = given.get("symbols")
        if not isinstance(symbols, list) or not all(
            isinstance(each, str) and _NAME.fullmatch(each) for each in symbols
        ):
            raise _wrong(where, "has symbols that are no list of names", "give 'symbols'")
        default = given.get("default")
        if len(set(symbols)) < len(symbols) or (default is not None and default not in symbols):
            raise _wrong(where, "has a symbol twice, or a default that is none", "correct 'symbols' or 'default'")
        found = EnumType(name, _aliases(given, where, below), tuple(symbols), default)
        self._define(found, where)
        return found

    def _fixed(self, given: Json, where: str, namespace: str) -> Fixed:
        name, below = self._name(given, where, namespace)
        size = given.get("size")
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= _MAX_FIXED_BYTES:
            raise _wrong(where, "has no size", "give 'size' as a number of bytes")
        found = Fixed(name, _aliases(given, where, below), size)
        self._define(found, where)
        return found

    def _name(self, given: Json, where: str, namespace: str) -> tuple[str, str]:
        """Return the full name of a type, and the namespace of the types inside."""
        name, own = given.get("name"), given.get("namespace")
        if not isinstance(name, str) or not _FULL_NAME.fullmatch(name):
            raise _wrong(where, f"has {name!r} as 'name'", "use letters, digits and '_', not a digit first")
        if own is not None and (not isinstance(own, str) or (own and not _FULL_NAME.fullmatch(own))):
            raise _wrong(where, f"has {own!r} as 'namespace'", "use names separated by dots")
        full = _qualified(name, namespace if own is None else own)
        return full, full.rpartition(".")[0]

    def _define(self, found: Record | EnumType | Fixed, where: str) -> None:
        if found.name in PRIMITIVES or found.name in self._named:
            raise _wrong(where, f"defines {found.name!r} again", "give it another name")
        self._named[found.name] = found


def _qualified(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"


def _aliases(given: Json, where: str, namespace: str) -> frozenset[str]:
    aliases = given.get("aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
        raise _wrong(where, "has aliases that are no list of names", "correct 'aliases'")
    return frozenset(_qualified(each, namespace) for each in aliases)


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _wrong(where: str, what: str, fix: str) -> InvalidInput:
    return InvalidInput(f"the Avro schema {f'at {where!r} ' if where else ''}{what}", fix=fix)


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
