"""A JSON Schema as `json_rules` reads it: its dialect, its references, several schemas as one list of facts. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from purveyor.model.jsontext import Json

Part: TypeAlias = Json | bool
"""A schema inside of a document."""
_MODERN: Final = "https://json-schema.org/draft/2020-12/schema"
_DIALECTS: Final = (
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-07/schema",
    "https://json-schema.org/draft/2019-09/schema",
    _MODERN,
)
_TYPES: Final = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
"""Every value is of one of these; `number` is `integer` and `fraction`."""


@dataclass(frozen=True, slots=True)
class Document:
    """A whole schema."""

    root: Json
    dialect: str

    @classmethod
    def of(cls, root: Json) -> "Document | None":
        """None: a dialect that is not known, or parts with an address of their own, where references go elsewhere."""
        given = root.get("$schema", _MODERN)
        dialect = given.rstrip("#") if isinstance(given, str) else ""
        own = any("$id" in part and part is not root for part in _objects(root))
        return None if own or dialect not in _DIALECTS else cls(root, dialect)

    @property
    def references_stand_alone(self) -> bool:
        """Up to draft 7 what stands beside a reference does not count."""
        return self.dialect.endswith(("draft-06/schema", "draft-07/schema"))

    def target(self, reference: object) -> Part | None:
        """What a reference means; None if it leaves the document, or leads nowhere."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        if reference in ("#", "#/"):
            return self.root if reference == "#" else None
        if not reference.startswith("#/"):
            anchors = (part for part in _objects(self.root) if part.get("$anchor") == reference[1:])
            return next(anchors, None)
        found: Any = self.root
        for step in reference[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found if isinstance(found, dict | bool) else None

    def prefix(self, part: Json) -> list[Part]:
        """The schemas of the first elements of a list."""
        found = part.get("prefixItems")
        return found if isinstance(found, list) and self.dialect == _MODERN else []

    def flat(self, parts: Sequence[Part]) -> list[Json] | None:
        """All that a value which fits all these schemas must fit, references and `allOf` followed; None: none can.

        What cannot be followed is left out: then less is known of the value.
        """
        found: list[Json] = []
        todo = list(parts)
        while todo:
            part = todo.pop(0)
            if part is False:
                return None
            if not isinstance(part, dict) or any(part is known for known in found):
                continue
            if "$ref" in part:
                target = self.target(part["$ref"])
                todo += [] if target is None else [target]
                if self.references_stand_alone:
                    continue
            found.append(part)
            todo += part.get("allOf") or []
        return found


def types_of(facts: Sequence[Json]) -> frozenset[str]:
    """The types that a value can have."""
    found = _TYPES
    for fact in facts:
        if "type" in fact:
            found &= named_types(fact["type"])
        for values in allowed_values(fact):
            found &= frozenset(map(type_of, values))
    return found


def named_types(given: Any) -> frozenset[str]:
    """The types that `type` allows."""
    names = set(given) if isinstance(given, list) else {given}
    if "number" in names:
        names |= {"integer", "fraction"}
    return frozenset(names) & _TYPES


def allowed_values(fact: Json) -> list[list[Any]]:
    """The sets of values that `enum` and `const` allow, each by itself."""
    found = [[fact["const"]]] if "const" in fact else []
    return [*found, fact["enum"]] if isinstance(fact.get("enum"), list) else found


def type_of(value: Any) -> str:
    """The type of a value."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    names = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _objects(value: Any) -> Iterator[Json]:
    """Every object in a document."""
    todo = [value]
    while todo:
        found = todo.pop()
        if isinstance(found, dict):
            yield found
            todo += found.values()
        elif isinstance(found, list):
            todo += found
