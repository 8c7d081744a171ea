"""A topic is exact, or an expression with the same meaning in Java and Python."""

import re

import pytest

from purveyor.model.errors import InvalidInput
from purveyor.model.topics import check_topic, is_exact, topic_matches

GOOD = [
    "groups/.*",
    "^users/.+$",
    "users/(?:user|self)",
    "(?!computers/).*",
    "a(?=/)/b",
    r"app\.users",
    r"[a-z_]+/\d{1,3}",
    r"[^/]+",
    r"x{2}y{1,}z{0,3}?",
    "a*?b+?c??",
    r"[a\-z\]-]",
    r"[\w-]+",
    "a|b|",
    r"\w+\s\S\D\W",
    "ü.",
]
BAD = [
    "*",
    "a**",
    "a*+",
    "a++",
    "a?+",
    "a{2}+",
    "a{,3}",
    "a{b}",
    "a{2,1}",
    "(a",
    "a)",
    "[a",
    "[]",
    "[z-a]",
    "[a[b]]",
    "[a&&b]",
    "[[:alpha:]]",
    "(?i)a",
    "(?P<n>a)",
    "(?<n>a)",
    "(?<=a)b",
    "(?<!a)b",
    "(?#c)a",
    "(?>a)",
    r"(a)\1",
    r"a\Z",
    r"\Aa",
    r"\bx",
    r"\p{L}",
    r"\x41",
    r"\n",
    r"\Qa\E",
    "a\\",
    "(?:)*+",
    "(*a)",
    "a|*",
    "x" * 1025,
    "x" * 511 + ".*",
]


@pytest.mark.parametrize("topic", GOOD)
def test_what_both_engines_read_alike_is_taken(topic: str) -> None:
    assert check_topic(topic) == topic
    re.compile(topic)


@pytest.mark.parametrize("topic", BAD)
def test_syntax_that_engines_read_differently_is_refused(topic: str) -> None:
    with pytest.raises(InvalidInput, match="topic"):
        check_topic(topic)


def test_a_topic_without_special_characters_matches_only_itself() -> None:
    assert is_exact("users/user-2:ü #1")
    assert topic_matches("users/user", "users/user")
    assert not topic_matches("users/user", "users/user2")
    assert not topic_matches("Users/user", "users/user")


def test_an_expression_must_match_in_full() -> None:
    assert topic_matches("users/.*", "users/user")
    assert not topic_matches("users/.", "users/user")
    assert not topic_matches("sers/.*", "users/user")
    assert topic_matches("a|ab", "ab")
    assert topic_matches("^a$", "a")
    assert not topic_matches(r"\d", "٣")  # digits are ASCII, as in Java
