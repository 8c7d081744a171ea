"""Reads a mapping: a built-in one by its name, or a TOML file. Every error names the line, the key and the fix."""

import difflib
import re
import tomllib
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

from purveyor.model.errors import InvalidConfig, InvalidInput
from purveyor.model.event import LONGEST_PUBLISHER_NAME_BYTES, check_realm_or_topic
from purveyor.model.json_fields import check_text
from purveyor.pipeline.transform.directory_records import attribute_key
from purveyor.pipeline.transform.mapping import (
    RESERVED_PROPERTIES,
    AttributeHandling,
    Mapping,
    Property,
    Rule,
    Secrets,
    Shape,
    Unmatched,
)
from purveyor.pipeline.transform.property_values import MemberKind, PropertyType

BUILT_IN: Final = ("udm", "plain")
"""The mappings that need no file; the first one is the default."""
DEFAULT_MAPPING: Final = BUILT_IN[0]
_FILE_KEYS: Final = (
    "realm",
    "shape",
    "publisher",
    "prefill_publisher",
    "topic_attribute",
    "unmatched",
    "unmatched_classes",
    "secrets",
    "ignored",
    "rule",
)
_RULE_KEYS: Final = ("any", "all", "realm", "topic", "others", "secrets", "properties", "options")
_PROPERTY_KEYS: Final = ("name", "type", "multi", "also", "members")
_PROPERTY_FORM: Final = '"string", { type = "string", multi = true }, or a list of such tables'
K = TypeVar("K", bound=Enum)


def load_mapping(mapping: str | Path = DEFAULT_MAPPING) -> Mapping:
    """Read a mapping: the name of a built-in one, or a file. InvalidConfig names the file, the key and the fix."""
    path = Path(__file__).with_name(f"{mapping}_mapping.toml") if mapping in BUILT_IN else Path(mapping)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        near = difflib.get_close_matches(str(mapping), BUILT_IN, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        fix = f"{meant}Give the path of a TOML file, or the name of a built-in mapping: {', '.join(BUILT_IN)}"
        raise InvalidConfig(f"mapping {mapping}: {error.strerror}", fix=fix) from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"mapping {path}: not UTF-8 text", fix="save it as UTF-8") from error
    return parse_mapping(text, str(path))


def parse_mapping(text: str, source: str = "mapping") -> Mapping:
    """Parse a mapping from a TOML text."""
    try:
        return _MappingReader(source, text).mapping(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"mapping {source}: not TOML: {error}", fix="correct the line it names") from error


class _MappingReader:
    """Checks a parsed file; every error names the file, the line and the key."""

    def __init__(self, source: str, text: str) -> None:
        self._source = source
        self._text = text

    def mapping(self, data: dict[str, Any]) -> Mapping:
        self._check_keys(data, _FILE_KEYS, "the file")
        realm = self._read_word(data, "realm", "realm", "udm")
        rules = data.get("rule", [])
        if not isinstance(rules, list) or not rules:
            raise self._error("rule", "there is none", "add [[rule]] with any = [...] and topic = ...")
        classes = self._read_table(data, "unmatched_classes", "unmatched_classes")
        shape = self._read_choice(Shape, data, "shape", "shape", Shape.FLAT)
        words = [attribute_key(word) for word in self._read_words(data, "secrets", "secrets")]
        secrets = Secrets(
            frozenset(each for each in words if "*" not in each), tuple(each for each in words if "*" in each)
        )
        topic_attribute = self._read_text(data, "topic_attribute", "topic_attribute")
        return Mapping(
            rules=tuple(
                self._read_rule(rule, f"rule {number}", realm, shape, secrets) for number, rule in enumerate(rules, 1)
            ),
            shape=shape,
            publisher=self._read_text(data, "publisher", "publisher") or "ldif",
            prefill_publisher=self._read_text(data, "prefill_publisher", "prefill_publisher"),
            topic_attribute=topic_attribute and attribute_key(topic_attribute),
            secrets=secrets,
            ignored=frozenset(map(attribute_key, self._read_words(data, "ignored", "ignored"))),
            unmatched=self._read_choice(Unmatched, data, "unmatched", "unmatched", Unmatched.DEAD_LETTER),
            unmatched_classes={
                name.lower(): self._read_choice(Unmatched, classes, name, f"unmatched_classes.{name}", Unmatched.IGNORE)
                for name in classes
            },
        )

    def _read_rule(self, data: object, where: str, realm: str, shape: Shape, secrets: Secrets) -> Rule:
        if not isinstance(data, dict):
            raise self._error(where, "it is no table", "write [[rule]]")
        self._check_keys(data, _RULE_KEYS, where)
        some, every = (
            frozenset(map(str.lower, self._read_words(data, key, f"{where}, {key}"))) for key in ("any", "all")
        )
        if not some and not every:
            raise self._error(where, "it names no object class", "add any = [...] or all = [...]")
        if "topic" not in data:
            raise self._error(f"{where}, topic", "it is missing", 'add one, such as topic = "users/user"')
        drops = self._read_choice(AttributeHandling, data, "secrets", f"{where}, secrets", AttributeHandling.DROP)
        properties = self._read_properties(data, where, shape)
        sources = frozenset(source for each in properties for source in each.sources)
        hidden = {each for each in sources if each in secrets} if drops is AttributeHandling.DROP else set()
        return Rule(
            realm=self._read_word(data, "realm", f"{where}, realm", realm),
            topic=self._read_word(data, "topic", f"{where}, topic", ""),
            any=some,
            all=every,
            properties=tuple(each for each in (prop.without(hidden) for prop in properties) if each.sources),
            sources=sources,
            options=self._read_options(data, where, shape),
            others=self._read_choice(AttributeHandling, data, "others", f"{where}, others", AttributeHandling.DROP),
            secrets=drops,
        )

    def _read_properties(self, data: dict[str, Any], where: str, shape: Shape) -> list[Property]:
        table = self._read_table(data, "properties", f"{where}, properties")
        keys = [attribute_key(name) for name in table]
        properties: list[Property] = []
        for attribute, given in table.items():
            several = given if isinstance(given, list) and given else [given]
            at = f"{where}, properties.{attribute}"
            properties += [self._read_property(attribute, each, at, shape) for each in several]
        names = [each.name for each in properties]
        twice = next((name for name in names if names.count(name) > 1), None)
        if len(set(keys)) < len(keys) or twice:
            fix = "keep one of them; also = [...] names further attributes of a property"
            raise self._error(f"{where}, properties", f"{twice or 'an attribute'} is there twice", fix)
        return properties

    def _read_property(self, attribute: str, data: object, where: str, shape: Shape) -> Property:
        table = {"type": data} if isinstance(data, str) else data
        if not isinstance(table, dict):
            raise self._error(where, "it is neither a type nor a table", _PROPERTY_FORM)
        self._check_keys(table, _PROPERTY_KEYS, where)
        multi = table.get("multi", False)
        if not isinstance(multi, bool):
            raise self._error(f"{where}.multi", f"{multi!r}", "true or false")
        name = self._read_word(table, "name", f"{where}.name", attribute)
        if shape is Shape.FLAT and name in RESERVED_PROPERTIES:
            raise self._error(f"{where}.name", f"{name!r} is taken: every object has it", "choose another name")
        members = None
        if "members" in table:
            members = self._read_choice(MemberKind, table, "members", f"{where}.members", MemberKind.USERS)
        more = self._read_words(table, "also", f"{where}.also")
        return Property(
            name=name,
            sources=tuple(dict.fromkeys(map(attribute_key, (attribute, *more)))),
            kind=self._read_choice(PropertyType, table, "type", f"{where}.type", PropertyType.STRING),
            multi=multi,
            members=members,
        )

    def _read_options(self, data: dict[str, Any], where: str, shape: Shape) -> dict[str, str]:
        table = self._read_table(data, "options", f"{where}, options")
        if table and shape is not Shape.UDM:
            raise self._error(f"{where}, options", "flat objects have no options", 'remove them, or add shape = "udm"')
        for name, kind in table.items():
            if not isinstance(kind, str) or not kind:
                raise self._error(f"{where}, options.{name}", f"{kind!r} is no object class", f'{name} = "objectClass"')
        return {name: kind.lower() for name, kind in table.items()}

    def _read_word(self, data: dict[str, Any], key: str, where: str, default: str) -> str:
        value = data.get(key, default)
        if not isinstance(value, str):
            raise self._error(where, f"{value!r} is no string", "put it in quotes")
        try:
            return check_realm_or_topic(value, key)
        except InvalidInput as error:
            raise self._error(where, error.message, error.fix or "") from None

    def _read_text(self, data: dict[str, Any], key: str, where: str) -> str | None:
        """Return a text that an event can hold as `publisher_name`; None without one."""
        if key not in data:
            return None
        value = data[key]
        if not isinstance(value, str):
            raise self._error(where, f"{value!r} is no string", "put it in quotes")
        try:
            check_text(value, key, LONGEST_PUBLISHER_NAME_BYTES)
        except InvalidInput as error:
            raise self._error(where, error.message, error.fix or "") from None
        return value

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
            near = difflib.get_close_matches(unknown, known, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            fix = f"{meant}known are {', '.join(known)}"
            raise self._error(where, f"unknown key {unknown!r}", fix, inside=unknown)

    def _error(self, where: str, what: str, fix: str, *, inside: str = "") -> InvalidConfig:
        line = find_line(self._text, f"{where}, {inside}" if inside else where)
        at = f"{self._source}, line {line}" if line else self._source
        return InvalidConfig(f"mapping {at}: {where}: {what}", fix=fix)


def find_line(text: str, where: str) -> int | None:
    r"""Return the line of a key such as `rule 2, properties.cn.type`; None if there is none.

    >>> find_line('[[rule]]\ntopic = "b"\n[rule.properties]\ncn = "text"', "rule 1, properties.cn.type")
    4
    """
    lines = text.splitlines()
    rules = [at for at, line in enumerate(lines) if re.match(r"\s*\[\[\s*rule\s*\]\]", line)]
    number = re.match(r"rule (\d+)", where)
    begin, end, found = 0, len(lines), None
    if number:
        if int(number[1]) > len(rules):
            return None
        found = begin = rules[int(number[1]) - 1]
        end = next((at for at in rules if at > begin), len(lines))
    for word in filter(None, re.split(r"[,.\s]+", where)):
        key = re.compile(rf"""\s*(\[+\s*([\w"-]+\s*\.\s*)*)?(\w+\s*\.\s*)*["']?{re.escape(word)}["']?\s*([=.\]]|$)""")
        found = next((at for at in range(max(begin, found or 0), end) if key.match(lines[at])), found)
    return None if found is None else found + 1
