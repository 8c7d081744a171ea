"""Matching in Spark SQL agrees with the rule of the model, for topics that are looked up, remembered or tried."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from purveyor.model.errors import InvalidInput
from purveyor.model.event import Event, encode_checked
from purveyor.model.subscription import Filter, RealmTopic, Subscription, matches
from purveyor.model.subscription_limits import check_topics
from purveyor.pipeline import matching
from purveyor.pipeline.expressions import Expressions, TopicInterests
from purveyor.pipeline.job_failures import explain
from purveyor.pipeline.matching import Matcher, match_subscriptions
from tests.support.scale import chance, pick

REALMS = ("udm", "shop")
TOPICS = ("users/user", "users/", "groups/group", "groups", "a.b", "aXb", "ünï/ö", "mail\u00a0box")
EXPRESSIONS = (
    "users/.*",
    "groups/[a-z]+",
    ".*",
    "a.b",
    r"a\.b",
    "(users|groups)/.+",
    r"\w+",
    r"\S+/\S*",
    "users/(?!u).*",
)
SCALARS = (
    "x", "", "1", "true", "ä\"'\\", 0, 1, -1, 2**53 + 1, 2**62, 1.0, 1.5, -0.25, 1e2, 1e17, 1e300, 0.1, True, False
)  # fmt: skip
VALUES: tuple[Any, ...] = (*SCALARS, None, [], ["x", 1], [None, True], [["x"]], {"b": "x"}, {"b": {"c": 1.0}}, {})

pairs = st.builds(RealmTopic, st.sampled_from(REALMS), st.sampled_from(TOPICS[:5] + EXPRESSIONS))
objects = st.dictionaries(st.sampled_from(("a", "d-e", "ß", "new")), st.sampled_from(VALUES), max_size=3)
filters = st.builds(
    Filter,
    attributes=st.dictionaries(
        st.sampled_from(("lang", "x'\"\\ y")),
        st.lists(st.sampled_from(("x", "", "1")), min_size=1).map(tuple),
        max_size=2,
    ),
    fields=st.dictionaries(
        st.sampled_from(("a", "a.b", "a.b.c", "new.a", "old.a", "d-e", "ß", "new.new")),
        st.lists(st.sampled_from(SCALARS), min_size=1, max_size=4).map(tuple),
        max_size=2,
    ),
)
subscriptions_of_all_kinds = st.lists(
    st.tuples(st.lists(pairs, min_size=1, max_size=3), st.just(Filter()) | filters), min_size=1, max_size=25
).map(
    lambda given: [
        Subscription(name=f"s{number}", realms_topics=tuple(topics), filter=wanted)
        for number, (topics, wanted) in enumerate(given)
    ]
)
events_of_all_kinds = st.lists(
    st.builds(
        Event,
        publisher_name=st.just("test"),
        ts=st.just(datetime(2026, 1, 1, tzinfo=UTC)),
        realm=st.sampled_from(REALMS),
        topic=st.sampled_from(TOPICS),
        old=objects,
        new=objects,
        attributes=st.dictionaries(st.sampled_from(("lang", "x'\"\\ y")), st.sampled_from(("x", "", "1"))),
    ),
    min_size=1,
    max_size=25,
)

few = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])


def table(spark: SparkSession, events: Sequence[Event]) -> DataFrame:
    return spark.createDataFrame(
        pa.table(
            {
                "position": pa.array(range(len(events)), pa.int64()),
                "realm": [event.realm for event in events],
                "topic": [event.topic for event in events],
                "data": pa.array([event.encode() for event in events], pa.binary()),
            }
        )
    )


def by_rule(events: Sequence[Event], subscriptions: Sequence[Subscription]) -> set[tuple[int, str]]:
    return {
        (position, each.name) for position, event in enumerate(events) for each in subscriptions if matches(each, event)
    }


def by_sql(found: DataFrame) -> set[tuple[int, str]]:
    rows = [(row.position, row.subscription) for row in found.select("position", "subscription").collect()]
    assert len(rows) == len(set(rows)), "a subscription gets an event once, by however many of its topics"
    return set(rows)


def add_known_topics(matcher: Matcher, pairs: Iterable[tuple[str, str]]) -> None:
    """As dispatch does it: what the expressions say of topics is found in Python, and looked up from then on."""
    match_topics = Expressions(matcher.patterns).match_topics(pairs)
    matcher.add_known_topics(
        {
            pair: frozenset(matcher.patterns[number][1] for number in each.matching)
            for pair, each in match_topics.items()
        }
    )


@pytest.fixture(params=["literal", "join"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Few routes are a literal in the plan, many a table that is joined."""
    if request.param == "join":
        monkeypatch.setattr(matching, "_MAX_LITERAL_ROUTES", 0)
    return str(request.param)


@few
@given(events=events_of_all_kinds, subscriptions=subscriptions_of_all_kinds)
def test_sql_agrees_with_the_rule(
    spark: SparkSession, form: str, events: list[Event], subscriptions: list[Subscription]
) -> None:
    assert by_sql(match_subscriptions(table(spark, events), subscriptions)) == by_rule(events, subscriptions)


@few
@given(events=events_of_all_kinds, subscriptions=subscriptions_of_all_kinds)
def test_what_was_learned_changes_nothing(
    spark: SparkSession, form: str, events: list[Event], subscriptions: list[Subscription]
) -> None:
    matcher = Matcher(subscriptions)
    add_known_topics(matcher, {(event.realm, event.topic) for event in events[::2]})
    rows = matcher.add_targets(table(spark, events)).collect()
    found = {(row.position, subscriptions[target].name) for row in rows for target in row.targets}
    assert found == by_rule(events, subscriptions)
    known_topics = {(event.realm, event.topic) for event in events[::2]}
    assert not any(row.unseen for row in rows if (row.realm, row.topic) in known_topics)


@few
@given(events=events_of_all_kinds, subscriptions=subscriptions_of_all_kinds)
def test_topic_batches_are_matched_as_their_events_are(
    spark: SparkSession, form: str, events: list[Event], subscriptions: list[Subscription]
) -> None:
    by_topic: dict[tuple[str, str], list[int]] = {}
    for position, event in enumerate(events):
        by_topic.setdefault((event.realm, event.topic), []).append(position)
    bodies = [[events[position].encode() for position in positions] for positions in by_topic.values()]
    batches = spark.createDataFrame(
        pa.table(
            {
                "realm": [realm for realm, _ in by_topic],
                "topic": [topic for _, topic in by_topic],
                "positions": pa.array(list(by_topic.values()), pa.list_(pa.int64())),
                "ends": pa.array([np.cumsum(list(map(len, each))).tolist() for each in bodies], pa.list_(pa.int32())),
                "data": pa.array([b"".join(each) for each in bodies], pa.binary()),
            }
        )
    )
    found = []
    matcher = Matcher(subscriptions, in_topic_batches=True)
    expressions, interests = Expressions(matcher.patterns), TopicInterests(matcher.patterns, matcher.target_topics)
    assert matcher.has_filters == any(each.filter for each in subscriptions)
    for row in matcher.match(batches, [batches[name] for name in ("positions", "realm", "topic")]).collect():
        passing = row.matched.passing if matcher.has_filters else None
        pair = (row.realm, row.topic)
        refused = (
            interests.non_matching(pair, expressions.match_topics([pair])[pair]) if row.matched.unseen else frozenset()
        )
        for place, position in enumerate(row.positions):
            targets = [*row.matched.targets, *(passing[place] if passing is not None else ())]
            found += [(position, subscriptions[target].name) for target in targets if target not in refused]
    assert len(found) == len(set(found))
    assert set(found) == by_rule(events, subscriptions)


LONGEST = 1024
HARD = (
    ".*.*b",
    ".*a.*b",
    ".*user.*admin.*",
    "[ab/]*a[ab/]*b",
    "a.*(b|c)?.*e",
    ".{0,999}?.{0,999}?x",
    "(?!.*x.*y).*z",
    "[^/]+/[^/]+/[^/]+/.*",
    "((((((((a|b)?c)?d)?e)?f)?g)?h)?i)?.*z",
    "(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)(a|a)b",
    "(" * 200 + "a.*" + ")" * 200,
    ".*(a|" + "a|" * 60 + "b)z",
    "a?" * 9 + "a*z",
)
"""Expressions that make a matcher try everything."""
LONG_TOPICS = (
    "a" * LONGEST,
    "a" * (LONGEST - 1) + "b",
    "ab/" * 341,
    "useradmin/" * 102,
    "\U0001f986" * 256,
    "a\U0001f986" * 204,
    "ü" * 512,
    "abcdefghi" * 113,
    ("x" * 30 + "y/") * 32,
)


@pytest.mark.chaos
def test_an_accepted_expression_matches_the_longest_topics_in_java_as_in_python(spark: SparkSession) -> None:
    """Every one ends: no stack overflows, and none takes more steps than its cost."""
    random = chance("expressions")
    for expression in HARD:
        check_topics([RealmTopic("r", expression)])
    accepted = [*HARD, *filter(is_accepted, (random_expression(random) for _ in range(pick(25, 1000))))]
    subscriptions = [
        Subscription(name=f"s{number}", realms_topics=(RealmTopic("r", expression),))
        for number, expression in enumerate(accepted)
    ]
    about: dict[str, Any] = {"publisher_name": "t", "ts": datetime(2026, 1, 1, tzinfo=UTC), "realm": "r"}
    events = [Event(topic=topic, new={"id": 1}, **about) for topic in LONG_TOPICS]
    assert all(LONGEST - 10 < len(topic.encode()) <= LONGEST for topic in LONG_TOPICS)
    for event in events:
        encode_checked(event)
    assert by_sql(match_subscriptions(table(spark, events), subscriptions)) == by_rule(events, subscriptions)


def is_accepted(expression: str) -> bool:
    try:
        check_topics([RealmTopic("r", expression)])
    except InvalidInput:
        return False
    return True


def random_expression(random: Random) -> str:
    """Anything that the grammar takes."""

    def sequence(depth: int) -> str:
        return "".join(part(depth) for _ in range(random.randint(1, 4)))

    def part(depth: int) -> str:
        if depth < 4 and random.random() < 0.3:
            inner = "|".join(sequence(depth + 1) for _ in range(random.randint(1, 3)))
            return f"({random.choice(['', '?:', '?!', '?='])}{inner})" + random.choice(["", "?"] if depth else [""])
        atom = random.choice(["a", "b", "/", ".", "[a-z]", "[^/]", r"\w", r"\S", "ü", "\U0001f986", "[^a]"])
        return atom + random.choice(["", "", "", "*", "+", "?", "*?", "{2}", "{0,9}", "{3,}"])

    return sequence(0)


def test_a_definition_that_no_event_can_match_stops_no_other_subscription(spark: SparkSession, form: str) -> None:
    """Such as an older version may have stored."""
    unfit = Subscription(
        name="unfit",
        realms_topics=(RealmTopic("udm\ud800", "users/user"), RealmTopic("udm", ".*\ud800"), RealmTopic("udm", "a.b")),
        filter=Filter(fields={"a": (10**400, "\ud800", "x")}),
    )
    good = Subscription(name="good", realms_topics=(RealmTopic("udm", ".*"),))
    about: dict[str, Any] = {"publisher_name": "t", "ts": datetime(2026, 1, 1, tzinfo=UTC), "realm": "udm"}
    events = [
        Event(topic=topic, new={"id": 1, "a": value}, **about) for topic in ("users/user", "aXb") for value in "xy?"
    ]
    expected = {(position, "good") for position in range(6)} | {(3, "unfit")}
    assert (
        by_sql(match_subscriptions(table(spark, events), [unfit, good])) == expected == by_rule(events, [unfit, good])
    )


def test_a_topic_is_unseen_until_it_is_learned(spark: SparkSession) -> None:
    wanted = Subscription(name="s", realms_topics=(RealmTopic("udm", "users/.*"), RealmTopic("udm", "groups/group")))
    matcher = Matcher([wanted])
    event: dict[str, Any] = {
        "publisher_name": "t",
        "ts": datetime(2026, 1, 1, tzinfo=UTC),
        "realm": "udm",
        "new": {"id": 1},
    }
    events = table(spark, [Event(topic=topic, **event) for topic in ("users/user", "groups/group", "other")])

    def unseen() -> list[bool]:
        return [row.unseen for row in sorted(matcher.add_targets(events).collect(), key=lambda row: row.position)]

    assert unseen() == [True, True, True]  # also one that is named exactly, as long as an expression may match it too
    add_known_topics(matcher, [("udm", "users/user"), ("udm", "other"), ("udm", "groups/group")])
    assert unseen() == [False, False, False]
    assert [row.targets for row in matcher.add_targets(events).orderBy("position").collect()] == [[0], [0], []]


def test_an_expression_that_never_ends_ends_a_prefill_with_its_reason(spark: SparkSession) -> None:
    """Prefill, replay and audit match one by one: Spark runs that in a thread of a worker that gets the signal."""
    slow = Subscription(name="slow", realms_topics=(RealmTopic("udm", "(a+)+b"),))
    event = Event(publisher_name="test", ts=datetime(2026, 1, 1, tzinfo=UTC), realm="udm", topic="a" * 64, new={})
    with pytest.raises(Exception, match="takes more than 1 s on the topic 'aaaa") as failed:
        match_subscriptions(table(spark, [event]), [slow]).count()
    assert explain(failed.value).permanent


def test_a_message_that_is_not_an_event_has_no_targets(spark: SparkSession) -> None:
    frame = spark.createDataFrame(
        pa.table(
            {
                "realm": pa.array([None, None], pa.string()),
                "topic": pa.array([None, None], pa.string()),
                "data": pa.array([b"not JSON", json.dumps({"a": 1}).encode()], pa.binary()),
            }
        )
    )
    wanted = Subscription(
        name="s", realms_topics=(RealmTopic("udm", ".*"),), filter=Filter(fields={"a": (1,)}, attributes={"b": ("c",)})
    )
    [first, second] = Matcher([wanted]).add_targets(frame).collect()
    assert first.targets == second.targets == []
    assert not first.unseen
    assert not second.unseen
