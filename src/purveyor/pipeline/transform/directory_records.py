r"""A message of the queue `ldif` as a record, with its names in a comparable form. Pure.

A record is parsed and checked once, where it enters the transform. The import guide describes the format. A message in
another format raises InvalidRecord, with the field that is wrong.

Two names of entries or attributes are the same if they differ only in case, in insignificant white space, or in how
characters are escaped (RFC 4514). The key of an entry begins at the root, so that in sorted order all descendants
follow the entry.

>>> parse_dn("UID=Ada\\2C L. , dc=Example").key == parse_dn("uid=ada\\,  l.,DC=example").key
True
"""

import binascii
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeAlias

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.ldif_changes import Change, Step

_RDN_SEPARATOR: Final = "\0"
_HEX: Final = re.compile(r"\\([0-9A-Fa-f]{2})")
_TYPE: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]*|[0-9]+(\.[0-9]+)*")
_CACHE_SIZE: Final = 1 << 16


class InvalidRecord(Exception):
    """Why a message cannot be applied. Never leaves the transform: it becomes the reason of a dead letter."""


@dataclass(frozen=True, slots=True)
class DistinguishedName:
    """A distinguished name."""

    rdns: tuple[str, ...]
    """Its parts as they are spelled, the entry's own rdn first."""
    key: str
    """The form for comparing and sorting."""

    @property
    def text(self) -> str:
        """The name as it is spelled."""
        return ",".join(self.rdns)

    def below(self, other: "DistinguishedName") -> bool:
        """Return whether it is a descendant of the other."""
        return self.key.startswith(other.key + _RDN_SEPARATOR)


def parse_dn(text: str) -> DistinguishedName:
    """Parse a name; raise InvalidRecord if the text is none."""
    rdns = tuple(part.strip(" ") if "\\" not in part else _trim(part) for part in _split(text, ","))
    if not text.strip():
        raise InvalidRecord("the name of the entry is empty")
    return DistinguishedName(rdns, _RDN_SEPARATOR.join(_rdn_key(rdn) for rdn in reversed(rdns)))


def renamed_dn(old: DistinguishedName, rdn: str, superior: DistinguishedName | None) -> DistinguishedName:
    """Return the name after a rename: another rdn, and another parent if one is given."""
    own = parse_dn(rdn)
    if len(own.rdns) != 1:
        raise InvalidRecord(f"the new rdn {rdn!r} is not one rdn")
    parents = old.rdns[1:] if superior is None else superior.rdns
    return parse_dn(",".join((*own.rdns, *parents)))


def rdn_values(name_: DistinguishedName) -> tuple[tuple[str, str], ...]:
    r"""Return the attributes of the entry's own rdn, with their values.

    >>> rdn_values(parse_dn("cn=Ada\\2c L.+UID=ada,dc=example"))
    (('cn', 'Ada, L.'), ('uid', 'ada'))
    """
    return tuple((attribute_key(kind), _unescape(value)) for kind, value in _pairs(name_.rdns[0]))


def descendant_prefix(key: str) -> str:
    """Return the prefix of the keys of all descendants."""
    return key + _RDN_SEPARATOR


@lru_cache(_CACHE_SIZE)
def attribute_key(spelled: str) -> str:
    """Return an attribute in comparable form: no case, options in order, without the transfer option `;binary`.

    >>> attribute_key("userCertificate;binary"), attribute_key("CN;lang-DE;x-a")
    ('usercertificate', 'cn;lang-de;x-a')
    """
    lowered = spelled.lower()
    if ";" not in lowered:
        return lowered
    base, *options = lowered.split(";")
    return ";".join((base, *sorted(option for option in options if option != "binary")))


@lru_cache(_CACHE_SIZE)
def fold_value(value: str) -> str:
    """Return a value as most attributes compare it: no case, white space collapsed."""
    readable = value if value.isascii() else unicodedata.normalize("NFKC", value)
    return " ".join(readable.casefold().split())


@lru_cache(_CACHE_SIZE)
def _rdn_key(rdn: str) -> str:
    parts = []
    for kind, value in _pairs(rdn):
        text = value if value.startswith("#") else fold_value(_unescape(value))
        safe = text.replace("\\", "\\5c").replace("+", "\\2b").replace(_RDN_SEPARATOR, "\\00")
        parts.append(f"{attribute_key(kind)}={safe}")
    return "+".join(sorted(parts))


def _pairs(rdn: str) -> list[tuple[str, str]]:
    found = []
    for part in _split(rdn, "+"):
        kind, equals, value = part.partition("=")
        if not equals or not _TYPE.fullmatch(kind.strip(" ")):
            raise InvalidRecord(f"{rdn!r} is no rdn: expected attribute=value")
        found.append((kind.strip(" "), _trim(value)))
    return found


def _trim(text: str) -> str:
    """Remove the spaces around it that are not escaped."""
    start = text.lstrip(" ")
    end = start.rstrip(" ")
    backslashes = len(end) - len(end.rstrip("\\"))
    return end + " " if len(end) < len(start) and backslashes % 2 else end


def _split(text: str, separator: str) -> list[str]:
    if "\\" not in text:
        return text.split(separator)
    parts, begin, at = [], 0, 0
    while at < len(text):
        if text[at] == "\\":
            at += 2
            continue
        if text[at] == separator:
            parts.append(text[begin:at])
            begin = at + 1
        at += 1
    return [*parts, text[begin:]]


def _unescape(value: str) -> str:
    if "\\" not in value:
        return value
    raw = bytearray()
    at = 0
    while at < len(value):
        pair = _HEX.match(value, at)
        if pair:
            raw.append(int(pair[1], 16))
            at = pair.end()
        elif value[at] == "\\" and at + 1 < len(value):
            raw += value[at + 1].encode("utf-8", "surrogatepass")
            at += 2
        else:
            raw += value[at].encode("utf-8", "surrogatepass")
            at += 1
    return raw.decode("utf-8", "surrogateescape")


Value: TypeAlias = str | dict[str, str]
"""Text, or `{"base64": ...}`: the same in the message, in the state, and in the values of an unmapped attribute."""

Attributes: TypeAlias = Mapping[str, list[Value]]
"""By `attribute_key`; every attribute has a value."""


@dataclass(frozen=True, slots=True)
class Modification:
    """One step of a modify, on an attribute by its key."""

    step: Step
    attribute: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `change` decides which of the later fields have a meaning."""

    name: DistinguishedName
    change: Change
    attributes: Attributes = field(default_factory=dict)
    modifications: tuple[Modification, ...] = ()
    new_rdn: str = ""
    delete_old_rdn: bool = True
    new_superior: str | None = None


def parse_record(data: bytes) -> Record:
    """Parse the record of a message; raise InvalidRecord if there is none."""
    try:
        return read_record(json_fields.parse(data, "message"))
    except InvalidInput as error:
        raise InvalidRecord(error.message) from None


def read_record(fields: json_fields.Json) -> Record:
    """Read a record from the fields of its message; raise InvalidRecord if there is none."""
    try:
        change = json_fields.member(Change, fields, "change", "message")
        entry = parse_dn(json_fields.text(fields, "dn", "message"))
        match change:
            case Change.CONTENT | Change.ADD:
                return Record(entry, change, read_attributes(fields.get("attributes")))
            case Change.MODIFY:
                return Record(entry, change, modifications=_modifications(fields.get("modifications")))
            case Change.MODRDN:
                superior = fields.get("new_superior")
                if superior is not None and not isinstance(superior, str):
                    raise InvalidRecord("new_superior is no string")
                return Record(
                    entry,
                    change,
                    new_rdn=json_fields.text(fields, "new_rdn", "message"),
                    delete_old_rdn=json_fields.flag(fields, "delete_old_rdn", "message"),
                    new_superior=superior,
                )
            case Change.DELETE:
                return Record(entry, change)
    except InvalidInput as error:
        raise InvalidRecord(error.message) from None


def read_attributes(given: object) -> dict[str, list[Value]]:
    """Read attributes by their keys; raise InvalidRecord for what is none."""
    if not isinstance(given, dict):
        raise InvalidRecord(f"the attributes are {json_fields.describe_type(given)}, not an object")
    found: dict[str, list[Value]] = {}
    for spelled, values in given.items():
        checked = _values(values, spelled)
        if checked:
            found.setdefault(attribute_key(spelled), []).extend(checked)
    return found


def _modifications(given: object) -> tuple[Modification, ...]:
    if not isinstance(given, list):
        raise InvalidRecord(f"the modifications are {json_fields.describe_type(given)}, not a list")
    found = []
    for each in given:
        fields = json_fields.mapping(each, "modification")
        spelled = json_fields.text(fields, "attribute", "modification")
        step = json_fields.member(Step, fields, "op", "modification")
        found.append(Modification(step, attribute_key(spelled), tuple(_values(fields.get("values", []), spelled))))
    return tuple(found)


def _values(given: object, spelled: str) -> list[Value]:
    if not isinstance(given, list):
        raise InvalidRecord(f"the values of {spelled!r} are {json_fields.describe_type(given)}, not a list")
    for value in given:
        if not isinstance(value, str):
            _check_binary(value, spelled)
    return given


def _check_binary(value: Any, spelled: str) -> None:
    if not isinstance(value, dict) or list(value) != ["base64"] or not isinstance(value["base64"], str):
        raise InvalidRecord(f"a value of {spelled!r} is neither a string nor base64")
    try:
        binascii.a2b_base64(value["base64"], strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRecord(f"bad base64 in a value of {spelled!r}: {error}") from None
