"""Objects in Avro's JSON form against an Avro type: the first place where they do not fit. Pure.

By the specification: a union other than null is an object with the name of its branch (`{"string": "x"}`), bytes are
strings of characters below 256. A field that is left out must have a default; one that nobody knows is refused.
"""

from typing import Any, Final

from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import kind
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

Mistake = tuple[tuple[str, ...], str]
"""Where, from the outside in, and what is wrong there."""
_WHOLE: Final = {"int": 1 << 31, "long": 1 << 63}


def mistake(wanted: Type, value: Any, where: tuple[str, ...] = (), *, default: bool = False) -> Mistake | None:
    """The first place where a value does not fit; None if it does.

    In a `default` of a schema a union is written without its name, as its first branch.
    """
    match wanted:
        case Primitive(name):
            return None if _fits(name, value) else (where, f"{kind(value)} is no {name}")
        case Record():
            return _in_record(wanted, value, where, default)
        case Union():
            return _in_union(wanted, value, where, default)
        case Array():
            if not isinstance(value, list):
                return where, f"{kind(value)} is no array"
            found = (mistake(wanted.items, each, (*where, str(n)), default=default) for n, each in enumerate(value))
        case Map():
            if not isinstance(value, dict):
                return where, f"{kind(value)} is no map"
            found = (mistake(wanted.values, each, (*where, name), default=default) for name, each in value.items())
        case EnumType():
            return None if value in wanted.symbols else (where, f"is none of {', '.join(wanted.symbols)}")
        case Fixed():
            return None if _is_bytes(value) and len(value) == wanted.size else (where, f"is not {wanted.size} bytes")
    return next((each for each in found if each is not None), None)


def check_defaults(root: Type) -> None:
    """Every default of a schema fits its field; InvalidInput tells which does not."""
    for record in walk(root):
        for field in record.fields.values() if isinstance(record, Record) else ():
            if field.has_default and mistake(field.type, field.default, default=True) is not None:
                raise InvalidInput(
                    f"the default of {field.name!r} in the Avro schema is no {type_name(field.type)}",
                    fix="the default of a union is one of its first type",
                )


def clear(wanted: Type, value: Any) -> Any:
    """A value as a decoder of the binary form gives it, in the JSON form.

    In unions it must give values of named types as pairs of the name and the value.
    """
    match wanted:
        case Primitive(name):
            return value.decode("latin-1") if name == "bytes" else value
        case Fixed():
            return value.decode("latin-1")
        case Record():
            return {name: clear(field.type, value[name]) for name, field in wanted.fields.items()}
        case Array():
            return [clear(wanted.items, each) for each in value]
        case Map():
            return {name: clear(wanted.values, each) for name, each in value.items()}
        case Union():
            return _clear_union(wanted, value)
        case EnumType():
            return value


def _clear_union(wanted: Union, value: Any) -> Any:
    if value is None:
        return None
    name, inner = value if isinstance(value, tuple) else (None, value)
    branch = next(
        each for each in wanted.branches if type_name(each) == name or (name is None and _decoded(each, inner))
    )
    return {type_name(branch): clear(branch, inner)}


def _decoded(branch: Type, value: Any) -> bool:
    """Whether a decoder gives such a value for a branch without a name."""
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
            return _fits(name, value)
        case _:
            return False


def _in_record(wanted: Record, value: Any, where: tuple[str, ...], default: bool) -> Mistake | None:
    if not isinstance(value, dict):
        return where, f"{kind(value)} is no {wanted.name}"
    for name, field in wanted.fields.items():
        if name in value:
            found = mistake(field.type, value[name], (*where, name), default=default)
            if found is not None:
                return found
        elif not field.has_default:
            return (*where, name), "is missing"
    unknown = next((name for name in value if name not in wanted.fields), None)
    return None if unknown is None else ((*where, unknown), f"is no field of {wanted.name}")


def _in_union(wanted: Union, value: Any, where: tuple[str, ...], default: bool) -> Mistake | None:
    if default:
        return mistake(wanted.branches[0], value, where, default=True)
    named = {type_name(branch): branch for branch in wanted.branches}
    if value is None and "null" in named:
        return None
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in named:
        names = " or ".join("null" if name == "null" else f'{{"{name}": ...}}' for name in named)
        return where, f"is not {names}"
    ((name, inner),) = value.items()
    return mistake(named[name], inner, (*where, name))


def _fits(name: str, value: Any) -> bool:
    match name:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "int" | "long":
            return isinstance(value, int) and not isinstance(value, bool) and -_WHOLE[name] <= value < _WHOLE[name]
        case "float" | "double":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "bytes":
            return _is_bytes(value)
        case _:
            return isinstance(value, str)


def _is_bytes(value: Any) -> bool:
    return isinstance(value, str) and all(ord(character) < 256 for character in value)
