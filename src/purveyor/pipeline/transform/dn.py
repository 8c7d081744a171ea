r"""Names of entries and attributes in a comparable form. Pure.

Two names are the same if they differ only in case, in insignificant white space, or in how characters are escaped (RFC
4514). The key of an entry begins at the root, so that in sorted order all descendants follow the entry.

>>> parse_dn("UID=Ada\\2C L. , dc=Example").key == parse_dn("uid=ada\\,  l.,DC=example").key
True
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

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
