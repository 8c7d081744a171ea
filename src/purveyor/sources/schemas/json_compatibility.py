"""Whether every value that fits one JSON Schema fits another one: what compatibility of revisions comes down to. Pure.

`narrowed` proves it or says where it cannot. It is sound and not complete: what it calls compatible is, and of what it
does not, some may be. It follows `type`, `enum`, `const`, bounds of numbers, lengths and counts, `properties`,
`required` and what else belongs to objects, `items`, `prefixItems`, `allOf`, `anyOf`, `oneOf` of the old revision, and
references inside of the document. All other keywords that check something must stand in the old revision as they
stand in the new one. The work has a bound; what goes beyond it is called too large to be compared.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from purveyor.model.json_fields import Json
from purveyor.sources.schemas import json_bounds
from purveyor.sources.schemas.json_schema_document import Document, Part, types_of

MOST_WORK: Final = 300_000
"""How many values a comparison looks at, each as often as it comes up: about a second of work. A schema of the largest
size takes a tenth of it, unless each of many parts has to be held against each of many others."""
_ALIKE: Final = (
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
"""Keywords that are not looked into: the old revision must have them, each group, as the new one has."""
_WHOLE: Final = frozenset({"unevaluatedProperties", "unevaluatedItems"})
"""Keywords that mean something else in other company: the old revision must have the same schema at that place."""
_FOLLOWED: Final = frozenset(
    {
        *("$ref", "allOf", "anyOf", "type", "enum", "const", "required"),
        *("properties", "patternProperties", "additionalProperties", "items", "prefixItems"),
        *json_bounds.KEYWORDS,
    }
)
_SAYING: Final = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "$vocabulary"),
    }
)
"""Keywords that check nothing."""
_KNOWN: Final = _FOLLOWED | _SAYING | _WHOLE | {name for group in _ALIKE for name in group}


def narrowed(old: Json, new: Json) -> tuple[str, ...]:
    """Where the new schema may refuse what the old one takes; empty if it takes all of that."""
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
    """The work goes beyond `MOST_WORK`, at this place."""


def _text(value: Any) -> str:
    """Equal texts are equal values; in Python True would be 1."""
    return json.dumps(value, sort_keys=True)


@dataclass(slots=True)
class _Comparison:
    """One question. On the left stand several schemas of the old document that a value fits all of."""

    old: Document
    new: Document
    work: int = 0
    asked: dict[tuple[frozenset[int], int], int] = field(default_factory=dict)

    def problems(self, left: Sequence[Part], wanted: Part, where: str, depth: int) -> Iterator[str]:
        """Where a value that fits all on the left might not fit what is wanted.

        `depth` counts how deep in the value we are. A question that comes up again deeper down is taken to be answered
        well, because values have an end; at the same depth it would be a circle, and proves nothing.
        """
        facts = self.old.flat(left)
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
        if key in self.asked:
            if self.asked[key] == depth:
                yield f"{here}: refers to itself"
            return
        self.asked[key] = depth
        try:
            found = list(self._keywords(facts, wanted, where, depth))
            if found and not self._by_cases(facts, wanted, where, depth):
                yield from found
        finally:
            del self.asked[key]

    def _charge(self, work: int, where: str) -> None:
        self.work += work
        if self.work > MOST_WORK:
            raise _TooMuchError(where or "it")

    def _by_cases(self, facts: Sequence[Json], wanted: Json, where: str, depth: int) -> bool:
        """Whether it holds in each case of an `anyOf` or `oneOf` on the left."""
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
            if self.new.references_stand_alone:
                return
        for each in wanted.get("allOf") or ():
            yield from self.problems(facts, each, where, depth)
        if "anyOf" in wanted:
            ways = (next(self.problems(facts, each, where, depth), None) for each in wanted["anyOf"])
            if all(problem is not None for problem in ways):
                yield f"{here}: none of anyOf takes all that was allowed"
        yield from (f"{here}: {what}" for what in self._others(facts, wanted, where))
        yield from (f"{here}: {what}" for what in json_bounds.missing(facts, wanted))
        types = types_of(facts)
        if "object" in types:
            yield from self._object(facts, wanted, where, depth)
        if "array" in types:
            yield from self._array(facts, wanted, where, depth)

    def _others(self, facts: Sequence[Json], wanted: Json, where: str) -> Iterator[str]:
        """Keywords that are not looked into."""
        whole = sorted(_WHOLE & wanted.keys())
        if whole:
            self._charge(sum(self.old.sizes[id(fact)] for fact in facts) + self.new.sizes[id(wanted)], where)
            if not any(_alike(fact, wanted) for fact in facts):
                yield f"a schema with {whole[0]} is not the same"
        unknown = ((name,) for name in wanted if name not in _KNOWN and not name.startswith("x-"))
        for group in (*_ALIKE, *unknown):
            asked = {name: wanted[name] for name in group if name in wanted}
            if not asked:
                continue
            told = [{name: fact[name] for name in group if name in fact} for fact in facts]
            sizes = [self.old.sizes[id(value)] for each in told for value in each.values()]
            self._charge(len(facts) + sum(sizes) + sum(self.new.sizes[id(each)] for each in asked.values()), where)
            if not any(_alike(each, asked) for each in told):
                yield f"{next(iter(asked))} is new or another"

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
                yield from self._every_property(facts, part, where, depth, but=())
        if "additionalProperties" in wanted:
            yield from self._every_property(facts, wanted["additionalProperties"], where, depth, but=tuple(given))

    def _every_property(
        self, facts: Sequence[Json], part: Part, where: str, depth: int, *, but: Sequence[str]
    ) -> Iterator[str]:
        """Every property that is allowed on the left fits."""
        named = dict.fromkeys(name for fact in facts for name in fact.get("properties") or {})
        others = frozenset(but)
        for name in named:
            if name not in others:
                self._charge(len(facts), where)
                yield from self.problems(_property(facts, name), part, _below(where, name), depth + 1)
        plain = [fact["additionalProperties"] for fact in facts if _says_all(fact)]
        for fact in facts:  # where patterns say more, a name follows one of them, or none
            patterns = fact.get("patternProperties")
            if patterns and "additionalProperties" in fact:
                for each in (*patterns.values(), fact["additionalProperties"]):
                    yield from self.problems((*plain, each), part, _below(where, "*"), depth + 1)
                return
        yield from self.problems(plain, part, _below(where, "*"), depth + 1)

    def _array(self, facts: Sequence[Json], wanted: Json, where: str, depth: int) -> Iterator[str]:
        first = self.new.prefix(wanted)
        most = json_bounds.most_items(facts)
        for index, part in enumerate(first):
            if most is None or index < most:
                self._charge(len(facts), where)
                yield from self.problems(self._item(facts, index), part, f"{where}[{index}]", depth + 1)
        rest = wanted.get("items")
        if isinstance(rest, list):
            if not any(_alike({"items": fact.get("items")}, {"items": rest}) for fact in facts):
                yield f"{where or 'it'}: items is new or another"
        elif rest is not None:
            longest = max((len(self.old.prefix(fact)) for fact in facts), default=0)
            for index in range(len(first), max(longest, len(first)) + 1):  # the last stands for all behind it
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


def _alike(one: Json, other: Json) -> bool:
    """The same words, and the same meaning: what is referred to may be another."""
    return _text(one) == _text(other) and not any(_references(other))


def _references(value: Any) -> Iterator[str]:
    """All references at any depth."""
    if isinstance(value, dict):
        yield from (name for name in value if name in ("$ref", "$dynamicRef", "$recursiveRef"))
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _references(each)


def _property(facts: Sequence[Json], name: str) -> list[Part]:
    """What is known of a property, if it is there at all."""
    found: list[Part] = []
    for fact in facts:
        properties = fact.get("properties") or {}
        if name in properties:
            found.append(properties[name])
        elif _says_all(fact):
            found.append(fact["additionalProperties"])
    return found


def _says_all(fact: Json) -> bool:
    """Whether its `additionalProperties` is for every property that it does not name."""
    return "additionalProperties" in fact and not fact.get("patternProperties")


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
