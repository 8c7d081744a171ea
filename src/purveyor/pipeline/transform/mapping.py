"""The mapping: which object an LDAP entry is to the subscribers. Pure.

The first rule that matches an entry's object classes gives realm, topic and properties. The rules come from a TOML
file (see `mapping_file`), which is read and checked once. The guide to the transform explains the file.
"""

from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, Final

from purveyor.pipeline.transform.directory_records import InvalidRecord, Value, parse_dn, rdn_values
from purveyor.pipeline.transform.directory_rules import Entry
from purveyor.pipeline.transform.property_values import (
    GroupMembers,
    MemberKind,
    PropertyType,
    convert_value,
    is_named_by_uid,
)

RESERVED_PROPERTIES: Final = ("dn", "uuid")
"""Properties that every flat object has; no rule can redefine them."""
EVERY_CLASS: Final = "*"
"""In place of an object class: the rule matches every entry."""
_OBJECT_CLASS: Final = "objectclass"
_IDENTIFIER: Final = "univentionobjectidentifier"
_POLICY_REFERENCE: Final = "univentionpolicyreference"
_MEMBER_UID: Final = "memberuid"
_MEMBER_TOPICS: Final = {"users": MemberKind.USERS, "groups": MemberKind.GROUPS, "computers": MemberKind.HOSTS}
"""What the objects of a topic are as members of a group, by its first part."""
_POLICY_TYPE: Final = "policies/policy"
"""The type under which an object lists its policies: the type of each is in the policy's own entry."""


class AttributeHandling(Enum):
    """What happens to attributes."""

    KEEP = "keep"
    DROP = "drop"


class Unmatched(Enum):
    """What happens to a message whose entry no rule matches."""

    DEAD_LETTER = "dead-letter"
    IGNORE = "ignore"


class Shape(Enum):
    """The form of the objects."""

    FLAT = "flat"
    """`dn`, `uuid` and the properties that the entry has a value for."""
    UDM = "udm"
    """As UDM shows objects: the properties in `properties`, and a property without a value is null or an empty list."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """The attributes that no event shows. Their options do not matter: `userPassword;x-old` is a secret as well."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    """Names with `*` for any text."""

    def __contains__(self, attribute: str) -> bool:
        """Return whether an attribute, as `attribute_key` spells it, is a secret.

        >>> secrets = Secrets(frozenset({"krb5key"}), ("*password*",))
        >>> "krb5key;x-old" in secrets, "userpassword" in secrets, "uid" in secrets
        (True, True, False)
        """
        name = attribute.partition(";")[0]
        return attribute in self.names or name in self.names or any(fnmatchcase(name, each) for each in self.patterns)


@dataclass(frozen=True, slots=True)
class Property:
    """A property of the object. One that is not multi-valued takes the first value."""

    name: str
    sources: tuple[str, ...]
    """The attributes that it comes from, as `attribute_key` spells them."""
    kind: PropertyType = PropertyType.STRING
    multi: bool = False
    members: MemberKind | None = None
    """Only the members of a group that are of this kind."""

    def without(self, hidden: AbstractSet[str]) -> "Property":
        """Return the property without these attributes."""
        return replace(self, sources=tuple(each for each in self.sources if each not in hidden)) if hidden else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The object for entries of certain object classes."""

    realm: str
    topic: str
    any: frozenset[str] = frozenset()
    all: frozenset[str] = frozenset()
    properties: tuple[Property, ...] = ()
    """Without the secrets that the rule drops."""
    sources: frozenset[str] = frozenset()
    """The attributes of all properties."""
    options: MappingOf[str, str] = field(default_factory=dict)
    """The object class that each option stands for, in lower case."""
    others: AttributeHandling = AttributeHandling.DROP
    """Attributes without a property: under their names in lower case, as lists."""
    secrets: AttributeHandling = AttributeHandling.DROP

    def matches(self, classes: frozenset[str]) -> bool:
        """Return whether the rule applies to an entry with these object classes (in lower case)."""
        if self.all <= classes and (not self.any or bool(self.any & classes)):
            return True
        return EVERY_CLASS in self.any


@dataclass(frozen=True, slots=True)
class MappedObject:
    """An entry as subscribers see it. `problems` are values that did not fit their property and were left out."""

    realm: str
    topic: str
    object: MappingOf[str, Any]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """All rules, in order."""

    rules: tuple[Rule, ...]
    shape: Shape = Shape.FLAT
    publisher: str = "ldif"
    """The `publisher_name` of the events."""
    prefill_publisher: str | None = None
    """The `publisher_name` of the same events in a prefill; None: it is the same."""
    topic_attribute: str | None = None
    """The attribute whose value, where an entry has it, is the topic."""
    secrets: Secrets = field(default_factory=Secrets)
    ignored: frozenset[str] = frozenset()
    """Attributes that `others = "keep"` leaves out."""
    unmatched: Unmatched = Unmatched.DEAD_LETTER
    unmatched_classes: MappingOf[str, Unmatched] = field(default_factory=dict)
    member_attributes: frozenset[str] = field(init=False)
    """The attributes that hold the members of groups."""

    def __post_init__(self) -> None:
        members = (prop for rule in self.rules for prop in rule.properties if prop.members is not None)
        object.__setattr__(self, "member_attributes", frozenset(each for prop in members for each in prop.sources))

    @property
    def dropped_secrets(self) -> Secrets:
        """The secrets that no rule shows, so that a source need not store them; none if a rule keeps secrets."""
        keeps = any(rule.secrets is AttributeHandling.KEEP for rule in self.rules)
        return Secrets() if keeps else self.secrets

    def map(self, entry: Entry) -> MappedObject | Unmatched:
        """Return the object of an entry, or what happens to an entry that is none."""
        classes = object_classes(entry)
        topic = self._given_topic(entry)
        rule = self._find_rule(topic, classes)
        if rule is None:
            choices = {self.unmatched_classes[each] for each in classes if each in self.unmatched_classes}
            return max(choices, key=lambda each: each is Unmatched.DEAD_LETTER) if choices else self.unmatched
        problems: list[str] = []
        topic = topic or rule.topic
        if self.shape is Shape.UDM:
            found = self._udm_object(entry, rule, topic, classes, problems)
        else:
            found = {"dn": entry.dn, "uuid": entry.uuid, **self._properties(entry, rule, problems)}
        return MappedObject(rule.realm, topic, found, tuple(problems))

    def member_kinds(
        self, entry: Entry, before: MappingOf[str, str], find: Callable[[str], Entry | None]
    ) -> MappingOf[str, str] | None:
        """Return what members of a group are by their entries, where that is not what their names say.

        `find` returns the entry of a name by its key. A member that is not found stays what it was `before`.
        """
        if self.member_attributes.isdisjoint(entry.attributes):
            return None
        by_name = GroupMembers(entry.dn, entry.attributes.get(_MEMBER_UID, ()))
        kinds: dict[str, str] = {}
        for member in (value for each in self.member_attributes for value in entry.attributes.get(each, ())):
            if not isinstance(member, str) or is_named_by_uid(member):
                continue
            try:
                found = find(parse_dn(member).key)
            except InvalidRecord:
                continue
            kind = before.get(member) if found is None else self._kind_of(found)
            if kind is not None and kind != by_name.kind_by_name(member).value:
                kinds[member] = kind
        return kinds or None

    def _kind_of(self, entry: Entry) -> str | None:
        """Return what an entry is as the member of a group; None if it is neither a user nor a group nor a host."""
        topic = self._given_topic(entry)
        rule = self._find_rule(topic, object_classes(entry))
        named = topic or (rule.topic if rule else "")
        kind = _MEMBER_TOPICS.get(named.partition("/")[0])
        return None if kind is None else kind.value

    def _find_rule(self, topic: str | None, classes: frozenset[str]) -> Rule | None:
        return next((rule for rule in self.rules if rule.topic == topic), None) or next(
            (rule for rule in self.rules if rule.matches(classes)), None
        )

    def _given_topic(self, entry: Entry) -> str | None:
        """Return the topic that the entry itself names."""
        values = entry.attributes.get(self.topic_attribute) if self.topic_attribute else None
        return values[0] if values and isinstance(values[0], str) and values[0] else None

    def _properties(self, entry: Entry, rule: Rule, problems: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        members = None
        for prop in rule.properties:
            if prop.members is not None and members is None:
                members = GroupMembers(entry.dn, entry.attributes.get(_MEMBER_UID, ()), entry.member_kinds)
            value = _property_value(prop, entry, members, problems)
            if self.shape is Shape.UDM or value not in (None, []):
                found[prop.name] = value
        if rule.others is AttributeHandling.KEEP:
            hides_secrets = rule.secrets is AttributeHandling.DROP
            for attribute, values in entry.attributes.items():
                base = attribute.partition(";")[0]
                hidden = base in self.ignored or (hides_secrets and attribute in self.secrets)
                if not hidden and attribute not in rule.sources and not self._is_taken(attribute, found):
                    found[attribute] = list(values)
        return found

    def _is_taken(self, attribute: str, found: MappingOf[str, Any]) -> bool:
        return attribute in found or (self.shape is Shape.FLAT and attribute in RESERVED_PROPERTIES)

    def _udm_object(
        self, entry: Entry, rule: Rule, topic: str, classes: frozenset[str], problems: list[str]
    ) -> dict[str, Any]:
        name, position = _name_and_position(entry.dn)
        identifier = _first_text(entry.attributes.get(_IDENTIFIER, ()))
        policies = [each for each in entry.attributes.get(_POLICY_REFERENCE, ()) if isinstance(each, str)]
        return {
            "dn": entry.dn,
            "objectType": topic,
            "id": identifier or name,
            "uuid": entry.uuid,
            "position": position,
            "properties": self._properties(entry, rule, problems),
            "options": {option: kind in classes for option, kind in rule.options.items()},
            "policies": {_POLICY_TYPE: policies} if policies else {},
        }


def object_classes(entry: Entry) -> frozenset[str]:
    """Return the object classes of an entry, in lower case."""
    return frozenset(value.lower() for value in entry.attributes.get(_OBJECT_CLASS, ()) if isinstance(value, str))


def _first_text(values: Sequence[Value]) -> str | None:
    return values[0] if values and isinstance(values[0], str) else None


def _name_and_position(dn: str) -> tuple[str, str]:
    r"""Return the values of the entry's own rdn, and the name of its parent.

    >>> _name_and_position("cn=Ada\\2c L.+uid=ada,ou=people,dc=e")
    ('Ada, L.+ada', 'ou=people,dc=e')
    """
    try:
        name = parse_dn(dn)
    except InvalidRecord:
        return dn, ""
    text = "+".join(value for _, value in rdn_values(name))
    readable = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return readable, ",".join(name.rdns[1:])


def _property_value(prop: Property, entry: Entry, members: GroupMembers | None, problems: list[str]) -> Any:
    """Return the value of a property from the values that fit; add a problem for each that does not."""
    fitting: list[Any] = []
    for attribute in prop.sources:
        for value in entry.attributes.get(attribute, ()):
            if not prop.multi and fitting:
                return fitting[0]
            if prop.members is not None and not _is_member(prop.members, value, members):
                continue
            try:
                converted = convert_value(prop.kind, value)
            except (ValueError, OverflowError):
                problems.append(f"a value of {prop.name} is no {prop.kind.value}")
                continue
            fitting.append(converted)
    if prop.multi:
        return list(dict.fromkeys(fitting)) if len(prop.sources) > 1 else fitting
    return fitting[0] if fitting else None


def _is_member(kind: MemberKind, value: Value, members: GroupMembers | None) -> bool:
    if not isinstance(value, str) or members is None:
        return kind is MemberKind.USERS  # which reports it as no text, once
    return members.kind(value) is kind
