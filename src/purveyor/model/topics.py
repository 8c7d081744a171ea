r"""Topics of a subscription: exact, or a regular expression that must match the whole topic of an event.

Java (in Spark SQL) and Python (in the reference rule) run the same expression, so only syntax with the same meaning in
both is allowed:

    literals, \ before a punctuation character, . ^ $ |, groups ( ) (?: ) (?= ) (?! ),
    sets [a-z_] [^/] (with & ~ | ^ - [ ] \ escaped, or - last), \d \D \w \W \s \S as ASCII,
    and the repetitions * + ? {n} {n,} {n,m}, also with ? behind them.

Everything else is refused: flags, named groups, back references, look-behind, possessive repetition, \A \Z \b,
classes inside of sets. Case matters.

`check_topic` is the rule for every topic, also for one that an older version stored. New subscriptions and schemas have
more limits: see `subscription_limits`.
"""

import re
from functools import lru_cache
from typing import Final

from purveyor.model.errors import InvalidInput

LONGEST_EXPRESSION_CHARACTERS: Final = 512
_LONGEST_EXACT_CHARACTERS: Final = 1024
_SPECIAL: Final = re.compile(r"[\\.^$*+?{}\[\]|()]")

ESCAPE: Final = r"\\(?:[dDwWsS]|[!-/:-@\[-`{-~])"
_IN_SET = r"[^\\\[\]&~|^\-]"
SET: Final = rf"\[\^?(?:{_IN_SET}-{_IN_SET}|{_IN_SET}|{ESCAPE})*-?\]"
REPEAT: Final = r"(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})\??(?![*+?{])"
_PATTERN: Final = re.compile(
    rf"(?:[^\\.^$*+?{{}}\[\]|()]|{ESCAPE}|{SET}|\((?:\?[:=!])?|\)|[.^$|]|(?<!^)(?<![(|]){REPEAT})*"
)


def is_exact(topic: str) -> bool:
    r"""Return whether a topic has no special character of an expression, and so matches only itself.

    >>> is_exact("users/user"), is_exact("groups/.*"), is_exact(r"a\.b")
    (True, False, False)
    """
    return not _SPECIAL.search(topic)


def check_topic(topic: str) -> str:
    """Return the topic; InvalidInput if it is an expression that cannot be used."""
    exact = is_exact(topic)
    longest = _LONGEST_EXACT_CHARACTERS if exact else LONGEST_EXPRESSION_CHARACTERS
    if len(topic) > longest:
        what = "topic" if exact else "expression for a topic"
        raise InvalidInput(f"the {what} {topic[:40]!r}... is longer than {longest} characters", fix="shorten it")
    if exact:
        return topic
    known = _PATTERN.match(topic)
    end = known.end() if known else 0
    if end < len(topic):
        raise InvalidInput(
            f"the topic {topic!r} uses syntax that regular expression engines read differently: from {topic[end:]!r}",
            fix="use literals, sets, groups, '.', '|' and the repetitions * + ? {n,m}; put \\ before other characters",
        )
    try:
        _compile(topic)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidInput(
            f"the topic {topic!r} is no regular expression: {error}", fix="put \\ before special characters"
        ) from None
    return topic


def topic_matches(wanted: str, topic: str) -> bool:
    """Return whether the topic of an event equals the wanted one, or matches it in full.

    >>> topic_matches("groups/.*", "groups/group"), topic_matches("users", "users/user")
    (True, False)
    """
    return wanted == topic if is_exact(wanted) else _compile(wanted).fullmatch(topic) is not None


@lru_cache(maxsize=10_000)
def _compile(topic: str) -> re.Pattern[str]:
    return re.compile(topic, re.ASCII)
