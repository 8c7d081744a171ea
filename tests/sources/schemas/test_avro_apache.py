"""Our Avro compatibility rules give the verdicts of Apache's `avro.compatibility`, except where this module says so.

The exceptions, each with a test:

1. Names of types. The specification compares unqualified names, as Apache does; we compare full names. Two types of the
   same name in different namespaces are usually different types, so we refuse more, and never accept what a reader
   cannot read.
2. Aliases of types. An alias is relative to the namespace of its type. Apache compares it as written, so it misses a
   short alias of a type in a namespace.
3. Unions of the reader in which several branches match by name or alias. The specification says "the first schema in
   the reader's union that matches", implementations differ in what matches means, so every such branch must be readable
   for us. One is enough for Apache.
4. The place of a problem. Apache loses the path inside of a union and the reason below it; our users get both.
"""

import copy
import json
from random import Random
from typing import Any

import avro.schema
import pytest
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from purveyor.sources.schemas import avro_schema
from purveyor.sources.schemas.schema import Encoding
from tests.support.avro_schemas import avro_fields, avro_record, parse_definition
from tests.support.scale import chance, pick

EXAMPLES = pick(300, 30_000)


def apache_reads(reader: dict[str, Any], writer: dict[str, Any]) -> bool:
    checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
    result = checker.get_compatibility(avro.schema.parse(json.dumps(reader)), avro.schema.parse(json.dumps(writer)))
    return result.compatibility is SchemaCompatibilityType.compatible


def we_read(reader: dict[str, Any], writer: dict[str, Any]) -> bool:
    return not avro_schema.find_unreadable(avro_schema.parse(reader), avro_schema.parse(writer))


def with_aliases(definition: dict[str, Any], random: Random) -> dict[str, Any]:
    """Rename some types and fields, and leave their old names as aliases."""
    renamed = {name: f"{name}2" for name in "RSEF" if random.random() < 0.3}

    def rename(given: Any) -> Any:
        if isinstance(given, list):
            return [rename(each) for each in given]
        if isinstance(given, str):
            return renamed.get(given, given)
        if not isinstance(given, dict):
            return given
        new = {key: rename(value) if key in ("type", "items", "values") else value for key, value in given.items()}
        if given.get("name") in renamed and "type" in given:
            new |= {"name": renamed[given["name"]], "aliases": [given["name"]]}
        if "fields" in given:
            new["fields"] = [rename_field(each) for each in given["fields"]]
        return new

    def rename_field(given: dict[str, Any]) -> dict[str, Any]:
        new: dict[str, Any] = {**given, "type": rename(given["type"])}
        return new | {"name": f"{given['name']}2", "aliases": [given["name"]]} if random.random() < 0.2 else new

    renamed_definition: dict[str, Any] = rename(copy.deepcopy(definition))
    return renamed_definition


@pytest.mark.chaos
def test_apache_gives_the_same_verdict() -> None:
    verdicts = {True: 0, False: 0}

    @seed(chance("apache").randrange(2**32))
    @given(avro_fields, avro_fields, st.randoms(use_true_random=False))
    @settings(max_examples=EXAMPLES, database=None)
    def check(one: Any, two: Any, random: Random) -> None:
        mixed = [random.choice([each, *two]) for each in one]
        two = list({name: (name, kind, default) for name, kind, default in [*mixed, *two[:1]]}.values())
        writer, reader = avro_record(one), with_aliases(avro_record(two), random)
        if parse_definition(writer, Encoding.JSON) is None or parse_definition(reader, Encoding.JSON) is None:
            return
        ours = we_read(reader, writer)
        assert ours is apache_reads(reader, writer), (reader, writer)
        verdicts[ours] += 1

    check()
    assert min(verdicts.values()) > sum(verdicts.values()) / 20, verdicts


def record(*fields: Any, **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": "Top", "fields": [{"name": name, "type": kind} for name, kind in fields], **more}


def test_names_differ_by_namespace_for_us_and_not_for_apache() -> None:
    writer, reader = record(("a", "int"), namespace="shop"), record(("a", "int"), namespace="stock")
    assert not we_read(reader, writer)
    assert apache_reads(reader, writer)


def test_an_alias_is_in_the_namespace_of_its_type_for_us_and_not_for_apache() -> None:
    writer = record(("a", "int"), namespace="shop")
    reader = record(("a", "int"), namespace="shop") | {"name": "Renamed", "aliases": ["Top"]}
    assert we_read(reader, writer)
    assert not apache_reads(reader, writer)
    full = reader | {"aliases": ["shop.Top"]}
    assert we_read(full, writer)
    assert apache_reads(full, writer)


def test_every_matching_branch_of_a_union_must_be_readable_for_us_and_one_for_apache() -> None:
    written = {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}]}
    same_name = {"type": "record", "name": "R", "fields": [{"name": "x", "type": "string"}]}
    by_alias = {"type": "record", "name": "S", "aliases": ["R"], "fields": [{"name": "x", "type": "int"}]}
    writer, reader = record(("a", written)), record(("a", [same_name, by_alias]))
    assert not we_read(reader, writer)
    assert apache_reads(reader, writer)


def test_we_name_the_place_inside_of_a_union_and_apache_does_not() -> None:
    inner = {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}]}
    narrow = {"type": "record", "name": "R", "fields": [{"name": "x", "type": "string"}]}
    writer, reader = record(("a", ["null", inner])), record(("a", ["null", narrow]))
    ours = avro_schema.find_unreadable(avro_schema.parse(reader), avro_schema.parse(writer))
    assert ours == ("a.x: int cannot be read as string",)
    checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
    theirs = checker.get_compatibility(avro.schema.parse(json.dumps(reader)), avro.schema.parse(json.dumps(writer)))
    assert not any("x" in text for text in (*theirs.locations, *theirs.messages))
