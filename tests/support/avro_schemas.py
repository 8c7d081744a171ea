"""Random Avro schemas for tests of compatibility."""

from typing import Any

from hypothesis import strategies as st

from purveyor.model.errors import InvalidInput
from purveyor.sources.schemas import avro_schema
from purveyor.sources.schemas.schema import Encoding, SchemaType
from purveyor.sources.schemas.validators import compile_schema

names = st.sampled_from(["a", "b", "c"])


def avro_types(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Types that contain others; `avro_record` resolves repeated names."""
    fields = st.lists(st.tuples(names, inner, st.booleans()), max_size=3, unique_by=lambda each: each[0])
    return st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries({"type": st.just("map"), "values": inner}),
        st.lists(inner.filter(lambda each: not isinstance(each, list)), min_size=1, max_size=3, unique_by=repr),
        st.fixed_dictionaries({"type": st.just("record"), "name": st.sampled_from("RS"), "fields": fields}),
    )


leaves = st.sampled_from(["null", "boolean", "int", "long", "float", "double", "bytes", "string"]) | st.one_of(
    st.fixed_dictionaries({"type": st.just("fixed"), "name": st.just("F"), "size": st.integers(1, 2)}),
    st.fixed_dictionaries(
        {"type": st.just("enum"), "name": st.just("E"), "symbols": st.sampled_from([["A"], ["A", "B"], ["B", "C"]])},
        optional={"default": st.sampled_from(["A", "B"])},
    ),
)
avro_parts = st.recursive(leaves, avro_types, max_leaves=5)
avro_fields = st.lists(st.tuples(names, avro_parts, st.booleans()), max_size=3, unique_by=lambda each: each[0])
DEFAULTS = {
    "null": None,
    "boolean": True,
    "int": 1,
    "long": 2,
    "float": 1.5,
    "double": 2.5,
    "bytes": "x",
    "string": "y",
}


def avro_record(fields: Any) -> dict[str, Any]:
    """Build a definition: the fields with their defaults, and each name defined at its first use."""
    known: set[str] = set()

    def settle(given: Any) -> Any:
        if isinstance(given, list):
            return [settle(each) for each in given]
        if not isinstance(given, dict):
            return given
        if "name" in given:
            if given["name"] in known:
                return given["name"]
            known.add(given["name"])
        new = {key: settle(value) if key in ("items", "values") else value for key, value in given.items()}
        if "fields" in new:
            new["fields"] = list(map(field, new["fields"]))
        return new

    def field(given: Any) -> dict[str, Any]:
        name, kind, has_default = given
        first = kind[0] if isinstance(kind, list) else kind
        with_default = has_default and isinstance(first, str)
        default = {"default": DEFAULTS[first]} if with_default else {}
        return {"name": name, "type": settle(kind), **default}

    return {"type": "record", "name": "Top", "fields": list(map(field, fields))}


def parse_definition(definition: dict[str, Any], encoding: Encoding = Encoding.BINARY) -> avro_schema.Record | None:
    """Parse a definition; None for two branches of one name, a default that does not fit, or no safe form."""
    try:
        compile_schema(SchemaType.AVRO, encoding, definition)
    except InvalidInput:
        return None
    return avro_schema.parse(definition)
