"""Matches events with subscriptions: the rule `model.subscription.matches` in Spark SQL, for all events of a batch.

Dispatch, prefill, replay, catch-up and audit all use it. A table of routes has every exact topic, and every other topic
that was seen before (`add_known_topics`), with the subscriptions whose expressions match it. A topic on which the
expressions were not tried yet is `unseen`: it leads to every subscription that may get it, and Python decides which of
them do (see `expressions`). Java runs no expression.

Filters are evaluated only for events that a filtered subscription may get. Each attribute or field that any filter
names is a probe, extracted from the event once, however many subscriptions filter by it.

Events are rows, or come in topic batches: rows that hold many events of one topic, joined in `data`, with their end
offsets in `ends`. A topic batch is looked up once; only filters go through its events one by one.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import in_range
from purveyor.model.name_rules import is_exact
from purveyor.model.subscription import Filter, Scalar, Subscription
from purveyor.pipeline.expressions import MAX_KNOWN_TOPICS, Expressions, Pair, TargetTopics, TopicInterests, TopicMatch
from purveyor.spark.pyspark_internals import arrow_function

_MAX_LITERAL_ROUTES: Final = 64
_INT64_LIMIT: Final = 2**63
_SIDES: Final = ("new", "old")
_FILTERED: Final = (
    "array<struct<target: int, conditions: array<struct<probe: int, texts: array<string>, numbers: array<double>>>>>"
)
_ROUTE: Final = f"struct<plain: array<int>, filtered: {_FILTERED}, open: boolean>"
"""The targets of a topic. An open route lacks those whose expressions were not tried on the topic yet."""
_CONDITION_ARROW: Final = pa.struct(
    {"probe": pa.int32(), "texts": pa.list_(pa.string()), "numbers": pa.list_(pa.float64())}
)
_FILTERED_ARROW: Final = pa.struct({"target": pa.int32(), "conditions": pa.list_(_CONDITION_ARROW)})
_ROUTE_ARROW: Final = pa.struct(
    {"plain": pa.list_(pa.int32()), "filtered": pa.list_(_FILTERED_ARROW), "open": pa.bool_()}
)


@dataclass(frozen=True, slots=True)
class KnownTopics:
    """The results of trying expressions on topics: for each realm and topic the expressions that match it.

    All of `patterns` were tried on all of `topics` of the same realm.
    """

    patterns: frozenset[Pair] = frozenset()
    topics: Mapping[Pair, frozenset[str]] = field(default_factory=dict)

    def only(self, patterns: Iterable[Pair]) -> "KnownTopics":
        """Return what is known about these patterns. Topics of a realm that has a new pattern are forgotten."""
        wanted = frozenset(patterns)
        realms = {realm for realm, _ in wanted - self.patterns}
        return KnownTopics(wanted, {pair: found for pair, found in self.topics.items() if pair[0] not in realms})


def match_subscriptions(events: DataFrame, subscriptions: Sequence[Subscription]) -> DataFrame:
    """Return each event once for each subscription that gets it, with its name in the column `subscription`.

    The columns `realm` and `topic` (null if the message is not an event) and `data` (the body) of the events are used.

    >>> match_subscriptions(events(spark, archive, 1, 1000), [definition]).count()  # doctest: +SKIP
    """
    names = _literal([each.name for each in subscriptions], "array<string>")
    found = Matcher(subscriptions).add_targets(events).selectExpr("*", "explode(targets) as _target")
    return found.selectExpr("*", f"get({names}, _target) as subscription").drop("targets", "unseen", "_target")


class Matcher:
    """The routes and filters of a list of subscriptions. Targets are indices of that list."""

    def __init__(
        self,
        subscriptions: Sequence[Subscription],
        known_topics: KnownTopics | None = None,
        *,
        in_topic_batches: bool = False,
    ) -> None:
        self._in_topic_batches = in_topic_batches
        self.subscriptions = tuple(subscriptions)
        self._exact: dict[Pair, set[int]] = defaultdict(set)
        self._patterns: dict[Pair, set[int]] = defaultdict(set)
        for index, each in enumerate(self.subscriptions):
            for wanted in each.realms_topics:
                if not _is_utf8(wanted.realm + wanted.topic):
                    continue  # no event can have it, and Arrow cannot encode it
                kind = self._exact if is_exact(wanted.topic) else self._patterns
                kind[wanted.realm, wanted.topic].add(index)
        self.patterns: tuple[Pair, ...] = tuple(self._patterns)
        """Realms and expressions of the subscriptions, which Python tries on unseen topics."""
        self._realms = {realm for realm, _ in self.patterns}
        filters = [each.filter for each in self.subscriptions if each.filter]
        asked = {_Probe(name, False) for each in filters for name in each.attributes}
        asked |= {_Probe(path, True) for each in filters for path in each.fields}
        self._probes = {probe: number for number, probe in enumerate(sorted(asked))}
        self.known_topics = (known_topics or KnownTopics()).only(self.patterns)
        self._routes = {pair: self._route(pair) for pair in {*self._exact, *self.known_topics.topics}}
        self._matched: Column | None = None
        self._table: DataFrame | None = None

    @property
    def has_filters(self) -> bool:
        """Whether any subscription has a filter."""
        return bool(self._probes)

    @property
    def target_topics(self) -> tuple[TargetTopics, ...]:
        """The topics of each subscription, as far as Python decides about them."""
        numbers = {pattern: number for number, pattern in enumerate(self.patterns)}
        asked = [[(each.realm, each.topic) for each in one.realms_topics] for one in self.subscriptions]
        found = [tuple(sorted({numbers[pair] for pair in pairs if pair in numbers})) for pairs in asked]
        return tuple(
            TargetTopics(patterns, tuple(pair for pair in pairs if pair not in numbers)) if patterns else TargetTopics()
            for patterns, pairs in zip(found, asked, strict=True)
        )

    def add_known_topics(self, topics: Mapping[Pair, frozenset[str]]) -> None:
        """Add topics to the routes. For each realm and topic: the expressions of `patterns` that match it."""
        new = {pair: found for pair, found in topics.items() if pair[0] in self._realms}
        if new and len(self.known_topics.topics) < MAX_KNOWN_TOPICS:
            self.known_topics = KnownTopics(self.known_topics.patterns, {**self.known_topics.topics, **new})
            self._routes |= {pair: self._route(pair) for pair in new}
            self._matched = None

    def add_targets(self, events: DataFrame) -> DataFrame:
        """Add `targets`, the indices of the subscriptions that get the event, and `unseen` (expressions were tried)."""
        found = self.match(events, [F.col("*")]).select("*", "matched.*").drop("_route", "matched")
        if not self.patterns:
            return found
        decide = arrow_function(_TopicDecision(self.patterns, self.target_topics), "array<int>")
        return found.withColumn("targets", decide(*(F.col(name) for name in ("realm", "topic", "targets", "unseen"))))

    def match(self, events: DataFrame, columns: Sequence[Column]) -> DataFrame:
        """Return some columns of the events, and `matched`: a struct of `targets` and `unseen`.

        The `targets` of a topic batch get all of it. With filters there is `passing` too: for each event of a topic
        batch the targets whose filters it passes, or null. For an unseen topic the targets are those that may get it:
        the caller tries the expressions, as `add_targets` does.

        All in one step, with columns that are built once: every step costs a small batch some milliseconds.
        """
        if self._matched is None:
            few = len(self._routes) <= _MAX_LITERAL_ROUTES
            self._table = None if few else self._routes_table(events.sparkSession)
            self._matched = F.expr(self._all_targets(self._routes_literal() if few else "_route")).alias("matched")
        found = events if self._table is None else events.join(self._table, ["realm", "topic"], "left")
        return found.select(*columns, self._matched)

    def _route(self, pair: Pair) -> dict[str, Any]:
        """Return the route of a realm and topic, as far as it is known without trying expressions."""
        targets = set(self._exact.get(pair, ()))
        matching = self.known_topics.topics.get(pair)
        for expression in matching or ():
            targets |= self._patterns.get((pair[0], expression), set())
        return self._as_route(targets, is_open=matching is None and pair[0] in self._realms)

    def _as_route(self, targets: Iterable[int], *, is_open: bool) -> dict[str, Any]:
        plain, filtered = [], []
        for target in sorted(targets):
            conditions = self._conditions(self.subscriptions[target].filter)
            if conditions:
                filtered.append({"target": target, "conditions": conditions})
            else:
                plain.append(target)
        return {"plain": plain, "filtered": filtered, "open": is_open}

    def _conditions(self, wanted: Filter) -> list[dict[str, Any]]:
        """Return the conditions of a filter on the probes; all must hold."""
        asked: list[tuple[_Probe, Sequence[Scalar]]] = [
            *((_Probe(name, False), values) for name, values in wanted.attributes.items()),
            *((_Probe(path, True), values) for path, values in wanted.fields.items()),
        ]
        return [{"probe": self._probes[probe], **_condition_values(values)} for probe, values in asked]

    def _routes_literal(self) -> str:
        """Return a few routes as a literal.

        A join, however small, costs a micro-batch more than the rest of its plan.
        """
        routes = _literal({"\n".join(pair): route for pair, route in self._routes.items()}, f"map<string,{_ROUTE}>")
        return f"element_at({routes}, concat(realm, '\\n', topic))"

    def _routes_table(self, spark: SparkSession) -> DataFrame:
        columns = {
            "realm": pa.array([realm for realm, _ in self._routes], pa.string()),
            "topic": pa.array([topic for _, topic in self._routes], pa.string()),
            "_route": pa.array(list(self._routes.values()), _ROUTE_ARROW),
        }
        return F.broadcast(spark.createDataFrame(pa.table(columns)))

    def _all_targets(self, known: str) -> str:
        if not self._patterns and not self._probes:  # the usual plan is small, and fast to build
            return self._matched_as(f"{known}.plain", None, "false")
        filtered = self._filtered() if self._probes else None
        if not self._patterns:
            matched = _let("route", "known", self._matched_as("route.plain", filtered, "false"))
            return _let("known", known, matched)
        unseen = "coalesce(known.open, candidates is not null)"
        route = f"if({unseen}, {self._combined_route()}, known)"
        matched = _let("route", route, self._matched_as("route.plain", filtered, unseen))
        return _let("known", known, _let("candidates", self._candidates(), matched))

    def _matched_as(self, plain: str, filtered: str | None, unseen: str) -> str:
        """Return the struct that `match` adds. `filtered` is None if no subscription has a filter."""
        targets = f"coalesce({plain}, cast(array() as array<int>))"
        values = {"targets": targets, "unseen": unseen}
        if filtered is not None and self._in_topic_batches:
            values["passing"] = filtered
        elif filtered is not None:
            values["targets"] = f"coalesce(concat({plain}, {filtered}), {targets})"
        fields = ", ".join(f"'{name}', {value}" for name, value in values.items())
        return f"named_struct({fields})"

    def _filtered(self) -> str:
        """Return the targets whose filters an event passes, or a list of them for each event of a topic batch."""
        passing = _let("text", _TEXT_IN_BATCH if self._in_topic_batches else _TEXT, self._passing_filters())
        if self._in_topic_batches:
            passing = f"transform(ends, (end, place) -> {passing})"
        return f"if(size(route.filtered) > 0, {passing}, null)"

    def _candidates(self) -> str:
        """Return every subscription that has an expression for the realm of an event."""
        of_realm: dict[str, set[int]] = defaultdict(set)
        for (realm, _), targets in self._patterns.items():
            of_realm[realm] |= targets
        values = {realm: self._as_route(targets, is_open=True) for realm, targets in of_realm.items()}
        return f"element_at({_literal(values, f'map<string,{_ROUTE}>')}, realm)"

    def _combined_route(self) -> str:
        """Return the targets that are certain for the topic, and the candidates."""
        kinds = {"plain": "array<int>", "filtered": _FILTERED}
        parts = {
            name: [f"coalesce({each}.{name}, cast(array() as {kind}))" for each in ("known", "candidates")]
            for name, kind in kinds.items()
        }
        values = ", ".join(f"'{name}', array_distinct(concat({', '.join(both)}))" for name, both in parts.items())
        return f"named_struct({values}, 'open', true)"

    def _passing_filters(self) -> str:
        """Return the filtered targets of a route whose conditions hold."""
        values = [probe.to_json() for probe in self._probes]
        probes = _literal(values, "array<struct<attribute: string, paths: array<string>>>")
        found = _let("event", _EVENT, f"transform({probes}, probe -> {_FOUND})")
        holds = "arrays_overlap(value.texts, asked.texts) or arrays_overlap(value.numbers, asked.numbers)"
        holds = _let("value", "get(found, asked.probe)", holds)
        passing = f"filter(route.filtered, each -> forall(each.conditions, asked -> {holds}))"
        return _let("found", found, f"transform({passing}, each -> each.target)")


class _TopicDecision:
    """Removes the targets of unseen topics whose expressions do not match. Runs in workers."""

    def __init__(self, patterns: tuple[Pair, ...], target_topics: tuple[TargetTopics, ...]) -> None:
        self._expressions = Expressions(patterns)
        self._interests = TopicInterests(patterns, target_topics)

    def __call__(self, realms: Any, topics: Any, targets: Any, unseen: Any) -> Any:
        """Return the targets of each row of a batch."""
        places = np.flatnonzero(unseen.fill_null(False)).tolist()
        if not places:
            return targets
        found = targets.to_pylist()
        pairs = [(realms[at].as_py(), topics[at].as_py()) for at in places]
        refused = {
            pair: self._non_matching(pair, match) for pair, match in self._expressions.match_topics(pairs).items()
        }
        for at, pair in zip(places, pairs, strict=True):
            found[at] = [target for target in found[at] if target not in refused[pair]]
        return pa.array(found, pa.list_(pa.int32()))

    def _non_matching(self, pair: Pair, match: TopicMatch) -> frozenset[int]:
        for number in self._interests.undecided(pair, match).values():
            why = self._expressions.failures[number]
            raise InvalidInput(
                f"it cannot be decided which subscriptions get an event: {why}", fix="subscribe to topics by name"
            )
        return self._interests.non_matching(pair, match)


@dataclass(frozen=True, slots=True, order=True)
class _Probe:
    """Something that filters compare: an attribute, or the field at a path."""

    name: str
    is_field: bool

    def to_json(self) -> dict[str, Any]:
        """Return where to look: an attribute by name, a field on the side of its path, else in new, then in old."""
        if not self.is_field:
            return {"attribute": self.name, "paths": []}
        side, _, rest = self.name.partition(".")
        one_sided = side in _SIDES and rest
        places = [self.name] if one_sided else [f"{side}.{self.name}" for side in _SIDES]
        return {"paths": ["$.body" + "".join(f"['{name}']" for name in place.split(".")) for place in places]}


def _condition_values(values: Iterable[Scalar]) -> dict[str, list[Any]]:
    """Return wanted values as texts, prefixed by their type, and as numbers. Whole numbers below 2**63 are texts."""
    texts, numbers = [], []
    for value in values:
        if isinstance(value, bool):
            texts.append(f"b{str(value).lower()}")
        elif isinstance(value, str):
            texts.append(f"s{value}")
        elif abs(value) < _INT64_LIMIT and value == int(value):
            texts.append(f"i{int(value)}")
        elif in_range(value):  # no event has another one
            numbers.append(float(value))
    return {"texts": list(filter(_is_utf8, texts)), "numbers": numbers}


def _is_utf8(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8: half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _literal(value: object, kind: str) -> str:
    """Return a value as a literal of a plan.

    Quotes end a literal and dollars begin a variable, so both are escaped as JSON.
    """
    values = json.dumps(value).replace("'", "\\u0027").replace("$", "\\u0024")
    return f"from_json(r'{values}', '{kind}')"


def _let(name: str, value: str, result: str) -> str:
    """Return an expression in which a name stands for a value, which Spark then computes once and not at each use."""
    return f"get(transform(array({value}), {name} -> {result}), 0)"


# The values that a probe finds in an event, in the form of `_condition_values`. Numbers in JSON are BIGINT if they are
# whole and written so; a string, a list or an object is not a number, and null is no value.
_EVENT: Final = (
    "named_struct('body', try_parse_json(text), "
    "'attributes', from_json(text, 'attributes map<string,string>').attributes)"
)
_TEXT: Final = "cast(data as string)"
_TEXT_IN_BATCH: Final = _let(
    "begin", "coalesce(get(ends, place - 1), 0)", "cast(substring(data, begin + 1, end - begin) as string)"
)
_FIELD: Final = (
    "get(filter(transform(probe.paths, path -> try_variant_get(event.body, path, 'variant')), "
    "one -> one is not null and not is_variant_null(one)), 0)"
)
_NUMBER: Final = "schema_of_variant(one) = 'DOUBLE' or schema_of_variant(one) like 'DECIMAL%'"
_TYPED: Final = _let(
    "number",
    f"if({_NUMBER}, try_variant_get(one, '$', 'double'), null)",
    f"""named_struct(
        'text', case
            when schema_of_variant(one) = 'STRING' then concat('s', try_variant_get(one, '$', 'string'))
            when schema_of_variant(one) = 'BOOLEAN' then concat('b', try_variant_get(one, '$', 'string'))
            when schema_of_variant(one) = 'BIGINT' then concat('i', try_variant_get(one, '$', 'string'))
            when abs(number) < {_INT64_LIMIT}D and number = floor(number) then concat('i', cast(number as bigint)) end,
        'number', if(abs(number) < {_INT64_LIMIT}D and number = floor(number), null, number))""",
)
_VALUES: Final = f"transform(coalesce(try_variant_get(field, '$', 'array<variant>'), array(field)), one -> {_TYPED})"
_FOUND: Final = f"""if(probe.attribute is null,
    {
    _let(
        "values",
        _let("field", _FIELD, _VALUES),
        "named_struct('texts', array_compact(values.text), 'numbers', array_compact(values.number))",
    )
},
    named_struct('texts', array_compact(array(concat('s', element_at(event.attributes, probe.attribute)))),
        'numbers', cast(array() as array<double>)))"""
