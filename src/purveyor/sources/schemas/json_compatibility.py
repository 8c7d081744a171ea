"""Whether every value that fits one JSON Schema fits another one: the compatibility of revisions. Pure.

`find_narrowed` proves it or says where it cannot. It is sound and not complete: what it calls compatible is compatible,
and some of what it does not call so is as well. It follows `type`, `enum`, `const`, bounds of numbers, lengths and
counts, `properties`, `required` and the other keywords of objects, `items`, `prefixItems`, `allOf`, `anyOf`, `oneOf` of
the old revision, and references inside of the document. All other keywords that check something must be the same in
both revisions. The work has a limit; a comparison beyond it is called too large.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from purveyor.model.json_fields import Json
from purveyor.sources.schemas.json_schema_document import Document, Part, allowed_values, named_types, types_of

_LOWER_BOUNDS: Final = {"minLength": "string", "minItems": "array", "minProperties": "object"}
_UPPER_BOUNDS: Final = {"maxLength": "string", "maxItems": "array", "maxProperties": "object"}
_NUMBER_BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
_BOUND_KEYWORDS: Final = (*_LOWER_BOUNDS, *_UPPER_BOUNDS, *_NUMBER_BOUNDS, "uniqueItems")
MAX_WORK: Final = 300_000
"""The number of values that a comparison may visit, repetitions included: about a second of work. A schema of the
largest size takes a tenth of it, unless each of many parts has to be compared with each of many others."""
_OPAQUE_GROUPS: Final = (
    ("oneOf",),
    ("not",),
    ("if", "then", "else"),
    ("contains", "minContains", "maxContains"),
    ("dependentRequired",),
    ("dependentSchemas",),
    ("dependencies",),
    ("propertyNames",),
    ("pattern",),
    ("format",),
    ("contentEncoding",),
    ("contentMediaType",),
    ("additionalItems",),
    ("$dynamicRef",),
    ("$recursiveRef",),
)
"""Keywords that the comparison does not follow: the old revision must have the same values, group by group."""
_CONTEXTUAL: Final = frozenset({"unevaluatedProperties", "unevaluatedItems"})
"""Keywords whose meaning depends on their neighbours: the old revision must have the same schema there."""
_FOLLOWED: Final = frozenset(
    {
        *("$ref", "allOf", "anyOf", "type", "enum", "const", "required"),
        *("properties", "patternProperties", "additionalProperties", "items", "prefixItems"),
        *_BOUND_KEYWORDS,
    }
)
_ANNOTATIONS: Final = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "$vocabulary"),
    }
)
"""Keywords that check nothing."""
_KNOWN: Final = _FOLLOWED | _ANNOTATIONS | _CONTEXTUAL | {name for group in _OPAQUE_GROUPS for name in group}


def find_narrowed(old: Json, new: Json) -> tuple[str, ...]:
    """Return where the new schema may refuse values that the old one takes; empty if it takes them all."""
    if _text(old) == _text(new):
        return ()
    first, second = Document.of(old), Document.of(new)
    if first is None or second is None or first.dialect != second.dialect:
        return ("it: another dialect of JSON Schema, or one with several documents in it, cannot be compared",)
    try:
        return tuple(dict.fromkeys(_Comparison(first, second).problems((old,), new, "", 0)))
    except _TooMuchError as error:
        return (f"{error.args[0]}: too large to be compared",)


class _TooMuchError(Exception):
    """The work goes beyond `MAX_WORK` at this path."""


def _text(value: Any) -> str:
    """Return a text that is equal for equal values; in Python True equals 1."""
    return json.dumps(value, sort_keys=True)


@dataclass(slots=True)
class _Comparison:
    """One comparison of two documents."""

    old: Document
    new: Document
    work: int = 0
    open_questions: dict[tuple[frozenset[int], int], int] = field(default_factory=dict)

    def problems(self, left: Sequence[Part], wanted: Part, where: str, depth: int) -> Iterator[str]:
        """Yield where a value that fits all schemas of `left` might not fit `wanted`.

        `depth` is the depth inside of the value. The same question again at a greater depth counts as proven, because
        values are finite; at the same depth it is a circle, and proves nothing.
        """
        facts = self.old.flatten(left)
        if facts is None:
            return
        self._charge(sum(map(self.old.weight, facts)) + self.new.weight(wanted), where)
        if wanted is True or not types_of(facts):
            return
        if wanted is False:
            yield f"{where or 'it'}: nothing is allowed any more"
            return
        here = where or "it"
        key = (frozenset(map(id, facts)), id(wanted))
        if key in self.open_questions:
            if self.open_questions[key] == depth:
                yield f"{here}: refers to itself"
            return
        self.open_questions[key] = depth
        try:
            found = list(self._keywords(facts, wanted, where, depth))
            if found and not self._by_cases(facts, wanted, where, depth):
                yield from found
        finally:
            del self.open_questions[key]

    def _charge(self, work: int, where: str) -> None:
        self.work += work
        if self.work > MAX_WORK:
            raise _TooMuchError(where or "it")

    def _by_cases(self, facts: Sequence[Json], wanted: Json, where: str, depth: int) -> bool:
        """Whether `wanted` holds in each case of an `anyOf` or `oneOf` on the left."""
        known = set(map(id, facts))
        for fact in facts:
            for cases in (fact.get("anyOf"), fact.get("oneOf")):
                if isinstance(cases, list) and known.isdisjoint(map(id, cases)):
                    each = (next(self.problems((*facts, case), wanted, where, depth), None) for case in cases)
                    if all(problem is None for problem in each):
                        return True
        return False

    def _keywords(self, facts: Sequence[Json], wanted: Json, where: str, depth: int) -> Iterator[str]:
        here = where or "it"
        if "$ref" in wanted:
            target = self.new.target(wanted["$ref"])
            if target is None:
                yield f"{here}: the reference cannot be followed"
            else:
                yield from self.problems(facts, target, where, depth)
            if self.new.ignores_siblings_of_references:
                return
        for each in wanted.get("allOf") or ():
            yield from self.problems(facts, each, where, depth)
        if "anyOf" in wanted:
            ways = (next(self.problems(facts, each, where, depth), None) for each in wanted["anyOf"])
            if all(problem is not None for problem in ways):
                yield f"{here}: none of anyOf takes all that was allowed"
        yield from (f"{here}: {what}" for what in self._opaque_keywords(facts, wanted, where))
        yield from (f"{here}: {what}" for what in _missing_bounds(facts, wanted))
        types = types_of(facts)
        if "object" in types:
            yield from self._object(facts, wanted, where, depth)
        if "array" in types:
            yield from self._array(facts, wanted, where, depth)

    def _opaque_keywords(self, facts: Sequence[Json], wanted: Json, where: str) -> Iterator[str]:
        """Yield the keywords that the comparison does not follow and that differ."""
        whole = sorted(_CONTEXTUAL & wanted.keys())
        if whole:
            self._charge(sum(self.old.sizes[id(fact)] for fact in facts) + self.new.sizes[id(wanted)], where)
            if not any(_is_same(fact, wanted) for fact in facts):
                yield f"a schema with {whole[0]} is not the same"
        unknown = ((name,) for name in wanted if name not in _KNOWN and not name.startswith("x-"))
        for group in (*_OPAQUE_GROUPS, *unknown):
            required = {name: wanted[name] for name in group if name in wanted}
            if not required:
                continue
            given = [{name: fact[name] for name in group if name in fact} for fact in facts]
            sizes = [self.old.sizes[id(value)] for each in given for value in each.values()]
            self._charge(len(facts) + sum(sizes) + sum(self.new.sizes[id(each)] for each in required.values()), where)
            if not any(_is_same(each, required) for each in given):
                yield f"{next(iter(required))} is new or another"

    def _object(self, facts: Sequence[Json], wanted: Json, where: str, depth: int) -> Iterator[str]:
        given: Mapping[str, Part] = wanted.get("properties") or {}
        for name, part in given.items():
            self._charge(len(facts), where)
            yield from self.problems(_property(facts, name), part, _below(where, name), depth + 1)
        for pattern, part in (wanted.get("patternProperties") or {}).items():
            self._charge(len(facts), where)
            same = [
                known for fact in facts if (known := (fact.get("patternProperties") or {}).get(pattern)) is not None
            ]
            if not same or next(self.problems(same, part, where, depth + 1), None) is not None:
                yield from self._every_property(facts, part, where, depth, excluded=())
        if "additionalProperties" in wanted:
            yield from self._every_property(facts, wanted["additionalProperties"], where, depth, excluded=tuple(given))

    def _every_property(
        self, facts: Sequence[Json], part: Part, where: str, depth: int, *, excluded: Sequence[str]
    ) -> Iterator[str]:
        """Yield where a property that the left allows might not fit."""
        named = dict.fromkeys(name for fact in facts for name in fact.get("properties") or {})
        skipped = frozenset(excluded)
        for name in named:
            if name not in skipped:
                self._charge(len(facts), where)
                yield from self.problems(_property(facts, name), part, _below(where, name), depth + 1)
        plain = [fact["additionalProperties"] for fact in facts if _covers_all_names(fact)]
        for fact in facts:  # with patterns, a name matches one of them, or none
            patterns = fact.get("patternProperties")
            if patterns and "additionalProperties" in fact:
                for each in (*patterns.values(), fact["additionalProperties"]):
                    yield from self.problems((*plain, each), part, _below(where, "*"), depth + 1)
                return
        yield from self.problems(plain, part, _below(where, "*"), depth + 1)

    def _array(self, facts: Sequence[Json], wanted: Json, where: str, depth: int) -> Iterator[str]:
        first = self.new.prefix(wanted)
        most = _max_items(facts)
        for index, part in enumerate(first):
            if most is None or index < most:
                self._charge(len(facts), where)
                yield from self.problems(self._item(facts, index), part, f"{where}[{index}]", depth + 1)
        rest = wanted.get("items")
        if isinstance(rest, list):
            if not any(_is_same({"items": fact.get("items")}, {"items": rest}) for fact in facts):
                yield f"{where or 'it'}: items is new or another"
        elif rest is not None:
            longest = max((len(self.old.prefix(fact)) for fact in facts), default=0)
            for index in range(len(first), max(longest, len(first)) + 1):  # the last index represents all behind it
                if most is None or index < most:
                    self._charge(len(facts), where)
                    yield from self.problems(self._item(facts, index), rest, f"{where}[]", depth + 1)

    def _item(self, facts: Sequence[Json], index: int) -> list[Part]:
        found: list[Part] = []
        for fact in facts:
            prefix, rest = self.old.prefix(fact), fact.get("items")
            if index < len(prefix):
                found.append(prefix[index])
            elif rest is not None and not isinstance(rest, list):
                found.append(rest)
        return found


def _is_same(one: Json, other: Json) -> bool:
    """Whether two values are the same and have no references: a reference may lead to another schema."""
    return _text(one) == _text(other) and not any(_references(other))


def _references(value: Any) -> Iterator[str]:
    """Yield all references at any depth."""
    if isinstance(value, dict):
        yield from (name for name in value if name in ("$ref", "$dynamicRef", "$recursiveRef"))
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _references(each)


def _property(facts: Sequence[Json], name: str) -> list[Part]:
    """Return the schemas of a property, if it is present."""
    found: list[Part] = []
    for fact in facts:
        properties = fact.get("properties") or {}
        if name in properties:
            found.append(properties[name])
        elif _covers_all_names(fact):
            found.append(fact["additionalProperties"])
    return found


def _covers_all_names(fact: Json) -> bool:
    """Whether its `additionalProperties` applies to every property that it does not name."""
    return "additionalProperties" in fact and not fact.get("patternProperties")


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


# Bounds, sets and lists of names: does a keyword follow from the facts?


def _missing_bounds(facts: Sequence[Json], wanted: Json) -> Iterator[str]:
    """Yield the bounds of `wanted` that do not follow from the facts."""
    types = types_of(facts)
    if "type" in wanted and not types <= named_types(wanted["type"]):
        more = ", ".join(sorted(types - named_types(wanted["type"])))
        yield f"the type {more.replace('fraction', 'number')} is not allowed any more"
    if not all(_has_subset(facts, allowed) for allowed in allowed_values(wanted)):
        yield "a value is not allowed any more"
    for name, kind in _LOWER_BOUNDS.items():
        if kind in types and name in wanted and _largest(facts, name, _implied_minimum(facts, name)) < wanted[name]:
            yield f"{name} is new or larger"
    for name, kind in _UPPER_BOUNDS.items():
        if kind in types and name in wanted:
            bound = _smallest(facts, name)
            if bound is None or bound > wanted[name]:
                yield f"{name} is new or smaller"
    if types & {"integer", "fraction"}:
        yield from _missing_number_bounds(facts, wanted, types)
    if "array" in types and wanted.get("uniqueItems") and not any(fact.get("uniqueItems") for fact in facts):
        yield "uniqueItems is new"
    if "object" in types:
        required = {name for fact in facts for name in fact.get("required") or ()}
        yield from (f"{name} is required now" for name in wanted.get("required") or () if name not in required)


def _max_items(facts: Sequence[Json]) -> int | None:
    """Return the largest length of a list."""
    found = _smallest(facts, "maxItems")
    return None if found is None else int(found)


def _missing_number_bounds(facts: Sequence[Json], wanted: Json, types: frozenset[str]) -> Iterator[str]:
    for name, strict, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        bound = _narrowest_bound(facts, name, strict, sign)
        for limit, is_strict in ((wanted.get(name), False), (wanted.get(strict), True)):
            if limit is not None and (bound is None or bound < (sign * limit, is_strict)):
                yield f"{strict if is_strict else name} is new or narrower"
    step = wanted.get("multipleOf")
    if step is not None and not (step == 1 and "fraction" not in types):
        known = [fact["multipleOf"] for fact in facts if "multipleOf" in fact]
        if not any(
            each == step or (_is_positive_integer(each) and _is_positive_integer(step) and each % step == 0)
            for each in known
        ):
            yield "multipleOf is new or another"


def _narrowest_bound(facts: Sequence[Json], name: str, strict: str, sign: int) -> tuple[Any, bool] | None:
    """Return the narrowest bound on one side, and whether it is exclusive; upper bounds with the opposite sign."""
    found = [(sign * fact[name], False) for fact in facts if name in fact]
    found += [(sign * fact[strict], True) for fact in facts if strict in fact]
    for allowed in (each for fact in facts for each in allowed_values(fact)):
        numbers = [sign * each for each in allowed if isinstance(each, int | float) and not isinstance(each, bool)]
        if numbers:
            found.append((min(numbers), False))
    return max(found, default=None)


def _has_subset(facts: Sequence[Json], wanted: list[Any]) -> bool:
    texts = set(map(_text, wanted))
    return any(set(map(_text, allowed)) <= texts for fact in facts for allowed in allowed_values(fact))


def _largest(facts: Sequence[Json], name: str, at_least: int) -> float:
    return max((fact[name] for fact in facts if name in fact), default=at_least)


def _implied_minimum(facts: Sequence[Json], name: str) -> int:
    """Return a lower bound that follows from others: an object has at least its required properties."""
    if name == "minProperties":
        return len({each for fact in facts for each in fact.get("required") or ()})
    return 0


def _smallest(facts: Sequence[Json], name: str) -> float | None:
    return min((fact[name] for fact in facts if name in fact), default=None)


def _is_positive_integer(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0
