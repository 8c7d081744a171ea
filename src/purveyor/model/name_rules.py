r"""Rules for names, subjects, headers and topics, shared by the API, the CLI and all parts. Pure.

They are checked before anything is sent: the server answers a bad name with a timeout or an unrelated error.

A topic of a subscription is exact, or a regular expression that must match the whole topic of an event. Java (in Spark
SQL) and Python (in the reference rule) run the same expression, so only syntax with the same meaning in both is
allowed:

    literals, \ before a punctuation character, . ^ $ |, groups ( ) (?: ) (?= ) (?! ),
    sets [a-z_] [^/] (with & ~ | ^ - [ ] \ escaped, or - last), \d \D \w \W \s \S as ASCII,
    and the repetitions * + ? {n} {n,} {n,m}, also with ? behind them.

Everything else is refused: flags, named groups, back references, look-behind, possessive repetition, \A \Z \b,
classes inside of sets. Case matters.

`check_topic` is the rule for every topic, also for one that an older version stored. New subscriptions and schemas have
more limits: see `subscription_limits`.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from purveyor.model.errors import InvalidHeader, InvalidInput, InvalidName, InvalidSubject
from purveyor.model.expression_faults import describe_error, find_fault

_FORBIDDEN_IN_NAME = re.compile(r"[\s.*>/\\\x00-\x1f\x7f]")
_FORBIDDEN_IN_SUBJECT = re.compile(r"[\s\x00-\x1f\x7f]")
_SUBSCRIPTION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEY = re.compile(r"[-/_=.a-zA-Z0-9]+")
_BUCKET = re.compile(r"[A-Za-z0-9_-]+")
_HEADER_NAME = re.compile(r"[!-9;-~]+")  # printable ASCII without the colon
LONGEST_EXPRESSION_CHARACTERS: Final = 512
_LONGEST_EXACT_TOPIC_CHARACTERS: Final = 1024
_SPECIAL_IN_TOPIC: Final = re.compile(r"[\\.^$*+?{}\[\]|()]")

ESCAPE: Final = r"\\(?:[dDwWsS]|[!-/:-@\[-`{-~])"
_IN_SET = r"[^\\\[\]&~|^\-]"
SET: Final = rf"\[\^?(?:{_IN_SET}-{_IN_SET}|{_IN_SET}|{ESCAPE})*-?\]"
REPEAT: Final = r"(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})\??(?![*+?{])"
_TOPIC_PATTERN: Final = re.compile(
    rf"(?:[^\\.^$*+?{{}}\[\]|()]|{ESCAPE}|{SET}|\((?:\?[:=!])?|\)|[.^$|]|(?<!^)(?<![(|]){REPEAT})*"
)


def check_name(name: str, what: str = "stream") -> str:
    """Check the name of a stream or consumer: no white space, dots, wildcards or slashes; at most 255 bytes."""
    if not name:
        raise InvalidName(f"the name of a {what} is empty", fix="give it a name, such as ORDERS")
    bad = _FORBIDDEN_IN_NAME.search(name)
    if bad:
        raise InvalidName(
            f"invalid {what} name {name!r}: {bad.group()!r} is not allowed",
            fix="use no white space, '.', '*', '>', '/' or '\\'",
        )
    if len(name.encode()) > 255:
        raise InvalidName(f"invalid {what} name {name[:32]!r}...: longer than 255 bytes", fix="shorten it")
    return name


def check_subscription_name(name: str, reserved: Iterable[str] = ()) -> str:
    """Check the name of a subscription: at most 64 letters, digits, '-' and '_', and not a reserved name."""
    if not _SUBSCRIPTION.fullmatch(name):
        raise InvalidName(f"invalid subscription name {name!r}", fix="use 1 to 64 letters, digits, '-' or '_'")
    if name in set(reserved):
        raise InvalidName(f"the name {name!r} is reserved for an internal queue", fix="choose another name")
    return name


def check_subject(subject: str, *, wildcards: bool = False) -> str:
    """Check a subject: tokens separated by dots, none empty, no white space; wildcards only where they are allowed."""
    if not subject:
        raise InvalidSubject("the subject is empty", fix="give one, such as orders.new")
    if _FORBIDDEN_IN_SUBJECT.search(subject):
        raise InvalidSubject(f"invalid subject {subject!r}: white space or control characters", fix="use '.' or '-'")
    tokens = subject.split(".")
    if "" in tokens:
        raise InvalidSubject(f"invalid subject {subject!r}: an empty token", fix="no dot first, last or doubled")
    for position, token in enumerate(tokens):
        wild = token == "*" or (token == ">" and position == len(tokens) - 1)
        if wild and wildcards:
            continue
        if wild:
            raise InvalidSubject(
                f"invalid subject {subject!r}: {token!r} is a wildcard, and a message needs one exact subject",
                fix="name each token",
            )
        if token == ">":
            raise InvalidSubject(f"invalid subject {subject!r}: '>' must be the last token", fix="move or drop it")
    return subject


def check_header(name: str, value: str) -> None:
    """Check a header: a printable ASCII name without colon, a value without line breaks."""
    if not _HEADER_NAME.fullmatch(name):
        raise InvalidHeader(f"invalid header name {name!r}", fix="use printable ASCII characters without spaces or ':'")
    if "\r" in value or "\n" in value or "\0" in value:
        raise InvalidHeader(
            f"invalid value of header {name!r}: it holds a line break or NUL", fix="encode it, for example in base64"
        )


def check_bucket(name: str) -> str:
    """Check the name of a key-value bucket: letters, digits, '-' and '_'."""
    if not _BUCKET.fullmatch(name):
        raise InvalidName(f"invalid bucket name {name!r}", fix="use letters, digits, '-' and '_'")
    return name


def check_key(key: str) -> str:
    """Check a key of a bucket: letters, digits and -/_=. with no dot at either end."""
    if not _KEY.fullmatch(key) or key.startswith(".") or key.endswith(".") or ".." in key:
        raise InvalidName(f"invalid key {key!r}", fix="use letters, digits and any of -/_=. with no dot at either end")
    return key


def subject_matches(pattern: str, subject: str) -> bool:
    """Return whether a subject matches a pattern with wildcards, by the rules of the server.

    >>> subject_matches("orders.>", "orders.eu.new"), subject_matches("orders.*", "orders.eu.new")
    (True, False)
    """
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


def is_exact(topic: str) -> bool:
    r"""Return whether a topic has no special character of an expression, and so matches only itself.

    >>> is_exact("users/user"), is_exact("groups/.*"), is_exact(r"a\.b")
    (True, False, False)
    """
    return not _SPECIAL_IN_TOPIC.search(topic)


def check_topic(topic: str) -> str:
    """Return the topic; InvalidInput if it is an expression that cannot be used."""
    exact = is_exact(topic)
    longest = _LONGEST_EXACT_TOPIC_CHARACTERS if exact else LONGEST_EXPRESSION_CHARACTERS
    if len(topic) > longest:
        what = "topic" if exact else "expression for a topic"
        raise InvalidInput(f"the {what} {topic[:40]!r}... is longer than {longest} characters", fix="shorten it")
    if exact:
        return topic
    known = _TOPIC_PATTERN.match(topic)
    end = known.end() if known else 0
    if end < len(topic):
        raise InvalidInput(
            f"the topic {topic!r} has {find_fault(topic, end)}",
            fix="use literals, sets, groups, '.', '|' and the repetitions * + ? {n,m}; put \\ before other characters",
        )
    try:
        _compile_topic(topic)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidInput(
            f"the topic {topic!r} has {describe_error(error)}", fix="put \\ before special characters"
        ) from None
    return topic


def topic_matches(wanted: str, topic: str) -> bool:
    """Return whether the topic of an event equals the wanted one, or matches it in full.

    >>> topic_matches("groups/.*", "groups/group"), topic_matches("users", "users/user")
    (True, False)
    """
    return wanted == topic if is_exact(wanted) else _compile_topic(wanted).fullmatch(topic) is not None


@lru_cache(maxsize=10_000)
def _compile_topic(topic: str) -> re.Pattern[str]:
    return re.compile(topic, re.ASCII)
