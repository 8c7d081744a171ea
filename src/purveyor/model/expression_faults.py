"""Name the fault of an expression that `name_rules.check_topic` refuses. Pure.

`find_fault` looks at the first place that the rule does not accept; `describe_error` translates an error of Python's
engine about an expression whose parts are all accepted, such as a group that is not closed. Characters count from 1.
"""

import re
from typing import Final

_REPETITION: Final = re.compile(r"[*+?]|\{\d{1,3}(?:,\d{0,3})?\}")
_LARGE_REPETITION: Final = re.compile(r"\{\d+(?:,\d*)?\}")
_GROUPS: Final = (
    ("(?<=", "a look-behind"),
    ("(?<!", "a look-behind"),
    ("(?P=", "a back reference"),
    ("(?P<", "a named group"),
    ("(?<", "a named group"),
    ("(?#", "a comment"),
    ("(?>", "an atomic group"),
    ("(?", "a flag"),
)
_ESCAPES: Final = (
    ("0123456789", "a back reference"),
    ("bBAZzG", "an anchor"),
    ("pPXN", "a Unicode class"),
    ("QE", "a quotation"),
)
_ERRORS: Final = (
    ("unterminated character set", "an unclosed set: no ']' for the '['"),
    ("missing ), unterminated subpattern", "an unclosed group: no ')' for the '('"),
    ("unbalanced parenthesis", "a ')' without a '('"),
    ("nothing to repeat", "a repetition with nothing before it"),
    ("multiple repeat", "a repetition of a repetition"),
    ("min repeat greater than max repeat", "a repetition whose minimum is greater than its maximum"),
    ("bad character range", "a set with a range in the wrong order"),
)


def find_fault(expression: str, at: int) -> str:
    r"""Return what is wrong at the first place that is not accepted.

    >>> find_fault("users/[a-z", 6), find_fault("(?i)users", 1)
    ("an unclosed set: no ']' for the '[' at character 7", "a flag, '(?i', at character 1")
    """
    if expression[at] == "?" and expression[at - 1 : at] == "(":
        at -= 1  # the rule accepts the parenthesis of a group, not the kind of group
    rest = expression[at:]
    where = f"at character {at + 1}"
    if rest[0] == "[":
        return _set_fault(rest, where)
    if rest[0] == "\\":
        return _escape_fault(rest, where)
    if rest[0] in "]}":
        return f"a {rest[0]!r} without a {'[' if rest[0] == ']' else '{'!r} {where}"
    for begin, what in _GROUPS:
        if rest.startswith(begin):
            return f"{what}, {rest[: len(begin) + 1]!r}, {where}"
    found = _REPETITION.match(rest)
    if found is None and (count := _LARGE_REPETITION.match(rest)):
        return f"a repetition of more than 999 times, {count.group()!r}, {where}"
    if found is None:
        return f"a '{{' that begins no repetition {where}"
    return _repetition_fault(expression, at, found.group(), where)


def describe_error(error: Exception) -> str:
    """Return what an engine's error says, in the words of `find_fault`.

    >>> describe_error(re.error("missing ), unterminated subpattern", "a(b", 1))
    "an unclosed group: no ')' for the '(' at character 2"
    """
    if not isinstance(error, re.error):
        return f"more parts than can be compiled ({type(error).__name__})"
    where = "" if error.pos is None else f" at character {error.pos + 1}"
    for begin, words in _ERRORS:
        if error.msg.startswith(begin):
            return f"{words}{where}"
    return f"a fault{where}: {error.msg}"


def _set_fault(rest: str, where: str) -> str:
    escaped = False
    for number, character in enumerate(rest[1:], 1):
        if character == "]" and not escaped:
            inside = rest[1:number]
            return f"a set that engines read differently, {f'[{inside}]'!r}, {where}: put \\ before [ & | ~ ^ - in it"
        escaped = character == "\\" and not escaped
    return f"an unclosed set: no ']' for the '[' {where}"


def _escape_fault(rest: str, where: str) -> str:
    if len(rest) == 1:
        return f"a single \\ at its end, {where}"
    for letters, what in _ESCAPES:
        if rest[1] in letters:
            return f"{what}, {rest[:2]}, {where}"
    return f"an escape that engines read differently, {rest[:2]}, {where}"


def _repetition_fault(expression: str, at: int, repetition: str, where: str) -> str:
    before = expression[:at]
    if not before or before[-1] in "(|" or before.endswith(("(?:", "(?=", "(?!")):
        return f"a repetition with nothing before it, {repetition!r}, {where}"
    after = expression[at + len(repetition) :]
    if after[:1] == "+":
        return f"a possessive repetition, {repetition + '+'!r}, {where}"
    return f"a repetition of a repetition, {(repetition + after[:1])!r}, {where}"
