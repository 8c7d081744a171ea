"""The keywords of JSON Schema that are a bound, a set or a list of names: does one follow from others? Pure."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from purveyor.model.json_fields import Json
from purveyor.sources.schemas.json_schema_document import allowed_values, named_types, types_of

_LEAST: Final = {"minLength": "string", "minItems": "array", "minProperties": "object"}
_MOST: Final = {"maxLength": "string", "maxItems": "array", "maxProperties": "object"}
_NUMBERS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
KEYWORDS: Final = (*_LEAST, *_MOST, *_NUMBERS, "uniqueItems")
"""What this module looks at beside `type`, `enum`, `const` and `required`."""


def missing(facts: Sequence[Json], wanted: Json) -> Iterator[str]:
    """What is asked for that does not follow from the facts."""
    types = types_of(facts)
    if "type" in wanted and not types <= named_types(wanted["type"]):
        more = ", ".join(sorted(types - named_types(wanted["type"])))
        yield f"the type {more.replace('fraction', 'number')} is not allowed any more"
    if not all(_in_set(facts, allowed) for allowed in allowed_values(wanted)):
        yield "a value is not allowed any more"
    for name, kind in _LEAST.items():
        if kind in types and name in wanted and _largest(facts, name, _implied(facts, name)) < wanted[name]:
            yield f"{name} is new or larger"
    for name, kind in _MOST.items():
        if kind in types and name in wanted:
            bound = _smallest(facts, name)
            if bound is None or bound > wanted[name]:
                yield f"{name} is new or smaller"
    if types & {"integer", "fraction"}:
        yield from _numbers(facts, wanted, types)
    if "array" in types and wanted.get("uniqueItems") and not any(fact.get("uniqueItems") for fact in facts):
        yield "uniqueItems is new"
    if "object" in types:
        required = {name for fact in facts for name in fact.get("required") or ()}
        yield from (f"{name} is required now" for name in wanted.get("required") or () if name not in required)


def most_items(facts: Sequence[Json]) -> int | None:
    """How many elements a list can have."""
    found = _smallest(facts, "maxItems")
    return None if found is None else int(found)


def _numbers(facts: Sequence[Json], wanted: Json, types: frozenset[str]) -> Iterator[str]:
    for name, strict, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        bound = _bound(facts, name, strict, sign)
        for asked, is_strict in ((wanted.get(name), False), (wanted.get(strict), True)):
            if asked is not None and (bound is None or bound < (sign * asked, is_strict)):
                yield f"{strict if is_strict else name} is new or narrower"
    step = wanted.get("multipleOf")
    if step is not None and not (step == 1 and "fraction" not in types):
        known = [fact["multipleOf"] for fact in facts if "multipleOf" in fact]
        if not any(each == step or (_whole(each) and _whole(step) and each % step == 0) for each in known):
            yield "multipleOf is new or another"


def _bound(facts: Sequence[Json], name: str, strict: str, sign: int) -> tuple[Any, bool] | None:
    """The narrowest bound on one side, and whether the bound itself is out; upper bounds with their sign turned."""
    found = [(sign * fact[name], False) for fact in facts if name in fact]
    found += [(sign * fact[strict], True) for fact in facts if strict in fact]
    for allowed in (each for fact in facts for each in allowed_values(fact)):
        numbers = [sign * each for each in allowed if isinstance(each, int | float) and not isinstance(each, bool)]
        if numbers:
            found.append((min(numbers), False))
    return max(found, default=None)


def _in_set(facts: Sequence[Json], wanted: list[Any]) -> bool:
    texts = set(map(_text, wanted))
    return any(set(map(_text, allowed)) <= texts for fact in facts for allowed in allowed_values(fact))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _largest(facts: Sequence[Json], name: str, at_least: int) -> float:
    return max((fact[name] for fact in facts if name in fact), default=at_least)


def _implied(facts: Sequence[Json], name: str) -> int:
    """An object has at least the properties that it must have."""
    if name == "minProperties":
        return len({each for fact in facts for each in fact.get("required") or ()})
    return 0


def _smallest(facts: Sequence[Json], name: str) -> float | None:
    return min((fact[name] for fact in facts if name in fact), default=None)


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0
