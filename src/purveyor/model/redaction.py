r"""What a subscription must not see is taken out of an event before it is stored in its queue. Pure, and the one rule.

`hidden_fields` are names or paths. A name without a dot hides every field of that name in the object, however deep; a
path such as `address.street` hides that field, counted from the outside in; with `new.` or `old.` before it only there.
Lists on the way are looked through. Small and capital letters of ASCII are the same, because they are in LDAP.

The field is cut out of the text, name and value; every other byte stays as it came. An event that has none of the
fields is not parsed at all: `suspicion` is an expression for all the ways in which JSON can spell a name.
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
class _Wanted:
    """A hidden field: the side that it is about, None for both, and its names from the outside in."""

    side: str | None
    steps: tuple[str, ...]

    @property
    def anywhere(self) -> bool:
        """Whether it is hidden however deep it lies."""
        return self.side is None and len(self.steps) == 1


def check_hidden(path: str) -> str:
    """A name or path of a hidden field, as it was given."""
    if not _NAME.fullmatch(path) or path in SIDES:
        raise InvalidInput(
            f"invalid hidden field {path!r}", fix="write a name, or names from the outside in: password, address.street"
        )
    return path


def hides(hidden: Iterable[str], path: str) -> str | None:
    """Which of the hidden fields, if any, covers the field at the path of a filter.

    >>> hides(["password"], "properties.Password"), hides(["a.b"], "new.a.b.c"), hides(["new.a"], "b")
    ('password', 'a.b', None)
    """
    looked = _sided(path)
    for each in hidden:
        wanted = _sided(each)
        same_side = wanted.side is None or looked.side in (None, wanted.side)
        if wanted.anywhere and wanted.steps[0] in looked.steps:
            return each
        if same_side and looked.steps[: len(wanted.steps)] == wanted.steps:
            return each
    return None


@lru_cache(maxsize=256)
def suspicion(hidden: tuple[str, ...]) -> str:
    """An expression that every event with one of the fields matches, and few others. For `re`, and for RE2 on bytes.

    >>> bool(re.search(suspicion(("password",)), '{"new": {"PassWord" : 1}}'))
    True
    """
    names = sorted({_sided(path).steps[-1] for path in hidden})
    return f'"(?:{"|".join("".join(map(_spelled, name)) for name in names)})"[ \\t\\n\\r]*:'


def censor(data: bytes, hidden: Iterable[str]) -> bytes:
    """An event without its hidden fields; the very same bytes if it has none. InvalidInput if it is no JSON object.

    >>> censor(b'{"body": {"old": {}, "new": {"uid": "a", "x": {"userpassword": "{SSHA}"}}}}', ["userPassword"])
    b'{"body": {"old": {}, "new": {"uid": "a", "x": {}}}}'
    """
    rule = _rule(tuple(hidden))
    try:
        text = data.decode()
        cuts = sorted(cut for side in _sides(text) for cut in rule.cuts(text, side))
        return _without(text, cuts).encode() if cuts else data
    except (ValueError, IndexError) as error:
        raise InvalidInput(f"the event is no JSON object: {error}", fix="write one JSON object in UTF-8") from None


@dataclass(frozen=True, slots=True)
class _Rule:
    """Hidden fields, prepared: names that are looked for by their spelling, and paths that are walked."""

    plain: re.Pattern[str] | None
    """The names as they are nearly always written ..."""
    spelled: re.Pattern[str] | None
    """... and in all the ways there are, for a text with escapes."""
    paths: tuple[_Wanted, ...]

    def cuts(self, text: str, side: _Member) -> Iterator[_Cut]:
        """What to cut out of one object: where a name begins, and where its value ends."""
        names = self.spelled if "\\u" in text or "\\/" in text else self.plain
        for found in names.finditer(text, side.begin, side.end) if names is not None else ():
            yield found.start(), _end(text, _after_space(text, found.end()))
        for wanted in self.paths:
            if wanted.side in (None, side.name):
                yield from _walk(text, side.begin, wanted.steps)


@lru_cache(maxsize=256)
def _rule(hidden: tuple[str, ...]) -> _Rule:
    wanted = [_sided(path) for path in hidden]
    names = [re.escape(each.steps[0]) for each in wanted if each.anywhere]
    whole = tuple(path for path, each in zip(hidden, wanted, strict=True) if each.anywhere)
    # Within a string a quote has a backslash before it, and before a name there never is one: what is found is a name.
    plain = rf'"(?<!\\")(?:{"|".join(names)})"[ \t\n\r]*+:'
    spelled = rf"(?<!\\){suspicion(whole)}"
    return _Rule(
        re.compile(plain, re.IGNORECASE | re.ASCII) if names else None,
        re.compile(spelled) if names else None,
        tuple(each for each in wanted if not each.anywhere),
    )


def _sides(text: str) -> Iterator[_Member]:
    """The objects of an event, `old` and `new`."""
    start = 1 if text.startswith("\ufeff") else 0
    for body in _members(text, _after_space(text, start)):
        if body.name == "body":
            yield from (side for side in _members(text, body.begin) if side.name in SIDES)


def _walk(text: str, at: int, steps: tuple[str, ...]) -> Iterator[_Cut]:
    """The fields at a path from the object or the list at a place on."""
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


def _without(text: str, cuts: Iterable[_Cut]) -> str:
    """The text without these fields. The comma behind each goes too; where none is, the one before it does."""
    kept: list[str] = []
    at = 0
    for begin, end in cuts:
        if end <= at:
            continue  # it lies in one that is out already
        kept.append(text[at:begin])
        at = end
        behind = _after_space(text, end)
        if text[behind] == ",":
            at = _after_space(text, behind + 1)
            continue
        while not kept[-1]:  # what lay between it and the field before it, which is out too
            kept.pop()
        before = kept[-1].rstrip(" \t\n\r")
        if before.endswith(","):
            kept[-1] = before[:-1]
    return "".join([*kept, text[at:]])


def _members(text: str, at: int) -> Iterator[_Member]:
    """The fields of the object at a place, all of them if a name is there twice; none if it is no object."""
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
    """Where the elements of the list at a place begin."""
    at = _after_space(text, at + 1)
    while text[at] != "]":
        yield at
        at = _next(text, _end(text, at))


def _next(text: str, end: int) -> int:
    """Behind a value: the next one, or what ends them all."""
    at = _after_space(text, end)
    return _after_space(text, at + 1) if text[at] == "," else at


def _end(text: str, at: int) -> int:
    """Where the value at a place ends."""
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
    """The same for an object or list, however deep."""
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
def _sided(path: str) -> _Wanted:
    first, _, rest = path.partition(".")
    if first in SIDES and rest:
        return _Wanted(first, tuple(rest.translate(_FOLD).split(".")))
    return _Wanted(None, tuple(path.translate(_FOLD).split(".")))


def _spelled(letter: str) -> str:
    """All the ways to write a letter of a name in JSON."""
    forms = sorted({letter, letter.swapcase()}) if letter in string.ascii_letters else [letter]
    ways = [re.escape(form) for form in forms]
    ways += [r"\\u" + r"\\u".join(map(_hex, _units(form))) for form in forms]
    ways += [r"\\/"] if letter == "/" else []
    return f"(?:{'|'.join(ways)})"


def _units(letter: str) -> list[str]:
    """Its UTF-16 units, which are what JSON escapes."""
    return re.findall("....", letter.encode("utf-16-be", "surrogatepass").hex())


def _hex(digits: str) -> str:
    return "".join(f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in digits)
