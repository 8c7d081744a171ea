"""A JSON Schema document for `json_compatibility`: its dialect, its references, and schemas as lists of facts. Pure."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from purveyor.model.json_fields import Json

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
    anchors: Mapping[str, Json]
    sizes: Mapping[int, int]
    """The number of values in each value at any depth, itself included; by `id`."""

    @classmethod
    def of(cls, root: Json) -> "Document | None":
        """Return the document; None for an unknown dialect, or if inner parts have an `$id`: it changes references."""
        given = root.get("$schema", _MODERN)
        dialect = given.rstrip("#") if isinstance(given, str) else ""
        objects = list(_objects(root))
        has_inner_ids = any("$id" in part and part is not root for part in objects)
        if has_inner_ids or dialect not in _DIALECTS:
            return None
        anchors = {part["$anchor"]: part for part in reversed(objects) if isinstance(part.get("$anchor"), str)}
        return cls(root, dialect, anchors, _sizes(root))

    @property
    def ignores_siblings_of_references(self) -> bool:
        """Whether keywords beside a reference are ignored, as up to draft 7."""
        return self.dialect.endswith(("draft-06/schema", "draft-07/schema"))

    def target(self, reference: object) -> Part | None:
        """Return the target of a reference; None if it is outside of the document, or missing."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        if reference in ("#", "#/"):
            return self.root if reference == "#" else None
        if not reference.startswith("#/"):
            return self.anchors.get(reference[1:])
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

    def weight(self, part: Part) -> int:
        """Return the work of one visit of a schema: its keywords, the lists in them, and all the values it allows."""
        if isinstance(part, bool):
            return 1
        return 1 + sum(
            self.sizes[id(value)] if name in ("enum", "const") else 1 + len(_inside(value))
            for name, value in part.items()
        )

    def prefix(self, part: Json) -> list[Part]:
        """Return the schemas of the first elements of a list."""
        found = part.get("prefixItems")
        return found if isinstance(found, list) and self.dialect == _MODERN else []

    def flatten(self, parts: Sequence[Part]) -> list[Json] | None:
        """Return all schemas that a value must fit if it fits these, through references and `allOf`; None if none can.

        This omits references that cannot be followed: then less is known of the value.
        """
        found: list[Json] = []
        known: set[int] = set()
        todo = deque(parts)
        while todo:
            part = todo.popleft()
            if part is False:
                return None
            if not isinstance(part, dict) or id(part) in known:
                continue
            known.add(id(part))
            if "$ref" in part:
                target = self.target(part["$ref"])
                todo += [] if target is None else [target]
                if self.ignores_siblings_of_references:
                    continue
            found.append(part)
            todo += part.get("allOf") or []
        return found


def types_of(facts: Sequence[Json]) -> frozenset[str]:
    """Return the types that a value can have."""
    found = _TYPES
    for fact in facts:
        if "type" in fact:
            found &= named_types(fact["type"])
        for values in allowed_values(fact):
            found &= frozenset(map(type_of, values))
    return found


def named_types(given: Any) -> frozenset[str]:
    """Return the types that `type` allows."""
    names = set(given) if isinstance(given, list) else {given}
    if "number" in names:
        names |= {"integer", "fraction"}
    return frozenset(names) & _TYPES


def allowed_values(fact: Json) -> list[list[Any]]:
    """Return the sets of values that `enum` and `const` allow, one for each."""
    found = [[fact["const"]]] if "const" in fact else []
    return [*found, fact["enum"]] if isinstance(fact.get("enum"), list) else found


def type_of(value: Any) -> str:
    """Return the type of a value."""
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    names = {type(None): "null", bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _objects(value: Any) -> Iterator[Json]:
    """Yield every object in a document."""
    todo = [value]
    while todo:
        found = todo.pop()
        if isinstance(found, dict):
            yield found
        todo += _inside(found)


def _sizes(root: Json) -> dict[int, int]:
    """Count the values in each object, itself included."""
    found: dict[int, int] = {}
    order: list[Any] = []
    todo: list[Any] = [root]
    while todo:  # each value before its contents
        value = todo.pop()
        order.append(value)
        todo += _inside(value)
    for value in reversed(order):
        found[id(value)] = 1 + sum(found[id(each)] for each in _inside(value))
    return found


def _inside(value: Any) -> Collection[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
