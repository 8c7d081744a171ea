r"""Redaction: remove the hidden fields of a subscription from an event before it is stored in its queue. Pure.

`hidden_fields` are names or paths. A name without a dot hides every field of that name in the object, at any depth; a
path such as `address.street` hides that field, from the outside in; the prefix `new.` or `old.` selects one side. Paths
go through lists. ASCII letters match in both cases, as in LDAP.

The field is cut out of the text, name and value; every other byte stays unchanged. An event without any of the fields
is not parsed at all: `candidate_pattern` matches all the ways in which JSON can spell a name.
"""

import json
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

from purveyor.model.errors import InvalidInput

SIDES: Final = ("new", "old")

_FOLD: Final = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_SPACE: Final = re.compile(r"[ \t\n\r]*+")
_STRING: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NESTING: Final = re.compile(rf"{_STRING.pattern}|[\[\]{{}}]", re.DOTALL)
_DECODER: Final = json.JSONDecoder(parse_int=str, parse_float=str)
_NAME: Final = re.compile(r"""[^\s\x00-\x1f\x7f.,:"\\\[\]{}]+(\.[^\s\x00-\x1f\x7f.,:"\\\[\]{}]+)*""")

_Cut: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Member:
    """A field of an object in a text: where its name begins, and where its value begins and ends."""

    name: str
    at: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _HiddenField:
    """A hidden field: its side (None for both), and its names from the outside in."""

    side: str | None
    steps: tuple[str, ...]

    @property
    def is_at_any_depth(self) -> bool:
        """Whether it is hidden at any depth."""
        return self.side is None and len(self.steps) == 1


def check_hidden_field(path: str) -> str:
    """Check the name or path of a hidden field, and return it unchanged."""
    if not _NAME.fullmatch(path) or path in SIDES:
        raise InvalidInput(
            f"invalid hidden field {path!r}", fix="write a name, or names from the outside in: password, address.street"
        )
    return path


def find_hiding_field(hidden: Iterable[str], path: str) -> str | None:
    """Return the hidden field that covers the field at the path of a filter; None if there is none.

    >>> find_hiding_field(["password"], "properties.Password"), find_hiding_field(["new.a"], "b")
    ('password', None)
    """
    target = _parse_path(path)
    for each in hidden:
        wanted = _parse_path(each)
        same_side = wanted.side is None or target.side in (None, wanted.side)
        if wanted.is_at_any_depth and wanted.steps[0] in target.steps:
            return each
        if same_side and target.steps[: len(wanted.steps)] == wanted.steps:
            return each
    return None


@lru_cache(maxsize=256)
def candidate_pattern(hidden: tuple[str, ...]) -> str:
    """Return a regular expression that matches every event with one of the fields, and few others. For `re` and RE2.

    >>> bool(re.search(candidate_pattern(("password",)), '{"new": {"PassWord" : 1}}'))
    True
    """
    names = sorted({_parse_path(path).steps[-1] for path in hidden})
    return f'"(?:{"|".join("".join(map(_spellings, name)) for name in names)})"[ \\t\\n\\r]*:'


def redact(data: bytes, hidden: Iterable[str]) -> bytes:
    """Remove the hidden fields of an event; return the same bytes if it has none. InvalidInput if it is no JSON object.

    >>> redact(b'{"body": {"old": {}, "new": {"uid": "a", "x": {"userpassword": "{SSHA}"}}}}', ["userPassword"])
    b'{"body": {"old": {}, "new": {"uid": "a", "x": {}}}}'
    """
    fields = _compile(tuple(hidden))
    try:
        text = data.decode()
        cuts = sorted(cut for side in _sides(text) for cut in fields.cuts(text, side))
        return _remove(text, cuts).encode() if cuts else data
    except (ValueError, IndexError) as error:
        raise InvalidInput(f"the event is no JSON object: {error}", fix="write one JSON object in UTF-8") from None


@dataclass(frozen=True, slots=True)
class _CompiledFields:
    """Compiled hidden fields: patterns for names, and paths to walk."""

    plain: re.Pattern[str] | None
    """Matches the names in plain spelling ..."""
    spelled: re.Pattern[str] | None
    """... and in all spellings, for a text with escapes."""
    paths: tuple[_HiddenField, ...]

    def cuts(self, text: str, side: _Member) -> Iterator[_Cut]:
        """Yield what to cut out of one object: where a name begins, and where its value ends."""
        names = self.spelled if "\\u" in text or "\\/" in text else self.plain
        for found in names.finditer(text, side.begin, side.end) if names is not None else ():
            yield found.start(), _end(text, _after_space(text, found.end()))
        for wanted in self.paths:
            if wanted.side in (None, side.name):
                yield from _walk(text, side.begin, wanted.steps)


@lru_cache(maxsize=256)
def _compile(hidden: tuple[str, ...]) -> _CompiledFields:
    wanted = [_parse_path(path) for path in hidden]
    names = [re.escape(each.steps[0]) for each in wanted if each.is_at_any_depth]
    whole = tuple(path for path, each in zip(hidden, wanted, strict=True) if each.is_at_any_depth)
    # A quote within a string has a backslash before it, the quote before a name never has: a match is a name.
    plain = rf'"(?<!\\")(?:{"|".join(names)})"[ \t\n\r]*+:'
    spelled = rf"(?<!\\){candidate_pattern(whole)}"
    return _CompiledFields(
        re.compile(plain, re.IGNORECASE | re.ASCII) if names else None,
        re.compile(spelled) if names else None,
        tuple(each for each in wanted if not each.is_at_any_depth),
    )


def _sides(text: str) -> Iterator[_Member]:
    """Yield the objects `old` and `new` of an event."""
    start = 1 if text.startswith("\ufeff") else 0
    for body in _members(text, _after_space(text, start)):
        if body.name == "body":
            yield from (side for side in _members(text, body.begin) if side.name in SIDES)


def _walk(text: str, at: int, steps: tuple[str, ...]) -> Iterator[_Cut]:
    """Yield the fields at a path, from the object or list at `at`."""
    waiting = [(at, steps)]
    while waiting:
        at, steps = waiting.pop()
        if text[at] == "[":
            waiting.extend((begin, steps) for begin in _elements(text, at))
        for member in _members(text, at):
            if member.name.translate(_FOLD) == steps[0]:
                if len(steps) == 1:
                    yield member.at, member.end
                else:
                    waiting.append((member.begin, steps[1:]))


def _remove(text: str, cuts: Iterable[_Cut]) -> str:
    """Remove fields from a text, each with the comma after it, or, without one, with the comma before it."""
    kept: list[str] = []
    at = 0
    for begin, end in cuts:
        if end <= at:
            continue  # inside a field that is already removed
        kept.append(text[at:begin])
        at = end
        behind = _after_space(text, end)
        if text[behind] == ",":
            at = _after_space(text, behind + 1)
            continue
        while not kept[-1]:  # between it and the removed field before it
            kept.pop()
        before = kept[-1].rstrip(" \t\n\r")
        if before.endswith(","):
            kept[-1] = before[:-1]
    return "".join([*kept, text[at:]])


def _members(text: str, at: int) -> Iterator[_Member]:
    """Yield all fields of the object at `at`, also repeated names; none if it is no object."""
    if text[at] != "{":
        return
    at = _after_space(text, at + 1)
    while text[at] != "}":
        name = _STRING.match(text, at)
        if name is None:
            raise ValueError(f"expected a name at character {at}")
        begin = _after_space(text, _after_space(text, name.end()) + 1)
        end = _end(text, begin)
        spelled = name[0]
        yield _Member(json.loads(spelled) if "\\" in spelled else spelled[1:-1], at, begin, end)
        at = _next(text, end)


def _elements(text: str, at: int) -> Iterator[int]:
    """Yield where the elements of the list at `at` begin."""
    at = _after_space(text, at + 1)
    while text[at] != "]":
        yield at
        at = _next(text, _end(text, at))


def _next(text: str, end: int) -> int:
    """Return the position of the next value after `end`, or of the closing bracket."""
    at = _after_space(text, end)
    return _after_space(text, at + 1) if text[at] == "," else at


def _end(text: str, at: int) -> int:
    """Return where the value at `at` ends."""
    if text[at] == '"':
        found = _STRING.match(text, at)
        if found is None:
            raise ValueError(f"the string at character {at} does not end")
        return found.end()
    try:
        _, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        return _end_of_deep(text, at)
    except StopIteration:
        raise ValueError(f"expected a value at character {at}") from None
    return end


def _end_of_deep(text: str, at: int) -> int:
    """Return where the object or list at `at` ends, at any depth of nesting."""
    depth = 0
    for token in _NESTING.finditer(text, at):
        if token[0] in ("[", "{"):
            depth += 1
        elif token[0] in ("]", "}"):
            depth -= 1
            if not depth:
                return token.end()
    raise ValueError(f"what begins at character {at} does not end")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


@lru_cache(maxsize=1024)
def _parse_path(path: str) -> _HiddenField:
    first, _, rest = path.partition(".")
    if first in SIDES and rest:
        return _HiddenField(first, tuple(rest.translate(_FOLD).split(".")))
    return _HiddenField(None, tuple(path.translate(_FOLD).split(".")))


def _spellings(letter: str) -> str:
    """Return a pattern for all spellings of a letter of a name in JSON."""
    forms = sorted({letter, letter.swapcase()}) if letter in string.ascii_letters else [letter]
    ways = [re.escape(form) for form in forms]
    ways += [r"\\u" + r"\\u".join(map(_hex, _units(form))) for form in forms]
    ways += [r"\\/"] if letter == "/" else []
    return f"(?:{'|'.join(ways)})"


def _units(letter: str) -> list[str]:
    """Return its UTF-16 units, which JSON escapes."""
    return re.findall("....", letter.encode("utf-16-be", "surrogatepass").hex())


def _hex(digits: str) -> str:
    return "".join(f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in digits)
