"""An expression runs for a limited time, and affects only its own subscription."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from purveyor.model.errors import SetupError
from purveyor.pipeline.expressions import Expressions, TopicMatch


def test_patterns_are_tried_on_topics_of_their_realm() -> None:
    expressions = Expressions([("udm", "users/.*"), ("udm", ".*"), ("shop", ".*")])
    assert expressions.match_topics([("udm", "users/user"), ("udm", "x"), ("none", "x")]) == {
        ("udm", "users/user"): TopicMatch(frozenset({0, 1})),
        ("udm", "x"): TopicMatch(frozenset({1})),
        ("none", "x"): TopicMatch(frozenset()),
    }
    assert not expressions.failures


def test_a_match_that_takes_too_long_is_ended_and_reported() -> None:
    expressions = Expressions([("udm", "(a+)+b"), ("udm", "a*")], limit_seconds=0.2)
    topic = "a" * 64
    assert expressions.match_topics([("udm", topic)]) == {("udm", topic): TopicMatch(frozenset({1}), frozenset({0}))}
    assert expressions.failures == {0: f"the expression '(a+)+b' takes more than 0.2 s on the topic {topic!r}"}
    # It came to no result once, so it is not tried again, and the other topics are no result for it either.
    assert expressions.match_topics([("udm", "ab")])["udm", "ab"] == TopicMatch(frozenset(), frozenset({0}))


def test_a_long_topic_and_a_repeated_group_are_no_matter() -> None:
    topic = "a/" * 100_000 + "user"
    assert Expressions([("udm", "([a-z]+/)*user")]).match_topics([("udm", topic)]) == {
        ("udm", topic): TopicMatch(frozenset({0}))
    }


def test_no_thread_tries_without_a_limit() -> None:
    """Only the main thread gets the signal of the timer: elsewhere a match could last for ever."""
    expressions = Expressions([("r", "(a+)+b")])
    with ThreadPoolExecutor(1) as pool, pytest.raises(SetupError, match="main thread"):
        pool.submit(expressions.match_topics, [("r", "ab")]).result()
    assert expressions.match_topics([("r", "ab")]) == {("r", "ab"): TopicMatch(frozenset({0}))}
