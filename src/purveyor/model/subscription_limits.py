"""The limits of a subscription or a schema, checked when it is added or changed. Pure.

They are not checked when a definition is read: one that an older version stored keeps working.

`count_matching_steps` is an upper bound of the cost of matching an expression on the longest topic. Java and Python
match by backtracking. An expression that lets them read one topic in many ways costs one step for each way on a topic
that does not match: `(a|a)(a|a)...` doubles with each group, `.*.*.*x` takes 10 seconds on 1024 letters, and Java
recurses for each round of a repeated group until its stack overflows. The function therefore

- refuses the repetition of a group by anything but `?`, and any repetition of a look-ahead;
- multiplies the ways of adjacent parts and adds those of alternatives. A repeated character has as many ways as its
  repetition has lengths, but only one way if the literal that must follow is not among its characters (`[^/]+/`), and
  only one as `.*` at the end of the expression, because nothing can fail after it.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.event import (
    LONGEST_ATTRIBUTE_NAME_BYTES,
    LONGEST_ATTRIBUTE_VALUE_BYTES,
    LONGEST_TOPIC_BYTES,
    check_realm_topic,
)
from purveyor.model.json_fields import check_json, check_optional_text, check_surrogates, check_text
from purveyor.model.name_rules import ESCAPE, REPEAT, SET, is_exact
from purveyor.model.subscription import Filter, RealmTopic, Subscription

LARGEST_SUBSCRIPTION_BYTES: Final = 256 << 10


def check_subscription(definition: Subscription) -> Subscription:
    """Return a new definition, or raise InvalidInput if no part could store or match it safely."""
    check_topics(definition.realms_topics)
    return check_options(definition)


def check_options(definition: Subscription) -> Subscription:
    """Check everything except the topics: what an update can change."""
    _check_filter(definition.filter)
    check_surrogates(definition.to_json(), f"subscription {definition.name}")
    size = len(json_fields.dump(definition.to_json()))
    if size > LARGEST_SUBSCRIPTION_BYTES:
        raise InvalidInput(
            f"subscription {definition.name!r} is {size} bytes long",
            fix=f"shorten it to at most {LARGEST_SUBSCRIPTION_BYTES} bytes",
        )
    return definition


def check_topics(topics: Iterable[RealmTopic]) -> None:
    """Raise InvalidInput if a realm or topic is too long, or if matching one topic could take too many steps."""
    steps = 0
    for each in topics:
        check_realm_topic(each.realm, each.topic)
        if is_exact(each.topic):
            continue
        own_steps = count_matching_steps(each.topic)
        steps += own_steps
        if own_steps > MAX_MATCHING_STEPS:
            raise InvalidInput(
                f"the expression {each.topic!r} can read one topic in too many ways ({own_steps:.1e} steps)",
                fix="use at most two of * + {n,} that can match the same characters, and fewer alternatives beside "
                "them; .* at the end and [^/]+ before / do not count",
            )
    if steps > MAX_MATCHING_STEPS:
        raise InvalidInput(
            f"all expressions together can read one topic in too many ways ({steps:.1e} steps)",
            fix="use fewer or simpler ones, or another subscription",
        )


def _check_filter(wanted: Filter) -> None:
    for name, values in wanted.attributes.items():
        check_text(name, "an attribute name in the filter", LONGEST_ATTRIBUTE_NAME_BYTES)
        for value in values:
            check_optional_text(value, f"the filter for {name!r}", LONGEST_ATTRIBUTE_VALUE_BYTES)
    check_json({path: list(values) for path, values in wanted.fields.items()}, "filter.fields")


MAX_MATCHING_STEPS: Final = 10_000_000
"""At most about half a second in Java. Two adjacent open repetitions take 3 million steps, three take 3 billion."""

_TOKEN: Final = re.compile(
    rf"(?P<open>\((?:\?[:=!])?)|(?P<close>\))|(?P<bar>\|)|(?P<repeat>{REPEAT})|(?P<anchor>[\^$])"
    rf"|(?P<set>{SET}|\.|\\[dDwWsS])|(?P<literal>{ESCAPE}|.)",
    re.DOTALL,
)
_LOOK_AHEAD: Final = ("(?=", "(?!")


@dataclass(frozen=True, slots=True)
class _Cost:
    """The number of ways to match a part at one position, and the number of steps to try all of them."""

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
        """Return its cost before another part."""
        if self.is_character and other.kind == "literal" and other.least > 0:
            literal = other.text[-1]  # after its backslash, if it has one
            if not re.fullmatch(self.text, literal, re.ASCII):
                return _Cost(1, self.cost.steps)
        return self.cost


def count_matching_steps(expression: str) -> int:
    """Return the largest number of steps of a match; InvalidInput for a repetition without a safe bound.

    >>> [count_matching_steps(topic) <= MAX_MATCHING_STEPS for topic in ("users/.*", ".*user.*admin.*", ".*a.*b.*c.*")]
    [True, True, False]
    """
    tokens = [(str(found.lastgroup), found.group()) for found in _TOKEN.finditer(expression)]
    while tokens and tokens[-1] == ("anchor", "$"):
        tokens.pop()
    return _CostParser(expression, tokens).alternatives(0).steps


class _CostParser:
    """A parser of the tokens of one expression."""

    def __init__(self, expression: str, tokens: list[tuple[str, str]]) -> None:
        self._expression = expression
        self._tokens = tokens
        self._at = 0

    def alternatives(self, depth: int) -> _Cost:
        """Return the cost up to the end of a group, or of the expression."""
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
    """Return the smallest and largest number of rounds of a repetition."""
    simple = {"*": (0, LONGEST_TOPIC_BYTES), "+": (1, LONGEST_TOPIC_BYTES), "?": (0, 1)}
    if repeat[0] in simple:
        return simple[repeat[0]]
    least, comma, most = repeat.rstrip("?")[1:-1].partition(",")
    return int(least), (int(most) if most else LONGEST_TOPIC_BYTES) if comma else int(least)
