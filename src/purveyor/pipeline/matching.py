"""Which subscriptions get an event: the rule `model.subscription.matches` in Spark SQL, for all events of a batch.

Dispatch, prefill, replay, catch-up and audit all decide by it. What a realm and topic lead to is looked up: the table
of routes knows every exact topic, and every other topic that was met before (`learn`), with the subscriptions whose
expressions match it. A topic on which the expressions were not tried yet is `unseen`: it leads to every subscription
that may get it, and Python decides which of them do (see `expressions`). Java runs no expression.

Filters are looked at only for events that some filtered subscription may get. Each attribute or field that any filter
names is a probe, taken out of the event once, however many subscriptions ask for it.

Events are rows, or lie in packs: rows that hold many events on one topic, side by side in `data`, with `ends` that tell
where each ends in it. A pack is looked up once; only filters go through its events one by one.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from purveyor.model.errors import InvalidInput
from purveyor.model.json_limits import in_range
from purveyor.model.subscription import Filter, Scalar, Subscription
from purveyor.model.topics import is_exact
from purveyor.pipeline.expressions import MOST_LEARNED, Choice, Expressions, Interests, Pair, Verdict
from purveyor.spark.map_in_arrow import arrow_function

_FEW_ROUTES: Final = 64
_LONG: Final = 2**63
_SIDES: Final = ("new", "old")
_FILTERED: Final = (
    "array<struct<target: int, conditions: array<struct<probe: int, texts: array<string>, numbers: array<double>>>>>"
)
_ROUTE: Final = f"struct<plain: array<int>, filtered: {_FILTERED}, open: boolean>"
"""Who gets events of a topic. An open one leaves out those whose expressions were not tried on it yet."""
_CONDITION_ARROW: Final = pa.struct(
    {"probe": pa.int32(), "texts": pa.list_(pa.string()), "numbers": pa.list_(pa.float64())}
)
_FILTERED_ARROW: Final = pa.struct({"target": pa.int32(), "conditions": pa.list_(_CONDITION_ARROW)})
_ROUTE_ARROW: Final = pa.struct(
    {"plain": pa.list_(pa.int32()), "filtered": pa.list_(_FILTERED_ARROW), "open": pa.bool_()}
)


@dataclass(frozen=True, slots=True)
class Learned:
    """What came of trying expressions on topics: to each realm and topic the expressions that match it.

    All of `patterns` were tried on all of `topics` that are of the same realm.
    """

    patterns: frozenset[Pair] = frozenset()
    topics: Mapping[Pair, frozenset[str]] = field(default_factory=dict)

    def only(self, patterns: Iterable[Pair]) -> "Learned":
        """What is known for sure of these patterns: topics of a realm that has a new pattern are forgotten."""
        wanted = frozenset(patterns)
        realms = {realm for realm, _ in wanted - self.patterns}
        return Learned(wanted, {pair: found for pair, found in self.topics.items() if pair[0] not in realms})


def deliveries(events: DataFrame, subscriptions: Sequence[Subscription]) -> DataFrame:
    """Each event once for each subscription that gets it, with the name of that in the column `subscription`.

    Of the events, `realm` and `topic` (null for what is no event) and `data` (the body) are looked at.

    >>> deliveries(events(spark, archive, 1, 1000), [definition]).count()  # doctest: +SKIP
    """
    names = _literal([each.name for each in subscriptions], "array<string>")
    found = Matcher(subscriptions).add_targets(events).selectExpr("*", "explode(targets) as _target")
    return found.selectExpr("*", f"get({names}, _target) as subscription").drop("targets", "unseen", "_target")


class Matcher:
    """What a list of subscriptions asks for. Those who get an event are told as indices of that list."""

    def __init__(
        self, subscriptions: Sequence[Subscription], learned: Learned | None = None, *, packed: bool = False
    ) -> None:
        self._packed = packed
        self.subscriptions = tuple(subscriptions)
        self._exact: dict[Pair, set[int]] = defaultdict(set)
        self._patterns: dict[Pair, set[int]] = defaultdict(set)
        for index, each in enumerate(self.subscriptions):
            for wanted in each.realms_topics:
                if not _is_text(wanted.realm + wanted.topic):
                    continue  # no event can have it, and Arrow could not carry it
                kind = self._exact if is_exact(wanted.topic) else self._patterns
                kind[wanted.realm, wanted.topic].add(index)
        self.patterns: tuple[Pair, ...] = tuple(self._patterns)
        """Realms and expressions that somebody asks for; what Python tries on topics that are unseen."""
        self._realms = {realm for realm, _ in self.patterns}
        filters = [each.filter for each in self.subscriptions if each.filter]
        asked = {_Probe(name, False) for each in filters for name in each.attributes}
        asked |= {_Probe(path, True) for each in filters for path in each.fields}
        self._probes = {probe: number for number, probe in enumerate(sorted(asked))}
        self.learned = (learned or Learned()).only(self.patterns)
        self._routes = {pair: self._route(pair) for pair in {*self._exact, *self.learned.topics}}
        self._matched: Column | None = None
        self._table: DataFrame | None = None

    @property
    def filters(self) -> bool:
        """Whether anybody filters."""
        return bool(self._probes)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What each subscription asks for, as far as Python decides it."""
        numbers = {pattern: number for number, pattern in enumerate(self.patterns)}
        asked = [[(each.realm, each.topic) for each in one.realms_topics] for one in self.subscriptions]
        found = [tuple(sorted({numbers[pair] for pair in pairs if pair in numbers})) for pairs in asked]
        return tuple(
            Choice(patterns, tuple(pair for pair in pairs if pair not in numbers)) if patterns else Choice()
            for patterns, pairs in zip(found, asked, strict=True)
        )

    def learn(self, topics: Mapping[Pair, frozenset[str]]) -> None:
        """Look these up from now on. To each realm and topic the expressions that match it, of all in `patterns`."""
        new = {pair: found for pair, found in topics.items() if pair[0] in self._realms}
        if new and len(self.learned.topics) < MOST_LEARNED:
            self.learned = Learned(self.learned.patterns, {**self.learned.topics, **new})
            self._routes |= {pair: self._route(pair) for pair in new}
            self._matched = None

    def add_targets(self, events: DataFrame) -> DataFrame:
        """The events with `targets`, the indices of those who get it, and `unseen`: not looked up, but tried."""
        found = self.match(events, [F.col("*")]).select("*", "matched.*").drop("_route", "matched")
        if not self.patterns:
            return found
        decide = arrow_function(_Decision(self.patterns, self.choices), "array<int>")
        return found.withColumn("targets", decide(*(F.col(name) for name in ("realm", "topic", "targets", "unseen"))))

    def match(self, events: DataFrame, columns: Sequence[Column]) -> DataFrame:
        """Some columns of the events, and `matched`: a struct of `targets` and `unseen`.

        Of a pack `targets` are those who get all of it; if somebody `filters` there is `passing` too, which has for
        each event of a pack those whose filters let it pass, or is null. The targets of what is unseen are those who
        may get it: the caller tries the expressions, as `add_targets` does.

        In one step, and with columns that are made once: every step costs a small batch some milliseconds.
        """
        if self._matched is None:
            few = len(self._routes) <= _FEW_ROUTES
            self._table = None if few else self._many(events.sparkSession)
            self._matched = F.expr(self._all_targets(self._few() if few else "_route")).alias("matched")
        found = events if self._table is None else events.join(self._table, ["realm", "topic"], "left")
        return found.select(*columns, self._matched)

    def _route(self, pair: Pair) -> dict[str, Any]:
        """Who gets events of a realm and topic, as far as it is known without trying."""
        targets = set(self._exact.get(pair, ()))
        matching = self.learned.topics.get(pair)
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
        """What a filter asks of the probes; all must hold."""
        asked: list[tuple[_Probe, Sequence[Scalar]]] = [
            *((_Probe(name, False), values) for name, values in wanted.attributes.items()),
            *((_Probe(path, True), values) for path, values in wanted.fields.items()),
        ]
        return [{"probe": self._probes[probe], **_told(values)} for probe, values in asked]

    def _few(self) -> str:
        """Few routes are a literal: a join, however small, costs a micro-batch more than all else in its plan."""
        routes = _literal({"\n".join(pair): route for pair, route in self._routes.items()}, f"map<string,{_ROUTE}>")
        return f"element_at({routes}, concat(realm, '\\n', topic))"

    def _many(self, spark: SparkSession) -> DataFrame:
        columns = {
            "realm": pa.array([realm for realm, _ in self._routes], pa.string()),
            "topic": pa.array([topic for _, topic in self._routes], pa.string()),
            "_route": pa.array(list(self._routes.values()), _ROUTE_ARROW),
        }
        return F.broadcast(spark.createDataFrame(pa.table(columns)))

    def _all_targets(self, known: str) -> str:
        if not self._patterns and not self._probes:  # the usual plan is small, and quickly made
            return self._matched_as(f"{known}.plain", None, "false")
        filtered = self._filtered() if self._probes else None
        if not self._patterns:
            matched = _let("route", "known", self._matched_as("route.plain", filtered, "false"))
            return _let("known", known, matched)
        unseen = "coalesce(known.open, candidates is not null)"
        route = f"if({unseen}, {self._together()}, known)"
        matched = _let("route", route, self._matched_as("route.plain", filtered, unseen))
        return _let("known", known, _let("candidates", self._candidates(), matched))

    def _matched_as(self, plain: str, filtered: str | None, unseen: str) -> str:
        """What `match` adds; without `filtered` nobody filters."""
        targets = f"coalesce({plain}, cast(array() as array<int>))"
        told = {"targets": targets, "unseen": unseen}
        if filtered is not None and self._packed:
            told["passing"] = filtered
        elif filtered is not None:
            told["targets"] = f"coalesce(concat({plain}, {filtered}), {targets})"
        fields = ", ".join(f"'{name}', {value}" for name, value in told.items())
        return f"named_struct({fields})"

    def _filtered(self) -> str:
        """Those of a route whose filters let an event pass, or a list of them for each event of a pack."""
        passing = _let("text", _TEXT_IN_PACK if self._packed else _TEXT, self._passing())
        if self._packed:
            passing = f"transform(ends, (end, place) -> {passing})"
        return f"if(size(route.filtered) > 0, {passing}, null)"

    def _candidates(self) -> str:
        """Everybody who has an expression for the realm of an event."""
        of_realm: dict[str, set[int]] = defaultdict(set)
        for (realm, _), targets in self._patterns.items():
            of_realm[realm] |= targets
        told = {realm: self._as_route(targets, is_open=True) for realm, targets in of_realm.items()}
        return f"element_at({_literal(told, f'map<string,{_ROUTE}>')}, realm)"

    def _together(self) -> str:
        """Those who get events of the topic for sure, and the candidates."""
        kinds = {"plain": "array<int>", "filtered": _FILTERED}
        parts = {
            name: [f"coalesce({each}.{name}, cast(array() as {kind}))" for each in ("known", "candidates")]
            for name, kind in kinds.items()
        }
        told = ", ".join(f"'{name}', array_distinct(concat({', '.join(both)}))" for name, both in parts.items())
        return f"named_struct({told}, 'open', true)"

    def _passing(self) -> str:
        """Of the filtered subscriptions of a route those whose conditions hold."""
        told = [probe.to_json() for probe in self._probes]
        probes = _literal(told, "array<struct<attribute: string, paths: array<string>>>")
        found = _let("event", _EVENT, f"transform({probes}, probe -> {_FOUND})")
        holds = "arrays_overlap(value.texts, asked.texts) or arrays_overlap(value.numbers, asked.numbers)"
        holds = _let("value", "get(found, asked.probe)", holds)
        passing = f"filter(route.filtered, each -> forall(each.conditions, asked -> {holds}))"
        return _let("found", found, f"transform({passing}, each -> each.target)")


class _Decision:
    """Takes out of the targets of unseen topics those that get nothing of them. Sent to workers."""

    def __init__(self, patterns: tuple[Pair, ...], choices: tuple[Choice, ...]) -> None:
        self._expressions = Expressions(patterns)
        self._interests = Interests(patterns, choices)

    def __call__(self, realms: Any, topics: Any, targets: Any, unseen: Any) -> Any:
        """Arrays of a batch; the targets of each row."""
        places = np.flatnonzero(unseen.fill_null(False)).tolist()
        if not places:
            return targets
        found = targets.to_pylist()
        pairs = [(realms[at].as_py(), topics[at].as_py()) for at in places]
        refused = {pair: self._refused(pair, verdict) for pair, verdict in self._expressions.verdicts(pairs).items()}
        for at, pair in zip(places, pairs, strict=True):
            found[at] = [target for target in found[at] if target not in refused[pair]]
        return pa.array(found, pa.list_(pa.int32()))

    def _refused(self, pair: Pair, verdict: Verdict) -> frozenset[int]:
        for number in self._interests.undecided(pair, verdict).values():
            why = self._expressions.failures[number]
            raise InvalidInput(f"it cannot be told who gets an event: {why}", fix="subscribe to topics by name")
        return self._interests.refused(pair, verdict)


@dataclass(frozen=True, slots=True, order=True)
class _Probe:
    """Something that filters ask for: an attribute, or the field at a path."""

    name: str
    is_field: bool

    def to_json(self) -> dict[str, Any]:
        """Where to look: an attribute by name, a field on the side that its path names, else in new, then in old."""
        if not self.is_field:
            return {"attribute": self.name, "paths": []}
        side, _, rest = self.name.partition(".")
        one_sided = side in _SIDES and rest
        places = [self.name] if one_sided else [f"{side}.{self.name}" for side in _SIDES]
        return {"paths": ["$.body" + "".join(f"['{name}']" for name in place.split(".")) for place in places]}


def _told(values: Iterable[Scalar]) -> dict[str, list[Any]]:
    """Wanted values as texts, marked by what they are, and numbers. A whole number that is not huge is a text."""
    texts, numbers = [], []
    for value in values:
        if isinstance(value, bool):
            texts.append(f"b{str(value).lower()}")
        elif isinstance(value, str):
            texts.append(f"s{value}")
        elif abs(value) < _LONG and value == int(value):
            texts.append(f"i{int(value)}")
        elif in_range(value):  # no event has another one
            numbers.append(float(value))
    return {"texts": list(filter(_is_text, texts)), "numbers": numbers}


def _is_text(text: str) -> bool:
    """Whether it has a form in UTF-8: half of a surrogate pair has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _literal(value: object, kind: str) -> str:
    """A value in a plan. Quotes end a literal and dollars begin a variable, so both are written as JSON can do it."""
    told = json.dumps(value).replace("'", "\\u0027").replace("$", "\\u0024")
    return f"from_json(r'{told}', '{kind}')"


def _let(name: str, value: str, result: str) -> str:
    """An expression in which a name stands for a value, which is then worked out once and not wherever it is used."""
    return f"get(transform(array({value}), {name} -> {result}), 0)"


# What a probe finds in an event, as `_told` tells what is wanted. Numbers in JSON are BIGINT where they are whole and
# written so; a string, a list or an object is no number, and null nothing at all.
_EVENT: Final = (
    "named_struct('body', try_parse_json(text), "
    "'attributes', from_json(text, 'attributes map<string,string>').attributes)"
)
_TEXT: Final = "cast(data as string)"
_TEXT_IN_PACK: Final = _let(
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
            when abs(number) < {_LONG}D and number = floor(number) then concat('i', cast(number as bigint)) end,
        'number', if(abs(number) < {_LONG}D and number = floor(number), null, number))""",
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
