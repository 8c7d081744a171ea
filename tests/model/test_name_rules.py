"""Names, subjects, headers and topics that are refused before anything is sent."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.model.errors import InvalidHeader, InvalidInput, InvalidName, InvalidSubject
from purveyor.model.name_rules import (
    check_bucket,
    check_header,
    check_key,
    check_name,
    check_subject,
    check_subscription_name,
    check_topic,
    is_exact,
    subject_matches,
    topic_matches,
)

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


FAULTS = {
    "users/[a-z": "an unclosed set: no ']' for the '[' at character 7",
    "users/(a|b": "an unclosed group: no ')' for the '(' at character 7",
    "users)": "a ')' without a '(' at character 6",
    "a]": "a ']' without a '[' at character 2",
    "*": "a repetition with nothing before it, '*', at character 1",
    "a|*": "a repetition with nothing before it, '*', at character 3",
    "a**": "a repetition of a repetition, '**', at character 2",
    "a*+": "a possessive repetition, '*+', at character 2",
    "a{2,1}": "a repetition whose minimum is greater than its maximum at character 3",
    "a{1000}": "a repetition of more than 999 times, '{1000}', at character 2",
    "a{2,1000}": "a repetition of more than 999 times, '{2,1000}', at character 2",
    "a{b}": "a '{' that begins no repetition at character 2",
    "[z-a]": "a set with a range in the wrong order at character 2",
    "[a&&b]": "a set that engines read differently, '[a&&b]', at character 1",
    "(?i)a": "a flag, '(?i', at character 1",
    "(?P<n>a)": "a named group, '(?P<n', at character 1",
    "(?<=a)b": "a look-behind, '(?<=a', at character 1",
    r"(a)\1": r"a back reference, \1, at character 4",
    "users\\": "a single \\ at its end, at character 6",
}


@pytest.mark.parametrize(("topic", "fault"), FAULTS.items())
def test_an_error_about_an_expression_names_the_fault_and_its_place(topic: str, fault: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_topic(topic)
    assert f"has {fault}" in refused.value.message


@pytest.mark.parametrize("name", ["", "a b", "a.b", "a*", "a>", "a/b", "a\\b", "a\tb", "a\x00", "x" * 256])
def test_a_stream_name_the_server_would_choke_on_is_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        check_name(name)


@pytest.mark.parametrize("name", ["ORDERS", "stream:incoming", "durable_name:incoming", "a-b_c", "Bestellungen-ü"])
def test_a_good_stream_name_is_kept(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["foo.bar", "a/b", "", "x" * 65, "ü", "a b"])
def test_a_subscription_name_is_letters_digits_dash_underscore(name: str) -> None:
    with pytest.raises(InvalidName):
        check_subscription_name(name)


def test_a_subscription_cannot_take_the_name_of_an_internal_queue() -> None:
    with pytest.raises(InvalidName, match="reserved"):
        check_subscription_name("incoming", {"incoming"})


@pytest.mark.parametrize("subject", ["", ".a", "a.", "a..b", "a b", "a\r\nb", "a.*", ">", "a.>.b"])
def test_a_message_needs_one_exact_subject(subject: str) -> None:
    with pytest.raises(InvalidSubject):
        check_subject(subject)


@pytest.mark.parametrize("subject", ["a.*", ">", "a.>", "*.b"])
def test_wildcards_are_welcome_where_a_filter_is_meant(subject: str) -> None:
    assert check_subject(subject, wildcards=True) == subject


def test_the_tail_wildcard_must_be_last() -> None:
    with pytest.raises(InvalidSubject, match="last"):
        check_subject("a.>.b", wildcards=True)


@pytest.mark.parametrize(("name", "value"), [("", "x"), ("a b", "x"), ("a:b", "x"), ("a", "x\r\ny"), ("ü", "x")])
def test_a_header_that_would_break_the_protocol_is_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidHeader):
        check_header(name, value)


def test_buckets_and_keys_have_their_own_alphabets() -> None:
    assert check_bucket("leases_1") == "leases_1"
    assert check_key("a/b=c.d") == "a/b=c.d"
    for bad in ("a.b", "", "a b"):
        with pytest.raises(InvalidName):
            check_bucket(bad)
    for bad in (".a", "a.", "a..b", "a b", "*"):
        with pytest.raises(InvalidName):
            check_key(bad)


TOKENS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4)


@given(TOKENS, st.data())
def test_a_pattern_made_from_a_subject_matches_it(tokens: list[str], data: st.DataObject) -> None:
    subject = ".".join(tokens)
    pattern = [data.draw(st.sampled_from([token, "*"])) for token in tokens]
    assert subject_matches(".".join(pattern), subject)
    cut = data.draw(st.integers(0, len(tokens) - 1))
    assert subject_matches(".".join([*pattern[:cut], ">"]), subject)
    assert not subject_matches(".".join([*pattern, "a"]), subject)
    assert not subject_matches(".".join([*pattern, ">"]), subject)


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
