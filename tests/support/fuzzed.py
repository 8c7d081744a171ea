"""Strategies for unusual events, valid and invalid, and a function that draws many with one seed."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from purveyor.model.event import (
    EARLIEST_TS,
    LATEST_TS,
    LONGEST_ATTRIBUTE_NAME_BYTES,
    LONGEST_ATTRIBUTE_VALUE_BYTES,
    LONGEST_ID_BYTES,
    LONGEST_KEY_BYTES,
    LONGEST_PUBLISHER_NAME_BYTES,
    LONGEST_REALM_BYTES,
    LONGEST_TOPIC_BYTES,
    MOST_ATTRIBUTES,
)
from purveyor.model.json_fields import LONGEST_FIELD_NAME_BYTES, MOST_LEVELS

T = TypeVar("T")
Fields = dict[str, Any]

LARGEST = int(1.7976931348623157e308)
NUMBERS = (0, -1, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**18, 10**40, LARGEST, -LARGEST)
FLOATS = (-0.0, 5e-324, 1.7976931348623157e308, 0.1, 1e16, 1e22, 123456789.123456789, -2.5e-8)
ODD_TEXTS = (
    " ",
    "a b",
    "%41",
    "a%2Fb",
    "'\"\\",
    "{}",
    "$.x",
    "🦆",
    "\ufeff",
    "\ufffe",
    "é",
    "e\u0301",
    "\u202e",
    "../..",
    "NULL",
)

FIRST, LAST = (each.replace(tzinfo=None) for each in (EARLIEST_TS + timedelta(days=1), LATEST_TS - timedelta(days=1)))

letters = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\u2028\u2029")
words = st.text(letters, min_size=1, max_size=12) | st.sampled_from(ODD_TEXTS)
body_texts = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(("\x00", "\r\n", "\u2028"))


def filled(unit: str, size: int) -> str:
    """Return texts with exactly this number of bytes."""
    count = size // len(unit.encode())
    return unit * count + "x" * (size - count * len(unit.encode()))


def up_to(size: int, *, rarely: int = 6) -> st.SearchStrategy[str]:
    """Return short words, and sometimes one of the maximum length."""
    longest = letters.map(lambda unit: filled(unit, size))
    return st.integers(1, rarely).flatmap(lambda die: longest if die == 1 else words)


def nested(levels: int) -> Any:
    found: Any = "end"
    for level in range(levels):
        found = [found] if level % 2 else {"in": found}
    return found


numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from((*NUMBERS, *FLOATS))
scalars: st.SearchStrategy[Any] = st.none() | st.booleans() | numbers | body_texts
names = body_texts | st.sampled_from(("", "a.b", "id", "uuid", "dn", "new", "old", "body", "realm"))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
deep = st.sampled_from((MOST_LEVELS - 1, MOST_LEVELS - 2, 10)).map(nested)
wide_names = letters.map(lambda unit: filled(unit, LONGEST_FIELD_NAME_BYTES))
objects = st.dictionaries(names, values, max_size=5) | st.dictionaries(
    st.one_of(words, words, wide_names), values | deep, min_size=1, max_size=2
)

zones = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
moments = st.datetimes(FIRST, LAST, timezones=zones) | st.sampled_from(
    (EARLIEST_TS, LATEST_TS, datetime(1970, 1, 1, tzinfo=UTC))
)
attribute_names = up_to(LONGEST_ATTRIBUTE_NAME_BYTES) | st.sampled_from(("realm", "topic", "traceparent", "id", "a"))
attributes = st.dictionaries(attribute_names, st.just("") | up_to(LONGEST_ATTRIBUTE_VALUE_BYTES), max_size=4)
attributes |= st.just({f"a{number}": str(number) for number in range(MOST_ATTRIBUTES)})
SOME_KEYS = ("k", "K", "cn=a,dc=b", "ä", "7")
keys = st.sampled_from(SOME_KEYS) | up_to(LONGEST_KEY_BYTES)
ids = up_to(LONGEST_ID_BYTES - 8).filter(lambda text: text == text.strip())


bodies = st.fixed_dictionaries({"old": objects, "new": objects}).filter(lambda body: body["old"] or body["new"])


def _event(required: Fields, given_fields: Fields) -> Fields:
    return {**required, **{name: value for name, value in given_fields.items() if value is not None}}


accepted = st.builds(
    _event,
    st.fixed_dictionaries(
        {
            "publisher_name": up_to(LONGEST_PUBLISHER_NAME_BYTES),
            "ts": moments.map(datetime.isoformat),
            "realm": up_to(LONGEST_REALM_BYTES),
            "topic": up_to(LONGEST_TOPIC_BYTES) | st.sampled_from(("users/user", "users/group")),
            "body": bodies,
        }
    ),
    st.fixed_dictionaries({"key": st.none() | keys, "attributes": st.none() | attributes, "id": st.none() | ids}),
)
"""Nearly all of these are within the limits."""

any_text = st.text(st.characters(codec=None), max_size=6)
any_text |= st.sampled_from(("x" * 300, "x" * 1100, "\ud800", "\n", "\x85"))
any_scalar = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | any_text
rubbish = st.recursive(
    any_scalar | st.sampled_from((10**400, -(10**310))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("publisher_name", "ts", "realm", "topic", "body", "key", "attributes", "id")


@st.composite
def anything(draw: st.DrawFn) -> Any:
    """Return events in which one or two fields are replaced by other values."""
    event = dict(draw(accepted))
    for name in draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=2)):
        match name:
            case "body" if draw(st.booleans()):
                event["body"] = {"new": {"id": 1, **draw(st.dictionaries(any_text, rubbish, min_size=1, max_size=2))}}
            case "attributes" if draw(st.booleans()):
                event["attributes"] = draw(st.dictionaries(any_text, any_text, min_size=1, max_size=2))
            case _:
                event[name] = draw(rubbish | any_text)
    return event


def drawn(strategy: st.SearchStrategy[T], count: int, number: int) -> list[T]:
    """Draw `count` examples, the same for the same seed."""
    found: list[T] = []

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    run: Callable[[], None] = collect
    run()
    return found
