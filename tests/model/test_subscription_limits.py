"""The cost of an expression bounds what a backtracking matcher does with it, and what has no bound is refused."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from purveyor.model import subscription_limits
from purveyor.model.errors import InvalidInput
from purveyor.model.name_rules import check_topic
from purveyor.model.subscription import Filter, RealmTopic, Subscription
from purveyor.model.subscription_limits import (
    MAX_MATCHING_STEPS,
    check_subscription,
    check_topics,
    count_matching_steps,
)

ACCEPTED = [
    ".*",
    "users/.*",
    "users/(user|group)",
    "[a-z]+/user",
    "(groups|users)/.*",
    ".*user.*",
    ".*user.*admin.*",
    "^users/.+$",
    "(?!computers/).*",
    "[^/]+/[^/]+/[^/]+/[^/]+",
    r"\w+-\w+-\w+",
    "(a|b)?c(d|e)?",
    r"x{2}y{1,}z{0,3}?",
    "a|b|",
]
REFUSED = {
    "([a-z]+/)*user": "repeats a group by '*'",
    "(a+)+b": "repeats a group by '+'",
    "(a|b){2,}": "repeats a group by '{2,}'",
    "(?:ab){3}": "repeats a group by '{3}'",
    "(?=a)?b": "repeats a look-ahead",
    "(?!a)*b": "repeats a look-ahead",
    ".*.*.*b": "too many ways",
    ".*user.*admin.*root.*": "too many ways",
    ".*a.*b.*c": "too many ways",
    "[^.]+.[^.]+.[^.]+.": "too many ways",
    r"\D+\d\D+\d\D+\d": "too many ways",
    "[^a]+a?" * 3 + "x": "too many ways",
    "a?" * 30 + "a" * 30: "too many ways",
    "(a|a)" * 40: "too many ways",
    ".*(?=.*a.*b).*c": "too many ways",
    "[a-z]{0,999}[a-z]{0,999}[a-z]{0,999}x": "too many ways",
}


@pytest.mark.parametrize("expression", ACCEPTED)
def test_what_people_need_is_accepted(expression: str) -> None:
    check_topics([RealmTopic("r", expression)])


@pytest.mark.parametrize(("expression", "fault"), REFUSED.items())
def test_what_could_run_without_end_is_refused_with_the_fault_but_can_be_read(expression: str, fault: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(fault)) as error:
        check_topics([RealmTopic("r", expression)])
    assert error.value.fix
    read = Subscription.from_json({"name": "s", "realms_topics": [{"realm": "r", "topic": expression}]})
    assert read.realms_topics == (RealmTopic("r", expression),)


@pytest.mark.parametrize("realm", [".*", "u.*", "udm|shop", "[a-z]", "shop.+", "ud?m", "^udm$", r"u\dm", "u{2}"])
def test_a_realm_that_looks_like_an_expression_is_refused(realm: str) -> None:
    with pytest.raises(InvalidInput, match="a realm is exact"):
        check_topics([RealmTopic(realm, ".*")])


@pytest.mark.parametrize("realm", ["udm", "shop.example", "Shop (EU)", "c++", "größe"])
def test_a_realm_with_ordinary_punctuation_is_accepted(realm: str) -> None:
    check_topics([RealmTopic(realm, ".*")])


def test_many_expressions_count_together() -> None:
    check_topics([RealmTopic(f"r{number}", ".*a.*b") for number in range(2)])
    with pytest.raises(InvalidInput, match="together"):
        check_topics([RealmTopic(f"r{number}", ".*a.*b") for number in range(9)])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"realms_topics": (RealmTopic("r" * 257, "t"),)}, "realm is 257 bytes"),
        ({"realms_topics": (RealmTopic("r", "ü" * 513),)}, "topic is 1026 bytes"),
        ({"realms_topics": (RealmTopic("r\ud800", "t"),)}, "half"),
        ({"filter": Filter(attributes={"a" * 257: ("x",)})}, "attribute name"),
        ({"filter": Filter(attributes={"a": ("x\n",)})}, "control character"),
        ({"filter": Filter(fields={"a": (10**400,)})}, "number"),
        ({"filter": Filter(fields={"a": (float("nan"),)})}, "number"),
        ({"filter": Filter(fields={"a": ("\ud800",)})}, "half"),
        ({"filter": Filter(fields={"a": ("x" * (256 << 10),)})}, "bytes long"),
        ({"hidden_fields": ("\ud800",)}, "half"),
    ],
)
def test_what_no_part_could_match_is_refused(change: dict[str, object], fault: str) -> None:
    whole: dict[str, object] = {"name": "s", "realms_topics": (RealmTopic("r", "t"),)}
    check_subscription(Subscription(**whole))  # type: ignore[arg-type]  # named fields
    with pytest.raises(InvalidInput, match=fault):
        check_subscription(Subscription(**(whole | change)))  # type: ignore[arg-type]  # named fields


# A matcher that tries everything in order, as Java and Python do, and counts its steps.
Part = Callable[[int], Iterator[int]]
"""From a place in the topic to the places behind what it has read, in the order in which they are tried."""


@dataclass
class Run:
    topic: str
    steps: int = 0


@dataclass(frozen=True)
class Node:
    text: str
    part: Callable[[Run], Part]


def character(text: str) -> Node:
    known = re.compile(text, re.ASCII)

    def part(run: Run) -> Part:
        def read(at: int) -> Iterator[int]:
            run.steps += 1
            if at < len(run.topic) and known.match(run.topic[at]):
                yield at + 1

        return read

    return Node(text, part)


def repeated(inner: Node, bounds: tuple[int, int], lazy: bool) -> Node:
    least, most = bounds

    def part(run: Run) -> Part:
        one = inner.part(run)

        def read(at: int) -> Iterator[int]:
            places = [at]
            while len(places) <= most and (place := next(one(places[-1]), None)) is not None:
                places.append(place)
            for place in places[least:] if lazy else reversed(places[least:]):
                run.steps += 1
                yield place

        return read

    signs = {(0, 1000): "*", (1, 1000): "+", (0, 1): "?"}
    sign = signs.get((least, most), f"{{{least},{most}}}")
    return Node(f"{inner.text}{sign}{'?' if lazy else ''}", part)


def sequence(nodes: list[Node]) -> Node:
    def part(run: Run) -> Part:
        parts = [node.part(run) for node in nodes]

        def read(at: int, first: int = 0) -> Iterator[int]:
            if first == len(parts):
                yield at
                return
            for place in parts[first](at):
                yield from read(place, first + 1)

        return read

    return Node("".join(node.text for node in nodes), part)


def either(nodes: list[Node], sign: str) -> Node:
    def part(run: Run) -> Part:
        parts = [node.part(run) for node in nodes]

        def read(at: int) -> Iterator[int]:
            for each in parts:
                yield from each(at)
            if sign == "?":
                yield at

        return read

    return Node(f"(?:{'|'.join(node.text for node in nodes)}){sign}", part)


def ahead(inner: Node, wanted: bool) -> Node:
    def part(run: Run) -> Part:
        look = inner.part(run)

        def read(at: int) -> Iterator[int]:
            if (next(look(at), None) is not None) == wanted:
                yield at

        return read

    return Node(f"(?{'=' if wanted else '!'}{inner.text})", part)


characters = st.sampled_from(["a", "b", "/", r"\.", ".", "[ab]", "[^/]", r"\w", r"\D", "[^a]"]).map(character)
repeats = st.builds(
    repeated,
    characters,
    st.sampled_from([(0, 1000), (1, 1000), (0, 1), (2, 2), (1, 4)]),
    st.booleans(),
)
nodes = st.recursive(
    characters | repeats,
    lambda inner: (
        st.builds(
            either,
            st.lists(st.lists(inner, max_size=3).map(sequence), min_size=1, max_size=3),
            st.sampled_from(["", "?"]),
        )
        | st.builds(ahead, st.lists(inner, min_size=1, max_size=2).map(sequence), st.booleans())
    ),
    max_leaves=6,
)
expressions = st.lists(nodes, min_size=1, max_size=5).map(sequence)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much], deadline=None)
@given(
    expression=expressions,
    unit=st.text("ab/.", min_size=1, max_size=4),
    end=st.text("ab/x", max_size=2),
)
def test_no_topic_takes_more_steps_than_the_cost(
    monkeypatch: pytest.MonkeyPatch, expression: Node, unit: str, end: str
) -> None:
    longest = 20
    monkeypatch.setattr(subscription_limits, "LONGEST_TOPIC_BYTES", longest)
    text = expression.text
    check_topic(text)
    bound = count_matching_steps(text)
    assume(bound <= 100_000)
    topic = ((unit * longest)[: longest - len(end)] + end)[:longest]
    run = Run(topic)
    whole = expression.part(run)
    found = any(place == len(topic) for place in whole(0))
    assert found == (re.fullmatch(text, topic, re.ASCII) is not None)
    assert run.steps <= bound + 2 * longest + 2, text  # a `.*` at the end reads the rest of the topic once


def test_the_limit_is_between_two_and_three_open_repetitions() -> None:
    assert count_matching_steps(".*a.*b") < MAX_MATCHING_STEPS < count_matching_steps(".*a.*b.*c")
