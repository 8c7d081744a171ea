"""A mapping as a file: TOML, read and checked once. Every complaint names the file, the key and the fix.

The guide to the transform explains it; `default_mapping.toml` is the one that is used when none is given.
"""

import tomllib
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

from purveyor.model.errors import InvalidConfig, InvalidInput
from purveyor.model.event import check_word
from purveyor.pipeline.transform.dn import attribute_key
from purveyor.pipeline.transform.ldap_values import Kind
from purveyor.pipeline.transform.mapping import OWN, Keep, Mapping, Property, Rule, Unmatched

DEFAULT_MAPPING: Final = Path(__file__).with_name("default_mapping.toml")
K = TypeVar("K", bound=Enum)


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
    """The mapping that a TOML text tells."""
    try:
        return _Reader(source).mapping(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"mapping {source}: not TOML: {error}", fix="correct the line it names") from error


class _Reader:
    """Checks a parsed file; every complaint names the file and the key."""

    def __init__(self, source: str) -> None:
        self._source = source

    def mapping(self, data: dict[str, Any]) -> Mapping:
        self._only(data, ("realm", "unmatched", "unmatched_classes", "secrets", "rule"), "the file")
        realm = self._word(data, "realm", "realm", "udm")
        rules = data.get("rule", [])
        if not isinstance(rules, list) or not rules:
            raise self._wrong("rule", "there is none", "add [[rule]] with any = [...] and topic = ...")
        classes = self._table(data, "unmatched_classes", "unmatched_classes")
        return Mapping(
            rules=tuple(self._rule(rule, f"rule {number}", realm) for number, rule in enumerate(rules, 1)),
            secrets=frozenset(map(attribute_key, self._words(data, "secrets", "secrets"))),
            unmatched=self._choice(Unmatched, data, "unmatched", "unmatched", Unmatched.DEAD_LETTER),
            unmatched_classes={
                name.lower(): self._choice(Unmatched, classes, name, f"unmatched_classes.{name}", Unmatched.IGNORE)
                for name in classes
            },
        )

    def _rule(self, data: object, where: str, realm: str) -> Rule:
        if not isinstance(data, dict):
            raise self._wrong(where, "it is no table", "write [[rule]]")
        self._only(data, ("any", "all", "realm", "topic", "others", "secrets", "properties"), where)
        some, every = (frozenset(map(str.lower, self._words(data, key, f"{where}, {key}"))) for key in ("any", "all"))
        if not some and not every:
            raise self._wrong(where, "it names no object class", "add any = [...] or all = [...]")
        if "topic" not in data:
            raise self._wrong(f"{where}, topic", "it is missing", 'add one, such as topic = "users/user"')
        table = self._table(data, "properties", f"{where}, properties")
        properties = {
            attribute_key(name): self._property(name, value, f"{where}, properties.{name}")
            for name, value in table.items()
        }
        names = [each.name for each in properties.values()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if len(properties) < len(table) or twice:
            raise self._wrong(f"{where}, properties", f"{twice or 'an attribute'} is there twice", "keep one of them")
        return Rule(
            realm=self._word(data, "realm", f"{where}, realm", realm),
            topic=self._word(data, "topic", f"{where}, topic", ""),
            any=some,
            all=every,
            properties=properties,
            others=self._choice(Keep, data, "others", f"{where}, others", Keep.DROP),
            secrets=self._choice(Keep, data, "secrets", f"{where}, secrets", Keep.DROP),
        )

    def _property(self, attribute: str, data: object, where: str) -> Property:
        table = {"type": data} if isinstance(data, str) else data
        if not isinstance(table, dict):
            raise self._wrong(
                where, "it is neither a type nor a table", '"string", or { type = "string", multi = true }'
            )
        self._only(table, ("name", "type", "multi"), where)
        multi = table.get("multi", False)
        if not isinstance(multi, bool):
            raise self._wrong(f"{where}.multi", f"{multi!r}", "true or false")
        name = self._word(table, "name", f"{where}.name", attribute)
        if name in OWN:
            raise self._wrong(f"{where}.name", f"{name!r} is taken: every object has it", "choose another name")
        return Property(name, self._choice(Kind, table, "type", f"{where}.type", Kind.STRING), multi)

    def _word(self, data: dict[str, Any], key: str, where: str, default: str) -> str:
        value = data.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(where, f"{value!r} is no string", "put it in quotes")
        try:
            return check_word(value, key)
        except InvalidInput as error:
            raise self._wrong(where, error.message, error.fix or "") from None

    def _words(self, data: dict[str, Any], key: str, where: str) -> Sequence[str]:
        value = data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise self._wrong(where, "it is no list of strings", f'{key} = ["...", "..."]')
        return value

    def _table(self, data: dict[str, Any], key: str, where: str) -> dict[str, Any]:
        value = data.get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(where, "it is no table", f"write [{key}], and one line for each")
        return value

    def _choice(self, kinds: type[K], data: dict[str, Any], key: str, where: str, default: K) -> K:
        value = data.get(key, default.value)
        try:
            return kinds(value)
        except ValueError:
            raise self._wrong(where, f"{value!r}", f"one of {', '.join(each.value for each in kinds)}") from None

    def _only(self, data: dict[str, Any], known: tuple[str, ...], where: str) -> None:
        unknown = next((key for key in data if key not in known), None)
        if unknown is not None:
            raise self._wrong(where, f"unknown key {unknown!r}", f"known are {', '.join(known)}")

    def _wrong(self, where: str, what: str, fix: str) -> InvalidConfig:
        return InvalidConfig(f"mapping {self._source}: {where}: {what}", fix=fix)
