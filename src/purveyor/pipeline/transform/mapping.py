"""The mapping: which object an entry is to the subscribers. Pure; `mapping_file` reads the rules.

The first rule that matches an entry's object classes gives realm, topic and properties.
"""

from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from purveyor.pipeline.transform.directory_rules import Entry
from purveyor.pipeline.transform.ldap_values import Kind, convert
from purveyor.pipeline.transform.records import Value

_OBJECT_CLASS: Final = "objectclass"
OWN: Final = ("dn", "uuid")
"""Properties that every object has; no rule can give them another meaning."""


class Keep(Enum):
    """What becomes of attributes."""

    KEEP = "keep"
    DROP = "drop"


class Unmatched(Enum):
    """What becomes of a message whose entry no rule matches."""

    DEAD_LETTER = "dead-letter"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Property:
    """A property of the object. One that is not multi-valued takes the first value."""

    name: str
    kind: Kind = Kind.STRING
    multi: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What entries of certain object classes are."""

    realm: str
    topic: str
    any: frozenset[str] = frozenset()
    all: frozenset[str] = frozenset()
    properties: MappingOf[str, Property] = field(default_factory=dict)
    """By `attribute_key`."""
    others: Keep = Keep.DROP
    """Attributes without a property: under their names in lower case, as lists."""
    secrets: Keep = Keep.DROP

    def matches(self, classes: frozenset[str]) -> bool:
        """Whether an entry with these object classes (in lower case) falls under it."""
        return self.all <= classes and (not self.any or bool(self.any & classes))


@dataclass(frozen=True, slots=True)
class Mapped:
    """An entry as subscribers see it. `problems` are values that did not fit their property and were left out."""

    realm: str
    topic: str
    object: MappingOf[str, Any]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """All rules, in order."""

    rules: tuple[Rule, ...]
    secrets: frozenset[str] = frozenset()
    unmatched: Unmatched = Unmatched.DEAD_LETTER
    unmatched_classes: MappingOf[str, Unmatched] = field(default_factory=dict)

    def map(self, entry: Entry) -> Mapped | Unmatched:
        """The object that an entry is, or what becomes of it when it is none."""
        classes = classes_of(entry)
        rule = next((rule for rule in self.rules if rule.matches(classes)), None)
        if rule is None:
            told = {self.unmatched_classes[each] for each in classes if each in self.unmatched_classes}
            return max(told, key=lambda each: each is Unmatched.DEAD_LETTER) if told else self.unmatched
        found: dict[str, Any] = {"dn": entry.dn, "uuid": entry.uuid}
        problems: list[str] = []
        for attribute, values in entry.attributes.items():
            if attribute in self.secrets and rule.secrets is Keep.DROP:
                continue
            prop = rule.properties.get(attribute)
            if prop is not None:
                _fill(found, prop, values, problems)
            elif rule.others is Keep.KEEP and attribute not in OWN:
                found[attribute] = list(values)
        return Mapped(rule.realm, rule.topic, found, tuple(problems))


def classes_of(entry: Entry) -> frozenset[str]:
    """Its object classes, in lower case."""
    return frozenset(value.lower() for value in entry.attributes.get(_OBJECT_CLASS, ()) if isinstance(value, str))


def _fill(found: dict[str, Any], prop: Property, values: Sequence[Value], problems: list[str]) -> None:
    """Set the property from the values that fit; say which do not."""
    if not prop.multi and prop.kind is Kind.STRING and isinstance(values[0], str):
        found[prop.name] = values[0]  # most are like this
        return
    fitting = []
    for value in values:
        try:
            fitting.append(convert(prop.kind, value))
        except (ValueError, OverflowError):
            problems.append(f"a value of {prop.name} is no {prop.kind.value}")
        if fitting and not prop.multi:
            break
    if fitting:
        found[prop.name] = fitting if prop.multi else fitting[0]
