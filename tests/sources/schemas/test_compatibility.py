"""A revision that is called backward-compatible takes every object of the one before it."""

import copy
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import fastavro
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from purveyor.model.errors import InvalidInput
from purveyor.sources.schemas import avro_schema, json_compatibility
from purveyor.sources.schemas.schema import Compatibility, Encoding, SchemaType
from purveyor.sources.schemas.validators import compile_schema, find_incompatibilities
from tests.support.avro_schemas import avro_fields, avro_record, parse_definition
from tests.support.scale import chance, pick

EXAMPLES = pick(120, 20_000)

SCALARS: list[Any] = [None, True, 0, 1, 1.5, 2, 4, -3, "", "a", "ab", "abc"]
LISTS: list[Any] = [[], [1], ["a"], [1, "a"], [1, 1], [None, 2, "ab"], [{"a": 1}], [{"a": "ab", "b": 2}]]
OBJECTS: list[Any] = [
    dict(pairs)
    for count in range(3)
    for names in itertools.combinations(("a", "b", "c"), count)
    for pairs in itertools.product(
        *([(name, value) for value in (*SCALARS[:7], "ab", [1], {"a": 1})] for name in names)
    )
]
UNIVERSE = [*SCALARS, *LISTS, *OBJECTS]
"""Small enough to try every value, large enough to contain a counterexample of each rule."""

numbers = st.sampled_from([-3, 0, 1, 1.5, 2, 4])
counts = st.integers(0, 3)
types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
names = st.sampled_from(["a", "b", "c"])


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A schema with up to three keywords, of any kind."""
    few = st.lists(inner, min_size=1, max_size=2)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": types | st.lists(types, min_size=1, max_size=3, unique=True),
        "enum": st.lists(st.sampled_from(SCALARS), min_size=1, max_size=4, unique_by=repr),
        "const": st.sampled_from(SCALARS),
        "minimum": numbers,
        "exclusiveMinimum": numbers,
        "maximum": numbers,
        "exclusiveMaximum": numbers,
        "multipleOf": st.sampled_from([1, 2, 4, 1.5]),
        "minLength": counts,
        "maxLength": counts,
        "pattern": st.sampled_from(["^a", "b$"]),
        "minItems": counts,
        "maxItems": counts,
        "uniqueItems": st.booleans(),
        "items": inner,
        "prefixItems": few,
        "contains": inner,
        "required": st.lists(names, max_size=2, unique=True),
        "properties": st.dictionaries(names, inner, max_size=2),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b|c"]), inner, max_size=1),
        "additionalProperties": inner,
        "propertyNames": inner,
        "minProperties": counts,
        "maxProperties": counts,
        "dependentRequired": st.dictionaries(names, st.lists(names, max_size=1), max_size=1),
        "allOf": few,
        "anyOf": few,
        "oneOf": few,
        "not": inner,
        "$ref": st.sampled_from(["#", "#/$defs/x"]),
        "unevaluatedProperties": inner,
        "title": st.just("x"),
    }
    chosen = st.lists(st.sampled_from(sorted(keywords)), max_size=3, unique=True)
    return chosen.flatmap(lambda found: st.fixed_dictionaries({name: keywords[name] for name in found}))


parts = st.recursive(st.booleans() | schemas(st.booleans()), schemas, max_leaves=6)


def changed(schema: Any, other: Any, random: Random) -> Any:
    """Return a schema with a part of another one."""
    if type(schema) is not type(other) or not isinstance(schema, dict):
        return random.choice([schema, other])
    new = copy.deepcopy(schema)
    match random.randrange(4):
        case 0 if new:
            del new[random.choice(sorted(new))]
        case 1:
            new |= other
        case 2 if new:
            name = random.choice(sorted(new))
            new[name] = changed(new[name], other.get(name, new[name]), random)
        case _:
            new = {"anyOf": [new, other]}
    return new


def valid(schema: Any) -> set[int] | None:
    """Return the numbers of the values that fit; None if the schema is invalid, or refers to itself in a circle."""
    try:
        validator = compile_schema(SchemaType.JSON_SCHEMA, Encoding.JSON, schema)
    except InvalidInput:
        return None
    return {number for number, value in enumerate(UNIVERSE) if not validator.find_mistakes(value)}


@pytest.mark.chaos
def test_what_is_called_backward_compatible_takes_every_old_object() -> None:
    compared = proven = 0

    @seed(chance("schemas").randrange(2**32))
    @given(parts, parts, parts, parts, st.randoms(use_true_random=False))
    @settings(max_examples=EXAMPLES, database=None)
    def check(one: Any, two: Any, three: Any, four: Any, random: Random) -> None:
        nonlocal compared, proven
        old = {"allOf": [one], "$defs": {"x": two}}
        new = {"allOf": [changed(one, three, random)], "$defs": {"x": changed(two, four, random)}}
        before, after = valid(old), valid(new)
        if before is None or after is None:
            return
        compared += 1
        if not json_compatibility.find_narrowed(old, new):
            proven += 1
            assert before <= after, (old, new, UNIVERSE[min(before - after)])

    check()
    assert proven > compared / 50, (proven, compared)


def datum(kind: avro_schema.Type, random: Random) -> Any:
    """Return a random value of a type, as fastavro writes it."""
    match kind:
        case avro_schema.Primitive(name):
            whole = random.randrange(-100, 100)
            found = {"null": None, "boolean": bool(whole % 2), "int": whole, "long": whole << 40, "float": whole / 2}
            return found.get(name, {"double": whole / 4, "bytes": bytes([whole % 256])}.get(name, f"t{whole}"))
        case avro_schema.Fixed():
            return bytes(random.randrange(256) for _ in range(kind.size))
        case avro_schema.EnumType():
            return random.choice(kind.symbols)
        case avro_schema.Array():
            return [datum(kind.items, random) for _ in range(random.randrange(3))]
        case avro_schema.Map():
            return {f"k{number}": datum(kind.values, random) for number in range(random.randrange(3))}
        case avro_schema.Record():
            return {name: datum(each.type, random) for name, each in kind.fields.items()}
        case avro_schema.Union():
            branch = random.choice(kind.branches)
            return (avro_schema.type_name(branch), datum(branch, random))


@pytest.mark.chaos
def test_what_is_called_readable_in_avro_is_read_by_fastavro() -> None:
    compared = proven = 0

    @seed(chance("avro").randrange(2**32))
    @given(avro_fields, avro_fields, st.randoms(use_true_random=False))
    @settings(max_examples=EXAMPLES, database=None)
    def check(one: Any, two: Any, random: Random) -> None:
        nonlocal compared, proven
        mixed = [random.choice([each, *two]) for each in one]
        two = list({name: (name, kind, default) for name, kind, default in [*mixed, *two[:1]]}.values())
        old, new = avro_record(one), avro_record(two)
        writer, reader = parse_definition(old), parse_definition(new)
        if writer is None or reader is None:
            return
        compared += 1
        value = datum(writer, random)
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, copy.deepcopy(old), value)
        decoder = compile_schema(SchemaType.AVRO, Encoding.BINARY, old)
        clear = decoder.decode(stream.getvalue())
        assert decoder.find_mistakes(clear) == [], "what was decoded is in the JSON form of the same schema"
        if not avro_schema.find_unreadable(reader, writer):
            proven += 1
            stream.seek(0)
            read = fastavro.schemaless_reader(stream, copy.deepcopy(old), copy.deepcopy(new))
            assert isinstance(read, dict)
            assert set(read) == set(reader.fields)

    check()
    assert proven > compared / 20, (proven, compared)


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ({"type": "object"}, {"type": "object", "required": ["a"]}, "a is required now"),
        ({"properties": {"a": {"type": "integer"}}}, {"properties": {"a": {"type": "string"}}}, "a: the type"),
        ({"properties": {"a": {}}}, {"properties": {"a": {"maxLength": 3}}}, "a: maxLength"),
        ({}, {"additionalProperties": False}, "*: nothing"),
        ({"items": {"minimum": 0}}, {"items": {"minimum": 1}}, "[]: minimum"),
        ({"enum": [1, 2]}, {"enum": [1]}, "a value"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {}}}, {"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}, "type"),
        ({"$schema": "http://json-schema.org/draft-04/schema#"}, {"type": "object"}, "dialect"),
        ({"oneOf": [{"type": "string"}]}, {"oneOf": [{"type": "string"}, {"minLength": 1}]}, "oneOf"),
    ],
)
def test_a_narrower_revision_is_reported_with_the_path(old: Any, new: Any, word: str) -> None:
    found = find_incompatibilities(SchemaType.JSON_SCHEMA, Compatibility.BACKWARD, old, new)
    assert any(word in problem for problem in found), found
    assert find_incompatibilities(SchemaType.JSON_SCHEMA, Compatibility.NONE, old, new) == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"type": "integer"}, {"type": "number"}),
        ({"properties": {"a": {"type": "string"}}}, {"properties": {"a": {"type": ["string", "null"]}}}),
        ({"required": ["a", "b"]}, {"required": ["a"], "title": "Order", "x-owner": "shop"}),
        ({"additionalProperties": False}, {"additionalProperties": False, "properties": {"a": {"type": "string"}}}),
        ({"$ref": "#/$defs/t", "$defs": {"t": {"items": {"$ref": "#/$defs/t"}}}}, {"items": {"$ref": "#"}}),
        ({"anyOf": [{"const": 1}, {"const": 2}]}, {"enum": [1, 2, 3]}),
        ({"type": "string", "format": "email"}, {"anyOf": [{"type": "null"}, {"type": "string", "format": "email"}]}),
        ({"minimum": 3, "type": "integer"}, {"exclusiveMinimum": 2, "multipleOf": 1}),
    ],
)
def test_a_wider_revision_is_compatible(old: Any, new: Any) -> None:
    assert find_incompatibilities(SchemaType.JSON_SCHEMA, Compatibility.BACKWARD, old, new) == ()
    assert find_incompatibilities(SchemaType.JSON_SCHEMA, Compatibility.FORWARD, new, old) == ()


def record(*fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "Order", "fields": list(fields)}


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (record(), record({"name": "a", "type": "int"}), "a: is not there"),
        (record({"name": "a", "type": "long"}), record({"name": "a", "type": "int"}), "a: long"),
        (record({"name": "a", "type": ["null", "int"]}), record({"name": "a", "type": "int"}), "a: null"),
        (
            record({"name": "a", "type": {"type": "array", "items": "int"}}),
            record({"name": "a", "type": "int"}),
            "array",
        ),
        (record(), {**record(), "name": "Other"}, "Order"),
    ],
)
def test_unreadable_avro_is_reported_with_the_path(old: Any, new: Any, word: str) -> None:
    found = find_incompatibilities(SchemaType.AVRO, Compatibility.BACKWARD, old, new)
    assert any(word in problem for problem in found), found
    assert find_incompatibilities(SchemaType.AVRO, Compatibility.BACKWARD, old, old) == ()


def test_a_field_may_be_added_with_a_default_renamed_by_an_alias_and_widened() -> None:
    old = record({"name": "a", "type": "int"})
    new = record(
        {"name": "b", "type": ["null", "long"], "aliases": ["a"], "default": None},
        {"name": "c", "type": "string", "default": ""},
    )
    assert find_incompatibilities(SchemaType.AVRO, Compatibility.BACKWARD, old, new) == ()
    assert find_incompatibilities(SchemaType.AVRO, Compatibility.FORWARD, old, new) != ()


def test_a_list_of_itself_can_be_compared() -> None:
    tree = record({"name": "below", "type": {"type": "array", "items": "Order"}})
    more = record(*tree["fields"], {"name": "n", "type": "int", "default": 0})
    assert find_incompatibilities(SchemaType.AVRO, Compatibility.FULL, tree, more) == ()
    assert find_incompatibilities(SchemaType.AVRO, Compatibility.FULL, tree, record({"name": "n", "type": "int"})) != ()


def calls_of(work: Callable[[], object]) -> int:
    """Count the function calls and generator steps of some work."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def with_fields(*fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": f"f{n}", "type": each} for n, each in enumerate(fields)]}


def empty_records(prefix: str, count: int) -> list[Any]:
    return [{"type": "record", "name": f"{prefix}{number}", "fields": []} for number in range(count)]


def shapes(n: int) -> dict[str, tuple[SchemaType, Any, Any]]:
    """Return definitions with many parts of one kind, each with a next revision."""

    def anchored(title: str) -> Any:
        definitions = {f"d{number}": {"$anchor": f"a{number}"} for number in range(n)}
        properties = {f"p{number}": {"$ref": f"#a{number}"} for number in range(n)}
        return {"title": title, "$defs": definitions, "properties": properties}

    def symbols(numbers: Iterable[int]) -> Any:
        return with_fields({"type": "enum", "name": "E", "symbols": [f"S{number}" for number in numbers]})

    whole = SchemaType.JSON_SCHEMA
    named: dict[str, Any] = {f"p{number}": {} for number in range(n)}
    return {
        "allOf": (whole, {"allOf": [{} for _ in named]}, {"allOf": [{} for _ in named], "title": "a"}),
        "cases": (
            whole,
            {"enum": list(range(n)), "anyOf": [{} for _ in named]},
            {"enum": list(range(n - 1)), "anyOf": [{"type": "string"} for _ in named]},
        ),
        "anchors": (whole, anchored("a"), anchored("b")),
        "keywords": (whole, {"allOf": [{name: 1} for name in named]}, dict.fromkeys(named, 1)),
        "properties": (whole, {"allOf": [{"properties": {name: {}}} for name in named]}, {"properties": named}),
        "branches": (
            SchemaType.AVRO,
            with_fields(["null", *empty_records("A", n)]),
            with_fields(["null", *empty_records("B", n)]),
        ),
        "symbols": (SchemaType.AVRO, symbols(range(n)), symbols(reversed(range(n)))),
    }


@pytest.mark.parametrize("shape", sorted(shapes(1).keys() - {"symbols"}))
def test_twice_the_definition_is_not_four_times_the_work(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison of each of many parts with each of many others is given up in time."""
    monkeypatch.setattr(json_compatibility, "MAX_WORK", 20_000)

    def work(size: int) -> int:
        kind, old, new = shapes(size)[shape]
        return calls_of(lambda: find_incompatibilities(kind, Compatibility.FULL, old, new))

    work(10)
    small, large = work(400), work(800)
    assert large < 3 * small


@pytest.mark.parametrize("shape", shapes(1))
def test_a_definition_of_the_largest_size_is_compared_or_given_up(shape: str) -> None:
    kind, old, new = shapes(1500)[shape]
    compile_schema(kind, Encoding.JSON, old)
    compile_schema(kind, Encoding.JSON, new)
    assert len(find_incompatibilities(kind, Compatibility.FULL, old, new)) <= 200


def test_a_large_schema_of_the_usual_kind_is_compared() -> None:
    def schema(depth: int, **more: Any) -> dict[str, Any]:
        if depth == 0:
            return {"type": "string", "maxLength": 100}
        below = {f"p{number}": schema(depth - 1) for number in range(10)}
        return {"type": "object", "properties": below, "required": ["p1"], **more}

    old, new = schema(3), schema(3, title="wider")
    assert 50_000 < len(json.dumps(old)) < 128 << 10
    assert find_incompatibilities(SchemaType.JSON_SCHEMA, Compatibility.FULL, old, new) == ()


def test_a_reference_to_itself_has_an_end() -> None:
    """Up to draft 7 keywords beside a reference are ignored."""
    draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
    loop: dict[str, Any] = {**draft, "$ref": "#"}
    circle: dict[str, Any] = {
        **draft,
        "$ref": "#/definitions/a",
        "definitions": {"a": {"$ref": "#/definitions/b"}, "b": {"$ref": "#"}},
    }
    for old, new in itertools.permutations([loop, circle, {**draft, "type": "object"}], 2):
        find_incompatibilities(SchemaType.JSON_SCHEMA, Compatibility.FULL, old, new)
