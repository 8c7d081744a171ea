"""What matching an expression on the longest topic can cost: an upper bound, computed from the expression. Pure.

Java and Python match by backtracking. An expression that lets them read one topic in many ways makes a topic that does
not match cost a step for each way: `(a|a)(a|a)...` doubles with each group, `.*.*.*x` takes 10 seconds on 1024 letters,
and Java recurses for each round of a repeated group until its stack overflows. `cost` therefore

- refuses the repetition of a group by anything but `?`, and of a look-ahead by anything;
- multiplies the ways of what stands side by side and adds those of alternatives. A repeated character has as many ways
  as its repetition has lengths, but one way only where the literal that must follow is not among its characters
  (`[^/]+/`), and one as well as `.*` at the end of the expression: nothing can fail behind it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from purveyor.model.errors import InvalidInput
from purveyor.model.event_limits import LONGEST_TOPIC_BYTES
from purveyor.model.topics import ESCAPE, REPEAT, SET

MOST_STEPS: Final = 10_000_000
"""About half a second in Java, at worst. Two open repetitions side by side take 3 million, three take 3 billion."""

_TOKEN: Final = re.compile(
    rf"(?P<open>\((?:\?[:=!])?)|(?P<close>\))|(?P<bar>\|)|(?P<repeat>{REPEAT})|(?P<anchor>[\^$])"
    rf"|(?P<set>{SET}|\.|\\[dDwWsS])|(?P<literal>{ESCAPE}|.)",
    re.DOTALL,
)
_LOOK_AHEAD: Final = ("(?=", "(?!")


@dataclass(frozen=True, slots=True)
class _Cost:
    """In how many ways a part can be read at one place, and how many steps trying all of them takes."""

    ways: int = 1
    steps: int = 0

    def then(self, other: "_Cost") -> "_Cost":
        return _Cost(self.ways * other.ways, self.steps + self.ways * other.steps)

    def either(self, other: "_Cost") -> "_Cost":
        return _Cost(self.ways + other.ways, self.steps + other.steps)


@dataclass(frozen=True, slots=True)
class _Atom:
    """The smallest part that a repetition applies to: a character, a set, a group or an anchor."""

    kind: str
    text: str
    cost: _Cost = _Cost(1, 1)
    least: int = 1
    most: int = 1

    @property
    def is_character(self) -> bool:
        return self.kind in ("literal", "set")

    def before(self, other: "_Atom") -> _Cost:
        """Its cost in front of another part."""
        if self.is_character and other.kind == "literal" and other.least > 0:
            literal = other.text[-1]  # behind its backslash, if it has one
            if not re.fullmatch(self.text, literal, re.ASCII):
                return _Cost(1, self.cost.steps)
        return self.cost


def cost(expression: str) -> int:
    """Return how many steps matching takes at most; InvalidInput for a repetition that has no safe bound.

    >>> cost("users/.*") < cost(".*user.*admin.*") < MOST_STEPS < cost(".*a.*b.*c.*")
    True
    """
    tokens = [(str(found.lastgroup), found.group()) for found in _TOKEN.finditer(expression)]
    while tokens and tokens[-1] == ("anchor", "$"):
        tokens.pop()
    return _Reading(expression, tokens).alternatives(0).steps


class _Reading:
    """The tokens of one expression, read from the left."""

    def __init__(self, expression: str, tokens: list[tuple[str, str]]) -> None:
        self._expression = expression
        self._tokens = tokens
        self._at = 0

    def alternatives(self, depth: int) -> _Cost:
        """The cost up to the end of a group, or of the expression."""
        found = self._sequence(depth)
        while self._next() == "bar":
            self._at += 1
            found = found.either(self._sequence(depth))
        return found

    def _sequence(self, depth: int) -> _Cost:
        found, last = _Cost(), None
        for atom in self._atoms(depth):
            if last is not None:
                found = found.then(last.before(atom))
            last = atom
        if last is None:
            return found
        if depth == 0 and self._next() is None and last.text == "." and last.most >= LONGEST_TOPIC_BYTES:
            return found.then(_Cost(1, 1))
        return found.then(last.cost)

    def _atoms(self, depth: int) -> Iterator[_Atom]:
        while self._next() not in (None, "bar", "close"):
            kind, text = self._tokens[self._at]
            self._at += 1
            if kind == "open":
                inner = self.alternatives(depth + 1)
                self._at += 1  # the bracket that closes it
                atom = _Atom(kind, text, _Cost(1, inner.steps) if text in _LOOK_AHEAD else inner)
            else:
                atom = _Atom(kind, text)
            yield self._repeated(atom) if self._next() == "repeat" else atom

    def _repeated(self, atom: _Atom) -> _Atom:
        repeat = self._tokens[self._at][1]
        self._at += 1
        least, most = _bounds(repeat)
        if atom.is_character:
            longest = min(most, LONGEST_TOPIC_BYTES)
            lengths = max(longest - least, 0) + 1
            return _Atom(atom.kind, atom.text, _Cost(lengths, longest + lengths), least, most)
        if (least, most) != (0, 1) or atom.text in _LOOK_AHEAD:
            what = "a look-ahead" if atom.text in _LOOK_AHEAD else "a group"
            raise InvalidInput(
                f"the expression {self._expression!r} repeats {what} by {repeat!r}, "
                "and a topic could let matching run without end",
                fix="repeat single characters or sets: [a-z/]+ in place of ([a-z]+/)+; a group may have ? behind it",
            )
        return _Atom(atom.kind, atom.text, atom.cost.either(_Cost(1, 1)))

    def _next(self) -> str | None:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else None


def _bounds(repeat: str) -> tuple[int, int]:
    """The fewest and the most rounds of a repetition."""
    simple = {"*": (0, LONGEST_TOPIC_BYTES), "+": (1, LONGEST_TOPIC_BYTES), "?": (0, 1)}
    if repeat[0] in simple:
        return simple[repeat[0]]
    least, comma, most = repeat.rstrip("?")[1:-1].partition(",")
    return int(least), (int(most) if most else LONGEST_TOPIC_BYTES) if comma else int(least)
