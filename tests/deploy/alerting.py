"""Evaluate alert rules over invented series, as `promtool test rules` does: the part of PromQL that our rules use.

The grammar is that of Prometheus (`promql-parser`); what it means is written here. A rule that uses more of the
language fails with `no rule for ...`, and this module learns it then. The format of the cases is promtool's own, so
that a machine with Prometheus runs the same file: `promtool test rules alerts.yml`, beside a copy of rules.yml.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import promql_parser as promql
import yaml  # type: ignore[import-untyped]  # it ships no types
from prometheus_client.parser import text_string_to_metric_families

from tests.support.deployment import DEPLOY

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
LOOKBACK_SECONDS = 300.0
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
}
_COMPUTE: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
_TOGETHER: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "sum": sum}
_RUN = re.compile(r"(_|-?[0-9.]+)(?:([+-][0-9.]+)?x([0-9]+))?$")
_PLACE = re.compile(r"\{\{\s*(\S+?)\s*(?:\|\s*(.+?)\s*)?\}\}")


@dataclass(frozen=True)
class Series:
    """A metric with its labels, and its samples by second."""

    name: str
    labels: Labels
    samples: tuple[tuple[float, float], ...]

    def between(self, after: float, until: float) -> list[tuple[float, float]]:
        return [(at, value) for at, value in self.samples if after < at <= until]


@dataclass(frozen=True)
class Alert:
    """An alert that fires."""

    labels: Labels
    annotations: Labels


def seconds(text: str) -> float:
    """Parse a duration in the syntax of Prometheus."""
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(float(count) * units[unit] for count, unit in re.findall(r"([0-9]+)(ms|s|m|h|d)", text))


def read_series(given: dict[str, str], interval: float) -> Series:
    """Parse a series of a case: `values` are numbers, gaps (`_`) and runs (`5+0x3` is four times 5)."""
    selector = promql.parse(given["series"])
    assert isinstance(selector, promql.VectorSelector)
    assert selector.name is not None
    values: list[float | None] = []
    for word in given["values"].split():
        match = _RUN.match(word)
        assert match, f"no rule for {word!r}"
        begin, step, count = match[1], float(match[2] or 0), int(match[3] or 0)
        if begin == "_":
            values += [None] * max(1, count)
        else:
            values += [float(begin) + step * number for number in range(count + 1)]
    samples = tuple((number * interval, value) for number, value in enumerate(values) if value is not None)
    labels = frozenset((each.name, each.value) for each in selector.matchers.matchers)
    return Series(selector.name, labels, samples)


def scraped(pages: Iterable[str], every_seconds: float, *, growing: frozenset[str] = frozenset()) -> list[Series]:
    """Return the series of pages that were scraped one after another, as if `every_seconds` had lain between them.

    The metrics in `growing` are ages: each page adds that time to them.
    """
    found: dict[tuple[str, Labels], list[tuple[float, float]]] = {}
    for number, page in enumerate(pages):
        at = number * every_seconds
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                value = sample.value + (at if sample.name in growing and sample.value else 0)
                found.setdefault((sample.name, frozenset(sample.labels.items())), []).append((at, value))
    return [Series(name, labels, tuple(samples)) for (name, labels), samples in found.items()]


class Store:
    """The series of a case, on which queries run."""

    def __init__(self, series: list[Series]) -> None:
        self._series = series

    def ask(self, node: promql.Expr, at: float) -> Vector | float:
        """Evaluate a query at a time: a vector or a number."""
        match node:
            case promql.NumberLiteral():
                return node.val
            case promql.ParenExpr():
                return self.ask(node.expr, at)
            case promql.VectorSelector():
                now = at - (node.offset.total_seconds() if node.offset is not None else 0)
                found = {each.labels: each.between(now - LOOKBACK_SECONDS, now) for each in self._matching(node)}
                return {labels: samples[-1][1] for labels, samples in found.items() if samples}
            case promql.Call() if node.func.name in ("rate", "increase"):
                return self._growth(node, at)
            case promql.AggregateExpr():
                return self._together(node, at)
            case promql.BinaryExpr():
                assert node.modifier is None or node.modifier.matching is None, f"no rule for the modifier of {node}"
                return _both(str(node.op), self.ask(node.lhs, at), self.ask(node.rhs, at))
            case _:
                raise AssertionError(f"no rule for {type(node).__name__}: {node}")

    def _matching(self, selector: promql.VectorSelector) -> Iterator[Series]:
        for each in self._series:
            labels = dict(each.labels)
            if each.name == selector.name and all(_fits(m, labels) for m in selector.matchers.matchers):
                yield each

    def _growth(self, node: promql.Call, at: float) -> Vector:
        (given,) = node.args
        assert isinstance(given, promql.MatrixSelector)
        length = given.range.total_seconds()
        found = {}
        for each in self._matching(given.vector_selector):
            grown = _extrapolated(each.between(at - length, at), at - length, at)
            if grown is not None:
                found[each.labels] = grown / (length if node.func.name == "rate" else 1)
        return found

    def _together(self, node: promql.AggregateExpr, at: float) -> Vector:
        modifier = node.modifier
        assert modifier is not None
        assert modifier.type == promql.AggModifierType.By
        inner = self.ask(node.expr, at)
        assert isinstance(inner, dict)
        groups: dict[Labels, list[float]] = {}
        for labels, value in inner.items():
            kept = frozenset((name, text) for name, text in labels if name in modifier.labels)
            groups.setdefault(kept, []).append(value)
        return {labels: _TOGETHER[str(node.op)](values) for labels, values in groups.items()}


def _fits(matcher: promql.Matcher, labels: dict[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    if matcher.op in (promql.MatchOp.Re, promql.MatchOp.NotRe):
        same = re.fullmatch(matcher.value, value) is not None
    else:
        same = value == matcher.value
    return same is (matcher.op in (promql.MatchOp.Re, promql.MatchOp.Equal))


def _extrapolated(samples: list[tuple[float, float]], begin: float, end: float) -> float | None:
    """Return the increase of a counter in a range, extrapolated to its ends as Prometheus does."""
    if len(samples) < 2:
        return None
    (first_at, first), (last_at, _) = samples[0], samples[-1]
    steps = [(before[1], after[1]) for before, after in pairwise(samples)]
    grown = sum(after - before if after >= before else after for before, after in steps)  # less: the counter was reset
    known = last_at - first_at
    average = known / (len(samples) - 1)
    before_first, after_last = first_at - begin, end - last_at
    if grown > 0 and first >= 0:
        before_first = min(before_first, known * first / grown)  # it was never below zero
    covered = known + sum(gap if gap < 1.1 * average else average / 2 for gap in (before_first, after_last))
    return grown * covered / known


def _both(word: str, left: Vector | float, right: Vector | float) -> Vector | float:
    """Apply an operator to two results. A comparison keeps the left values for which it is true."""
    if word == "or":
        assert isinstance(left, dict)
        assert isinstance(right, dict)
        return {**right, **left}
    if word == "unless":
        assert isinstance(left, dict)
        assert isinstance(right, dict)
        return {labels: value for labels, value in left.items() if labels not in right}
    if isinstance(left, float | int) and isinstance(right, float | int):
        return _COMPUTE[word](left, right)
    if isinstance(left, float | int):
        assert isinstance(right, dict)
        pairs = {labels: (left, value) for labels, value in right.items()}
    elif isinstance(right, float | int):
        pairs = {labels: (value, right) for labels, value in left.items()}
    else:
        pairs = {labels: (left[labels], right[labels]) for labels in left.keys() & right.keys()}
    if word in _COMPARE:
        return {labels: a for labels, (a, b) in pairs.items() if _COMPARE[word](a, b)}
    return {labels: _COMPUTE[word](a, b) for labels, (a, b) in pairs.items()}


def firing(rule: dict[str, Any], store: Store, at: float, every: float) -> list[Alert]:
    """Return the alerts of a rule that fire at a time; evaluate it at regular times from the start."""
    query, patience = promql.parse(rule["expr"]), seconds(rule.get("for", "0s"))
    since: dict[Labels, float] = {}
    active: Vector = {}
    for number in range(int(at // every) + 1):
        now = number * every
        found = store.ask(query, now)
        assert isinstance(found, dict)
        active = found
        since = {labels: since.get(labels, now) for labels in active}
    fired = [(labels, value) for labels, value in active.items() if at - since[labels] >= patience]
    return [
        Alert(
            frozenset({**dict(labels), **rule["labels"]}.items()),
            frozenset((name, _fill(text, dict(labels), value)) for name, text in rule["annotations"].items()),
        )
        for labels, value in fired
    ]


def fired(pages: Sequence[str], *, growing: frozenset[str] = frozenset(), minutes: int = 60) -> set[str]:
    """Return the shipped alerts that come if a system stays for some time as it was in these scrapes.

    `growing`: see `scraped`. The pages are repeated; a counter grows in each repetition as it did in the first, unless
    it began again between the pages, as when a process restarts.
    """
    repeated = [pages[number % len(pages)] for number in range(minutes)]
    store = Store([_continued(each, 60.0 * len(pages)) for each in scraped(repeated, 60.0, growing=growing)])
    times = [60.0 * minutes * share for share in (0.25, 0.5, 0.99)]
    return {rule["alert"] for rule in shipped_rules() for at in times if firing(rule, store, at, 60.0)}


def _continued(series: Series, repeat_seconds: float) -> Series:
    """Let a counter whose samples repeat after some time grow on, instead of beginning again each time."""
    first = [value for at, value in series.samples if at < repeat_seconds]
    is_counter = series.name.endswith(("_total", "_count", "_sum", "_bucket"))
    grown = first[-1] - first[0] if is_counter and first else 0.0
    if grown <= 0:
        return series
    samples = tuple((at, value + grown * (at // repeat_seconds)) for at, value in series.samples)
    return Series(series.name, series.labels, samples)


def shipped_rules() -> list[dict[str, Any]]:
    """Return the alert rules of the deployment files."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _fill(text: str, labels: dict[str, str], value: float) -> str:
    def put(match: re.Match[str]) -> str:
        word, way = match[1], match[2]
        if word.startswith("$labels."):
            return labels.get(word.removeprefix("$labels."), "")
        assert word == "$value", f"no rule for {word}"
        if way is None:
            return f"{value:g}"
        if way == "humanize":
            return _humanized(value)
        if way == "humanizeDuration":
            return _as_duration(value)
        assert way == 'printf "%.0f"', f"no rule for {way}"
        return f"{value:.0f}"

    return _PLACE.sub(put, text)


def _humanized(value: float) -> str:
    prefixes = iter(("", "k", "M", "G"))
    prefix = next(prefixes)
    while abs(value) >= 1000:
        value, prefix = value / 1000, next(prefixes)
    return f"{value:.4g}{prefix}"


def _as_duration(value: float) -> str:
    assert value >= 1, "no rule for parts of a second"
    minutes, rest = divmod(int(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    words = ([f"{days}d"] if days else []) + ([f"{hours}h"] if days or hours else [])
    words += [f"{minutes}m"] if days or hours or minutes else []
    return " ".join([*words, f"{rest}s"])


__all__ = ["Alert", "Series", "Store", "fired", "firing", "read_series", "scraped", "seconds", "shipped_rules"]
