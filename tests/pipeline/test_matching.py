"""Matching in Spark SQL agrees with the rule of the model, whatever is looked up, learned or tried."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from purveyor.model.event import Event
from purveyor.model.subscription import Filter, RealmTopic, Subscription, matches
from purveyor.pipeline import matching
from purveyor.pipeline.matching import Matcher, deliveries

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

few = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


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


@pytest.fixture(params=["literal", "join"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Few routes are a literal in the plan, many a table that is joined."""
    if request.param == "join":
        monkeypatch.setattr(matching, "_FEW_ROUTES", 0)
    return str(request.param)


@few
@given(events=events_of_all_kinds, subscriptions=subscriptions_of_all_kinds)
def test_sql_agrees_with_the_rule(
    spark: SparkSession, form: str, events: list[Event], subscriptions: list[Subscription]
) -> None:
    assert by_sql(deliveries(table(spark, events), subscriptions)) == by_rule(events, subscriptions)


@few
@given(events=events_of_all_kinds, subscriptions=subscriptions_of_all_kinds)
def test_what_was_learned_changes_nothing(
    spark: SparkSession, form: str, events: list[Event], subscriptions: list[Subscription]
) -> None:
    matcher = Matcher(subscriptions)
    matcher.learn({(event.realm, event.topic) for event in events[::2]})
    rows = matcher.add_targets(table(spark, events)).collect()
    found = {(row.position, subscriptions[target].name) for row in rows for target in row.targets}
    assert found == by_rule(events, subscriptions)
    learned = {(event.realm, event.topic) for event in events[::2]}
    assert not any(row.unseen for row in rows if (row.realm, row.topic) in learned)


@few
@given(events=events_of_all_kinds, subscriptions=subscriptions_of_all_kinds)
def test_packs_are_matched_as_their_events_are(
    spark: SparkSession, form: str, events: list[Event], subscriptions: list[Subscription]
) -> None:
    by_topic: dict[tuple[str, str], list[int]] = {}
    for position, event in enumerate(events):
        by_topic.setdefault((event.realm, event.topic), []).append(position)
    bodies = [[events[position].encode() for position in positions] for positions in by_topic.values()]
    packs = spark.createDataFrame(
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
    matcher = Matcher(subscriptions, packed=True)
    assert matcher.filters == any(each.filter for each in subscriptions)
    for row in matcher.match(packs, [packs["positions"]]).collect():
        passing = row.matched.passing if matcher.filters else None
        for place, position in enumerate(row.positions):
            targets = [*row.matched.targets, *(passing[place] if passing is not None else ())]
            found += [(position, subscriptions[target].name) for target in targets]
    assert len(found) == len(set(found))
    assert set(found) == by_rule(events, subscriptions)


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

    assert unseen() == [True, False, True]
    matcher.learn([("udm", "users/user"), ("udm", "other")])
    assert unseen() == [False, False, False]
    assert [row.targets for row in matcher.add_targets(events).orderBy("position").collect()] == [[0], [0], []]


def test_what_is_no_event_goes_to_nobody(spark: SparkSession) -> None:
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
