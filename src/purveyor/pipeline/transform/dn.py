r"""Names of entries and attributes, made comparable: the words by which the transform finds what a record means. Pure.

Two names are the same if they differ only in case, in white space that does not count, or in how characters are
escaped (RFC 4514). The key of an entry begins at the root, so that in sorted order an entry is followed by all that is
below it.

>>> name("UID=Ada\\2C L. , dc=Example").key == name("uid=ada\\,  l.,DC=example").key
True
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

_BETWEEN: Final = "\0"
_HEX: Final = re.compile(r"\\([0-9A-Fa-f]{2})")
_TYPE: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]*|[0-9]+(\.[0-9]+)*")
_CACHED: Final = 1 << 16


class Unfit(Exception):
    """Why a message cannot be applied. Never leaves the transform: it becomes the reason of a dead letter."""


@dataclass(frozen=True, slots=True)
class Name:
    """A distinguished name."""

    rdns: tuple[str, ...]
    """Its parts as they are spelled, the entry's own first."""
    key: str
    """What is compared and sorted by."""

    @property
    def text(self) -> str:
        """As it is spelled."""
        return ",".join(self.rdns)

    def below(self, other: "Name") -> bool:
        """Whether it is a descendant of the other."""
        return self.key.startswith(other.key + _BETWEEN)


def name(text: str) -> Name:
    """The name that a text spells; Unfit when it spells none."""
    rdns = tuple(part.strip(" ") if "\\" not in part else _trim(part) for part in _split(text, ","))
    if not text.strip():
        raise Unfit("the name of the entry is empty")
    return Name(rdns, _BETWEEN.join(_rdn_key(rdn) for rdn in reversed(rdns)))


def moved(old: Name, rdn: str, superior: Name | None) -> Name:
    """The name after a rename: another rdn, and another parent if one is given."""
    own = name(rdn)
    if len(own.rdns) != 1:
        raise Unfit(f"the new rdn {rdn!r} is not one rdn")
    parents = old.rdns[1:] if superior is None else superior.rdns
    return name(",".join((*own.rdns, *parents)))


def rdn_values(name_: Name) -> tuple[tuple[str, str], ...]:
    r"""The attributes that the entry's own rdn names, with their values.

    >>> rdn_values(name("cn=Ada\\2c L.+UID=ada,dc=example"))
    (('cn', 'Ada, L.'), ('uid', 'ada'))
    """
    return tuple((attribute_key(kind), _unescape(value)) for kind, value in _pairs(name_.rdns[0]))


def below_prefix(key: str) -> str:
    """What the keys of all descendants begin with."""
    return key + _BETWEEN


@lru_cache(_CACHED)
def attribute_key(spelled: str) -> str:
    """An attribute as it is compared: no case, options in order, and without `;binary`, which is a way of transfer.

    >>> attribute_key("userCertificate;binary"), attribute_key("CN;lang-DE;x-a")
    ('usercertificate', 'cn;lang-de;x-a')
    """
    lowered = spelled.lower()
    if ";" not in lowered:
        return lowered
    base, *options = lowered.split(";")
    return ";".join((base, *sorted(option for option in options if option != "binary")))


@lru_cache(_CACHED)
def folded(value: str) -> str:
    """A value as most attributes compare it: no case, white space collapsed."""
    readable = value if value.isascii() else unicodedata.normalize("NFKC", value)
    return " ".join(readable.casefold().split())


@lru_cache(_CACHED)
def _rdn_key(rdn: str) -> str:
    parts = []
    for kind, value in _pairs(rdn):
        text = value if value.startswith("#") else folded(_unescape(value))
        safe = text.replace("\\", "\\5c").replace("+", "\\2b").replace(_BETWEEN, "\\00")
        parts.append(f"{attribute_key(kind)}={safe}")
    return "+".join(sorted(parts))


def _pairs(rdn: str) -> list[tuple[str, str]]:
    found = []
    for part in _split(rdn, "+"):
        kind, equals, value = part.partition("=")
        if not equals or not _TYPE.fullmatch(kind.strip(" ")):
            raise Unfit(f"{rdn!r} is no rdn: expected attribute=value")
        found.append((kind.strip(" "), _trim(value)))
    return found


def _trim(text: str) -> str:
    """Without the spaces around it that are not escaped."""
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
