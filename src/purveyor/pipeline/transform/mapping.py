"""The mapping: which object an LDAP entry is to the subscribers. Pure, except that `load_mapping` reads the file.

The first rule that matches an entry's object classes gives realm, topic and properties. The rules come from a TOML
file, which is read and checked once; every error names the file, the key and the fix. The guide to the transform
explains the file; `default_mapping.toml` is used if none is given.
"""

import base64
import re
import tomllib
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

from purveyor.model.errors import InvalidConfig, InvalidInput
from purveyor.model.event import check_realm_or_topic
from purveyor.pipeline.transform.directory_records import Value, attribute_key
from purveyor.pipeline.transform.directory_rules import Entry

_OBJECT_CLASS: Final = "objectclass"
RESERVED_PROPERTIES: Final = ("dn", "uuid")
"""Properties that every object has; no rule can redefine them."""


_TIME: Final = re.compile(r"(\d{4})(\d\d)(\d\d)(\d\d)(?:(\d\d)(\d\d)?)?(?:[.,](\d+))?(?:(Z)|([+-])(\d\d)(\d\d)?)")
DEFAULT_MAPPING: Final = Path(__file__).with_name("default_mapping.toml")
K = TypeVar("K", bound=Enum)


class PropertyType(Enum):
    """How the values of a property are written in JSON."""

    STRING = "string"
    INT = "int"
    BOOL = "bool"
    BINARY = "binary"
    """As base64."""
    TIME = "time"
    """ISO 8601, in UTC."""


def convert_value(kind: PropertyType, value: Value) -> Any:
    """Convert a value to its type; raise ValueError or OverflowError if it is not of that type."""
    return _CONVERT[kind](value)


def _string(value: Value) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")  # noqa: TRY004 - the same for every value that does not fit
    return value


def _int(value: Value) -> int:
    return int(_string(value))


def _bool(value: Value) -> bool:
    word = _string(value).lower()
    if word not in ("true", "false"):
        raise ValueError("not a boolean")
    return word == "true"


def _binary(value: Value) -> str:
    return base64.b64encode(value.encode()).decode() if isinstance(value, str) else value["base64"]


def _time(value: Value) -> str:
    """Convert LDAP's generalized time.

    >>> _time("20260131120000Z"), _time("202601311200+0130")
    ('2026-01-31T12:00:00+00:00', '2026-01-31T10:30:00+00:00')
    """
    found = _TIME.fullmatch(_string(value))
    if found is None:
        raise ValueError("not a generalized time")
    year, month, day, hour, minute, second, fraction, utc, sign, off_hours, off_minutes = found.groups()
    offset = timedelta(0) if utc else timedelta(hours=int(off_hours), minutes=int(off_minutes or 0))
    zone = timezone(-offset if sign == "-" else offset)
    seconds = min(int(second or 0), 59)  # 60 is a leap second
    moment = datetime(int(year), int(month), int(day), int(hour), int(minute or 0), seconds, tzinfo=zone)
    unit = timedelta(seconds=1) if second else timedelta(minutes=1) if minute else timedelta(hours=1)
    if fraction:
        moment += unit * float(f"0.{fraction}")
    return moment.astimezone(UTC).isoformat()


_CONVERT: Final = {
    PropertyType.STRING: _string,
    PropertyType.INT: _int,
    PropertyType.BOOL: _bool,
    PropertyType.BINARY: _binary,
    PropertyType.TIME: _time,
}


class AttributeHandling(Enum):
    """What happens to attributes."""

    KEEP = "keep"
    DROP = "drop"


class Unmatched(Enum):
    """What happens to a message whose entry no rule matches."""

    DEAD_LETTER = "dead-letter"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Property:
    """A property of the object. One that is not multi-valued takes the first value."""

    name: str
    kind: PropertyType = PropertyType.STRING
    multi: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The object for entries of certain object classes."""

    realm: str
    topic: str
    any: frozenset[str] = frozenset()
    all: frozenset[str] = frozenset()
    properties: MappingOf[str, Property] = field(default_factory=dict)
    """By `attribute_key`."""
    others: AttributeHandling = AttributeHandling.DROP
    """Attributes without a property: under their names in lower case, as lists."""
    secrets: AttributeHandling = AttributeHandling.DROP

    def matches(self, classes: frozenset[str]) -> bool:
        """Return whether the rule applies to an entry with these object classes (in lower case)."""
        return self.all <= classes and (not self.any or bool(self.any & classes))


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
    secrets: frozenset[str] = frozenset()
    unmatched: Unmatched = Unmatched.DEAD_LETTER
    unmatched_classes: MappingOf[str, Unmatched] = field(default_factory=dict)

    def map(self, entry: Entry) -> MappedObject | Unmatched:
        """Return the object of an entry, or what happens to an entry that is none."""
        classes = object_classes(entry)
        rule = next((rule for rule in self.rules if rule.matches(classes)), None)
        if rule is None:
            choices = {self.unmatched_classes[each] for each in classes if each in self.unmatched_classes}
            return max(choices, key=lambda each: each is Unmatched.DEAD_LETTER) if choices else self.unmatched
        found: dict[str, Any] = {"dn": entry.dn, "uuid": entry.uuid}
        problems: list[str] = []
        for attribute, values in entry.attributes.items():
            if attribute in self.secrets and rule.secrets is AttributeHandling.DROP:
                continue
            prop = rule.properties.get(attribute)
            if prop is not None:
                _set_property(found, prop, values, problems)
            elif rule.others is AttributeHandling.KEEP and attribute not in RESERVED_PROPERTIES:
                found[attribute] = list(values)
        return MappedObject(rule.realm, rule.topic, found, tuple(problems))


def object_classes(entry: Entry) -> frozenset[str]:
    """Return the object classes of an entry, in lower case."""
    return frozenset(value.lower() for value in entry.attributes.get(_OBJECT_CLASS, ()) if isinstance(value, str))


def _set_property(found: dict[str, Any], prop: Property, values: Sequence[Value], problems: list[str]) -> None:
    """Set the property from the values that fit; add a problem for each that does not."""
    if not prop.multi and prop.kind is PropertyType.STRING and isinstance(values[0], str):
        found[prop.name] = values[0]  # most are like this
        return
    fitting = []
    for value in values:
        try:
            fitting.append(convert_value(prop.kind, value))
        except (ValueError, OverflowError):
            problems.append(f"a value of {prop.name} is no {prop.kind.value}")
        if fitting and not prop.multi:
            break
    if fitting:
        found[prop.name] = fitting if prop.multi else fitting[0]


def load_mapping(path: Path | None = None) -> Mapping:
    """Read a mapping, or the default one; InvalidConfig names the file, the key and the fix."""
    path = path or DEFAULT_MAPPING
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"mapping {path}: {error.strerror}", fix="check the path") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"mapping {path}: not UTF-8 text", fix="save it as UTF-8") from error
    return parse_mapping(text, str(path))


def parse_mapping(text: str, source: str = "mapping") -> Mapping:
    """Parse a mapping from a TOML text."""
    try:
        return _MappingReader(source).mapping(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"mapping {source}: not TOML: {error}", fix="correct the line it names") from error


class _MappingReader:
    """Checks a parsed file; every error names the file and the key."""

    def __init__(self, source: str) -> None:
        self._source = source

    def mapping(self, data: dict[str, Any]) -> Mapping:
        self._check_keys(data, ("realm", "unmatched", "unmatched_classes", "secrets", "rule"), "the file")
        realm = self._read_word(data, "realm", "realm", "udm")
        rules = data.get("rule", [])
        if not isinstance(rules, list) or not rules:
            raise self._error("rule", "there is none", "add [[rule]] with any = [...] and topic = ...")
        classes = self._read_table(data, "unmatched_classes", "unmatched_classes")
        return Mapping(
            rules=tuple(self._read_rule(rule, f"rule {number}", realm) for number, rule in enumerate(rules, 1)),
            secrets=frozenset(map(attribute_key, self._read_words(data, "secrets", "secrets"))),
            unmatched=self._read_choice(Unmatched, data, "unmatched", "unmatched", Unmatched.DEAD_LETTER),
            unmatched_classes={
                name.lower(): self._read_choice(Unmatched, classes, name, f"unmatched_classes.{name}", Unmatched.IGNORE)
                for name in classes
            },
        )

    def _read_rule(self, data: object, where: str, realm: str) -> Rule:
        if not isinstance(data, dict):
            raise self._error(where, "it is no table", "write [[rule]]")
        self._check_keys(data, ("any", "all", "realm", "topic", "others", "secrets", "properties"), where)
        some, every = (
            frozenset(map(str.lower, self._read_words(data, key, f"{where}, {key}"))) for key in ("any", "all")
        )
        if not some and not every:
            raise self._error(where, "it names no object class", "add any = [...] or all = [...]")
        if "topic" not in data:
            raise self._error(f"{where}, topic", "it is missing", 'add one, such as topic = "users/user"')
        table = self._read_table(data, "properties", f"{where}, properties")
        properties = {
            attribute_key(name): self._read_property(name, value, f"{where}, properties.{name}")
            for name, value in table.items()
        }
        names = [each.name for each in properties.values()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if len(properties) < len(table) or twice:
            raise self._error(f"{where}, properties", f"{twice or 'an attribute'} is there twice", "keep one of them")
        return Rule(
            realm=self._read_word(data, "realm", f"{where}, realm", realm),
            topic=self._read_word(data, "topic", f"{where}, topic", ""),
            any=some,
            all=every,
            properties=properties,
            others=self._read_choice(AttributeHandling, data, "others", f"{where}, others", AttributeHandling.DROP),
            secrets=self._read_choice(AttributeHandling, data, "secrets", f"{where}, secrets", AttributeHandling.DROP),
        )

    def _read_property(self, attribute: str, data: object, where: str) -> Property:
        table = {"type": data} if isinstance(data, str) else data
        if not isinstance(table, dict):
            raise self._error(
                where, "it is neither a type nor a table", '"string", or { type = "string", multi = true }'
            )
        self._check_keys(table, ("name", "type", "multi"), where)
        multi = table.get("multi", False)
        if not isinstance(multi, bool):
            raise self._error(f"{where}.multi", f"{multi!r}", "true or false")
        name = self._read_word(table, "name", f"{where}.name", attribute)
        if name in RESERVED_PROPERTIES:
            raise self._error(f"{where}.name", f"{name!r} is taken: every object has it", "choose another name")
        return Property(
            name, self._read_choice(PropertyType, table, "type", f"{where}.type", PropertyType.STRING), multi
        )

    def _read_word(self, data: dict[str, Any], key: str, where: str, default: str) -> str:
        value = data.get(key, default)
        if not isinstance(value, str):
            raise self._error(where, f"{value!r} is no string", "put it in quotes")
        try:
            return check_realm_or_topic(value, key)
        except InvalidInput as error:
            raise self._error(where, error.message, error.fix or "") from None

    def _read_words(self, data: dict[str, Any], key: str, where: str) -> Sequence[str]:
        value = data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise self._error(where, "it is no list of strings", f'{key} = ["...", "..."]')
        return value

    def _read_table(self, data: dict[str, Any], key: str, where: str) -> dict[str, Any]:
        value = data.get(key, {})
        if not isinstance(value, dict):
            raise self._error(where, "it is no table", f"write [{key}], and one line for each")
        return value

    def _read_choice(self, kinds: type[K], data: dict[str, Any], key: str, where: str, default: K) -> K:
        value = data.get(key, default.value)
        try:
            return kinds(value)
        except ValueError:
            raise self._error(where, f"{value!r}", f"one of {', '.join(each.value for each in kinds)}") from None

    def _check_keys(self, data: dict[str, Any], known: tuple[str, ...], where: str) -> None:
        unknown = next((key for key in data if key not in known), None)
        if unknown is not None:
            raise self._error(where, f"unknown key {unknown!r}", f"known are {', '.join(known)}")

    def _error(self, where: str, what: str, fix: str) -> InvalidConfig:
        return InvalidConfig(f"mapping {self._source}: {where}: {what}", fix=fix)
