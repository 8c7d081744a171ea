"""Search filters: the text of RFC 4515 in, the encoding of RFC 4511 out. Errors name the place."""

import re
from typing import Final, NoReturn

from purveyor.model.errors import InvalidInput
from purveyor.sources.ldap.ber import encode_boolean, encode_octets, encode_sequence

MAX_NESTING: Final = 50
MAX_FILTER_CHARACTERS: Final = 100_000

_AND, _OR, _NOT, _EQUAL, _SUBSTRINGS = 0xA0, 0xA1, 0xA2, 0xA3, 0xA4
_GREATER_OR_EQUAL, _LESS_OR_EQUAL, _PRESENT, _APPROXIMATE, _EXTENSIBLE = 0xA5, 0xA6, 0x87, 0xA8, 0xA9
_INITIAL, _ANY, _FINAL = 0x80, 0x81, 0x82

_OID: Final = r"(?:[A-Za-z][A-Za-z0-9-]*|\d+(?:\.\d+)*)"
_DESCRIPTION: Final = re.compile(rf"{_OID}(?:;[A-Za-z0-9-]+)*")
_RULE: Final = re.compile(_OID)
_OPERATORS: Final = (
    ("~=", _APPROXIMATE),
    (">=", _GREATER_OR_EQUAL),
    ("<=", _LESS_OR_EQUAL),
    (":", _EXTENSIBLE),
    ("=", _EQUAL),
)
_ESCAPE: Final = re.compile(r"\\([0-9A-Fa-f]{2})")
_SPECIAL: Final = re.compile(r"[\x00()*\\]")


class FilterError(InvalidInput):
    """A text that is no search filter. `position` is the place of the mistake, from 0."""

    def __init__(self, message: str, *, position: int = 0, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.position = position


def encode_filter(text: str) -> bytes:
    r"""Return the encoded filter; FilterError names the place of a mistake.

    >>> encode_filter("(cn=a)")
    b'\xa3\x07\x04\x02cn\x04\x01a'
    """
    if len(text) > MAX_FILTER_CHARACTERS:
        raise FilterError(f"a filter of {len(text)} characters, at most {MAX_FILTER_CHARACTERS} are accepted")
    return _Parser(text).parse()


def escape_filter_value(value: str) -> str:
    r"""Return a value so that a filter takes it literally.

    >>> escape_filter_value("a*(b)")
    'a\\2a\\28b\\29'
    """
    return _SPECIAL.sub(lambda match: f"\\{ord(match[0]):02x}", value)


class _Parser:
    """Reads one text from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def parse(self) -> bytes:
        self._skip_spaces()
        encoded = self._filter(0)
        self._skip_spaces()
        if self._at < len(self._text):
            self._fail("the filter ends before this")
        return encoded

    def _filter(self, depth: int) -> bytes:
        if depth > MAX_NESTING:
            self._fail(f"more than {MAX_NESTING} nested filters")
        self._expect("(")
        self._skip_spaces()
        match self._text[self._at : self._at + 1]:
            case "&":
                encoded = self._list(_AND, depth)
            case "|":
                encoded = self._list(_OR, depth)
            case "!":
                self._at += 1
                self._skip_spaces()
                encoded = encode_sequence(self._filter(depth + 1), tag=_NOT)
                self._skip_spaces()
            case _:
                encoded = self._item()
        self._expect(")")
        return encoded

    def _list(self, tag: int, depth: int) -> bytes:
        self._at += 1
        parts = []
        self._skip_spaces()
        while self._text.startswith("(", self._at):
            parts.append(self._filter(depth + 1))
            self._skip_spaces()
        return encode_sequence(*parts, tag=tag)  # without parts: absolute true or false (RFC 4526)

    def _item(self) -> bytes:
        found = _DESCRIPTION.match(self._text, self._at)
        attribute = found[0] if found else ""
        if not attribute and not self._text.startswith(":", self._at):
            self._fail("the name of an attribute is expected")
        self._at += len(attribute)
        self._skip_spaces()
        sign, tag = next((each for each in _OPERATORS if self._text.startswith(each[0], self._at)), ("", 0))
        if not sign:
            self._fail(f"=, ~=, >=, <= or := is expected after {attribute!r}")
        self._at += len(sign)
        if tag == _EXTENSIBLE:
            return self._extensible(attribute)
        start = self._at
        pieces = self._value().split("*")
        if len(pieces) == 1:
            return encode_sequence(encode_octets(attribute), encode_octets(self._unescape(pieces[0], start)), tag=tag)
        if tag != _EQUAL:
            self._at = start + len(pieces[0])
            self._fail(r"* is allowed after = only; write \2a for the character")
        if pieces == ["", ""]:
            return encode_octets(attribute, tag=_PRESENT)
        return self._substrings(attribute, pieces, start)

    def _substrings(self, attribute: str, pieces: list[str], start: int) -> bytes:
        parts, at = [], start
        for number, piece in enumerate(pieces):
            tag = _INITIAL if number == 0 else _FINAL if number == len(pieces) - 1 else _ANY
            if piece:
                parts.append(encode_octets(self._unescape(piece, at), tag=tag))
            at += len(piece) + 1
        if not parts:
            self._at = start
            self._fail("a substring is expected between the *")
        return encode_sequence(encode_octets(attribute), encode_sequence(*parts), tag=_SUBSTRINGS)

    def _extensible(self, attribute: str) -> bytes:
        """Read `attr:dn:rule:=value`; the colon behind the attribute is read already."""
        dn_attributes = False
        if self._text[self._at : self._at + 3].lower() == "dn:":
            dn_attributes, self._at = True, self._at + 3
        parts = []
        if rule := _RULE.match(self._text, self._at):
            parts.append(encode_octets(rule[0], tag=0x81))
            self._at = rule.end()
            self._expect(":")
        elif not attribute:
            self._fail("a matching rule is expected")
        self._expect("=")
        if attribute:
            parts.append(encode_octets(attribute, tag=0x82))
        start = self._at
        parts.append(encode_octets(self._unescape(self._value(), start), tag=0x83))
        if dn_attributes:
            parts.append(encode_boolean(True, tag=0x84))
        return encode_sequence(*parts, tag=_EXTENSIBLE)

    def _value(self) -> str:
        """Return the text up to the bracket that ends the item, still escaped."""
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in "()\0":
            self._at += 1
        return self._text[start : self._at]

    def _unescape(self, piece: str, start: int) -> bytes:
        parts, at = [], 0
        while (place := piece.find("\\", at)) >= 0:
            escape = _ESCAPE.match(piece, place)
            if escape is None:
                self._at = start + place
                self._fail(r"two hexadecimal digits are expected after \ ")
            parts += [piece[at:place].encode(errors="surrogateescape"), bytes.fromhex(escape[1])]
            at = escape.end()
        return b"".join([*parts, piece[at:].encode(errors="surrogateescape")])

    def _skip_spaces(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
            self._at += 1

    def _expect(self, sign: str) -> None:
        if not self._text.startswith(sign, self._at):
            self._fail(f"{sign!r} is expected")
        self._at += len(sign)

    def _fail(self, reason: str) -> NoReturn:
        place = f"at character {self._at + 1}" if self._at < len(self._text) else "at the end"
        shown = self._text[max(0, self._at - 30) : self._at + 20]
        raise FilterError(
            f"invalid search filter {place}: {reason} (near {shown!r})",
            position=self._at,
            fix="write a filter such as (&(objectClass=person)(uid=*))",
        )
